"""What a request costs a server that sleeps between two requests, from a bare protocol to boxcal.

    python -m benchmarks.scaling wakeups [--rounds 3] [--seconds 7] [--rate 60]

Every server answers the same request of 10 logits, all but boxcal with a fixed response. The kernel's count
of processor time, beyond what the server takes without requests, is divided by the number of answers. Printed
are the lowest and the highest of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import uvicorn
import uvloop

from benchmarks.scaling.on_ray import ROW
from benchmarks.scaling.servers import require, threads_seconds
from tests.app.fitting.service import Service, free_port
from tests.app.steady_load import SteadyLoad

BODY = b'{"calibrator": {"version": 0}}' + 370 * b" "
HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\ncontent-type: application/json\r\n\r\n" % len(BODY)
HAPROXY = """
global
  nbthread 1
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
  http-reuse always
frontend front
  bind 127.0.0.1:{front}
  default_backend back
backend back
  server one 127.0.0.1:{back}
"""
START_SECONDS = 5.0


class Fixed(asyncio.Protocol):
    """Sends the fixed response once the body of a request has begun."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        """Answer."""
        if b"{" in data:
            self._transport.write(HEAD + BODY)


async def serve_fixed(port: int) -> None:
    """Serve the protocol alone."""
    server = await asyncio.get_running_loop().create_server(Fixed, "127.0.0.1", port)
    await server.serve_forever()


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answer every request with the fixed response."""
    while (await receive()).get("more_body", False):
        pass
    headers = [(b"content-length", b"%d" % len(BODY)), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": BODY})


def serve_application(port: int) -> None:
    """Serve the application by uvicorn."""
    uvicorn.run(application, port=port, loop="uvloop", http="httptools", log_level="error", lifespan="off")


SERVERS: dict[str, Callable[[int], object]] = {
    "uvloop": lambda port: uvloop.run(serve_fixed(port)),
    "asyncio": lambda port: asyncio.run(serve_fixed(port)),
    "uvicorn": serve_application,
}
TITLES = {
    "uvloop": "a protocol on uvloop, a fixed response",
    "haproxy": "HAProxy with one thread, before the first",
    "asyncio": "a protocol on asyncio, a fixed response",
    "uvicorn": "uvicorn with uvloop and an application that only answers",
    "boxcal": "boxcal, `logits:10`",
}


def processor_seconds(process: psutil.Process) -> float:
    """Processor time of all threads of a process and its children, as precise as the scheduler counts it."""
    return sum(threads_seconds(one.pid) for one in [process, *process.children(recursive=True)])


def main(arguments: list[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling wakeups", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=7.0)
    parser.add_argument("--rate", type=float, default=60.0)
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def start(*command: str) -> psutil.Process:
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.kill)
            return psutil.Process(process.pid)

        ports = {name: free_port() for name in (*SERVERS, "haproxy")}
        module = sys.executable, "-m", "benchmarks.scaling.wakeups"
        found = {name: start(*module, name, str(ports[name])) for name in SERVERS}
        (folder / "haproxy.cfg").write_text(HAPROXY.format(front=ports["haproxy"], back=ports["uvloop"]))
        found["haproxy"] = start("haproxy", "-f", str(folder / "haproxy.cfg"))
        service = stack.enter_context(Service(folder / "data", model="logits:10"))
        ports["boxcal"] = int(service.url.rpartition(":")[2])
        found["boxcal"] = service.process
        time.sleep(START_SECONDS)
        costs: dict[str, list[float]] = {name: [] for name in TITLES}
        for name in [*TITLES] * options.rounds:
            before = processor_seconds(found[name])
            time.sleep(options.seconds)
            idle = processor_seconds(found[name]) - before
            before = processor_seconds(found[name])
            with SteadyLoad(ports[name], options.rate, body=ROW, renews=True) as load:
                time.sleep(options.seconds)
            spent = processor_seconds(found[name]) - before
            require(not load.failures, load.failures)
            costs[name].append(1e3 * (spent - idle) / len(load.seconds))
    print(
        f"| server at {options.rate:.0f} requests a second, no Ray | ms of processor time of each request |"
    )
    print("|---|---:|")
    for name, title in TITLES.items():
        print(f"| {title} | {min(costs[name]):.2f} to {max(costs[name]):.2f} |")


if __name__ == "__main__":
    SERVERS[sys.argv[1]](int(sys.argv[2]))
