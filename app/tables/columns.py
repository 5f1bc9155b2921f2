"""Which columns of a table are read: logits, probabilities, features or texts; labels, groups and weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from boxcal.app.http.problems import InvalidUpload
from boxcal.app.settings.nearest import hint
from boxcal.app.tables.model_inputs import FEATURES, TEXTS, ModelInputs

LABEL = "label"
GROUPS = "groups"
SAMPLE_WEIGHT = "sample_weight"
WEIGHTS = ("sample_weights", "weight", "weights")
GROUP_COLUMNS = ("group", "groups")
SCORES = ("logits", "probabilities")
MAX_COLUMNS = 20_000


@dataclass(frozen=True)
class Columns:
    """Which columns of a table hold the scores or samples.

    Attributes
    ----------
    names
        One list column, one column for each class in the order of the classes, or those of the features or of
        the text.
    kind
        `logits`, `probabilities`, `features` or `texts`.
    classes
        The class names; None where a list column is read and no names are known.
    group
        The column of groups; None without one.
    weight
        The column of weights; None without one.
    """

    names: tuple[str, ...]
    kind: str
    classes: Sequence[str] | None
    group: str | None = None
    weight: str | None = None

    @property
    def read(self) -> list[str]:
        """Every column that is read."""
        return [*self.names, LABEL, *(name for name in (self.group, self.weight) if name)]

    @property
    def is_list(self) -> bool:
        """Whether one column holds a list per row."""
        return len(self.names) == 1 and not self.has_samples

    @property
    def has_samples(self) -> bool:
        """Whether the table holds what the model reads in place of logits."""
        return self.kind in (FEATURES, TEXTS)


def choose_columns(
    names: Sequence[str],
    classes: Sequence[str] | None,
    scores: str | None,
    inputs: ModelInputs | None = None,
) -> Columns:
    """Find the columns of the scores, or of the features or texts that the model reads.

    Parameters
    ----------
    classes
        The class names; None to take them from the columns.
    scores
        What columns named by class hold; logits unless given.
    inputs
        Of a model of features or texts.

    Raises
    ------
    InvalidUpload
        Naming the column that is missing, repeated or unknown.
    """
    own = set(inputs.table_columns) if inputs is not None else set()
    own = own if own <= set(names) else set()
    _check_names(names)
    reserved = {*(classes or ()), *own}
    group = next((name for name in GROUP_COLUMNS if name in names and name not in reserved), None)
    weight = SAMPLE_WEIGHT if SAMPLE_WEIGHT in names and SAMPLE_WEIGHT not in reserved else None
    lists = [name for name in SCORES if name in names and name not in own]
    if len(lists) > 1:
        raise InvalidUpload("The table has both `logits` and `probabilities`; send the one to be fitted.")
    if inputs is None or lists:
        refuse_weights([name for name in names if name not in own])
    if lists and own and inputs is not None:
        raise InvalidUpload(
            f"The table has both `{lists[0]}` and the columns of {inputs.member} that {inputs.model} reads; "
            "send the one to be fitted."
        )
    if lists:
        return Columns((lists[0],), lists[0], classes, group, weight)
    others = [name for name in names if name not in (LABEL, group, weight)]
    if inputs is not None:
        classes = classes or inputs.labels
        if _are_samples(others, inputs, classes, scores):
            return Columns(inputs.table_columns, inputs.member, inputs.labels, group, weight)
    if classes is None and len(others) < 2:
        raise InvalidUpload("The table needs a column `logits` of lists, or one column for each class.")
    wanted = others if classes is None else _scores_by_class(others, classes)
    return Columns(tuple(wanted), scores or SCORES[0], classes or others, group, weight)


def _check_names(names: Sequence[str]) -> None:
    """Refuse columns that are repeated or too many, and a table without labels."""
    if len(names) > MAX_COLUMNS:
        raise InvalidUpload(f"The table has {len(names):,} columns; the limit is {MAX_COLUMNS:,}.")
    if LABEL not in names:
        shown = ", ".join(f"`{name:.50}`" for name in names[:20])
        raise InvalidUpload(f"The table needs one column `{LABEL}`; it has the columns {shown}.")
    if len(set(names)) < len(names):
        name = Counter(names).most_common(1)[0][0]
        raise InvalidUpload(f"The table has more than one column {name!r:.100}.")


def _scores_by_class(others: Sequence[str], classes: Sequence[str]) -> Sequence[str]:
    """Order the columns by class.

    Raises
    ------
    InvalidUpload
        Naming the column that is missing or unknown.
    """
    wanted = _class_columns(others, classes)
    for name in others:
        if name not in wanted:
            raise InvalidUpload(f"The column {name!r:.100} is no class of the model{hint(name, wanted)}.")
    if missing := [name for name in wanted if name not in others]:
        raise InvalidUpload(
            f"The table needs one column for each of the {len(classes)} classes; {missing[0]!r:.100} is "
            f"missing" + (f", and {len(missing) - 1} more." if len(missing) > 1 else ".")
        )
    return wanted


def _class_columns(others: Sequence[str], classes: Sequence[str]) -> list[str]:
    """Columns of the classes: their names, or their indices."""
    indices = list(map(str, range(len(classes))))
    return indices if set(others) == set(indices) and set(classes) != set(indices) else list(classes)


def _are_samples(
    others: Sequence[str], inputs: ModelInputs, classes: Sequence[str], scores: str | None
) -> bool:
    """Tell the columns of features or texts from those of logits, by their names.

    Raises
    ------
    InvalidUpload
        They are both, or neither.
    """
    own, of_classes, there = set(inputs.table_columns), set(_class_columns(others, classes)), set(others)
    if own <= there and of_classes <= there and scores is None:
        if own == of_classes or there not in (own, of_classes):
            raise InvalidUpload(
                f"The columns are the {inputs.member} that {inputs.model} reads, and also its classes. With "
                f"the field `scores` they are its logits or probabilities; send {inputs.member} as JSON."
            )
        return there == own
    if of_classes <= there and (scores is not None or not own <= there):
        return False
    if not own <= there:
        raise InvalidUpload(_neither(others, inputs, classes))
    if unknown := next((name for name in others if name not in own), None):
        raise InvalidUpload(f"The column {unknown!r:.100} is nothing that {inputs.model} reads.")
    return True


def _neither(others: Sequence[str], inputs: ModelInputs, classes: Sequence[str]) -> str:
    """Say which columns are missing, as samples and as logits."""
    absent = []
    for wanted in (inputs.table_columns, _class_columns(others, classes)):
        missing = [name for name in wanted if name not in others]
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        absent.append(
            f"{missing[0]!r:.100}{more}{hint(missing[0], [one for one in others if one not in wanted])}"
        )
    what = "the text" if inputs.member == TEXTS else "the features"
    note = ""
    if inputs.names and inputs.names == tuple(map(str, range(len(inputs.names)))):
        note = ' The model\'s features have no names; declare them as "features" in its JSON file.'
    return (
        f"The columns are neither {what} that {inputs.model} reads (missing: {absent[0]}) nor logits of its "
        f"classes (missing: {absent[1]}).{note}"
    )


def refuse_weights(names: Sequence[str]) -> None:
    """Refuse weights by another name than `sample_weight`, under which nothing would read them."""
    for name in names:
        if name.lower() in WEIGHTS:
            raise InvalidUpload(f"`{name}` is not read; send the weights of samples as `{SAMPLE_WEIGHT}`.")
