"""Rates of the protocols: `python -m benchmarks.protocols [ROUNDS] [--mosec PYTHON]`.

A request has 1 or 64 rows of 1000 logits, and the response all their probabilities. Each round measures, one
after the other: `/calibrate` with JSON and `.npy`, the Open Inference Protocol with binary tensors over HTTP
and over gRPC, all by one process; binary tensors by one process per core; plain FastAPI with orjson and
NumPy, one process; and mosec, which has one process per core and one more for HTTP, if `--mosec` names an
interpreter that has it. One load generator keeps 16 requests under way. The peers have no bounds, no
calibrator and no statistics. Only ratios matter.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.serving.payloads import JSON, Request, free_port
from benchmarks.serving.running import run_part

PEERS = Path(__file__).parent / "serving" / "peers"
CLASSES = 1000
CONNECTIONS = 16
SECONDS = 2.0
WARM_SECONDS = 0.5
BODIES = 8
QUIET_SECONDS, QUIET_SHARE = 1.0, 0.05
"""The processes of a service have all started when they use less of a core than this for so long."""
NPY, BINARY = "application/x-npy", "application/octet-stream"
MODEL = f"logits:{CLASSES}.calibrator"

Floats = np.ndarray[Any, np.dtype[np.float64]]


def json_request(logits: Floats) -> Request:
    """Logits to `/calibrate` in JSON, probabilities back in JSON."""
    document = {"logits": logits.tolist(), "options": {"probabilities": True, "top_k": 1}}
    return Request("/calibrate", JSON, json.dumps(document).encode())


def npy_request(logits: Floats) -> Request:
    """Logits to `/calibrate` as an array, probabilities back as an array."""
    body = io.BytesIO()
    np.save(body, logits)
    return Request("/calibrate", NPY, body.getvalue(), (("Accept", NPY),))


def v2_request(logits: Floats) -> Request:
    """Logits and probabilities as binary tensors of the Open Inference Protocol."""
    tensor = {
        "name": "logits",
        "shape": list(logits.shape),
        "datatype": "FP64",
        "parameters": {"binary_data_size": logits.nbytes},
    }
    wanted = {"name": "probabilities", "parameters": {"binary_data": True}}
    head = json.dumps({"inputs": [tensor], "outputs": [wanted]}).encode()
    headers = (("Inference-Header-Content-Length", str(len(head))),)
    return Request(f"/v2/models/{MODEL}/infer", BINARY, head + logits.tobytes(), headers)


def plain_request(path: str) -> Callable[[Floats], Request]:
    """One row in JSON, as the peers take it."""
    return lambda logits: Request(path, JSON, json.dumps({"logits": logits.tolist()}).encode())


@contextmanager
def serving(command: list[str], settings: dict[str, str], place: str) -> Iterator[psutil.Process]:
    """Run a server in a process of its own, which is given, while the block runs."""
    process = subprocess.Popen(
        command, env=os.environ | settings, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} did not start")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{place}", timeout=1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def spent(server: psutil.Process) -> float:
    """Return the processor time, in seconds, of a server and the processes that it has started."""
    times = [each.cpu_times() for each in (server, *server.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


def wait_for_all(server: psutil.Process, processes: int) -> None:
    """Wait until a service has started all its processes; it starts them one after the other."""
    used = -1e9
    while len(server.children()) < processes or spent(server) - used > QUIET_SHARE * QUIET_SECONDS:
        used = spent(server)
        time.sleep(QUIET_SECONDS)


def http_rate(server: psutil.Process, port: int, requests: list[Request]) -> tuple[float, float]:
    """Measure responses/s at saturation, and the server's seconds of processor time for one."""
    plan = {
        "port": port,
        "requests": [base64.b64encode(request.encoded(port)).decode() for request in requests],
        "phases": [
            {"name": "warm-up", "seconds": WARM_SECONDS, "connections": CONNECTIONS},
            {"name": "saturation", "seconds": SECONDS, "connections": CONNECTIONS},
        ],
    }
    before = spent(server)
    phases = run_part("load", plan=plan)
    used, full = spent(server) - before, phases[1]
    if full["failures"]:
        raise SystemExit(f"requests failed: {full['failures']}")
    return len(full["latencies"]) / full["elapsed"], used / sum(len(one["latencies"]) for one in phases)


def grpc_rate(port: int, rows: int) -> float:
    """Measure responses/s of gRPC, sent by another process."""
    command = [sys.executable, "-m", "benchmarks.protocols", "--grpc-load", f"{port},{rows}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(found.stdout)


async def grpc_load(port: int, rows: int) -> float:
    """Keep `CONNECTIONS` calls under way, and return responses/s."""
    import grpc  # noqa: PLC0415 - an optional package

    from boxcal.app.v2.messages import SERVICE, message_class  # noqa: PLC0415

    logits = batch(rows, 0)
    request = message_class("ModelInferRequest")(model_name=MODEL)
    request.inputs.add(name="logits", datatype="FP64", shape=logits.shape)
    request.outputs.add(name="probabilities")
    request.raw_input_contents.append(logits.tobytes())
    body = request.SerializeToString()
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{port}", options=[("grpc.max_receive_message_length", -1)]
    ) as channel:
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        counted, end, begin = 0, 0.0, 0.0

        async def send() -> None:
            nonlocal counted
            while (now := time.perf_counter()) < end:
                await call(body)
                counted += now >= begin

        begin = time.perf_counter() + WARM_SECONDS
        end = begin + SECONDS
        await asyncio.gather(*(send() for _ in range(CONNECTIONS)))
        return counted / (time.perf_counter() - begin)


def batch(rows: int, seed: int) -> Floats:
    """Draw logits (rows, K)."""
    return np.random.default_rng(seed).normal(0, 4, (rows, CLASSES)).round(6)


def measure_ours() -> dict[str, tuple[float, float]]:
    """Measure every protocol of one service: rows/s, and seconds of processor time for a row."""
    port, grpc_port = free_port(), free_port()
    command = [str(Path(sys.executable).with_name("boxcal")), "serve"]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "BOXCAL_MODEL": f"logits:{CLASSES}",
            "BOXCAL_PORT": str(port),
            "BOXCAL_GRPC_PORT": str(grpc_port),
            "BOXCAL_DATA_DIR": folder,
        }
        with serving(command, settings, f"{port}/health/ready") as server:
            for rows in (1, 64):
                batches = [batch(rows, seed) for seed in range(BODIES)]
                for name, make in (("JSON", json_request), (".npy", npy_request), ("V2", v2_request)):
                    rate, used = http_rate(server, port, [make(one) for one in batches])
                    found[f"{name}, {rows}"] = rows * rate, used / rows
                before = spent(server)
                rate = grpc_rate(grpc_port, rows)
                answered = rate * (SECONDS + WARM_SECONDS)  # about: the warm-up is not counted
                found[f"gRPC, {rows}"] = rows * rate, (spent(server) - before) / answered / rows
        processes = os.cpu_count() or 1
        with serving(
            command, settings | {"BOXCAL_WORKERS": str(processes)}, f"{port}/health/ready"
        ) as server:
            wait_for_all(server, processes)
            for rows in (1, 64):
                rate, used = http_rate(
                    server, port, [v2_request(batch(rows, seed)) for seed in range(BODIES)]
                )
                found[f"V2, {processes} processes, {rows}"] = rows * rate, used / rows
    return found


def measure_peer(command: list[str], port: int, ready: str, path: str) -> tuple[float, float]:
    """Do the same for a peer, with one row in JSON."""
    settings = {"BENCH_PORT": str(port), "BENCH_TASK": "logits"}
    with serving(command, settings, f"{port}{ready}") as server:
        return http_rate(server, port, [plain_request(path)(batch(1, seed)) for seed in range(BODIES)])


def main(rounds: int, mosec: str | None) -> None:
    """Measure, and print each round and the medians."""
    measured: list[dict[str, tuple[float, float]]] = []
    for _ in range(rounds):
        found = measure_ours()
        port = free_port()
        found["plain FastAPI, JSON, 1"] = measure_peer(
            [sys.executable, str(PEERS / "plain_fastapi.py")], port, "/ready", "/logits"
        )
        if mosec is not None:
            port = free_port()
            command = [mosec, str(PEERS / "on_mosec.py"), "--address", "127.0.0.1", "--port", str(port)]
            found["mosec, JSON, 1"] = measure_peer(command, port, "/", "/inference")
        measured.append(found)
        print("; ".join(f"{name}: {rate:,.0f}" for name, (rate, _) in found.items()), flush=True)
    print(f"median of {rounds} rounds, rows/s, and processor time of the server for a row:")
    for name in measured[0]:
        rate, used = (statistics.median(one[name][n] for one in measured) for n in (0, 1))
        base = statistics.median(one["JSON, 1"][0] for one in measured)
        print(f"  {name:<24} {rate:>10,.0f} {rate / base:6.2f} times JSON with one row {used * 1e6:8.1f} us")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=3)
    parser.add_argument("--mosec", help="interpreter of an environment with mosec, numpy and orjson")
    parser.add_argument("--grpc-load", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.grpc_load:
        ports = [int(one) for one in arguments.grpc_load.split(",")]
        print(asyncio.run(grpc_load(ports[0], ports[1])))
    else:
        main(arguments.rounds, arguments.mosec)
