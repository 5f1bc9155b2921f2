"""The claims of the paper, each held against the stored results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from benchmarks.paper.sets import BASES, joined
from benchmarks.paper.statistics import BASELINE, ERRORS, Results

FALL = 0.75
"""A large improvement: the error is at most this share of what it was."""


def claims(found: Sequence[Results]) -> str:
    """Return the section on the claims."""
    parts = (_pb_alone, _pb_added, _pts, _networks, _stability, _dpb, _top, _one_sided, _best)
    return "\n".join(["## The paper's claims, held against these tables\n", *(part(found) for part in parts)])


def _with(found: Sequence[Results], *methods: str) -> list[Results]:
    """Keep the sets on which all of the methods were run."""
    return [one for one in found if all(method in one.cells for method in methods)]


def _section(title: str, criterion: str, lines: Sequence[str]) -> str:
    return "\n".join([f"### {title}\n", f"{criterion}\n", *lines, ""])


def _verdict(agrees: Sequence[bool]) -> str:
    return f"Holds on {sum(agrees)} of {len(agrees)} sets."


def _counted(found: Sequence[Results], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Count over the calibration errors how often the first of each pair is lower, higher or the same."""
    lines, total = [], Counter[str]()
    for one in found:
        counts = Counter[str]()
        for method, other in pairs:
            if method in one.cells and other in one.cells:
                for metric in ERRORS:
                    change = one.difference(method, other, metric)
                    word = ("unchanged", "worse", "better")[change.direction]
                    counts[word] += 1
                    counts[f"clearly {word}"] += change.is_clear
        total += counts
        if counts:
            lines.append(f"- {one.title}: {_words(counts)}.")
    return [f"- All: {_words(total)}.", *lines]


def _words(counts: Counter[str]) -> str:
    return (
        f"{counts['better']} better ({counts['clearly better']} clearly), {counts['worse']} worse"
        f" ({counts['clearly worse']} clearly), {counts['unchanged']} unchanged"
    )


def _pb_alone(found: Sequence[Results]) -> str:
    agrees, lines = [], []
    for one in _with(found, "pb"):
        if one.is_overconfident:
            before, after = (one.mean(name, "ece_width") for name in (BASELINE, "pb"))
            changed = one.mean("pb", "changed_labels")
            agrees.append(after <= FALL * before and changed == 0)
            lines.append(
                f"- {one.title}: ewECE {100 * before:.2f} % to {100 * after:.2f} %, {changed:.0f} labels"
                " changed."
            )
    return _section(
        "`pb` improves an overconfident network by a large margin and keeps its labels",
        f"Criterion: ewECE falls by at least a quarter, and no label changes. {_verdict(agrees)}",
        lines,
    )


def _pb_added(found: Sequence[Results]) -> str:
    pairs = [(joined(base, "pb"), base) for base in BASES[1:]]
    return _section(
        "Adding `pb` to the other methods improves most cells",
        "Counted over smECE, emECE and ewECE of every base but `uncalibrated`. At the optimum of a joint fit"
        " the bounds are often inactive, and nothing changes.",
        _counted(found, pairs),
    )


def _pts(found: Sequence[Results]) -> str:
    return _section(
        "`pts` is better calibrated than `ts`",
        "Counted over smECE, emECE and ewECE.",
        _counted(found, [("pts", "ts")]),
    )


def _networks(found: Sequence[Results]) -> str:
    pairs = [(joined(base, "pb-mlp"), joined(base, "pb")) for base in BASES]
    return _section(
        "Bounds of a network (`pb-mlp`) are better than constant bounds (`pb`)",
        "Counted over smECE, emECE and ewECE of all bases.",
        _counted(found, pairs),
    )


def _stability(found: Sequence[Results]) -> str:
    lines = []
    for one in _with(found, "pb", "lb"):
        texts = [
            f"`{name}` {100 * one.mean(name, 'ece_width'):.2f} % (standard error"
            f" {100 * one.spread(name, 'ece_width'):.2f}), error rate"
            f" {100 * one.mean(name, 'error_rate'):.2f} %"
            for name in ("pb", "lb")
        ]
        lines.append(f"- {one.title}: ewECE {'; '.join(texts)}.")
    return _section(
        "`lb` alone is less stable than `pb` alone, and can cost accuracy",
        "ewECE and its standard error over splits, and the error rate, which `pb` never changes.",
        lines,
    )


def _dpb(found: Sequence[Results]) -> str:
    lines = []
    for one in _with(found, "dpb"):
        names = [name for name in ("dpb", "fc", "pb", "ts") if name in one.cells]
        texts = [
            f"`{name}` smECE {100 * one.mean(name, 'smooth_ece'):.2f} %, NLL {one.mean(name, 'nll'):.4f}"
            for name in names
        ]
        lines.append(f"- {one.title}: {'; '.join(texts)}.")
    return _section(
        "`dpb` is better than feature clipping (`fc`)",
        "`fc` needs features, so the two meet only where there are some.",
        lines,
    )


def _top(found: Sequence[Results]) -> str:
    lines = []
    for one in _with(found, "pb", "pb-mlp"):
        texts = [
            f"`{name}` {100 * one.mean(name, 'top_changed'):.2f} % (ties in"
            f" {100 * one.mean(name, 'top_ties'):.1f} %)"
            for name in ("pb", "pb-mlp")
        ]
        lines.append(f"- {one.title}: {', '.join(texts)}.")
    return _section(
        "Bounds keep the five largest classes",
        "Share of samples in which a class outside the five largest logits has a larger probability than one"
        " inside. Equality is common: probabilities on the same bound tie, so that the five are no longer"
        " determined by the probabilities alone. The paper calls the preservation exact; it is up to these"
        " ties, which boxcal breaks by the logits.",
        lines,
    )


def _one_sided(found: Sequence[Results]) -> str:
    less, costs, by_order, lines = [], [], [], []
    for one in _with(found, "pb", "pb-lower", "pb-upper"):
        if not one.is_overconfident:
            continue
        errors = {name: one.mean(name, "ece_width") for name in ("pb", "pb-lower", "pb-upper")}
        less.append(errors["pb-lower"] >= errors["pb"])
        costs.append(one.difference("pb-upper", BASELINE, "error_rate").direction > 0)
        by_order.append(one.mean("pb-upper", "order_error") > one.mean("pb-upper", "error_rate"))
        values = ", ".join(f"`{name}` {100 * error:.2f} %" for name, error in errors.items())
        lines.append(f"- {one.title}: ewECE {values}.")
    return _section(
        "Lower bounds alone gain less than both bounds, upper bounds alone cost accuracy",
        f"Lower bounds gain less: {_verdict(less)} Upper bounds cost accuracy: {_verdict(costs)} If an upper"
        " bound makes classes equal, the label is the class with the larger logit, so uniform bounds never"
        " change a label. If ties were broken by the order of the classes, upper bounds would cost accuracy:"
        f" {_verdict(by_order)}",
        lines,
    )


def _best(found: Sequence[Results]) -> str:
    lines = []
    for one in found:
        leaders = sorted(one.cells, key=lambda name: one.mean(name, "smooth_ece"))[:3]
        texts = [f"`{name}` {100 * one.mean(name, 'smooth_ece'):.2f} %" for name in leaders]
        lines.append(f"- {one.title}: {', '.join(texts)}.")
    return _section(
        "The best calibrated method",
        "In the paper, `pts+pb` is best on the largest data sets and `dpb` on CIFAR-100 and 20News. Lowest"
        " smECE here:",
        lines,
    )
