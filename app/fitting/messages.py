"""Messages between the service and its worker processes: one JSON document per line.

What a worker sends is validated like any other input. It is never unpickled, because a worker reads files
from strangers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Base64Bytes, Field, TypeAdapter

from boxcal.app.fitting.backbones import BackboneSource, BackboneSummary
from boxcal.app.registry.records import ActivatePolicy, FittedCalibrator

BODY_FILE = "body"
ITEMS_FILE = "items.jsonl"
BUDGET_SECONDS = 120.0
"""How long `auto` compares methods unless the upload says otherwise."""


@dataclass(frozen=True, slots=True)
class CheckTask:
    """To a worker: check the request body `folder/BODY_FILE` and convert it to arrays in `folder`."""

    folder: Path
    content_type: str  # Of the request, with the boundary of the multipart body
    backbone: BackboneSummary
    methods: dict[str, str]  # What each method reads: `logits`, `features` or `inputs`
    fields: tuple[str, ...]  # The fields that the form may have
    # Who else reads the data besides the method, and what: `logits`, `features` or `inputs`
    others: list[tuple[str, str]]
    max_bytes: int  # Most bytes of all arrays together, as they are stored
    memory_bytes: int  # Memory that the check may allocate
    kind: Literal["check"] = "check"


@dataclass(frozen=True, slots=True)
class FitTask:
    """To a worker: fit a method to the checked validation set in `folder`."""

    folder: Path
    source: BackboneSource
    method: str
    # Artifact of the active calibrator, which the report compares with; None for `uncalibrated`
    against: Base64Bytes | None = None
    # Sketch of the data that it was fitted to, from its report; None where there is none
    known: dict[str, Any] | None = None
    budget_seconds: float = BUDGET_SECONDS  # How long `auto` compares methods
    memory_bytes: int | None = None  # Memory that the fit may allocate; None for no limit
    kind: Literal["fit"] = "fit"


@dataclass(frozen=True, slots=True)
class RefitTask:
    """To a worker: fit the candidates of a refit to the labels in `folder`."""

    folder: Path
    champion: Base64Bytes | None  # Artifact of the active calibrator; None for `uncalibrated`
    # (K,) its mean answer to the data that it was fitted to; None where it is not known
    class_prior: list[float] | None
    # Version, artifact and class prior of calibrators that were active before
    earlier: list[tuple[int, Base64Bytes | None, list[float] | None]]
    classes: list[str] | None = None  # The K class names
    memory_bytes: int | None = None
    kind: Literal["refit"] = "refit"


@dataclass(frozen=True, slots=True)
class TableTask:
    """To a worker: convert the table of labels in `folder/BODY_FILE` to JSON in `folder/ITEMS_FILE`.

    Each line of it is a list of items.
    """

    folder: Path
    max_rows: int  # Most rows, most bytes of the JSON, and most of one row
    max_bytes: int
    max_row_bytes: int
    memory_bytes: int | None = None  # Memory that the conversion may allocate; None for no limit
    kind: Literal["table"] = "table"


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A calibrator of the registry."""

    version: int
    method: str
    artifact: Base64Bytes | None  # None for `uncalibrated`
    known: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class CompareTask:
    """To a worker: evaluate calibrators, and methods by cross-fitting, on the checked set in `folder`."""

    folder: Path
    source: BackboneSource
    versions: list[StoredVersion]
    methods: list[str]
    memory_bytes: int | None = None
    kind: Literal["comparison"] = "comparison"


@dataclass(frozen=True, slots=True)
class Checked:
    """From a worker: the upload can be fitted; the other attributes are fields of the form."""

    method: str
    activate: ActivatePolicy
    budget_seconds: float
    samples: int
    kind: Literal["checked"] = "checked"


@dataclass(frozen=True, slots=True)
class Tabled:
    """From a worker: the table was converted."""

    rows: int
    kind: Literal["tabled"] = "tabled"


@dataclass(frozen=True, slots=True)
class Guarded:
    """From a worker that reads uploads, at its start: the parts of its sandbox that this host forbids."""

    missing: list[str]
    kind: Literal["guarded"] = "guarded"


@dataclass(frozen=True, slots=True)
class Advanced:
    """From a worker: the fit is `progress` (0 to 1) done, and in the stage `stage`."""

    progress: float
    stage: str
    kind: Literal["advanced"] = "advanced"


@dataclass(frozen=True, slots=True)
class Refused:
    """From a worker: the task failed."""

    problem: str  # `type` of the error in the service's error tree
    detail: str
    # For the log; empty where the data are the cause. Otherwise the process is not used again.
    trace: str = ""
    kind: Literal["refused"] = "refused"


@dataclass(frozen=True, slots=True)
class FitOutcome:
    """From a worker: the calibrator, and whether the report says that it is significantly better."""

    fitted: FittedCalibrator
    is_better: bool
    kind: Literal["outcome"] = "outcome"


@dataclass(frozen=True, slots=True)
class RefitOutcome:
    """From a worker: the best candidate of a refit."""

    name: str
    version: int | None  # Of an earlier calibrator; None of a new one
    nll: float  # Of it, with its parameters a label, and of the active calibrator, in nats a label
    champion_nll: float
    compared: int  # How many candidates there were
    # The new calibrator; None of an earlier one, and where the active one is not worse
    fitted: FittedCalibrator | None
    kind: Literal["refitted"] = "refitted"


@dataclass(frozen=True, slots=True)
class Compared:
    """From a worker: the comparison as a JSON document."""

    document: dict[str, Any]
    kind: Literal["compared"] = "compared"


Task = CheckTask | FitTask | RefitTask | TableTask | CompareTask
Reply = Checked | Tabled | Guarded | Advanced | Refused | FitOutcome | RefitOutcome | Compared

TASK: TypeAdapter[Task] = TypeAdapter(Annotated[Task, Field(discriminator="kind")])
REPLY: TypeAdapter[Reply] = TypeAdapter(Annotated[Reply, Field(discriminator="kind")])
