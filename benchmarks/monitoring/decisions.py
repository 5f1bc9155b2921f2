"""Duels, and the refit loop from the change of a stream to its end."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch

from benchmarks.monitoring.detection import Record
from benchmarks.monitoring.streams import (
    Answers,
    Array,
    Draw,
    Stream,
    calm,
    drawn,
    drifting,
    generator,
    sharpened,
    shifted,
    shifted_by,
    tempered,
)
from boxcal.calibrators.monitoring.candidates import candidates, mean_nll
from boxcal.calibrators.monitoring.decisions import DecisionKind
from boxcal.calibrators.monitoring.duel import FLOOR, Duel, Winner
from boxcal.calibrators.monitoring.refit_loop import RefitLoop

DUEL_LABELS = 5_000
LOOP_LABELS, CHANGE, CHANGE_BACK = 20_000, 5_000, 12_500
STEP = 50

FEWER = {"T 1.25", "T 2", "slow drift to T 2"}
FEW = 30
"""Streams of these kinds; a third of it with more than 10 classes."""

FEW_WITH_MANY_CLASSES = 40
"""Streams with a change, of more than 10 classes."""

LOOPS: dict[str, Draw] = {
    "no change": calm,
    "T 1.25": sharpened(1.25),
    "T 1.5": sharpened(1.5),
    "T 2": sharpened(2.0),
    "label shift": shifted,
    "slow drift to T 2": drifting(2.0),
}


def duels(answers: Answers, index: int) -> Record:
    """Duel two calibrators of equal NLL, and `ts` against the plain softmax on the true labels."""
    random = generator(3, index)
    rows = calm(answers, DUEL_LABELS, random).index
    duel = Duel(answers.size)
    soft, sharp = _opposite_errors(answers)
    duel.update(soft[rows], sharp[rows], drawn(answers.law[rows], random))
    order = random.permutation(len(answers.labels))
    other = Duel(answers.size)
    evidence = other.update(answers.raw[order], answers.law[order], answers.labels[order])[:, 0]
    hits = np.flatnonzero(evidence >= math.log(2.0 / other.alpha))
    return {
        "equal NLL decided": float(duel.winner is not Winner.UNDECIDED),
        "softmax against ts": float(hits[0] + 1) if len(hits) else math.inf,
    }


def duel_summary(records: list[Record]) -> dict[str, Any]:
    """Give the share of decided duels of equals, and the median labels to a decision for `ts`."""
    return {
        "equal NLL decided": float(np.mean([record["equal NLL decided"] for record in records])),
        "softmax against ts, median labels": float(
            np.median([record["softmax against ts"] for record in records])
        ),
    }


@cache
def _errors(law_bytes: bytes, size: int) -> tuple[Array, Array]:
    law = np.frombuffer(law_bytes).reshape(-1, size)
    soft = tempered(law, 1.3)
    target, low, high = _floored_nll(law, soft), 0.3, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        above = _floored_nll(law, tempered(law, middle)) > target
        low, high = (middle, high) if above else (low, middle)
    return soft, tempered(law, (low + high) / 2)


def _floored_nll(law: Array, rows: Array) -> float:
    """Give the expected NLL as duels compare it."""
    return float(_cross_entropy(law, (1.0 - FLOOR) * rows + FLOOR / law.shape[1]).mean())


def _opposite_errors(answers: Answers) -> tuple[Array, Array]:
    """Give answers that are too soft and answers that are too sharp, of the same expected NLL."""
    return _errors(answers.law.tobytes(), answers.size)


def loop(answers: Answers, index: int) -> Record:
    """Run the loop on a stream of each kind, and on one of which the change goes away."""
    record: Record = {}
    for title, draw in LOOPS.items():
        few = FEW if answers.size <= 10 else FEW // 3
        if (title in FEWER and index >= few) or (draw is not calm and not _is_run(answers, index)):
            continue
        random = generator(4, index)
        stream = calm(answers, CHANGE, random).then(draw(answers, LOOP_LABELS - CHANGE, random))
        for name, value in _run(answers, stream).items():
            record[f"{title}, {name}"] = value
    for title in ("T 1.5", "label shift") if _is_run(answers, index) else ():
        random = generator(5, index)
        factors = random.dirichlet(np.ones(answers.size)) * answers.size
        draw = shifted_by(factors) if title == "label shift" else LOOPS[title]
        stream = calm(answers, CHANGE, random)
        stream = stream.then(draw(answers, CHANGE_BACK - CHANGE, random))
        stream = stream.then(calm(answers, LOOP_LABELS - CHANGE_BACK, random))
        for name, value in _run(answers, stream).items():
            record[f"{title} and back, {name}"] = value
    return record


def _is_run(answers: Answers, index: int) -> bool:
    return answers.size <= 10 or index < FEW_WITH_MANY_CLASSES


def _run(answers: Answers, stream: Stream) -> Record:
    """Fit and activate what the loop asks for, at once; the NLL is expected under the law."""
    versions = {0: (answers.calibrator, answers.prior)}
    logits, labels = answers.logits[stream.index], stream.labels

    def calibrate(version: int, rows: Array) -> Array:
        found: Array = versions[version][0](torch.as_tensor(rows)).numpy()
        return found

    fold = RefitLoop(answers.size, calibrate, version=0, class_prior=answers.prior)
    nll, activations, back = np.empty(len(labels)), 0, math.inf
    for first in range(0, len(labels), STEP):
        rows = slice(first, first + STEP)
        nll[rows] = _cross_entropy(stream.law[rows], calibrate(fold.champion, logits[rows]))
        fold.update(logits[rows], labels[rows])
        request = fold.request
        if request:
            champion, prior = versions[request.champion]
            chosen = slice(request.first, request.last)
            earlier = {version: versions[version] for version in fold.earlier_versions}
            best = candidates(champion, logits[chosen], labels[chosen], prior, earlier=earlier)[0]
            version = max(versions) + 1 if best.version is None else best.version
            versions[version] = best.calibrator, best.class_prior
            own = mean_nll(champion, logits[chosen], labels[chosen])
            fold.fitted(version, name=best.name, nll=best.score, champion_nll=own)
        proposal = fold.proposal
        if proposal:
            told = fold.activated(proposal.version, versions[proposal.version][1])
            activations += told.kind is DecisionKind.ACTIVATED
            if proposal.version == 0 and first >= CHANGE_BACK:
                back = min(back, first + STEP - CHANGE_BACK)
    after = slice(CHANGE, None)
    still = _cross_entropy(stream.law, answers.law[stream.index])[after].mean()
    oracle = _cross_entropy(stream.law, stream.law)[after].mean()
    gap = still - oracle
    closed = (still - nll[after].mean()) / gap if gap > 1e-12 else math.nan
    return {"activations": activations, "gap closed": closed, "first version again after": back}


def _cross_entropy(law: Array, answers: Array) -> Array:
    losses: Array = -(law * np.log(np.maximum(answers, 1e-300))).sum(1)
    return losses


def loop_summary(records: list[Record]) -> dict[str, Any]:
    """Give the share of streams with an activation or a rollback, and the median share of the gap closed."""
    summary: dict[str, Any] = {}
    for title in [*LOOPS, "T 1.5 and back", "label shift and back"]:
        columns = {
            name: np.array([record[f"{title}, {name}"] for record in records if f"{title}, {name}" in record])
            for name in ("activations", "gap closed", "first version again after")
        }
        if title == "no change":
            summary["no change, streams with an activation"] = int((columns["activations"] > 0).sum())
        elif title.endswith("back"):
            again = columns["first version again after"]
            summary[f"{title}, first version again"] = float(np.isfinite(again).mean())
            summary[f"{title}, first version again, median labels"] = float(np.median(again))
        else:
            summary[f"{title}, gap closed"] = float(np.median(columns["gap closed"]))
    return summary
