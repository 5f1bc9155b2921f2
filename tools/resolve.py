"""Resolves what `pip install` would for each extra, platform and Python, with uv: `make resolve`.

Only wheels count: what has to be compiled does not install on a machine without a compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = ("", "calibrators", "onnx", "serve")
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = {
    "Linux x86-64": "x86_64-manylinux_2_28",
    "Linux aarch64": "aarch64-manylinux_2_28",
    "macOS 14 arm64": "aarch64-apple-darwin",
    "Windows": "x86_64-pc-windows-msvc",
}
ENVIRONMENT = {"MACOSX_DEPLOYMENT_TARGET": "14.0", "UV_PYTHON_DOWNLOADS": "never"}
"""onnxruntime has wheels for macOS 14 and newer."""
CLIENTS_ONLY = "Windows"
"""The service does not run there; the client and the methods do."""


def wanted() -> list[tuple[str, str]]:
    """List each platform with the extras that it must resolve."""
    return [
        (platform, extra)
        for platform in PLATFORMS
        for extra in EXTRAS
        if platform != CLIENTS_ONLY or extra in ("", "calibrators")
    ]


def resolve(extra: str, platform: str, python: str) -> tuple[int, str]:
    """Return how many packages an extra brings, or 0 and why it does not resolve."""
    asked = ("--extra", extra) if extra else ()
    done = subprocess.run(
        ["uv", "pip", "compile", "pyproject.toml", *asked, "--python-platform", PLATFORMS[platform],
         "--python-version", python, "--only-binary", ":all:", "--no-header", "--no-annotate"],
        cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return 0, " ".join(done.stderr.split())
    return sum("==" in line for line in done.stdout.splitlines()), ""


def main() -> int:
    """Print a table of how many packages each brings."""
    print(f"{'platform':15}{'extra':13}" + "".join(f"{python:>7}" for python in PYTHONS))
    failures = []
    for platform, extra in wanted():
        counts = []
        for python in PYTHONS:
            count, why = resolve(extra, platform, python)
            counts.append(count)
            if why:
                failures.append(f"boxcal[{extra}] on {platform}, Python {python}: {why}")
        print(
            f"{platform:15}{extra or '-':13}" + "".join(f"{count or 'no':>7}" for count in counts), flush=True
        )
    print(*failures, sep="\n", end="\n" if failures else "")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
