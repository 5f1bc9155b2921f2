"""Shares a device between the models of a service: each pass of a batch waits for the turn of its model.

A model that has used less of the device than the others, in proportion to its share, comes first. While only
one has work, it has the whole device; what a model did not use while it was idle is not saved up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

HOLD_SECONDS = 0.02
"""How long others wait at most for a model that is due, whose thread has just ended a pass."""
SMOOTHING = 0.2
"""Weight of the newest pass in the mean duration of a model's passes."""


class Device:
    """A device, such as `cpu` or `cuda:0`.

    `slots`: number of passes that use the whole device, as `Backbone.passes`. `clock`: seconds, never
    decreasing.
    """

    def __init__(self, slots: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._slots = slots
        self._clock = clock
        self._running = 0
        self._granted = 0.0  # the largest `used` of a model when its turn came
        self._changed = threading.Condition()
        self._turns: list[Turns] = []

    def share(self, weight: float = 1.0) -> Turns:
        """Return the turns of one more model.

        `weight`: its share, in proportion to those of the others.
        """
        turns = Turns(self, weight)
        with self._changed:
            self._turns.append(turns)
        return turns

    def enter(self, turns: Turns) -> bool:
        """Wait for the turn of a model; returns whether it has the device for itself."""
        with self._changed:
            if not (turns.running or turns.is_due(self._clock())):
                turns.used = max(turns.used, self._granted)
            turns.coming = max(0, turns.coming - 1)
            turns.waiting += 1
            while self._running >= self._slots or self._first() is not turns:
                # Whoever is first may be a model whose thread is about to come, so nobody waits for long.
                self._changed.wait(HOLD_SECONDS if self._running < self._slots else None)
            turns.waiting -= 1
            turns.running += 1
            self._running += 1
            self._granted = max(self._granted, turns.used)
            if self._running < self._slots:
                self._changed.notify_all()
            return all(other is turns or not (other.running or other.waiting) for other in self._turns)

    def leave(self, turns: Turns, seconds: float, *, is_coming: bool) -> None:
        """End a pass that took some time; `is_coming` as for `Turns.leave`."""
        with self._changed:
            turns.running -= 1
            self._running -= 1
            turns.used += seconds / turns.weight
            if seconds:
                turns.typical += SMOOTHING * (seconds - turns.typical) if turns.typical else seconds
            turns.coming += is_coming
            turns.left_at = self._clock()
            self._changed.notify_all()

    def forgo(self, turns: Turns) -> None:
        """Let others take the turn that a thread of this model was about to take."""
        with self._changed:
            turns.coming = max(0, turns.coming - 1)
            self._changed.notify_all()

    def _first(self) -> Turns:
        """Return the model that is due."""
        now = self._clock()
        return min((one for one in self._turns if one.is_due(now)), key=Turns.expected)


class Turns:
    """The turns of one model on its device; any thread may take one.

    `used`: seconds of passes that have ended, divided by the share.
    """

    def __init__(self, device: Device, weight: float) -> None:
        self._device = device
        self.weight = weight
        self.used = 0.0
        self.typical = 0.0
        self.waiting = 0
        self.running = 0
        self.coming = 0
        self.left_at = 0.0
        self.has_work: Callable[[], bool] = lambda: False

    def enter(self) -> bool:
        """Wait for a turn; returns whether the model has the device for itself."""
        return self._device.enter(self)

    def leave(self, seconds: float, *, is_coming: bool = False) -> None:
        """End the turn, in which a pass took so long."""
        self._device.leave(self, seconds, is_coming=is_coming)

    def forgo(self) -> None:
        """Say that the thread takes no turn soon."""
        self._device.forgo(self)

    def is_due(self, now: float) -> bool:
        """Whether a thread waits for a turn, or is about to."""
        return self.waiting > 0 or (self.coming > 0 and now - self.left_at < HOLD_SECONDS and self.has_work())

    def expected(self) -> float:
        """Return what the model will have used once the passes that run have ended."""
        return self.used + self.running * self.typical / self.weight
