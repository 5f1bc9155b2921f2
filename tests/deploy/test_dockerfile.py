import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import yaml

from tests.deploy.dockerfile import environment, read_dockerfile
from tests.deploy.test_wheel import copy_checkout, source_files

ROOT = Path(__file__).parents[2]
TOOLS = (
    "requirements-dev.lock",
    "requirements-release.lock",
    "requirements-light.lock",
    "requirements-pip.lock",
)
INSTRUCTIONS = read_dockerfile(ROOT / "Dockerfile")
FINAL = max(each.stage for each in INSTRUCTIONS)


def values(keyword: str, stage: int | None = None) -> list[str]:
    return [each.value for each in INSTRUCTIONS if each.keyword == keyword and stage in (None, each.stage)]


def test_base_images_are_pinned_to_a_version() -> None:
    for base in values("FROM"):
        tag = base.split()[0].partition(":")[2]
        assert re.match(r"\d+\.\d+-", tag), f"FROM {base} names no version"


def test_the_service_does_not_run_as_root() -> None:
    """And says so by number, which `runAsNonRoot` of Kubernetes needs."""
    (setup, *_) = values("RUN", FINAL)
    assert setup.split("useradd ")[1].split(" &&")[0].split()[:2] == ["--uid", "10001"]
    assert values("USER", FINAL) == ["10001"]


def test_loops_are_compiled_into_the_image_and_not_onto_the_volume_that_may_hide_them() -> None:
    inside = environment(INSTRUCTIONS, FINAL)
    (volume,) = values("VOLUME", FINAL)
    (compile_loops,) = [run for run in values("RUN", FINAL) if "boxcal.calibrators.warm" in run]
    assert (
        compile_loops == f"NUMBA_CACHE_DIR={inside['COMPILED_LOOPS_DIR']} python -m boxcal.calibrators.warm"
    )
    assert not inside["COMPILED_LOOPS_DIR"].startswith(volume)
    assert inside["NUMBA_CACHE_DIR"].startswith(volume)


def test_every_package_comes_from_the_lock_file_by_hash() -> None:
    installs = [run for run in values("RUN") if re.search(r"\bpip .*\binstall ", run)]
    assert installs
    for run in installs:
        assert '--require-hashes --requirement "/build/$LOCK"' in run or "--no-index" in run, run
    assert "LOCK=requirements-onnx.lock" in values("ARG")
    copied = " ".join(values("COPY"))
    for lock in ROOT.glob("requirements*.lock"):
        assert lock.name in TOOLS or f"{lock.name} " in copied


def test_the_image_says_what_it_is() -> None:
    (labels,) = values("LABEL", FINAL)
    assert f"org.opencontainers.image.version={version('boxcal')}" in labels
    assert "org.opencontainers.image.licenses=Apache-2.0" in labels


def test_the_small_image_is_without_torch_and_with_all_that_the_service_loads() -> None:
    names = set(re.findall(r"^([a-z0-9-]+)==", (ROOT / "requirements-onnx.lock").read_text(), re.MULTILINE))
    assert {"onnxruntime", "grpcio", "fastapi", "setuptools"} <= names
    assert not {"torch", "torchvision", "onnxruntime-gpu"} & names


def test_data_live_on_the_volume_that_compose_mounts() -> None:
    (volume,) = values("VOLUME", FINAL)
    inside = environment(INSTRUCTIONS, FINAL)
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    (mount,) = [each for each in compose["services"]["boxcal"]["volumes"] if each["source"] == "data"]
    assert inside["BOXCAL_DATA_DIR"] == volume == mount["target"]
    assert inside["BOXCAL_HOST"] == "0.0.0.0"  # noqa: S104 (loopback in a container cannot be reached)
    caches = [path for name, path in inside.items() if name.endswith(("CACHE_DIR", "CACHE_HOME"))]
    assert caches
    assert all(path.startswith(volume) for path in caches)


def test_the_build_context_holds_what_is_copied_and_nothing_else() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        source for copy in values("COPY") if not copy.startswith("--from") for source in copy.split()[:-1]
    }
    assert copied == allowed
    assert all((ROOT / source).exists() for source in copied)


def test_the_installed_project_has_its_files_and_its_command(tmp_path: Path) -> None:
    """It is installed as the image installs it, from a copy of what the image copies."""
    context = copy_checkout(tmp_path)
    (run,) = [run for run in values("RUN") if "--target" in run]
    installed = context / "installed"
    command = run.split("-m ", 1)[1].replace("--python /opt/venv ", "")
    arguments = command.replace("/opt/boxcal", str(installed)).split()
    subprocess.run([sys.executable, "-m", *arguments], cwd=context, check=True, capture_output=True)
    assert not [file for file in source_files() if not (installed / file).is_file()]
    command = (installed / "bin" / "boxcal").read_text()
    assert "from boxcal.app.cli import main" in command
    assert values("CMD", FINAL) == ['["boxcal", "serve"]']
    assert environment(INSTRUCTIONS, FINAL)["PATH"].startswith("/opt/boxcal/bin:")
