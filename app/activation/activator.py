"""Activates calibrators of the registry: build, check, warm up, commit, then replace the active one.

Whatever goes wrong before the swap leaves the active calibrator as it was. One lock spans the commit and
the swap, so the order in the registry is the order in which the service answered.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from boxcal.app.activation.active import ActiveCalibrator, ServedCalibrator
from boxcal.app.registry.errors import DamagedArtifact
from boxcal.app.registry.records import Activation, Decision, FittedCalibrator
from boxcal.app.registry.store import UNCALIBRATED, Registry
from boxcal.calibrators.calibrator import Calibrator

if TYPE_CHECKING:
    from boxcal.app.telemetry import Telemetry

KEPT = 16


class Activator:
    """Activates calibrators, and hands out others to requests that name them.

    Its methods block, so the service calls them in a thread; any number of threads may.

    Parameters
    ----------
    registry
        Where they come from.
    num_classes
        K of the backbone.
    telemetry
        Is told which calibrator is active.

    Attributes
    ----------
    active
        The reference that predictions read; holds the last activation from the start.
    """

    def __init__(self, registry: Registry, num_classes: int, telemetry: Telemetry) -> None:
        self._registry = registry
        self._num_classes = num_classes
        self._telemetry = telemetry
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, ServedCalibrator] = OrderedDict()
        self.active = ActiveCalibrator(self.load(registry.active_version()))
        self._tell()

    def load(self, version: int) -> ServedCalibrator:
        """Give a calibrator of the registry, ready to answer; the ones loaded last are kept.

        Raises
        ------
        CalibratorNotFound, ForeignCalibrator, DamagedArtifact
            There is no such version; it belongs to another backbone; it cannot be read.
        """
        kept = self._kept.get(version)
        if kept is not None:
            return kept
        return self._keep(self._build(version))

    def activate(self, version: int) -> Activation:
        """Activate a calibrator of the registry.

        Raises
        ------
        CalibratorNotFound, ForeignCalibrator, DamagedArtifact
            As `load`; the active calibrator stays.
        """
        with self._lock:
            new = self.load(version)
            activation = self._registry.activate(version)
            self._swap(new)
        return activation

    def rollback(self) -> Activation:
        """Return to the calibrator before the active one.

        Raises
        ------
        NothingToRollBack
            No activation came before it.
        """
        with self._lock:
            new = self.load(self._registry.rollback_target())
            activation = self._registry.rollback()
            self._swap(new if new.version == activation.version else self.load(activation.version))
        return activation

    def follow(self) -> None:
        """Activate what another process that shares the registry has activated, if one has.

        Raises
        ------
        DamagedArtifact
            As `load`; the active calibrator stays.
        """
        with self._lock:
            version = self._registry.active_version()
            if version != self.active.current.version:
                self._swap(self.load(version))

    def accept(
        self, fit_id: str, fitted: FittedCalibrator, decide: Callable[[int], Decision]
    ) -> tuple[int, Decision]:
        """Record a finished fit and, where `decide` says so, activate its calibrator.

        Raises
        ------
        DamagedArtifact
            The fit's calibrator does not answer as one of this backbone; nothing is recorded.
        """
        calibrator = read(fitted.artifact, self._num_classes)
        with self._lock:
            version, decision = self._registry.record_fit(fit_id, fitted, decide)
            new = self._keep(ServedCalibrator(version, fitted.method, calibrator))
            if decision.activate:
                self._swap(new)
        return version, decision

    def _build(self, version: int) -> ServedCalibrator:
        record = self._registry.check_belongs(version)
        if version == UNCALIBRATED:
            calibrator = check(Calibrator.uncalibrated(self._num_classes), self._num_classes)
        else:
            calibrator = read(self._registry.artifact(version), self._num_classes)
        return ServedCalibrator(version, record.method, calibrator)

    def _keep(self, served: ServedCalibrator) -> ServedCalibrator:
        self._kept[served.version] = served
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return served

    def _swap(self, new: ServedCalibrator) -> None:
        self.active.swap(new)
        self._tell()

    def _tell(self) -> None:
        current = self.active.current
        self._telemetry.calibrator_active(current.version, current.method)


def read(artifact: bytes, num_classes: int) -> Calibrator:
    """Build a calibrator from its bytes, and check and warm it.

    Raises
    ------
    DamagedArtifact
        It cannot be built, or it does not answer.
    """
    try:
        calibrator = Calibrator.from_bytes(artifact)
    except ValueError as error:
        raise DamagedArtifact(f"A recorded calibrator cannot be read: {error}") from error
    return check(calibrator, num_classes)


def check(calibrator: Calibrator, num_classes: int) -> Calibrator:
    """Let a calibrator answer plain, extreme and equal logits, or features, once, which also warms it.

    Raises
    ------
    DamagedArtifact
        It is for another number of classes, or an answer is no probability vector.
    """
    if calibrator.num_classes != num_classes:
        raise DamagedArtifact(
            f"The calibrator is for {calibrator.num_classes} classes, the backbone has {num_classes}."
        )
    ramp = torch.linspace(-1.0, 1.0, calibrator.logit_map.width, dtype=torch.float64)
    probabilities = calibrator(torch.stack([ramp, 1000.0 * ramp, torch.zeros_like(ramp)]))
    sums = probabilities.sum(dim=1)
    if not bool(((probabilities >= 0).all() & ((sums - 1).abs() <= 1e-6).all()).item()):
        raise DamagedArtifact(f"The calibrator `{calibrator.method}` answers with sums {sums.tolist()}.")
    return calibrator
