"""What the refit loop asks for and decides; every decision has one plain sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

CHANGES = {
    "overconfident": "the answers are too confident",
    "underconfident": "the answers are not confident enough",
    "label_shift": "the classes occur at other frequencies",
    "class_bias": "some classes are too probable and others too improbable",
    "classes": "the answers are wrong by how often they are right where some classes are predicted",
    "confidence_range": "the answers of one range of confidence are wrong by how often they are right",
    "none": "no single kind of change stands out",
}


class Phase(IntEnum):
    """What the loop waits for: an alarm, the result of a fit, the end of a duel, or an activation."""

    WATCHING = 0
    FITTING = 1
    DUEL = 2
    PROPOSED = 3


class DecisionKind(StrEnum):
    """What a decision is about."""

    ALARM = "alarm"
    MATERIAL_ALARM = "material_alarm"
    REFIT = "refit"
    CANDIDATE = "candidate"
    NO_CANDIDATE = "no_candidate"
    DUEL_WON = "duel_won"
    DUEL_LOST = "duel_lost"
    DUEL_UNDECIDED = "duel_undecided"
    ROLLBACK = "rollback"
    ACTIVATED = "activated"
    DISMISSED = "dismissed"
    FORGOTTEN = "forgotten"


@dataclass(frozen=True)
class LoopDecision:
    """What the loop decided or was told.

    Attributes
    ----------
    at
        How many labels the loop had seen.
    champion
        The version that was active.
    evidence
        Numbers and names that the decision rests on.
    """

    kind: DecisionKind
    at: int
    champion: int
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """The decision and its reason, for people."""
        return sentence_of(self.kind, self.champion, self.evidence)


@dataclass(frozen=True)
class RefitRequest:
    """Asks for a fit to the labels `first` to `last` - 1 of those that the loop has seen, counted from 0."""

    champion: int
    first: int
    last: int


@dataclass(frozen=True)
class Proposal:
    """Asks for the activation of a version."""

    version: int
    rollback: bool


SENTENCES = {
    DecisionKind.ALARM: "Version {champion} is no longer calibrated: {change}{since} (evidence {odds}).",
    DecisionKind.MATERIAL_ALARM: (
        "Version {champion} is so far from calibrated that a refit is worthwhile: {change}{since};"
        " a recalibration would lower the NLL by about {recoverable_nll:.3f} nats a label."
    ),
    DecisionKind.REFIT: (
        "A refit was started on the {labels:,} labels since the change of version {champion}."
    ),
    DecisionKind.CANDIDATE: (
        "`{candidate}`, version {version}, is the best of {candidates} candidates: NLL {nll:.4f}, version"
        " {champion} {champion_nll:.4f}; labels that arrive from now on decide between the two."
    ),
    DecisionKind.NO_CANDIDATE: (
        "Version {champion} stays: its NLL on the labels since the change, {champion_nll:.4f}, is not above"
        " that of the best candidate, {nll:.4f}."
    ),
    DecisionKind.DUEL_WON: (
        "Version {version} is better than version {champion}: its NLL was lower by {gain:.4f} nats on"
        " {labels:,} new labels. Activate it."
    ),
    DecisionKind.DUEL_LOST: (
        "Version {champion} stays: the NLL of version {version} was higher by {loss:.4f} nats on {labels:,}"
        " new labels."
    ),
    DecisionKind.DUEL_UNDECIDED: (
        "Version {champion} stays: {labels:,} new labels did not show that version {version} is better."
    ),
    DecisionKind.ROLLBACK: (
        "Version {version}, which was active before, is better than version {champion} again: its NLL was"
        " lower by {gain:.4f} nats on {labels:,} labels. Return to it."
    ),
    DecisionKind.ACTIVATED: "Version {champion} was activated; its test begins anew.",
    DecisionKind.DISMISSED: "Version {champion} stays: the activation of version {version} was declined.",
    DecisionKind.FORGOTTEN: (
        "Version {champion} stays: version {version}, which was compared with it, was pruned or is damaged."
    ),
}


_FAILED = "Version {champion} stays: the refit failed ({reason})."


def sentence_of(kind: DecisionKind, champion: int, evidence: Mapping[str, Any]) -> str:
    """Say a decision and its reason, for people; `champion` is the active version."""
    values = dict(evidence, champion=champion)
    if "log_evidence" in values:
        since = values["labels_since_change"]
        values["change"], values["odds"] = CHANGES[values["diagnosis"]], _odds(values["log_evidence"])
        values["since"] = f" for about {since:,} labels" if since else ""
    if "gain" in values:
        values["loss"] = -values["gain"]
    return (_FAILED if "reason" in values else SENTENCES[kind]).format_map(values)


def _odds(log_evidence: float) -> str:
    """Write evidence as odds, `4,800 : 1`."""
    if log_evidence > math.log(1e6):
        return f"1e{log_evidence / math.log(10):.0f} : 1"
    return f"{math.exp(log_evidence):,.0f} : 1"
