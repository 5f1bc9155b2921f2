"""Logits calibrated from Parquet to Parquet by `boxcal predict`, beside the operator on the same array.

python -m benchmarks.bulk [ROWS] [CLASSES]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

PART_ROWS = 50_000


def write_logits(path: Path, rows: int, classes: int) -> None:
    """Write a column `logits` of float32 lists."""
    import pyarrow as pa  # noqa: PLC0415 - loads for a second
    import pyarrow.parquet as pq  # noqa: PLC0415

    generator = np.random.default_rng(0)
    schema = pa.schema([("logits", pa.list_(pa.float32(), classes))])
    with pq.ParquetWriter(path, schema) as out:
        for first in range(0, rows, PART_ROWS):
            values = generator.normal(0, 3, (min(PART_ROWS, rows - first), classes)).astype(np.float32)
            column = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), classes)
            out.write_table(pa.table([column], schema=schema))


def bare_seconds(rows: int, classes: int) -> float:
    """Measure the operator on the same number of rows, on one thread, in parts."""
    import torch  # noqa: PLC0415 - the parent process stays small

    from boxcal.calibrators import Calibrator  # noqa: PLC0415

    torch.set_num_threads(1)
    calibrator = Calibrator.uncalibrated(classes)
    part = torch.from_numpy(np.random.default_rng(0).normal(0, 3, (PART_ROWS, classes)))
    calibrator(part[:10])
    began = time.perf_counter()
    for first in range(0, rows, PART_ROWS):
        calibrator(part[: rows - first])
    return time.perf_counter() - began


def main(rows: int, classes: int) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "logits.parquet", Path(folder) / "probabilities.parquet"
        writer = [sys.executable, "-m", "benchmarks.bulk", str(rows), str(classes), "--write", str(source)]
        subprocess.run(writer, check=True)
        settings = {"BOXCAL_MODEL": f"logits:{classes}", "BOXCAL_DATA_DIR": folder}
        boxcal = str(Path(sys.executable).with_name("boxcal"))
        command = [boxcal, "predict", str(source), "--output", str(target)]
        began = time.perf_counter()
        process = subprocess.Popen(command, env=os.environ | settings, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        if status:
            raise SystemExit(f"boxcal predict ended with {status}")
        used = usage.ru_utime + usage.ru_stime
        read, written = (path.stat().st_size / 2**20 for path in (source, target))
        print(f"{rows:,} x {classes}: {seconds:.1f} s, of which {used:.1f} s on the processor")
        print(f"at most {usage.ru_maxrss / 2**10:.0f} MiB; {read:.0f} MiB read, {written:.0f} MiB written")
    print(f"the operator alone, one thread: {bare_seconds(rows, classes):.1f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=int, nargs="?", default=1_000_000)
    parser.add_argument("classes", type=int, nargs="?", default=100)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        write_logits(arguments.write, arguments.rows, arguments.classes)
    else:
        main(arguments.rows, arguments.classes)
