"""Items of feedback: each is read or named, whatever the others are."""

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxcal.app.http.problems import InvalidParameter
from boxcal.app.monitoring import routes
from boxcal.app.monitoring.records import ItemProblem, Label
from boxcal.app.monitoring.routes import ItemReader
from boxcal.app.predict.options import Labels
from boxcal.calibrators.monitoring.stored_logits import unpack
from tests.app.raising import raises_problem

LABELS = Labels(["cat", "dog", "7"])
ID = "01936d8f2b7c4d0e9a5f6b1c2d3e4f50"


def read_items(items: Any, labels: Labels) -> tuple[list[Label], list[ItemProblem]]:
    reader = ItemReader(labels)
    reader.add(items)
    return reader.found, reader.problems


def test_labels_are_names_or_indices() -> None:
    found, problems = read_items([{"id": ID, "label": "dog"}, {"id": ID, "label": 2, "source": "a"}], LABELS)
    assert [(one.index, one.id, one.label, one.source) for one in found] == [
        (0, ID, 1, None),
        (1, ID, 2, "a"),
    ]
    assert problems == []


def test_space_around_a_label_is_none_of_its_name() -> None:
    ((found,), problems) = read_items([{"id": ID, "label": " dog"}], LABELS)
    assert (found.label, problems) == (1, [])


def test_logits_are_kept_relative_to_the_largest() -> None:
    (one,), _ = read_items([{"logits": [1.5 + 1e6, 1e6, 2.5 + 1e6], "key": "a", "label": 0}], LABELS)
    assert one.logits is not None
    assert unpack(np.frombuffer(one.logits, np.int16)[None]).tolist() == [[1.5 + 1e6, 1e6, 2.5 + 1e6]]


@pytest.mark.parametrize(
    ("item", "says"),
    [
        (5, "5 is no object"),
        ({"id": ID}, "label is None"),
        ({"id": ID, "label": 3}, "label is 3; it is the name of a class, or an index from 0 to 2"),
        ({"id": ID, "label": True}, "label is True"),
        ({"id": ID, "label": "dot"}, "label is 'dot', a class the model does not have"),
        ({"id": ID, "label": "catt"}, "did you mean 'cat'?"),
        ({"label": 1}, "it needs either `id`, or `logits` and `key`"),
        ({"id": ID, "key": "a", "label": 1}, "it needs either"),
        ({"id": ID, "logits": [1, 2, 3], "label": 1}, "it needs either"),
        ({"id": 5, "label": 1}, "id is 5; it is text"),
        ({"id": ID, "label": 1, "propensity": 0}, "propensity is 0; it is a probability of at least 1e-06"),
        ({"id": ID, "label": 1, "propensity": 9.9e-7}, "propensity is 9.9e-07; it is a probability of at"),
        ({"id": ID, "label": 1, "propensity": float("nan")}, "propensity is nan"),
        ({"id": ID, "label": 1, "propensity": "inf"}, "propensity is 'inf'; it is a probability of at least"),
        ({"id": ID, "label": 1, "source": "a\x00b"}, "source is"),
        ({"id": ID, "label": 1, "sauce": "a"}, "there is no member 'sauce'"),
        ({"key": "a", "logits": [1, 2], "label": 1}, "logits must be a list of 3 numbers"),
        ({"key": "a", "logits": [1, 2, float("inf")], "label": 1}, "logits[2] is inf; logits are finite"),
        ({"key": "a", "logits": [1, 2, 10**400], "label": 1}, "logits[2] is 1000"),
        ({"key": "a", "logits": [1, 2, float("nan")], "label": 1}, "logits[2] is nan"),
        ({"key": "", "logits": [1, 2, 3], "label": 1}, "key is ''"),
    ],
)
def test_a_malformed_item_is_named_and_the_others_are_read(item: Any, says: str) -> None:
    good = {"id": ID, "label": 0}
    found, (problem,) = read_items([good, item, good], LABELS)
    assert [one.index for one in found] == [0, 2]
    assert (problem.index, problem.reason) == (1, "malformed")
    assert problem.detail.startswith("items[1]: ")
    assert says in problem.detail


@pytest.mark.parametrize("sent", [None, {}, [], "items"])
def test_items_must_be_a_list(sent: Any) -> None:
    with raises_problem(InvalidParameter, match="items must be a list"):
        read_items(sent, LABELS)


def test_the_number_of_items_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("boxcal.app.settings.limits.MAX_LABELS", 2)
    with raises_problem(InvalidParameter, match="more than 2 items"):
        read_items([{}] * 3, LABELS)


def test_few_unknown_labels_are_compared_with_all_that_are_known() -> None:
    many = Labels([f"class {k}" for k in range(3000)])
    sent = [{"id": str(n), "label": f"clasz {n % 3000}"} for n in range(20_000)]
    started = time.process_time()
    found, problems = read_items(sent, many)
    assert time.process_time() - started < 5.0  # a label costs 2 ms: all would take 40 s
    assert not found
    assert ["did you mean" in problem.detail for problem in problems] == [True] * 100 + [False] * 19_900


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*sorted(routes.MEMBERS), "x"]), inner, max_size=5)
    ),
    max_leaves=8,
)


@given(st.lists(JSON, min_size=1, max_size=6))
def test_every_item_is_either_read_or_named(sent: list[Any]) -> None:
    found, problems = read_items(sent, LABELS)
    assert sorted([one.index for one in found] + [problem.index for problem in problems]) == list(
        range(len(sent))
    )
