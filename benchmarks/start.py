"""Start and memory of servers of an ONNX file: `python -m benchmarks.start MODEL [ROUNDS] [--mosec PYTHON]`.

Each round starts, one after the other: this service with the ONNX model and with `logits:1000`; plain
FastAPI without and with the model (`serving/peers`), in this environment; and mosec with the model, if
`--mosec` names an interpreter that has it and onnxruntime. Printed are the seconds from the start of the
process until it is ready, its processor time until then, and the memory of all its processes at that moment:
RSS as `ps` shows it, and PSS, which counts shared pages once. Each is the median of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.serving.payloads import free_port
from benchmarks.serving.running import BOXCAL, started

PEERS = Path(__file__).parent / "serving" / "peers"
LIBRARIES = ("libtorch", "sklearn", "matplotlib", "libarrow", "pandas")
BARE = "import os, uvicorn; from fastapi import FastAPI; app = FastAPI(); app.get('/ready')(lambda: {}); "
BARE += "uvicorn.run(app, host='127.0.0.1', port=int(os.environ['BENCH_PORT']), log_level='warning')"
MIB = 2.0**20


@dataclass(frozen=True)
class Start:
    """How a server is started, and the path that answers when it is ready."""

    command: list[str]
    ready: str
    settings: dict[str, str]


class Measured(NamedTuple):
    """Seconds until ready, processor time until then, and mebibytes."""

    ready: float
    processor: float
    rss: float
    pss: float


def starts(model: Path, folder: Path, mosec: str | None) -> dict[str, Start]:
    port, python = str(free_port()), sys.executable
    ours = {"BOXCAL_PORT": port, "BOXCAL_DATA_DIR": str(folder / "data")}
    bench = {"BENCH_PORT": port, "BENCH_TASK": "images", "BENCH_MODEL": str(model)}
    found = {
        f"boxcal, {model.name}": Start(BOXCAL, "/health/ready", ours | {"BOXCAL_MODEL": f"onnx:{model}"}),
        "boxcal, logits:1000": Start(BOXCAL, "/health/ready", ours | {"BOXCAL_MODEL": "logits:1000"}),
        "plain FastAPI, no model": Start([python, "-c", BARE], "/ready", bench),
        f"plain FastAPI, {model.name}": Start([python, str(PEERS / "plain_fastapi.py")], "/ready", bench),
    }
    if mosec is not None:
        command = [mosec, str(PEERS / "on_mosec.py"), "--address", "127.0.0.1", "--port", port]
        found[f"mosec, {model.name}"] = Start([*command, "--timeout", "60000"], "/", bench)
    return found


def measure(start: Start) -> tuple[Measured, set[str]]:
    """Start a server, wait until it answers, and look at its memory and the libraries it has loaded."""
    port = start.settings.get("BOXCAL_PORT") or start.settings["BENCH_PORT"]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        url = f"http://127.0.0.1:{port}{start.ready}"
        with started(start.command, url, start.settings, Path(folder)) as server:
            ready = time.perf_counter() - began
            family = [server, *server.children(recursive=True)]
            times = [one.cpu_times() for one in family]
            memory = [one.memory_full_info() for one in family]
            mapped = "".join(Path(f"/proc/{one.pid}/maps").read_text() for one in family)
        used = sum(one.user + one.system for one in times)
        sizes = (sum(getattr(one, kind) for one in memory) / MIB for kind in ("rss", "pss"))
        return Measured(ready, used, *sizes), {name for name in LIBRARIES if name in mapped}


def main(model: Path, rounds: int, mosec: str | None) -> None:
    measured: dict[str, list[Measured]] = {}
    loaded: dict[str, set[str]] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for name, start in starts(model, Path(folder), mosec).items():
                one, loaded[name] = measure(start)
                measured.setdefault(name, []).append(one)
    print(f"median of {rounds} rounds: seconds until ready, processor time until then, MiB of RSS and of PSS")
    for name, all_of in measured.items():
        ready, used, rss, pss = (statistics.median(values) for values in zip(*all_of, strict=True))
        libraries = ", ".join(sorted(loaded[name])) or "none of " + ", ".join(LIBRARIES)
        print(f"  {name:<46} {ready:6.2f} s {used:6.2f} s {rss:6.0f} {pss:6.0f}  {libraries}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("rounds", type=int, nargs="?", default=3)
    parser.add_argument("--mosec", help="interpreter of an environment with mosec, onnxruntime and Pillow")
    arguments = parser.parse_args()
    main(arguments.model.resolve(), arguments.rounds, arguments.mosec)
