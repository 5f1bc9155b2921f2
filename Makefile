# Every target installs what it requires into .venv. You need Python 3.11-3.13 and make (Linux x86-64).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# With PyTorch, torchvision and onnxruntime-gpu, and without.
RUNTIME := $(VENV)/.runtime-installed
LIGHT := $(VENV)/.light-installed
# What `serve` and `demo` need: PyTorch only for models that are run by it, or where it is installed already.
TORCH_MODELS := torchvision:% timm:% transformers:% pt2:%
SERVICE = $(if $(or $(wildcard $(RUNTIME)),$(filter $(TORCH_MODELS),$(BOXCAL_MODEL))),$(RUNTIME),$(LIGHT))
DEV := $(VENV)/.dev-installed
# Ray has an environment of its own: its packages are many, and only tests/deploy/test_ray.py uses them.
RAY_VENV := .venv-ray
RAY := $(RAY_VENV)/.installed
# What writes the list of packages of a release.
RELEASE_VENV := .venv-release
RELEASE := $(RELEASE_VENV)/.installed
TAG ?=
# Three where there are two cores, because a test waits for a fifth of its time.
PYTEST_WORKERS ?= 3
# In the order of the folders: the quick tests come last, so that no process waits for a long one of another.
# Where PYTHONDONTWRITEBYTECODE is set, as in some images, each service that a test starts would compile all modules.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 1

# `compat` puts the checkout on sys.path. Otherwise `import boxcal` in the folder that contains a clone named boxcal finds the clone,
# a folder without __init__.py, before it finds the package.
# Twice quiet, as setuptools warns of that.
EDITABLE := --quiet --quiet --no-deps --no-build-isolation --config-settings editable_mode=compat --editable .

# Of what pip says: each package that it fetches, with its size, and that it unpacks them.
PACKAGES := sed -un 's/^ *\(Downloading\|Using cached\) /  /p; s/^Installing collected packages.*/Unpacking them/p'
SHELL := bash
.SHELLFLAGS := -o pipefail -c

.DEFAULT_GOAL := help
# Where python3-venv is missing, what `venv` has made by then is not kept as .venv/bin/python.
.DELETE_ON_ERROR:
.PHONY: help system-packages serve gpu test coverage test-long ray fuzz check format demo docs bench-serving bench-operator dist test-dist notes sbom release lock resolve clean

help: ## Show this help
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The pip that comes with Python 3.11 takes a third longer: it compares each file of an index with each tag of the platform.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and "boxcal requires Python 3.11 to 3.13; select one with: make PYTHON=python3.11 ...")'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --no-compile --require-hashes --requirement requirements-pip.lock

# Not compiled by pip, as most modules are never imported: those that are imported compile themselves. By two processes, as each
# reads indexes and unpacks on one core.
$(LIGHT): requirements-light.lock pyproject.toml | $(BIN)/python
	@echo "Installing requirements-light.lock: downloads 240 MB, needs 0.8 GB in $(VENV)"
	@awk '/^[a-z]/ {n++} {print > ("$(VENV)/half-" n % 2)}' requirements-light.lock
	@printf '%s\n' $(VENV)/half-0 $(VENV)/half-1 | xargs -P 2 -I {} \
	  $(BIN)/python -m pip install --quiet --no-compile --no-deps --require-hashes --requirement {}
	@echo "Installing boxcal; it compiles its loops for this processor at the first start, beside the service"
	@$(BIN)/python -m pip install $(EDITABLE)
	@touch $@

$(RUNTIME): requirements.lock pyproject.toml | $(BIN)/python
	@echo "Installing requirements.lock into $(VENV): 6.7 GB, most of it PyTorch with CUDA. This takes some minutes."
	@$(BIN)/python -m pip uninstall --quiet --yes onnxruntime  # onnxruntime-gpu holds the same module
	@$(BIN)/python -m pip install --progress-bar off --require-hashes --requirement requirements.lock | $(PACKAGES)
	@echo "Installing boxcal"
	@$(BIN)/python -m pip install $(EDITABLE)
	@echo "Compiling its loops"
	@$(BIN)/python -m boxcal.calibrators.warm
	@touch $@

$(DEV): $(RUNTIME) requirements-dev.lock
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes --requirement requirements-dev.lock
	touch $@

serve: ## Start the service on http://127.0.0.1:8000
	@$(MAKE) --no-print-directory $(SERVICE)
	$(BIN)/boxcal serve

gpu: $(RUNTIME) ## Install PyTorch, torchvision and onnxruntime-gpu, 6.7 GB

# Prometheus checks the dashboard and the rules; PostgreSQL, PgBouncer and libfaketime test the shared registry.
# HAProxy and nginx are tested in front of replicas. Chromium tests the web page, with libatomic1 for Playwright's Node.
DEBIAN := curl prometheus postgresql pgbouncer faketime haproxy nginx-light chromium fonts-dejavu-core libatomic1
AS_ROOT := $(if $(filter 0,$(shell id -u)),,sudo -n)

system-packages: ## Install the Debian packages that the tests need, as root or with sudo
	@dpkg -s $(DEBIAN) >/dev/null 2>&1 || \
	if command -v apt-get >/dev/null && $(AS_ROOT) true 2>/dev/null; then \
	  echo "Installing $(DEBIAN)"; \
	  $(AS_ROOT) sh -c 'cd /etc && mkdir -p postgresql-common && cd postgresql-common && \
	    test -e createcluster.conf || echo "create_main_cluster = false" > createcluster.conf' && \
	  $(AS_ROOT) apt-get update -qq && \
	  $(AS_ROOT) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(DEBIAN) >/dev/null; \
	else \
	  echo "Without the rights to install: $(DEBIAN). Tests skip what is missing, and say so with 'pytest -rs'."; \
	fi

test: $(DEV) system-packages ## Run the test suite, its files in PYTEST_WORKERS processes
	$(PYTEST)

coverage: $(DEV) ## Run the test suite and report which lines and branches it reaches
	$(PYTEST) --cov=boxcal --cov-report=term --cov-report=xml

$(RAY): requirements-ray.lock pyproject.toml
	test -x $(RAY_VENV)/bin/python || $(PYTHON) -m venv $(RAY_VENV)
	$(RAY_VENV)/bin/python -m pip install --quiet --require-hashes --requirement requirements-ray.lock
	$(RAY_VENV)/bin/python -m pip install $(EDITABLE)
	touch $@

ray: $(RAY) ## Install Ray into an environment of its own, .venv-ray

test-long: $(DEV) $(RAY) ## Run the tests that take minutes
	$(BIN)/python -m pytest -m long --timeout 1800 -o faulthandler_timeout=1920

fuzz: $(DEV) ## Send 5,000 damaged requests to a running service
	$(BIN)/python -m tools.fuzz 5000 --seed 14

check: $(DEV) ## Check formatting, lint, types and import direction
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py

format: $(DEV) ## Format the code and apply automatic fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

demo: ## Demonstrate prediction, bounds, fit, monitoring and rollback with the running service
	@$(MAKE) --no-print-directory $(SERVICE)
	$(BIN)/python -m boxcal.app.demo

docs: $(DEV) ## Build the documentation site in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench-serving: $(DEV) ## Compare the service with six others (inputs: BENCH_SERVING_MODEL, _LABELS, _IMAGES)
	$(BIN)/python -m benchmarks.serving

bench-operator: $(DEV) ## Compare the operator with torch.softmax and others
	$(BIN)/python -m benchmarks.operator

dist: $(DEV) ## Build the wheel and the source archive of the last commit in dist/
	rm -rf dist
	source=$$(mktemp -d) && trap 'rm -rf "$$source"' EXIT && git archive HEAD | tar -x -C "$$source" && \
	  SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --no-isolation --outdir dist "$$source"

test-dist: dist ## Test the files of dist/ in environments without this checkout
	DIST=$(CURDIR)/dist $(BIN)/python -m pytest -m "long or not long" tests/deploy/test_wheel.py

notes: $(DEV) ## Write release/notes.md, the section of the version in CHANGELOG.md; checks TAG if it is set
	mkdir -p release
	$(BIN)/python -m tools.release --tag "$(TAG)" > release/notes.md

# In an environment of its own, so that what lists the packages adds none.
$(RELEASE): requirements-release.lock
	test -x $(RELEASE_VENV)/bin/python || $(PYTHON) -m venv $(RELEASE_VENV)
	$(RELEASE_VENV)/bin/python -m pip install --quiet --require-hashes --requirement requirements-release.lock
	touch $@

sbom: $(RELEASE) ## Write the packages of both images as CycloneDX documents in release/
	mkdir -p release
	for lock in requirements requirements-onnx; do \
	  SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(RELEASE_VENV)/bin/cyclonedx-py requirements $$lock.lock \
	    --pyproject pyproject.toml --output-reproducible --output-file release/$$lock.cdx.json || exit 1; \
	done

release: test-dist notes sbom ## Make everything that the workflow `release` publishes, in dist/ and release/

lock: ## Update the lock files (requires uv)
	uv pip compile pyproject.toml --extra serve --extra grpc --universal --python-version 3.11 --generate-hashes --no-header --quiet --output-file requirements.lock
	echo "setuptools>=80" | uv pip compile pyproject.toml - --extra onnx --extra tables --constraint requirements.lock --universal --python-version 3.11 --generate-hashes --no-header --quiet --output-file requirements-light.lock
	echo "setuptools>=80" | uv pip compile pyproject.toml - --extra onnx --extra tables --extra postgres --extra grpc --constraint requirements.lock --universal --python-version 3.11 --generate-hashes --no-header --quiet --output-file requirements-onnx.lock
	uv pip compile pyproject.toml --extra serve --extra ray --constraint requirements.lock --universal --python-version 3.11 --generate-hashes --no-header --quiet --output-file requirements-ray.lock
	uv pip compile pyproject.toml --extra serve --extra grpc --extra s3 --constraint requirements.lock --universal --python-version 3.11 --generate-hashes --no-header --quiet --output-file requirements-s3.lock
	uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes --no-header --quiet --output-file requirements-dev.lock
	echo "pip>=26.3" | uv pip compile - --universal --python-version 3.11 --generate-hashes --no-header --quiet --output-file requirements-pip.lock
	echo "cyclonedx-bom>=7" | uv pip compile - --universal --python-version 3.11 --generate-hashes --no-header --quiet --output-file requirements-release.lock

resolve: ## Show what each extra brings on each platform and Python (requires uv)
	$(PYTHON) -m tools.resolve

clean: ## Remove the virtual environment, caches and the built site
	rm -rf $(VENV) $(RAY_VENV) $(RELEASE_VENV) dist release site .coverage* coverage.xml .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
