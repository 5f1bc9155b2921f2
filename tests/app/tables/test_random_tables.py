"""Random files: each means what the plain arrays mean, or is refused; never something else."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from boxcal.app.http.problems import BoxcalError
from boxcal.app.tables.labels import Declared
from boxcal.calibrators.scores import integer_of
from tests.app.fitting.validation_data import npz
from tests.app.tables.sets import TABLES, Given, arrays_of, frame, read, softmax

NAMES = st.sampled_from(
    [
        ("ape", "bee", "cat"),
        ("no", "yes"),
        ("0", "1", "2", "3"),
        ("1", "2", "3"),
        ("10", "20", "30"),
        ("-1", "1"),
        ("0", "1", "10", "2"),
        ("a", "ab", "b"),
        ("Ärger", "Freude"),
    ]
)
LABELS = st.sampled_from(["names", "indices", "floats", "texts of indices"])
EXTRA = st.sampled_from([None, "id", "fold", "path", "group", "sample_weight"])
KINDS = st.sampled_from(["logits", "probabilities", "rounded", "percent", "whole percent"])
DECLARED = {"rounded": "probabilities", "whole percent": "percent"}


def labels_of(one: Given, how: str) -> Any:
    """Labels as names or as numbers, which are names where they name the classes."""
    if how == "names":
        return one.named_labels()
    are_names = integer_of(one.names[0]) is not None
    numbers = one.named_labels().astype(int) if are_names else one.labels
    return numbers.astype({"indices": int, "floats": float, "texts of indices": str}[how])


def as_sent(scores: Any, kind: str) -> Any:
    rows = softmax(scores)
    return {
        "logits": scores,
        "probabilities": rows,
        "rounded": rows.round(2),
        "percent": 100 * rows,
        "whole percent": (100 * rows).round(),
    }[kind]


@settings(max_examples=250)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([*TABLES, "npz", "json"]),
    NAMES,
    LABELS,
    EXTRA,
    KINDS,
    st.booleans(),
    st.booleans(),
    st.sampled_from(["", "p_", "score "]),
)
def test_a_file_means_what_the_plain_arrays_mean(  # noqa: PLR0917
    seed: int,
    form: str,
    names: tuple[str, ...],
    how: str,
    extra: str | None,
    kind: str,
    is_known: bool,
    is_declared: bool,
    start: str,
) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, len(names), 40)
    scores = rng.normal(size=(40, len(names)))
    scores[np.arange(40), labels] += 2
    sent = as_sent(scores, kind)
    order = rng.permutation(len(names))
    own = Given(sent[:, order], [names[k] for k in order], np.argsort(order)[labels])
    # An index in a table counts the classes of the model, and those of the file where it names its own.
    counts = own if form not in TABLES or not is_known else Given(sent, names, labels)
    values = labels_of(counts, how)
    if form in TABLES:
        others = {
            **{"path": [f"{n}.png" for n in range(40)], "sample_weight": rng.random(40) + 0.5},
            **{"group": np.arange(40) // 4, "id": np.arange(40), "fold": np.arange(40)},
        }
        more = {} if extra is None else {extra: others[extra]}
        table = frame(own, values, **more).rename(columns={name: f"{start}{name}" for name in own.names})
        body = TABLES[form](table)
    else:
        body = arrays_of(own, values)[form]
    scores_kind = DECLARED.get(kind, kind)
    declared = Declared(scores_kind) if is_declared else Declared()
    with tempfile.TemporaryDirectory() as folder:
        try:
            data = read(body, Path(folder) / "read", names if is_known else None, declared)
        except BoxcalError:
            # What is meant by names and declared is never refused.
            assert how != "names" or extra in {"id", "fold"} or not (is_declared or kind == "logits")
            return
        plain = read(
            npz(**{"logits": sent, "labels": labels}),
            Path(folder) / "plain",
            tuple(f"class {k}" for k in range(len(names))),
            Declared(scores_kind),
        )
        found, expected = softmax(data.arrays()[0]), softmax(plain.arrays()[0])
        classes = data.classes or list(map(str, range(len(names))))
        back = [classes.index(name) for name in names]
        np.testing.assert_allclose(found[:, back], expected, rtol=1e-12, atol=1e-15)
        assert [classes[k] for k in data.arrays()[1]] == [names[k] for k in labels]
