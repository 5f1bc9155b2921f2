"""What the refit loop asks for, is told and decides; every decision has one plain sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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


@dataclass(frozen=True)
class Decision:
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
        return SENTENCES[self.kind](self.champion, self.evidence)


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


def _alarm(champion: int, evidence: Mapping[str, Any]) -> str:
    return (
        f"Version {champion} is no longer calibrated: {CHANGES[evidence['diagnosis']]}"
        f"{_since(evidence)} (evidence {odds(evidence['log_evidence'])})."
    )


def _material_alarm(champion: int, evidence: Mapping[str, Any]) -> str:
    return (
        f"Version {champion} is so far from calibrated that a refit is worthwhile:"
        f" {CHANGES[evidence['diagnosis']]}{_since(evidence)}; a recalibration would lower the NLL by about"
        f" {evidence['recoverable_nll']:.3f} nats a label."
    )


def _since(evidence: Mapping[str, Any]) -> str:
    return f" for about {evidence['labels_since_change']:,} labels" if evidence["labels_since_change"] else ""


def _refit(champion: int, evidence: Mapping[str, Any]) -> str:
    return f"A refit was started on the {evidence['labels']:,} labels since the change of version {champion}."


def _candidate(champion: int, evidence: Mapping[str, Any]) -> str:
    return (
        f"`{evidence['candidate']}`, version {evidence['version']}, is the best of {evidence['candidates']}"
        f" candidates: NLL {evidence['nll']:.4f}, version {champion} {evidence['champion_nll']:.4f};"
        " labels that arrive from now on decide between the two."
    )


def _no_candidate(champion: int, evidence: Mapping[str, Any]) -> str:
    if "reason" in evidence:
        return f"Version {champion} stays: the refit failed ({evidence['reason']})."
    return (
        f"Version {champion} stays: its NLL on the labels since the change, {evidence['champion_nll']:.4f},"
        f" is not above that of the best candidate, {evidence['nll']:.4f}."
    )


def _duel_won(champion: int, evidence: Mapping[str, Any]) -> str:
    return (
        f"Version {evidence['version']} is better than version {champion}: its NLL was lower by"
        f" {evidence['gain']:.4f} nats on {evidence['labels']:,} new labels. Activate it."
    )


def _duel_lost(champion: int, evidence: Mapping[str, Any]) -> str:
    return (
        f"Version {champion} stays: the NLL of version {evidence['version']} was higher by"
        f" {-evidence['gain']:.4f} nats on {evidence['labels']:,} new labels."
    )


def _duel_undecided(champion: int, evidence: Mapping[str, Any]) -> str:
    return (
        f"Version {champion} stays: {evidence['labels']:,} new labels did not show that version"
        f" {evidence['version']} is better."
    )


def _rollback(champion: int, evidence: Mapping[str, Any]) -> str:
    return (
        f"Version {evidence['version']}, which was active before, is better than version {champion} again:"
        f" its NLL was lower by {evidence['gain']:.4f} nats on {evidence['labels']:,} labels. Return to it."
    )


def _activated(champion: int, _: Mapping[str, Any]) -> str:
    return f"Version {champion} was activated; its test begins anew."


def _dismissed(champion: int, evidence: Mapping[str, Any]) -> str:
    return f"Version {champion} stays: the activation of version {evidence['version']} was declined."


def odds(log_evidence: float) -> str:
    """Write evidence as odds, `4,800 : 1`."""
    if log_evidence > math.log(1e6):
        return f"1e{log_evidence / math.log(10):.0f} : 1"
    return f"{math.exp(log_evidence):,.0f} : 1"


SENTENCES: Mapping[DecisionKind, Callable[[int, Mapping[str, Any]], str]] = {
    DecisionKind.ALARM: _alarm,
    DecisionKind.MATERIAL_ALARM: _material_alarm,
    DecisionKind.REFIT: _refit,
    DecisionKind.CANDIDATE: _candidate,
    DecisionKind.NO_CANDIDATE: _no_candidate,
    DecisionKind.DUEL_WON: _duel_won,
    DecisionKind.DUEL_LOST: _duel_lost,
    DecisionKind.DUEL_UNDECIDED: _duel_undecided,
    DecisionKind.ROLLBACK: _rollback,
    DecisionKind.ACTIVATED: _activated,
    DecisionKind.DISMISSED: _dismissed,
}
