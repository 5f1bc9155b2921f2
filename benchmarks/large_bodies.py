"""How long large bodies stop the event loop: `python -m benchmarks.large_bodies [FOLDER]`.

One connection asks for /health/live without a pause while another posts a body of up to 32 MiB to the service
in a process of its own; printed is the longest that it waited. The line "idle" is the same with a tiny body:
the waits that the machine itself causes. FOLDER is the source to serve from, by default this one.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import orjson

from benchmarks.overload import wait_until_ready
from benchmarks.serving.payloads import free_port

MIB = 2**20
SERVE = "from {0}.server import serve; from {0}.settings import Settings; serve(Settings())"


def bodies() -> list[tuple[str, str, bytes]]:
    """Give names, paths and JSON bodies."""
    unknown = b",".join(b'"k%d":1' % n for n in range(31 * MIB // 12))
    rows = orjson.dumps(np.random.default_rng(0).normal(size=(31 * MIB // 200, 10)).tolist())
    inputs = b",".join([b'{"tensor": [0.25]}'] * (31 * MIB // 24))
    labels = b",".join(b'"label %d": 0.5' % n for n in range(30_000))
    return [
        ("idle", "/calibrate", b"{}"),
        ("unknown options", "/calibrate", b'{"logits":[[0]],"options":{%b}}' % unknown),
        ("1.3 M inputs", "/predict", b'{"inputs":[%b]}' % inputs),
        ("logits", "/calibrate", b'{"logits":%b}' % rows),
        ("unknown labels", "/calibrate", b'{"logits":[[0]],"options":{"bounds":{"upper":{%b}}}}' % labels),
        ("one image", "/predict", b'{"inputs":[{"image":"%b"}]}' % (b"A" * 31 * MIB)),
    ]


def longest_wait(port: int, path: str, body: bytes) -> tuple[int, float, float]:
    """Post a body; give its status, how long that took and the longest wait of the other connection."""
    done = threading.Event()
    waits = [0.0]

    def ping() -> None:
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        while not done.is_set():
            began = time.perf_counter()
            line.request("GET", "/health/live")
            line.getresponse().read()
            waits.append(time.perf_counter() - began)

    thread = threading.Thread(target=ping)
    thread.start()
    began = time.perf_counter()
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    line.request("POST", path, body, {"content-type": "application/json"})
    answer = line.getresponse()
    answer.read()
    took = time.perf_counter() - began
    time.sleep(max(0.0, 1.0 - took))
    done.set()
    thread.join()
    return answer.status, took, max(waits)


def main(folder: Path) -> None:
    """Start the service, post every body, and print the waits."""
    port = free_port()
    package = "boxcal.app" if (folder / "boxcal").is_dir() else "app"
    with tempfile.TemporaryDirectory() as data:
        settings = {"PYTHONPATH": str(folder), "BOXCAL_PORT": str(port), "BOXCAL_DATA_DIR": data}
        command = [sys.executable, "-c", SERVE.format(package)]
        process = subprocess.Popen(command, cwd=folder, env=os.environ | settings, stderr=subprocess.DEVNULL)
        try:
            wait_until_ready(process, port)
            for name, path, body in bodies():
                status, took, wait = longest_wait(port, path, body)
                print(
                    f"{name}: {len(body) / MIB:.1f} MiB, status {status} after {took:.2f} s, "
                    f"longest wait for /health/live {wait * 1e3:.1f} ms",
                    flush=True,
                )
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve())
