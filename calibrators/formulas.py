"""The formulas of all maps, on arrays of any library: what a fit differentiates and what a service evaluates.

A formula takes the operations (`array_ops` or `tensor_ops`), an object whose attributes are the parameters
(a module, or arrays read from an artifact), and the rows. `FORMULAS` says what each map stores; a logit map
that is not among them is served by its module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Parameters = Any
"""Has the parameters as attributes, float64."""
Values = Any
"""An ndarray or a tensor, as the operations take it."""
Size = int | str
"""A number, or a letter: K classes, the T largest logits, D features, P places, H1 and H2 hidden units."""

LARGEST_RATIO = 80.0
"""Limits the gradient of a part of weight 0: log of its probability over that of the largest other part."""
OLD_LIMIT = 3.0
"""Networks stored before they read the log-softmax limit the log of the temperature to -3 to 3."""
LOG_SOFTMAX, CENTRED, LOG_SURPRISAL = 1.0, 2.0, 3.0
"""What a network reads of the largest logits: their log-softmax (stored networks only); these less the mean
of all of the row; or -log(1 + surprisal), where the surprisal is their log-softmax with its sign changed."""
TOP, HIDDEN = 10, 5
"""How many of the largest logits a network reads, and how many units each of its two layers has in a fit."""


def identity(ops: Any, p: Parameters, scores: Values) -> Values:
    """Return (N, K) logits as they are."""
    del ops, p
    return scores


def temperature_scaling(ops: Any, p: Parameters, scores: Values) -> Values:
    """Divide (N, K) logits by the temperature."""
    del ops
    return scores / p.temperature


def logit_bounding(ops: Any, p: Parameters, scores: Values) -> Values:
    """Clip (N, K) logits to limits that grow with the row's norm."""
    norm = ops.norm(scores)
    return ops.clip(scores, p.logit_lower * norm, p.logit_upper * norm)


def ensemble(ops: Any, p: Parameters, scores: Values) -> Values:
    """Mix three distributions over (N, K) logits and return the log, exactly however small it is."""
    uniform = ops.full_like(scores, -math.log(scores.shape[1]))
    logs = [ops.log_softmax(scores / p.temperature), ops.log_softmax(scores), uniform]
    parts, weights = ops.stack(logs), p.mixture_weights[:, None, None]
    anchor = ops.amax(ops.where(weights <= 0.0, -math.inf, ops.constant(parts)), 0)
    mixture = (weights * ops.exp(ops.clip(parts - anchor, None, LARGEST_RATIO))).sum(0)
    return anchor + ops.log(mixture)


def feature_clipping(ops: Any, p: Parameters, scores: Values) -> Values:
    """Map (N, D) features to logits."""
    return ops.clip(scores, -p.radius, p.radius) @ p.head_weight.T + p.head_bias


def tilt_and_average(ops: Any, p: Parameters, scores: Values) -> Values:
    """Map (N, D) features to logits."""
    tilted = ops.cos(p.angle) * p.head_weight + ops.sin(p.angle) * p.turned_weight
    return scores @ tilted.T + p.head_bias


def network_reads(ops: Any, p: Parameters, scores: Values) -> Values:
    """Give what a network reads of (N, K) logits, before it is standardised."""
    top = ops.largest(scores, len(p.centre))
    if p.normalised == CENTRED:
        return top - ops.mean(scores)
    if p.normalised == LOG_SURPRISAL:
        return -ops.log(1.0 - ops.log_softmax(top))
    return ops.log_softmax(top) if p.normalised else top


def hidden_layers(ops: Any, p: Parameters, scores: Values) -> tuple[Values, Values]:
    """Give both hidden layers of a network, each (N, H)."""
    inputs = (network_reads(ops, p, scores) - p.centre) / p.spread
    first = ops.tanh(inputs @ p.weight_1.T + p.bias_1)
    return first, ops.tanh(first @ p.weight_2.T + p.bias_2)


def network(ops: Any, p: Parameters, scores: Values) -> Values:
    """Map (N, K) logits to (N, outputs) numbers."""
    return hidden_layers(ops, p, scores)[1] @ p.weight_3.T + p.bias_3


def inverse_temperature(ops: Any, p: Parameters, scores: Values) -> Values:
    """Ask the network of `pts` for 1 / temperature of every row, (N, 1)."""
    log_change = network(ops, p.network, scores / p.temperature)
    if not p.network.normalised:
        log_change = OLD_LIMIT * ops.tanh(log_change / OLD_LIMIT)
    return ops.exp(-log_change) / p.temperature


def parameterised_temperature(ops: Any, p: Parameters, scores: Values) -> Values:
    """Divide every row of (N, K) logits by a temperature of its own."""
    return scores * inverse_temperature(ops, p, scores)


def vector_scaling(ops: Any, p: Parameters, scores: Values) -> Values:
    """Scale and shift every class of (N, K) logits."""
    del ops
    return scores / p.temperature * p.factors + p.offsets


def matrix_scaling(ops: Any, p: Parameters, scores: Values) -> Values:
    """Map (N, K) logits linearly."""
    del ops
    return scores / p.temperature @ p.weight.T + p.intercept


def dirichlet(ops: Any, p: Parameters, scores: Values) -> Values:
    """Map the log probabilities of (N, K) logits linearly."""
    return ops.log_softmax(scores / p.temperature) @ p.weight.T + p.intercept


def dual_bounding(ops: Any, p: Parameters, scores: Values) -> Values:
    """Shift (N, K) logits by their soft-thresholded, weighted selves."""
    weighted = p.shift_weights * scores
    return scores - (weighted - ops.clip(weighted, -p.shift_threshold, p.shift_threshold))


def logs_of_both(ops: Any, scores: Values) -> tuple[Values, Values]:
    """Log p and log(1 - p) of every class, floored far below what a float's rounding can tell from 0."""
    log_p = ops.log_softmax(scores)
    half = ops.tanh(0.5 * log_p)
    complement = -2.0 * half / (1.0 - half)  # -expm1(log_p), which ONNX does not have
    return ops.clip(log_p, -690.0, None), ops.log(ops.clip(complement, 1e-16, None))


def beta(ops: Any, p: Parameters, scores: Values) -> Values:
    """Map (N, K) logits, class by class."""
    inside, outside = logs_of_both(ops, scores)
    return ops.log_sigmoid(p.log_weights * inside - p.complement_weights * outside + p.offsets)


def steps(ops: Any, p: Parameters, scores: Values) -> Values:
    """Look up every class of (N, K) logits in its own curve, which keeps the value of the place before."""
    return _look_up(ops, p, scores, is_linear=False)


def lines(ops: Any, p: Parameters, scores: Values) -> Values:
    """Look up every class of (N, K) logits in its own curve, which is linear between two places."""
    return _look_up(ops, p, scores, is_linear=True)


def _look_up(ops: Any, p: Parameters, scores: Values, *, is_linear: bool) -> Values:
    if p.places.shape[1] == 0:
        return scores
    own = ops.softmax(scores).T
    last = p.places.shape[1] - 1
    right = ops.clip(ops.search_rows(p.places, own), None, last)
    left = ops.clip(right - 1, 0, None)
    at_left = ops.gather(p.values, left)
    if not is_linear:
        return ops.log(ops.where(own >= p.places[:, last:], p.values[:, last:], at_left)).T
    begin, end = ops.gather(p.places, left), ops.gather(p.places, right)
    share = ops.clip(ops.nan_to_num((own - begin) / (end - begin), nan=0.0), 0.0, 1.0)
    return ops.log(at_left + share * (ops.gather(p.values, right) - at_left)).T


def class_prior(ops: Any, p: Parameters, scores: Values) -> Values:
    """Add the offsets to (N, K) logits and divide by the temperature."""
    del ops
    return (scores + p.adjustment_offsets) / p.adjustment_temperature


def box_at(ops: Any, fraction: Values, slack: Values, num_classes: int) -> tuple[Values, Values]:
    """Give (lower, upper) for `fraction = lower * K` and the share of the upper bound's range left out.

    No probability exceeds `1 - (K - 1) lower`, so an upper bound above that is inert, its gradient exactly
    zero, and a search over the paper's own parameters can be caught there. This upper bound is never inert:
    `1/K + (1 - 1/K) (1 - lower K) (1 - slack)`.
    """
    share = 1.0 - 1.0 / num_classes
    upper = 1.0 / num_classes + share * (1.0 - fraction) * (1.0 - slack)
    return fraction / num_classes, ops.clip(upper, 1.0 / num_classes, 1.0)


def constant_box(ops: Any, p: Parameters, logits: Values) -> tuple[Values, Values]:
    """Give the two numbers."""
    del ops, logits
    return p.lower, p.upper


def instance_box(ops: Any, p: Parameters, logits: Values) -> tuple[Values, Values]:
    """Give lower and upper, each (N, 1), for mapped logits (N, K)."""
    chances = ops.sigmoid(network(ops, p.network, logits))
    return box_at(ops, chances[:, :1], chances[:, 1:], logits.shape[1])


def no_reason(p: Parameters, num_classes: int) -> str | None:
    """Refuse nothing."""
    del p, num_classes
    return None


def positive(name: str) -> Callable[[Parameters, int], str | None]:
    """Refuse a map of which one number is not above 0."""

    def reason(p: Parameters, num_classes: int) -> str | None:
        del num_classes
        value = getattr(p, name).item()
        return None if value > 0.0 else f"{name} must be positive; it is {value}"

    return reason


def invalid_ensemble(p: Parameters, num_classes: int) -> str | None:
    """Say so if the temperature is not positive, or the weights do not add up to 1."""
    weights = p.mixture_weights
    if weights.min().item() < 0.0 or not math.isclose(weights.sum().item(), 1.0, abs_tol=1e-9):
        return f"the mixture weights must be non-negative and sum to 1; they are {weights.tolist()}"
    return positive("temperature")(p, num_classes)


def invalid_limits(p: Parameters, num_classes: int) -> str | None:
    """Say so if the limits of logit bounding are not in order."""
    del num_classes
    lower, upper = p.logit_lower.item(), p.logit_upper.item()
    in_order = -1.0 <= lower <= upper <= 1.0
    return None if in_order else f"the logit limits {lower} and {upper} are out of order"


def invalid_shift(p: Parameters, num_classes: int) -> str | None:
    """Say so if a weight or the threshold of dual probability bounding is negative."""
    del num_classes
    lowest = min(p.shift_weights.min().item(), p.shift_threshold.item())
    return None if lowest >= 0.0 else f"a shift weight or the shift threshold is {lowest}, below 0"


def invalid_reading(p: Parameters, num_classes: int) -> str | None:
    """Say so if this version does not know what a network reads."""
    del num_classes
    reading = p.network.normalised.item()
    known = (0.0, LOG_SOFTMAX, CENTRED, LOG_SURPRISAL)
    return None if reading in known else f"network.normalised is {reading}; this version knows {known}"


def invalid_tempered_network(p: Parameters, num_classes: int) -> str | None:
    """Say so if the temperature is not positive, or what the network reads is not known."""
    return positive("temperature")(p, num_classes) or invalid_reading(p, num_classes)


def invalid_curve(p: Parameters, num_classes: int) -> str | None:
    """Say so if places are out of order, or a value is not a probability above 0."""
    del num_classes
    if p.places.shape[1] and bool((p.places[:, 1:] < p.places[:, :-1]).any()):
        return "the places of a curve are not in ascending order"
    if p.places.shape[1] and not bool(((p.values > 0) & (p.values <= 1)).all()):
        return "a curve has a value that is not a probability above 0"
    return None


def invalid_box(p: Parameters, num_classes: int) -> str | None:
    """Say so if no distribution lies in the constant bounds."""
    lower, upper, even = p.lower.item(), p.upper.item(), 1.0 / num_classes
    if 0.0 <= lower <= even + 1e-12 and even - 1e-12 <= upper <= 1.0:
        return None
    return f"no distribution over {num_classes} classes lies in [{lower}, {upper}]"


class Formula(NamedTuple):
    """One map as it is stored and evaluated.

    Attributes
    ----------
    apply
        From the operations, the parameters and the rows to mapped logits, or to lower and upper bounds.
    shapes
        Of the tensors; None for any shape.
    invalid_reason
        Says which parameter no fit could have produced, if there is one.
    reads
        `logits`, `features` or `inputs`.
    combines
        Whether a box, or logit bounding, may follow the map.
    later
        Values of tensors that were added after version 1, for artifacts that do not have them.
    """

    apply: Callable[[Any, Parameters, Values], Any]
    shapes: Mapping[str, tuple[Size, ...] | None]
    invalid_reason: Callable[[Parameters, int], str | None] = no_reason
    reads: str = "logits"
    combines: bool = True
    later: Mapping[str, float] = {}


def _network(outputs: int, H: str) -> dict[str, tuple[Size, ...] | None]:
    shapes: dict[str, tuple[Size, ...]] = {
        "centre": ("T",), "spread": ("T",), "normalised": (), "weight_1": (H, "T"), "bias_1": (H,),
        "weight_2": (H, H), "bias_2": (H,), "weight_3": (outputs, H), "bias_3": (outputs,),
    }  # fmt: skip
    return {f"network.{name}": shape for name, shape in shapes.items()}


ONE = {"temperature": 1.0}
HEAD: dict[str, tuple[Size, ...] | None] = {"head_weight": ("K", "D"), "head_bias": ("K",)}
CURVES: dict[str, tuple[Size, ...] | None] = {"places": ("K", "P"), "values": ("K", "P")}
SQUARE: dict[str, tuple[Size, ...] | None] = {"temperature": (), "weight": ("K", "K"), "intercept": ("K",)}

FORMULAS: dict[str, Formula] = {
    "uncalibrated": Formula(identity, {}),
    "ts": Formula(temperature_scaling, {"temperature": ()}, positive("temperature")),
    "lb": Formula(logit_bounding, {"logit_lower": (), "logit_upper": ()}, invalid_limits),
    "ets": Formula(ensemble, {"temperature": (), "mixture_weights": (3,)}, invalid_ensemble),
    "fc": Formula(feature_clipping, {**HEAD, "radius": ()}, positive("radius"), "features"),
    "ta": Formula(tilt_and_average, {**HEAD, "turned_weight": ("K", "D"), "angle": ()}, reads="features"),
    "pts": Formula(
        parameterised_temperature,
        {"temperature": (), **_network(1, "H1")},
        invalid_tempered_network,
        later={**ONE, "network.normalised": 0.0},
    ),
    "vector": Formula(vector_scaling, {"temperature": (), "factors": ("K",), "offsets": ("K",)}, later=ONE),
    "dpb": Formula(dual_bounding, {"shift_weights": ("K",), "shift_threshold": ()}, invalid_shift),
    "beta": Formula(
        beta, {"log_weights": ("K",), "complement_weights": ("K",), "offsets": ("K",)}, combines=False
    ),
    "histogram": Formula(steps, CURVES, invalid_curve, combines=False),
    "isotonic": Formula(lines, CURVES, invalid_curve, combines=False),
    "venn-abers": Formula(steps, CURVES, invalid_curve, combines=False),
    "sms": Formula(matrix_scaling, SQUARE, later=ONE),
    "dirichlet": Formula(dirichlet, SQUARE, later=ONE),
    "matrix": Formula(matrix_scaling, SQUARE, later=ONE),
    "nc": Formula(
        temperature_scaling, {"temperature": (), "input_shift": None}, positive("temperature"), "inputs"
    ),
    "em": Formula(
        class_prior,
        {"adjustment_offsets": ("K",), "adjustment_temperature": ()},
        positive("adjustment_temperature"),
        combines=False,
    ),
}

BOXES: dict[str, Formula] = {
    "pb": Formula(constant_box, {"lower": (), "upper": ()}, invalid_box),
    "pb-mlp": Formula(instance_box, _network(2, "H2"), invalid_reading, later={"network.normalised": 0.0}),
}
