"""The sets of the paper's experiment, their splits, and the methods that are fitted to each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from boxcal.calibrators.data import ValidationSet, check_validation_set

SPLITS = 10
ADDITIONS = ("", "pb", "lb", "pb-mlp")
BASES = ("uncalibrated", "ts", "pts", "ets", "dirichlet", "nc", "ta")
"""The bases of the paper's main table, each alone and with every addition."""
OTHERS = ("auto", "vector", "sms", "matrix", "beta", "isotonic", "venn-abers")
"""Common methods that are not in the paper, and what `auto` selects."""
WIDE = ("dirichlet", "matrix")
"""Methods with K² + K parameters and thirteen strengths of their penalty."""


def joined(base: str, addition: str) -> str:
    """Name a base with an addition: `ts` and `pb` are `ts+pb`, `uncalibrated` and `pb` are `pb`."""
    return "+".join(part for part in (base, addition) if part and (part != "uncalibrated" or not addition))


METHODS = (
    *(joined(base, addition) for base in BASES for addition in ADDITIONS),
    "pb-lower",
    "pb-upper",
    "fc",
    "dpb",
    *OTHERS,
)


@dataclass(frozen=True)
class DataSet:
    """A data set: its folder's name, its title, methods that take too long on it, and what it cannot show."""

    name: str
    title: str
    without: tuple[str, ...] = ()
    remark: str = ""

    @property
    def methods(self) -> list[str]:
        """The methods that are run, where the set has what they read."""
        return [name for name in METHODS if name.split("+")[0] not in self.without]


DATA_SETS = (
    DataSet("cifar10_densenet40", "CIFAR-10, DenseNet-40"),
    DataSet(
        "cifar10_resnet20",
        "CIFAR-10, ResNet-20, with features",
        remark="The images are JPEG files of quality 75, which doubles the error rate of the network.",
    ),
    DataSet("eurosat_rgb", "EuroSAT-RGB, almost calibrated"),
    DataSet("cifar100_densenetbc100", "CIFAR-100, DenseNet-BC-100"),
    DataSet(
        "tinyimagenet_mobilenet_v2",
        "Tiny-ImageNet, MobileNetV2, 200 classes",
        WIDE,
        "The network was trained on ImageNet, and these are its outputs for the 200 classes that occur here.",
    ),
    DataSet(
        "tinyimagenet_mobilenet_v2_k1000",
        "Tiny-ImageNet, MobileNetV2, all 1,000 outputs",
        (*WIDE, "sms"),
        "The images and the network are those of the set before. Only 200 of the 1,000 classes occur, so this"
        " shows the methods at the size of ImageNet, but not on ImageNet.",
    ),
)


def read(path: Path) -> ValidationSet:
    """Read `.npz` with `labels` and `logits`, or `probabilities`, whose logarithms serve as logits.

    `features` with `head_weight` and `head_bias` are read where they are there.
    """
    with np.load(path, allow_pickle=False) as arrays:
        if "logits" in arrays:
            logits = arrays["logits"].astype(np.float64)
        else:
            tiny = np.finfo(np.float32).tiny
            logits = np.log(np.maximum(arrays["probabilities"].astype(np.float64), tiny))
        if "features" not in arrays:
            return check_validation_set(logits, arrays["labels"])
        head = arrays["head_weight"], arrays["head_bias"]
        return check_validation_set(logits, arrays["labels"], features=arrays["features"], head=head)


def split(folder: Path, seed: int) -> tuple[ValidationSet, ValidationSet]:
    """Give both sets as they are for seed 0; otherwise redistribute their samples at random."""
    parts = read(folder / "val.npz"), read(folder / "test.npz")
    if seed == 0:
        return parts
    logits, labels = (
        np.concatenate([part.logits for part in parts]),
        np.concatenate([part.labels for part in parts]),
    )
    features = None
    if parts[0].features is not None and parts[1].features is not None:
        features = np.concatenate([parts[0].features, parts[1].features])
    whole = ValidationSet(logits, labels, features=features, head=parts[0].head)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed)).numpy()
    count = len(parts[0])
    return whole.rows(order[:count]), whole.rows(order[count:])
