"""The servers: how each is installed, started and called. The first is the service under test."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.serving import payloads
from benchmarks.serving.payloads import Request
from benchmarks.serving.peers.work import CROP, RESIZE

Task = Literal["images", "logits"]
TASKS: tuple[Task, ...] = ("images", "logits")
PEERS = Path(__file__).parent / "peers"
OURS = "boxcal"
COMMON = ("onnxruntime==1.31.1", "pillow==13.0.0", "orjson==3.13.0")


@dataclass(frozen=True)
class Model:
    """The model of all servers: an ONNX classifier of 224 × 224 images, and its labels."""

    path: Path
    labels: Path


@dataclass(frozen=True)
class Launch:
    """A command and its environment; `folder` is a temporary folder for this start."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Contestant:
    """One server: the pinned packages of its environment, how it is started, and how it is asked.

    `ready` is the path that returns 200 when the model is loaded. A body is a JPEG file or logits in JSON.
    """

    name: str
    requirements: tuple[str, ...]
    launch: Callable[[Path, Model, int, Path], Launch]
    ready: str
    request: Callable[[Task, bytes], Request]


def _script(name: str) -> Callable[[Path, Model, int, Path], Launch]:
    return lambda python, model, port, folder: Launch([str(python), str(PEERS / name)])


def declared(model: Path, folder: Path) -> Path:
    """Put the declaration of the preprocessing beside a link to the model."""
    (served := folder / "model.onnx").symlink_to(model)
    half = [0.5, 0.5, 0.5]
    preprocessing = {"resize": RESIZE, "crop": CROP, "mean": half, "std": half}
    served.with_suffix(".json").write_text(json.dumps({"preprocessing": preprocessing}))
    return served


def _boxcal(python: Path, model: Model, port: int, folder: Path) -> Launch:
    settings = {
        "BOXCAL_MODEL": f"onnx:{declared(model.path, folder)}",
        "BOXCAL_LABELS": str(model.labels),
        "BOXCAL_PORT": str(port),
        "BOXCAL_DATA_DIR": str(folder / "data"),
    }
    return Launch([str(Path(sys.executable).with_name("boxcal")), "serve"], settings)


def _bentoml(python: Path, model: Model, port: int, folder: Path) -> Launch:
    command = [str(python), "-m", "bentoml", "serve", "on_bentoml:Bench", "--working-dir", str(PEERS)]
    environment = {"BENTOML_HOME": str(folder), "BENTOML_DO_NOT_TRACK": "True"}
    return Launch([*command, "--host", "127.0.0.1", "--port", str(port)], environment)


def _mlserver(python: Path, model: Model, port: int, folder: Path) -> Launch:
    ports = {"http_port": port, "grpc_port": payloads.free_port(), "metrics_port": payloads.free_port()}
    server = {"host": "127.0.0.1", "parallel_workers": os.cpu_count() or 1, "debug": False, **ports}
    (folder / "settings.json").write_text(json.dumps(server))
    (folder / "model-settings.json").write_text(
        json.dumps({"name": "bench", "implementation": "on_mlserver.Bench"})
    )
    return Launch([str(python.with_name("mlserver")), "start", str(folder)])


def _mosec(python: Path, model: Model, port: int, folder: Path) -> Launch:
    command = [str(python), str(PEERS / "on_mosec.py"), "--address", "127.0.0.1", "--port", str(port)]
    return Launch([*command, "--timeout", "60000", "--log-level", "warning"])


def _ray(python: Path, model: Model, port: int, folder: Path) -> Launch:
    environment = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    return Launch([str(python), str(PEERS / "on_ray.py")], environment)


CONTESTANTS: tuple[Contestant, ...] = (
    Contestant(OURS, (), _boxcal, "/health/ready", payloads.for_boxcal),
    Contestant(
        "fastapi",
        (*COMMON, "numpy==2.4.6", "fastapi==0.165.0", "uvicorn[standard]==0.54.0"),
        _script("plain_fastapi.py"),
        "/ready",
        payloads.raw,
    ),
    Contestant(
        "mosec", (*COMMON, "numpy==2.4.6", "mosec==0.9.8"), _mosec, "/", payloads.raw_to("/inference")
    ),
    Contestant(
        "litserve",
        (*COMMON, "numpy==2.4.6", "litserve==0.2.19"),
        _script("on_litserve.py"),
        "/health",
        payloads.raw_to("/predict"),
    ),
    Contestant(
        "mlserver",
        (*COMMON, "mlserver==1.7.1", "uvloop==0.21.0"),
        _mlserver,
        "/v2/models/bench/ready",
        payloads.open_inference,
    ),
    Contestant("bentoml", (*COMMON, "bentoml==1.4.39"), _bentoml, "/readyz", payloads.raw),
    Contestant("ray", (*COMMON, "ray[serve]==2.60.0"), _ray, "/-/healthz", payloads.raw_to("/")),
)
