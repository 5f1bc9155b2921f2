"""Immutable records that the registry returns; they do not depend on the database."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

import orjson
from pydantic import ConfigDict

UNCALIBRATED = 0
"""The version of the calibrator that changes nothing; every registry has it."""


class FitState(StrEnum):
    """State of a fit; the last four are final."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"

    @property
    def is_final(self) -> bool:
        """Whether the state will not change again."""
        return self not in UNFINISHED


UNFINISHED = (FitState.QUEUED, FitState.RUNNING)


class ActivatePolicy(StrEnum):
    """When the calibrator of a fit is activated: the field `activate` of `/fit`."""

    IF_BETTER = "if_better"
    ALWAYS = "always"
    NEVER = "never"


class Reason(StrEnum):
    """Reason of an activation."""

    FIT = "fit"
    REQUEST = "request"
    ROLLBACK = "rollback"
    REFIT = "refit"


@dataclass(frozen=True, slots=True)
class BackboneIdentity:
    """What a calibrator belongs to: another name, other weights or other labels make another backbone."""

    name: str  # As the setting names it, such as ``digits``
    fingerprint: str  # SHA-256 of the weights, in hexadecimal
    labels: tuple[str, ...]  # The K class names, in the order of the logits
    model: str = ""  # Tells models with the same backbone apart; empty for the first of them

    @property
    def num_classes(self) -> int:
        return len(self.labels)

    @property
    def labels_sha256(self) -> str:
        """One short value that differs where the labels, their order or `model` do."""
        told_apart = [self.labels, self.model] if self.model else self.labels
        return hashlib.sha256(orjson.dumps(told_apart)).hexdigest()

    def apart_from(self, others: Collection[BackboneIdentity], name: str) -> BackboneIdentity:
        """Return this identity, with the name of the model if another model has the same backbone."""
        return replace(self, model=name) if self in others else self

    def __str__(self) -> str:
        of_model = f" of the model {self.model!r}" if self.model else ""
        return f"{self.name!r}{of_model} ({self.num_classes} classes, weights {self.fingerprint[:12]})"


@dataclass(frozen=True, slots=True)
class CalibratorRecord:
    """One row of the record of calibrators, without its large parts."""

    version: int  # Its number; 0 is `uncalibrated`, which belongs to every backbone and was never fitted
    method: str
    backbone: BackboneIdentity | None  # What it was fitted to; None for version 0
    spec: dict[str, Any] | None
    sha256: str | None
    size: int | None  # Bytes of the artifact
    samples: int | None  # How many validation samples it was fitted to
    created_at: datetime
    pruned_at: datetime | None  # When its artifact, specification and report were deleted


@dataclass(frozen=True, slots=True)
class FittedCalibrator:
    """What a fit hands to the registry."""

    __pydantic_config__ = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    method: str  # The method fitted; what `auto` chose, where it was asked to choose
    artifact: bytes  # The calibrator as safetensors bytes
    spec: dict[str, Any]  # The JSON document that describes it
    report: dict[str, Any]  # The JSON document of `cross_fitted_report`
    reliability_svg: bytes  # The reliability diagram of that report, in two formats
    reliability_png: bytes
    samples: int  # Size of the validation set


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a fit's calibrator is activated, and why, in a sentence for the client."""

    activate: bool
    why: str


@dataclass(frozen=True, slots=True)
class Activation:
    id: int  # Grows with every activation; 0 where there has been none, and version 0 is active
    version: int
    method: str
    reason: Reason
    created_at: datetime


@dataclass(frozen=True, slots=True)
class FitRecord:
    """One fit, from the moment it was queued."""

    id: str
    attempt: int  # How often it was started: only the process of the last attempt may change the fit
    state: FitState
    method: str  # What was asked for, possibly `auto`
    activate: ActivatePolicy
    samples: int
    progress: float  # Share of the work done, 0 to 1
    stage: str  # What is being done, in words
    calibrator: int | None  # The version it made, once it succeeded
    activated: bool | None  # Whether that version was activated, once it succeeded; `decision` says why
    decision: str | None
    # What is probably wrong with the data, once it succeeded: `code`, `severity`, `message`, `rows` each
    warnings: list[dict[str, Any]] | None
    error: str | None  # Why it failed, was cancelled or was interrupted
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
