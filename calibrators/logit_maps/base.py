"""What every logit map is: the first stage of a calibrator, `T` in `p = BCSoftmax(T(g); a, b)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Self

from torch import Tensor

from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.errors import MissingDataError
from boxcal.calibrators.parametrised import Parametrised

Reads = Literal["logits", "features", "inputs"]


class Solution(NamedTuple):
    """How a map's own solver did, for the certificate; the gradient norm is nan where there is none."""

    gradient_norm: float
    starts: int
    starts_agreeing: int
    evaluations: int


class LogitMap(Parametrised):
    """A map from what it `reads` to logits (N, K).

    A subclass says in `forward` how, and in `starts` from where a fit descends. Everything else has a
    default.
    """

    reads: Reads = "logits"
    """What `forward` takes: logits (N, K), features (N, D), or logits of inputs that the map has shifted."""

    combines: bool = True
    """Whether it can be fitted jointly with a box; not so where a library fits it by other means."""

    contains_ts: bool = False
    """Whether the map can be `ts`; its fit then begins there, and is never above it."""

    normalises: bool = False
    """Whether its answers are log probabilities: as `ts`, but for a number added to each row."""

    perturbations: int = 0
    """How many descents a fit makes around the best end, for maps whose loss has kinks."""

    followed: int = 3
    """How many of the starts a fit follows: those that look best on some of the rows."""

    thorough: bool = True
    """Whether `solve` searches to full precision, which a comparison of methods does not need."""

    tick: Callable[[float], None] = staticmethod(lambda fraction: None)
    """Told the fraction done while `prepare` runs."""

    @property
    def width(self) -> int:
        """How many columns `forward` takes: K, or D for features."""
        return self.num_classes

    def forward(self, scores: Tensor) -> Tensor:
        """Map (N, K) logits, or (N, D) features, to (N, K) logits."""
        raise NotImplementedError

    def starts(self) -> Sequence[Tensor]:
        """Coordinates from which a fit descends; the first one is the identity or nearest to it.

        Where there are many, only those that look best on some of the rows are followed.
        """
        raise NotImplementedError

    def variants(self, data: ValidationSet) -> Sequence[Self]:
        """Give maps that differ in what their network reads; cross-validation chooses one."""
        del data
        return [self]

    def tempered(self, log_temperature: float) -> Sequence[Tensor]:
        """Coordinates at which a map that `contains_ts` only divides by a temperature."""
        raise NotImplementedError

    def adopt(self, alone: LogitMap) -> None:
        """Take over what the fit of the map alone has chosen besides coordinates, for a joint fit."""
        del alone

    def edges(self) -> Mapping[str, str]:
        """Name what ended at the edge of its range, each with a sentence for users."""
        return {}

    def saturation(self, scores: Tensor) -> float | None:
        """Share of a network's units that are flat on some logits; None where there is no network."""
        del scores
        return None

    def penalty(self, parameters: Mapping[str, Tensor]) -> Tensor | None:
        """Regularisation added to the mean loss while fitting."""
        del parameters
        return None

    def prepare(self, data: ValidationSet) -> None:
        """Take from the data what is not fitted: a head, the scale of a network's inputs."""
        del data

    def solve(self, data: ValidationSet, seed: int, tick: Callable[[float], None]) -> Solution | None:
        """Fit the map in its own way and store the parameters; None leaves it to descent from the starts."""
        del data, seed, tick
        return None

    def shift_of_inputs(self) -> Tensor | None:
        """Give what to add to a backbone's inputs, for a map that reads them."""
        return None

    def release(self) -> None:
        """Release what only the fit needs."""

    def source(self, data: ValidationSet) -> Tensor:
        """Pick what the map reads.

        Raises
        ------
        MissingDataError
            If it was not given.
        """
        if self.reads == "logits":
            return data.scores
        given = data.features if self.reads == "features" else data.inputs
        partner = data.head if self.reads == "features" else data.backbone
        if given is None or partner is None:
            needed = "features and the head" if self.reads == "features" else "inputs and the backbone"
            raise MissingDataError(f"the method {self.name!r} needs {needed}, and they were not given")
        return given
