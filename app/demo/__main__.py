"""Demonstrates a running service with the client: predict, fit, monitor, refit, roll back (`make demo`).

It sends images of scikit-learn's handwritten digits to the service. The fit uses the validation split. The
comparison uses the test split, which neither the training of the model nor the fit has seen. Then
`run_shift` adds noise to the images, which makes the calibrated answers too confident, and sends every true
label: an alarm, a refit, a comparison and an activation follow. At the end the calibrator that was active
before is active again.
"""

import os
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from boxcal.app.cli.output import failure_of, progress_bar, screen
from boxcal.app.client import DEFAULT_URL, AnswerTimeoutError, BoxcalClient, Prediction, UnreachableError
from boxcal.calibrators import Metrics, evaluate
from boxcal.models.digits_data import Digits, load_digits_split
from boxcal.models.inputs.images import GREY_LEVELS

NOISE = 5.0
"""Standard deviation of the noise, in grey levels."""
PART = 77
"""Predictions a request; a seventh of the test split."""
MOST_ROUNDS = 20
SECONDS = 120.0
"""For an answer, the first of which may wait for a compiler, and for the monitor."""
PAUSE = 0.05
EVERY = ("alarm", "candidate", "no_candidate", "duel_won", "duel_lost", "duel_undecided")

Levels = npt.NDArray[np.float32]


def run_shift(client: BoxcalClient, digits: Digits, say: Callable[[str], None]) -> None:
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
            if one["kind"] in EVERY:
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


IMAGES_PER_REQUEST = 64
SHOWN_DIGIT = 0
SHOWN = {
    "error_rate": "error rate",
    "nll": "NLL",
    "ece_width": "ECE (equal width)",
    "ece_mass": "ECE (equal mass)",
}

Matrix = npt.NDArray[np.float64]


def address() -> str:
    """Return BOXCAL_URL, or where `make serve` listens with the same environment."""
    port = os.environ.get("BOXCAL_PORT")
    return os.environ.get("BOXCAL_URL") or (f"http://127.0.0.1:{port}" if port else DEFAULT_URL)


def main() -> None:
    """Run the demo; exit codes are those of the command line."""
    parser = ArgumentParser(prog="python -m boxcal.app.demo", description=__doc__)
    parser.add_argument("--url", default=address(), help="address of the service (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        with BoxcalClient(arguments.url, timeout=SECONDS) as client:
            run(client)
    except UnreachableError as error:
        sys.exit(f"demo: {error}. Set the address with --url or BOXCAL_URL.")
    except Exception as error:
        failure = failure_of(error)
        if failure is None:
            raise
        sys.exit(f"demo: {failure[0]}")


def run(client: BoxcalClient) -> None:
    """Run every step and print the responses of the service."""
    digits = load_digits_split()
    image = digits.test.png(SHOWN_DIGIT)

    say(f"1. Predict an image of a handwritten {digits.test.labels[SHOWN_DIGIT]} from the test split:")
    answer = client.predict(image, top_k=3)
    before = answer.calibrator
    say(f"   model {answer.model}, calibrator {before.version} ({before.method})")
    show(answer.predictions[0])

    say("2. Predict the same image with bounds: no class above 0.75, class 8 at least 0.02:")
    show(client.predict(image, top_k=3, upper=0.75, lower={"8": 0.02}).predictions[0])

    say("3. Fit a calibrator to the validation split:")
    with progress_bar("scoring") as advance:
        validation = logits_of(client, digits.validation)
        advance(0.5, "")
        test = logits_of(client, digits.test)
    uploaded = client.fit_arrays(validation, digits.validation.labels)
    with progress_bar("fitting") as advance:
        fit = client.wait_for_fit(uploaded.id, lambda state: advance(state.progress, state.stage or ""))
    fitted = client.calibrator(fit.version)
    say(f"   {len(validation)} images, method {fitted.method}" + (", activated" if fit.activated else ""))

    try:
        say("4. Compare both on the test split:")
        compare(client, test, digits.test, fit.version)
        if fit.activated:
            say("5. Monitor the calibrator with labels, while the images change:")
            run_shift(client, digits.test, say)
    finally:
        if fit.activated:
            restore(client, before.version)


def restore(client: BoxcalClient, version: int) -> None:
    """Roll back by one calibrator and, where that is not yet the version, activate the version."""
    say("6. Roll back:")
    active = client.rollback()
    say(f"   calibrator {active.version} ({active.method}) is active")
    if active.version != version:
        say("7. Activate the calibrator from before the demo:")
        active = client.activate(version)
        say(f"   calibrator {active.version} ({active.method}) is active")


def compare(client: BoxcalClient, logits: Matrix, part: Digits, version: int) -> None:
    """Print the metrics of the uncalibrated model and of one calibrator."""
    uncalibrated = metrics_of(client, logits, part.labels, 0)
    calibrated = metrics_of(client, logits, part.labels, version)
    say(f"   {len(part.labels)} images           before    after")
    for name, title in SHOWN.items():
        say(f"   {title:<20} {getattr(uncalibrated, name):9.4f}{getattr(calibrated, name):9.4f}")


def metrics_of(client: BoxcalClient, logits: Matrix, labels: npt.NDArray[np.int64], version: int) -> Metrics:
    """Return the metrics of one version of the calibrators for (N, K) logits."""
    answer = client.calibrate(logits, probabilities=True, calibrator=version)
    return evaluate(
        np.array([p.probabilities for p in answer.predictions]),
        labels,
        np.array([p.index for p in answer.predictions]),
    )


def logits_of(client: BoxcalClient, digits: Digits) -> Matrix:
    """Return the logits (N, K) of the model for all images, requested in small batches."""
    rows = [
        prediction.logits
        for first in range(0, len(digits), IMAGES_PER_REQUEST)
        for prediction in client.predict(
            *(digits.png(i) for i in range(first, min(first + IMAGES_PER_REQUEST, len(digits)))),
            logits=True,
            calibrator=0,
        ).predictions
    ]
    return np.array(rows)


def show(prediction: Prediction) -> None:
    """Print the classes of one prediction, and which are at a bound."""
    for entry in prediction.top:
        note = f"  at its {entry.bound} bound" if entry.bound else ""
        say(f"   {entry.label}  {entry.probability:.4f}{note}")


def say(line: str) -> None:
    screen().print(line, soft_wrap=True, markup=False)


if __name__ == "__main__":
    main()
