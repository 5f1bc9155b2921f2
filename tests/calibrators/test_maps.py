"""Every map: its vector-Jacobian product by finite differences, its formula on arrays and on tensors."""

import numpy as np
import pytest
import torch

from boxcal.calibrators.fitting.objective import Objective, objective_of
from boxcal.calibrators.maps.base import LogitMap
from boxcal.calibrators.maps.chain import Chain
from boxcal.calibrators.maps.logit_bounding import LogitBounding
from boxcal.calibrators.maps.network import CENTRED, NetworkMap
from boxcal.calibrators.method import BOUND_MAPS, logit_maps
from tests.calibrators.filled_maps import CLASSES, filled
from tests.calibrators.samples import Array, central_differences, contaminated


def made() -> list[LogitMap]:
    singles = [one for one in logit_maps().values() if one is not Chain]
    chained = [Chain(filled(one), filled(LogitBounding)) for one in singles if one.combines]
    networks = [filled(one, CENTRED) for one in singles if issubclass(one, NetworkMap)]
    return [*(filled(one) for one in singles), *chained, *networks]


EACH_MAP = pytest.mark.parametrize("one", made(), ids=lambda one: one.name)


@EACH_MAP
def test_the_product_of_a_logit_map_is_that_of_finite_differences(one: LogitMap) -> None:
    """In its coordinates and in what it takes; kinks are not near these rows."""
    rng = np.random.default_rng(0)
    scores, upstream = 2.0 * rng.normal(size=(7, one.width)), rng.normal(size=(7, CLASSES))
    scores -= scores.mean(axis=1, keepdims=True)
    at = one.coordinates()
    mapped, back = one.vjp(one.at(at), scores, one.precompute(scores))
    np.testing.assert_allclose(mapped, one(scores), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(one(torch.from_numpy(scores)), mapped, rtol=1e-9, atol=1e-12)
    gradients, by_scores = back(upstream, True)

    def through(rows: Array) -> float:
        return float(np.vdot(upstream, one.vjp(one.parameters, rows.reshape(scores.shape))[0]))

    numeric = central_differences(through, scores.ravel())
    np.testing.assert_allclose(by_scores.ravel(), numeric, rtol=1e-5, atol=1e-7)
    numeric = central_differences(
        lambda x: float(np.vdot(upstream, one.vjp(one.at(x), scores, one.precompute(scores))[0])), at
    )
    np.testing.assert_allclose(one.slopes(at, gradients), numeric, rtol=1e-5, atol=1e-7)
    assert back(upstream, False)[1] is None
    np.testing.assert_array_equal(one.moved(at).coordinates(), at)


@pytest.mark.parametrize("bounds", ["", *BOUND_MAPS])
@EACH_MAP
def test_the_gradient_of_an_objective_is_that_of_finite_differences(one: LogitMap, bounds: str) -> None:
    if one.reads == "inputs":
        return
    logits, labels = (part.numpy() for part in contaminated(60, CLASSES))
    scores = np.ascontiguousarray(logits[:, : one.width])
    box = filled(BOUND_MAPS[bounds]) if bounds else None
    weights = np.linspace(0.5, 1.5, 60)
    whole: Objective = objective_of(one, box, scores, labels, weights)
    point = np.concatenate([one.coordinates(), box.coordinates() if box else np.empty(0)])
    directions = np.random.default_rng(0).normal(size=(12, len(point)))
    for objective in (whole, whole.with_pseudo_sample(), whole.rows(np.arange(0, 60, 2))):
        numeric = central_differences(objective.value, point, directions)
        np.testing.assert_allclose(directions @ objective(point)[1], numeric, rtol=2e-5, atol=1e-6)
