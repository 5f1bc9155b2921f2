"""Activates calibrators of the registry: build, check, warm up, commit, then replace the active one.

A failure before the commit leaves the active calibrator as it was. No lock is held while the database works:
where several are activated at once, the number of the activation decides which one stays.

The active calibrator: fits and activations replace it, predictions read it.

A request reads `current` once and uses that object to the end, so that its probabilities and the version it
names belong together, whatever is activated meanwhile.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from boxcal.app.http.problems import DamagedArtifact, RegistryUnavailable
from boxcal.app.registry.audit import SERVICE, Caller
from boxcal.app.registry.records import (
    UNCALIBRATED,
    Activation,
    Decision,
    FitRecord,
    FittedCalibrator,
    Reason,
)
from boxcal.app.registry.storage import CalibratorCopy
from boxcal.app.registry.store import Registry
from boxcal.calibrators.array_calibrator import ArrayCalibrator

if TYPE_CHECKING:
    from boxcal.app.observability.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class ServedCalibrator:
    """A calibrator, checked and warmed, with its version in the registry."""

    version: int  # Its number in the registry; 0 is `uncalibrated`
    method: str  # The name it was fitted under, such as ``ts+pb``
    calibrator: ArrayCalibrator  # The map from logits to probabilities
    reads: str = field(init=False)  # What the calibrator takes: `logits`, `features` or `inputs`

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads", self.calibrator.reads)


class ActiveCalibrator:
    def __init__(self, served: ServedCalibrator, activation: int = 0) -> None:
        self.current = served
        self.activation = activation
        self._lock = threading.Lock()

    def swap(self, new: ServedCalibrator, activation: int) -> bool:
        """Activate `new`, unless a later activation came first; returns whether it did.

        Threads may come here in another order than the registry committed their activations in.
        """
        with self._lock:
            if activation <= self.activation:
                return False
            self.current, self.activation = new, activation
            return True


KEPT = 16


class Activator:
    """Activates calibrators, and loads others for requests that name them.

    Its methods but `fetch` block, so the service calls them by `registry.run`; any number of threads may.

    `copy`: keeps the active calibrator for a start without the registry; None where the registry itself is a
    file in the data folder.
    """

    def __init__(
        self, registry: Registry, num_classes: int, telemetry: Telemetry, copy: CalibratorCopy | None = None
    ) -> None:
        self._registry = registry
        self._num_classes = num_classes
        self._telemetry = telemetry
        self._copy = copy
        self._kept: OrderedDict[int, ServedCalibrator] = OrderedDict()
        try:
            last = registry.activations.active()
            self.active = ActiveCalibrator(self.load(last.version), last.id)
            self._write_copy(self.active.current, last)
        except RegistryUnavailable as error:
            self.active = self._read_copy(str(error))
        self._show()

    def load(self, version: int) -> ServedCalibrator:
        """Load a calibrator; the last few stay in memory."""
        kept = self._kept.get(version)
        return self._keep(self._build(version)) if kept is None else kept

    async def fetch(self, version: int) -> ServedCalibrator:
        """Load a calibrator, without a thread if it is in memory; errors as for `load`."""
        kept = self._kept.get(version)
        return await self._registry.run(self.load, version) if kept is None else kept

    def activate(
        self,
        version: int,
        reason: Reason = Reason.REQUEST,
        caller: Caller = SERVICE,
        expected: int | None = None,
    ) -> Activation:
        """Activate a calibrator of the registry.

        `expected`: the version that must be active before; None if any may.
        """
        new = self.load(version)
        activation = self._registry.activations.activate(version, reason, caller, expected)
        self._swap(new, activation)
        return activation

    def rollback(self, caller: Caller = SERVICE, expected: int | None = None) -> Activation:
        """Return to the calibrator before the active one, or `expected`."""
        new = self.load(self._registry.activations.rollback_target(expected))
        activation = self._registry.activations.rollback(caller, expected)
        self._swap(new if new.version == activation.version else self.load(activation.version), activation)
        return activation

    def follow(self) -> None:
        """Activate what another process that shares the registry has activated, if one has."""
        last = self._registry.activations.active()
        if last.id > self.active.activation:
            self._swap(self.load(last.version), last)

    def accept(
        self, fit: FitRecord, fitted: FittedCalibrator, decide: Callable[[int], Decision]
    ) -> tuple[int, Activation | None]:
        """Record a finished fit and, if `decide` says so, activate it; returns as `record_fit`."""
        calibrator = read(fitted.artifact, self._num_classes)
        version, activation = self._registry.record_fit(fit, fitted, decide)
        new = self._keep(ServedCalibrator(version, fitted.method, calibrator))
        if activation is not None:
            self._swap(new, activation)
        return version, activation

    def _build(self, version: int) -> ServedCalibrator:
        record = self._registry.activations.check_belongs(version)
        if version == UNCALIBRATED:
            calibrator = check(ArrayCalibrator.uncalibrated(self._num_classes), self._num_classes)
        else:
            calibrator = read(self._registry.artifact(version), self._num_classes)
        return ServedCalibrator(version, record.method, calibrator)

    def _keep(self, served: ServedCalibrator) -> ServedCalibrator:
        self._kept[served.version] = served
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return served

    def _swap(self, new: ServedCalibrator, activation: Activation) -> None:
        if self.active.swap(new, activation.id):
            self._show()
            self._write_copy(new, activation)

    def _show(self) -> None:
        current = self.active.current
        self._telemetry.calibrator_active(current.version, current.method)

    def _write_copy(self, served: ServedCalibrator, activation: Activation) -> None:
        if self._copy is not None:
            self._copy.write(activation.id, served.version, served.method, served.calibrator.to_bytes())

    def _read_copy(self, why: str) -> ActiveCalibrator:
        kept = None if self._copy is None else self._copy.read()
        if kept is None:
            raise RegistryUnavailable(f"{why} The data folder has no calibrator of this model.")
        activation, version, method, artifact = kept
        served = ServedCalibrator(version, method, read(artifact, self._num_classes))
        return ActiveCalibrator(self._keep(served), activation)


def read(artifact: bytes, num_classes: int) -> ArrayCalibrator:
    """Build a calibrator from its bytes, and check and warm it."""
    try:
        calibrator = ArrayCalibrator.from_bytes(artifact)
    except ValueError as error:
        raise DamagedArtifact(
            f"A recorded calibrator cannot be read: {error}. If a later release fitted it, activate another "
            "version there."
        ) from error
    return check(calibrator, num_classes)


def check(calibrator: ArrayCalibrator, num_classes: int) -> ArrayCalibrator:
    """Let a calibrator answer plain, extreme and equal logits, or features, once, which also warms it."""
    if calibrator.num_classes != num_classes:
        raise DamagedArtifact(
            f"The calibrator is for {calibrator.num_classes} classes, the backbone has {num_classes}."
        )
    ramp = np.linspace(-1.0, 1.0, calibrator.width)
    probabilities = calibrator(np.stack([ramp, 1000.0 * ramp, np.zeros_like(ramp)]))
    sums = probabilities.sum(axis=1)
    if not ((probabilities >= 0).all() and (np.abs(sums - 1) <= 1e-6).all()):
        raise DamagedArtifact(f"The calibrator `{calibrator.method}` answers with sums {sums.tolist()}.")
    return calibrator
