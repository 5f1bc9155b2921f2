"""The part of the demo about monitoring: calm traffic, a shift, an alarm, a refit, a duel and an activation.

Every prediction gets its true label. The shift is noise on the images, which makes the calibrated answers too
confident.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from boxcal.app.client import AnswerTimeoutError, BoxcalClient
from boxcal.models.digits_data import GREY_LEVELS, Digits

NOISE = 5.0
"""Standard deviation of the noise, in grey levels."""
PART = 77
"""Predictions a request; a seventh of the test split."""
MOST_ROUNDS = 20
SECONDS = 120.0
PAUSE = 0.05
SHOWN = ("alarm", "candidate", "no_candidate", "duel_won", "duel_lost", "duel_undecided")

Levels = npt.NDArray[np.float32]


def run(client: BoxcalClient, digits: Digits, say: Callable[[str], None]) -> None:
    """Play the act, and show what the service decides."""
    rng = np.random.default_rng(0)
    first = max((one["id"] for one in client.refits(limit=1)), default=0)
    state = play(client, digits.levels, digits.labels)
    say(f"   {len(digits)} clear images: {describe(state)}")
    for _ in range(MOST_ROUNDS):
        noisy = digits.levels + rng.normal(0.0, NOISE, digits.levels.shape)
        state = play(client, np.clip(noisy, 0, GREY_LEVELS).astype(np.float32), digits.labels)
        if state["phase"] == "fitting":
            state = settled(client, lambda now: now["phase"] != "fitting")
        news = [one for one in client.refits() if one["id"] > first]
        for one in reversed(news):
            first = one["id"]
            if one["kind"] in SHOWN:
                say(f"   {one['sentence']}")
        if state["phase"] == "proposed":
            say(f"   {len(digits)} noisy images: {describe(state)}")
            client.activate(state["challenger"])
            state = play(client, np.clip(noisy, 0, GREY_LEVELS).astype(np.float32), digits.labels)
            active = state["calibrator"]
            say(f"   Activated calibrator {active['version']} ({active['method']}): {describe(state)}")
            return
    say("   No calibrator was proposed; does BOXCAL_AUTO_REFIT have its default, propose?")


def play(client: BoxcalClient, levels: Levels, labels: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Predict images, give their labels, and return the state of the monitor once it includes them."""
    seq = 0
    for start in range(0, len(levels), PART):
        answer = client.predict_tensors(levels[start : start + PART], feedback=True, top_k=1)
        ids = [str(prediction.id) for prediction in answer.predictions]
        given = dict(zip(ids, labels[start : start + PART].tolist(), strict=True))
        seq = client.feedback(given).seq
    return settled(client, lambda state: state["seq"] >= seq)


def settled(client: BoxcalClient, is_done: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait for the monitor."""
    deadline = time.monotonic() + SECONDS
    while not is_done(state := client.monitor()):
        if time.monotonic() > deadline:
            raise AnswerTimeoutError(f"the monitor took longer than {SECONDS:g} s")
        time.sleep(PAUSE)
    return state


def describe(state: dict[str, Any]) -> str:
    """Say whether there is an alarm, and how many answers are right."""
    raised = state["alarms"]["strict"]["alarm"]
    accuracy = state["expected_accuracy"]
    return (
        f"{'alarm' if raised else 'no alarm'}, expected accuracy "
        f"{accuracy['value']:.2f} ({accuracy['low']:.2f} to {accuracy['high']:.2f})"
    )
