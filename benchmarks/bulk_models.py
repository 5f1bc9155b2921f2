"""Bulk predictions beside loops around the bare model: `python -m benchmarks.bulk_models [CASE...]`.

A round runs three programs over the same file or folder, each in this process, in turns:

- boxcal: everything that `boxcal predict SOURCE --output FILE` does after it has started;
- threads: one thread per core; each reads or decodes a batch, runs the model on one thread, keeps the logits;
- loop: one batch after the other; threads decode them, and the model runs on all cores.

All three open the model, and have the same batches; images are decoded by the same function. The models have
random weights: trees (XGBoost), two convolutional networks and a small transformer of texts. At last the
command itself runs, for its seconds and its memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

FEATURES = 20
WORDS = 2000
PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
Array = np.ndarray[Any, Any]
Batches = Iterable[Callable[[], dict[str, Array]]]
"""Functions, each of which reads one batch of the model's inputs."""


@dataclass(frozen=True)
class Case:
    """A model and what it predicts.

    Attributes
    ----------
    batches
        Given a loaded backbone, the batches of the source.
    """

    model: Path
    source: Path
    rows: int
    batches: Callable[[Any], Batches]


def rows_of_features(folder: Path, rows: int) -> Case:
    """100 trees of depth 6 for three classes, and a Parquet file of 20 float64 features."""
    import pyarrow as pa  # noqa: PLC0415 - a case imports what it needs
    import pyarrow.parquet as pq  # noqa: PLC0415
    import xgboost  # noqa: PLC0415
    from onnxmltools import convert_xgboost  # noqa: PLC0415
    from onnxmltools.convert.common.data_types import FloatTensorType  # noqa: PLC0415

    from boxcal.app.cli.bulk_sources import ROWS  # noqa: PLC0415

    generator = np.random.default_rng(0)
    known = generator.normal(size=(5000, FEATURES)).astype(np.float32)
    labels = (known[:, 0] + generator.normal(size=5000) > 0).astype(int) + (known[:, 1] > 0)
    trees = xgboost.XGBClassifier(n_estimators=100, max_depth=6, n_jobs=1).fit(known, labels)
    model, source = folder / "trees.onnx", folder / "features.parquet"
    exported = convert_xgboost(trees, initial_types=[("rows", FloatTensorType([None, FEATURES]))])
    model.write_bytes(exported.SerializeToString())
    names = [f"f{index}" for index in range(FEATURES)]
    model.with_suffix(".json").write_text(json.dumps({"features": names}))
    values = generator.normal(size=(rows, FEATURES))
    pq.write_table(pa.table(dict(zip(names, values.T, strict=True))), source)

    def batches(_: Any) -> Iterator[Callable[[], dict[str, Array]]]:
        for batch in pq.ParquetFile(source).iter_batches(ROWS, columns=names):
            yield partial(matrix, batch)

    return Case(model, source, rows, batches)


def matrix(batch: Any) -> dict[str, Array]:
    """Bring the columns of a table to the input of the trees."""
    return {"rows": np.stack([column.to_numpy() for column in batch.columns], axis=1, dtype=np.float32)}


def images(folder: Path, rows: int, *, small: bool) -> Case:
    """MobileNetV2 and JPEG files of 500 x 375, or a ResNet-20 and files of 32 x 32."""
    import torch  # noqa: PLC0415
    import torchvision  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415

    from boxcal.app.cli.bulk_sources import IMAGE_BATCH  # noqa: PLC0415

    torch.manual_seed(0)
    side, size = (32, (32, 32)) if small else (224, (500, 375))
    network = resnet20() if small else torchvision.models.mobilenet_v2(weights=None)
    model, source = folder / "images.onnx", folder / "images"
    export(network, (torch.zeros(2, 3, side, side),), model, ["input"], {0: "n"})
    steps = {"resize": 32 if small else 256, "crop": side, "mean": [0.5] * 3, "std": [0.25] * 3}
    model.with_suffix(".json").write_text(json.dumps({"preprocessing": steps}))
    generator = np.random.default_rng(0)
    source.mkdir()
    for number in range(rows):
        coarse = generator.integers(0, 256, (12, 16, 3), np.uint8)
        Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(source / f"{number:06}.jpg")
    paths = sorted(source.iterdir())

    def batches(backbone: Any) -> Iterator[Callable[[], dict[str, Array]]]:
        from boxcal.models.inputs.decoding import decode  # noqa: PLC0415

        def read(chosen: list[Path]) -> dict[str, Array]:
            decoded = [
                decode(path.read_bytes(), preprocessing=backbone.preprocessing, max_pixels=10**8)
                for path in chosen
            ]
            return {"input": np.stack(decoded)}

        for first in range(0, len(paths), IMAGE_BATCH):
            yield partial(read, paths[first : first + IMAGE_BATCH])

    return Case(model, source, rows, batches)


def texts(folder: Path, rows: int) -> Case:
    """Make a transformer of two layers, and texts of 5 to 60 words."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415

    from boxcal.app.cli.bulk_sources import TEXT_BATCH, TEXTS  # noqa: PLC0415

    torch.manual_seed(0)
    model, source = folder / "texts.onnx", folder / "texts.parquet"
    ids = torch.ones(2, 9, dtype=torch.long)
    export(reader(), (ids, ids), model, ["input_ids", "attention_mask"], {0: "n", 1: "length"})
    words = [f"w{number}" for number in range(WORDS)]
    known = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))  # noqa: S106 - no password
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    generator = np.random.default_rng(0)
    lengths = generator.integers(5, 61, rows)
    written = [" ".join(generator.choice(words, length)) for length in lengths]
    pq.write_table(pa.table({"text": written}), source)

    def batches(_: Any) -> Iterator[Callable[[], dict[str, Array]]]:
        for batch in pq.ParquetFile(source).iter_batches(TEXTS, columns=["text"]):
            encoded = sorted(tokenizer.encode_batch(batch.column(0).to_pylist()), key=len)
            for first in range(0, len(encoded), TEXT_BATCH):
                yield partial(padded, encoded[first : first + TEXT_BATCH])

    return Case(model, source, rows, batches)


def padded(encoded: list[Any]) -> dict[str, Array]:
    """Give the tokens of a batch and their mask."""
    shape = len(encoded), max(map(len, encoded))
    ids, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row, one in enumerate(encoded):
        ids[row, : len(one)], mask[row, : len(one)] = one.ids, 1
    return {"input_ids": ids, "attention_mask": mask}


def export(
    network: Any, example: tuple[Any, ...], path: Path, names: list[str], free: dict[int, str]
) -> None:
    """Write a network as ONNX, with these dimensions free."""
    import torch  # noqa: PLC0415

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network.eval(), example, path, input_names=names, output_names=["logits"],
            dynamic_axes=dict.fromkeys(names, free), dynamo=False,
        )  # fmt: skip


def resnet20() -> Any:
    """Build the residual network of 20 layers for images of 32 x 32."""
    from torch import nn  # noqa: PLC0415
    from torchvision.models.resnet import BasicBlock  # noqa: PLC0415

    def stage(before: int, width: int) -> list[Any]:
        shrink = before != width
        shortcut = nn.Sequential(nn.Conv2d(before, width, 1, 2), nn.BatchNorm2d(width)) if shrink else None
        return [
            BasicBlock(before, width, 1 + shrink, shortcut),
            *(BasicBlock(width, width) for _ in range(2)),
        ]

    first = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*first, *stage(16, 16), *stage(16, 32), *stage(32, 64), *last)


def reader() -> Any:
    """Build a transformer of texts: two layers of width 128, four heads, and the mean of the tokens."""
    import torch  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(WORDS + 2, 128)
            self.mixed = nn.ModuleList(nn.Linear(128, 384) for _ in range(2))
            self.feed = nn.ModuleList(
                nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(2)
            )
            self.head = nn.Linear(128, 5)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            hidden = self.embedding(input_ids)
            hides = (1 - attention_mask[:, None, None, :].float()) * -1e9
            for mixed, feed in zip(self.mixed, self.feed, strict=True):
                queries, keys, values = mixed(hidden).unflatten(2, (3, 4, 32)).permute(2, 0, 3, 1, 4)
                weights = (queries @ keys.transpose(2, 3) / 32**0.5 + hides).softmax(3)
                hidden = hidden + (weights @ values).transpose(1, 2).flatten(2)
                hidden = nn.functional.layer_norm(hidden + feed(hidden), (128,))
            weight = attention_mask[..., None].float()
            logits: torch.Tensor = self.head((hidden * weight).sum(1) / weight.sum(1))
            return logits

    return Reader()


CASES: dict[str, tuple[Callable[[Path, int], Case], int]] = {
    "features": (rows_of_features, 1_000_000),
    "MobileNetV2": (lambda folder, rows: images(folder, rows, small=False), 600),
    "ResNet-20": (lambda folder, rows: images(folder, rows, small=True), 8000),
    "texts": (texts, 16_000),
}


def session(path: Path, threads: int) -> Any:
    """Open a model as a program of its own would."""
    import onnxruntime  # noqa: PLC0415

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def in_threads(case: Case, backbone: Any, cores: int) -> None:
    """Run batches side by side, each from its file to its logits in one thread; as many wait as run."""
    opened = session(case.model, 1)
    name = opened.get_outputs()[-1].name
    kept: list[Any] = []

    def run(read: Callable[[], dict[str, Array]]) -> Any:
        return opened.run([name], read())[0]

    with ThreadPoolExecutor(cores) as pool:
        waiting: list[Any] = []
        for read in case.batches(backbone):
            waiting.append(pool.submit(run, read))
            if len(waiting) > 2 * cores:
                kept.append(waiting.pop(0).result())
        kept += [one.result() for one in waiting]
    np.concatenate(kept)


def in_a_loop(case: Case, backbone: Any, cores: int) -> None:
    """Run one batch after the other on all cores; the next ones are read meanwhile."""
    opened = session(case.model, cores)
    name = opened.get_outputs()[-1].name
    kept: list[Any] = []
    with ThreadPoolExecutor(cores) as pool:
        waiting: list[Any] = []
        for read in case.batches(backbone):
            waiting.append(pool.submit(read))
            if len(waiting) > cores:
                kept.append(opened.run([name], waiting.pop(0).result())[0])
        kept += [opened.run([name], one.result())[0] for one in waiting]
    np.concatenate(kept)


def measure(name: str, rows: int, rounds: int, folder: Path) -> None:
    """Print rates, and the ratio of boxcal's to each of the others."""
    from boxcal.app.cli import bulk  # noqa: PLC0415
    from boxcal.models.loading.specifications import load_backbone  # noqa: PLC0415

    make, usual = CASES[name]
    case, cores = make(folder, rows or usual), len(os.sched_getaffinity(0))
    os.environ |= {"BOXCAL_MODEL": f"onnx:{case.model}", "BOXCAL_DATA_DIR": str(folder)}
    backbone, target = load_backbone(f"onnx:{case.model}", device="cpu"), folder / "out.parquet"
    programs: dict[str, Callable[[], Any]] = {
        "boxcal": lambda: bulk.run(case.source, target, lower=None, upper=0.9, calibrator=None),
        "threads": lambda: in_threads(case, backbone, cores),
        "loop": lambda: in_a_loop(case, backbone, cores),
    }
    taken: dict[str, list[float]] = {program: [] for program in programs}
    used: dict[str, list[float]] = {program: [] for program in programs}
    for number in range(rounds + 1):
        for program in (list(programs), list(programs)[::-1])[number % 2]:
            gc.collect()
            began, busy = time.perf_counter(), time.process_time()
            programs[program]()
            if number:  # the first round warms up
                taken[program].append(time.perf_counter() - began)
                used[program].append(time.process_time() - busy)
    rates = {program: case.rows / statistics.median(seconds) for program, seconds in taken.items()}
    print(f"{name}: {case.rows:,} rows, {cores} cores")
    for program, rate in rates.items():
        busy = statistics.median(used[program]) / case.rows * 1e6
        print(f"  {program}: {rate:,.0f} a second, {busy:,.1f} us of processor time each")
    for other in ("threads", "loop"):
        ratios = sorted(bare / own for own, bare in zip(taken["boxcal"], taken[other], strict=True))
        print(
            f"  boxcal / {other}: median {statistics.median(ratios):.3f} of {rounds} rounds "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )
    command = [str(Path(sys.executable).with_name("boxcal")), "predict", str(case.source)]
    began = time.perf_counter()
    # From a small process: the memory that is reported for a program is at least that of its parent.
    ended = subprocess.run(
        [sys.executable, "-c", PEAK, *command, "--output", str(target)],
        check=True,
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - began
    print(f"  the command: {seconds:.1f} s, at most {int(ended.stdout) / 2**10:,.0f} MiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], default=[])
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    for chosen in arguments.cases or CASES:
        with tempfile.TemporaryDirectory() as made:
            measure(chosen, arguments.rows, arguments.rounds, Path(made))
