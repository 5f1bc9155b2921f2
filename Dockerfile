# Image of the service for ONNX models and logits on CPUs, without PyTorch: about 0.9 GB.
#   --build-arg LOCK=requirements.lock        with PyTorch: every model, about 7 GB
#   --build-arg ACCELERATOR=cuda              besides: what an NVIDIA GPU needs
#   --build-arg LOCK=requirements-ray.lock    with PyTorch and Ray (deploy/ray)
#   --build-arg LOCK=requirements-s3.lock     with PyTorch and a client of S3
# Dependencies and project are separate layers, so that a code change does not rebuild the dependencies.

FROM python:3.11-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
ARG LOCK=requirements-onnx.lock
COPY requirements-onnx.lock requirements.lock requirements-ray.lock requirements-s3.lock /build/
RUN python -m venv --without-pip /opt/venv \
 && python -m pip --python /opt/venv install --no-compile --require-hashes --requirement "/build/$LOCK"
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY calibrators calibrators
COPY models models
COPY app app
COPY boxcal boxcal
RUN python -m pip --python /opt/venv install --no-deps --no-index --no-build-isolation --target /opt/boxcal .
# What nothing imports goes: tests of packages, headers and clients of pyarrow, symbols for debuggers, and what built the project
# unless Triton needs it. Only what the service, a fit and its file import is compiled; where the root is read-only no more can be.
RUN apt-get update && apt-get install --yes --no-install-recommends binutils \
 && cd /opt/venv/lib/python3*/site-packages \
 && find matplotlib numba numpy onnx pyarrow scipy -depth -type d \
      \( -name tests -o -path "onnx/*/test" -o -name include \) -exec rm -r {} + \
 && rm -f pyarrow/*_flight.* pyarrow/*_s3.* pyarrow/_s3fs.* \
 && find fontTools kiwisolver llvmlite pyarrow uvloop -name "*.so*" -exec strip --strip-unneeded {} + \
 && { test -d torch || python -m pip --python /opt/venv uninstall --yes setuptools; } \
 && NUMBA_CACHE_DIR=/tmp PYTHONPATH=/opt/boxcal /opt/venv/bin/python -c "import boxcal.app.server, boxcal.app.cli.commands, \
    boxcal.app.fitting.worker.main, boxcal.app.fitting.worker.fit, boxcal.app.tables.formats, boxcal.app.protocols.grpc.server, \
    pyarrow.parquet, uvloop"

FROM python:3.11-slim-bookworm
LABEL org.opencontainers.image.title=boxcal \
      org.opencontainers.image.version=0.3.0 \
      org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.description="Calibrated classifier probabilities within hard bounds, over HTTP"
ARG ACCELERATOR=cpu
# Triton compiles the launchers of its kernels with a C compiler at run time, on a GPU only.
RUN if [ "$ACCELERATOR" = cuda ]; then \
      apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi \
 && useradd --uid 10001 --user-group --home-dir /var/lib/boxcal --shell /usr/sbin/nologin boxcal \
 && install --directory --owner=boxcal --group=boxcal --mode=0750 /var/lib/boxcal /var/lib/boxcal-keys \
 && install --directory --owner=boxcal --group=boxcal /opt/loops
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/boxcal /opt/boxcal
COPY deploy/healthcheck.py /opt/healthcheck.py
# The root file system may be read-only: caches of compiled kernels and downloaded weights are written to
# the data volume or to /tmp. Where the volume has no compiled loops, the first process copies them from the image.
ENV PATH=/opt/boxcal/bin:/opt/venv/bin:$PATH \
    PYTHONPATH=/opt/boxcal \
    PYTHONUNBUFFERED=1 \
    BOXCAL_HOST=0.0.0.0 \
    BOXCAL_PORT=8000 \
    BOXCAL_DATA_DIR=/var/lib/boxcal \
    XDG_CACHE_HOME=/var/lib/boxcal/.cache \
    NUMBA_CACHE_DIR=/var/lib/boxcal/.cache/numba \
    COMPILED_LOOPS_DIR=/opt/loops \
    TRITON_CACHE_DIR=/var/lib/boxcal/.cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/var/lib/boxcal/.cache/inductor \
    MPLCONFIGDIR=/tmp/matplotlib
WORKDIR /var/lib/boxcal
# By number: Kubernetes cannot tell whether a name is root, and `runAsNonRoot` alone would refuse the image.
USER 10001
RUN NUMBA_CACHE_DIR=/opt/loops python -m boxcal.calibrators.warm
VOLUME /var/lib/boxcal
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=90s --retries=3 CMD ["python", "-I", "/opt/healthcheck.py"]
CMD ["boxcal", "serve"]
