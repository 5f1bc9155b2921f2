"""Which columns of a table are read: logits, probabilities, features or texts; labels, groups and weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from boxcal.app.http.problems import InvalidUpload
from boxcal.app.tables.labels import BOOLEANS, Declared, shown
from boxcal.app.tables.sample_schema import FEATURES, TEXTS, ModelInputs
from boxcal.calibrators.checks import may_miss_classes
from boxcal.calibrators.class_columns import (
    SCORE,
    affixes,
    class_columns,
    class_of_score,
    clean,
    without_decimals,
)
from boxcal.calibrators.errors import hint
from boxcal.calibrators.scores import LOGITS, PROBABILITIES, integer_of

LABEL = "label"
LABEL_NAMES = {"label", "labels", "target", "targets", "y", "y_true", "ytrue", "class", "truth", "true"}
LABEL_NAMES |= {"true_label", "true_class", "label_id", "ground_truth", "category", "outcome", "actual"}
GROUPS = "groups"
SAMPLE_WEIGHT = "sample_weight"
WEIGHTS = ("sample_weights", "weight", "weights")
GROUP_COLUMNS = ("group", "groups")
SCORES = (LOGITS, PROBABILITIES)
MAX_COLUMNS = 20_000
MAX_LISTED = 10
TRAINING = {"train", "training"}
"""The part of the data that a model is trained with, in small letters."""
PART = re.compile(r"(data)?_?(split|subset|partition|part|set)|(is|in)_?train(ing)?", re.IGNORECASE)
SHARED = re.compile(
    r"(patient|subject|person|participant|user|customer|client|case|session|video)s?([_ -]?id)?", re.I
)
"""Columns whose rows are of one part of the data, and those whose equal values are of one unit."""
INDEX = re.compile(r"|Unnamed: \d+|__index_level_\d+__")
"""Columns that spreadsheets and data frames write beside the named ones."""
FEATURES_ALONE = (
    "Features are no scores: add a column of the model's score for each class, or name a model that reads "
    "them with BOXCAL_MODEL."
)
MISSING = {"na", "n/a", "nan", "<na>", "null", "none", "?"}
"""How labels that are missing are written in text, in small letters."""
PERCENT_SIGN = re.compile(r"\d\s*%")


@dataclass(frozen=True)
class Columns:
    """Which columns of a table hold the scores or samples."""

    # One list column, one column for each class in the order of the classes, or those of the features or of
    # the text
    names: tuple[str, ...]
    kind: str  # `logits`, `probabilities`, `percent`, `features` or `texts`
    classes: Sequence[str] | None  # The class names; None where a list column is read and no names are known
    label: str = LABEL  # The column of labels
    group: str | None = None  # The column of groups; None without one
    weight: str | None = None  # The column of weights; None without one
    reordered: bool = False  # Whether the columns of the classes are in another order than the classes
    left_out: tuple[str, ...] = ()  # Columns that are not read, and were not named by the sender

    @property
    def read(self) -> list[str]:
        return [*self.names, self.label, *(name for name in (self.group, self.weight) if name)]

    @property
    def is_list(self) -> bool:
        """Whether one column holds a list per row, or the score of the second of two classes."""
        return len(self.names) == 1 and not self.has_samples

    @property
    def is_single(self) -> bool:
        """Whether one column holds the score of the second of two classes."""
        return self.is_list and self.names[0] not in SCORES

    @property
    def has_samples(self) -> bool:
        """Whether the table holds what the model reads in place of logits."""
        return self.kind in (FEATURES, TEXTS)


def choose_columns(
    names: Sequence[str],
    classes: Sequence[str] | None,
    declared: Declared,
    inputs: ModelInputs | None = None,
    *,
    label_values: Callable[[str], tuple[list[str], int]] | None = None,
    texts: Callable[[], Mapping[str, str]] = dict,
) -> Columns:
    """Find the columns of the scores, or of the features or texts that the model reads.

    `classes`: the class names of the model or the calibrator; None to find them among the columns.
    `label_values`: gives the distinct labels of a column, and the number of labels. `texts`: gives the
    columns that hold no numbers, and what they hold.
    """
    label = declared.label or LABEL
    kept = {label, declared.group}
    names = [name for name in names if name in kept or name not in declared.ignore]
    own = set(inputs.table_columns) if inputs is not None else set()
    own = own if own <= set(names) else set()
    if not own and (cleaned := [clean(name) for name in names]) != names:
        back = dict(zip(cleaned, names, strict=True))
        found = choose_columns(
            cleaned,
            None if classes is None else [clean(name) for name in classes],
            replace(declared, label=clean(label), group=declared.group and clean(declared.group)),
            inputs,
            label_values=None if label_values is None else lambda name: label_values(back[name]),
            texts=lambda: {clean(name): held for name, held in texts().items()},
        )
        return replace(
            found,
            names=tuple(back[name] for name in found.names),
            classes=classes or found.classes,
            label=back[found.label],
            group=back.get(found.group or ""),
            weight=back.get(found.weight or ""),
        )
    known = classes if classes is not None else declared.classes
    _check_names(names, label)
    reserved = {*(known or ()), *own}
    group = _group_column(names, declared.group, {*reserved, label})
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
        return Columns((lists[0],), kind_of(lists[0], declared), known, label, group, weight)
    others = [name for name in names if name not in (label, group, weight)]
    dropped = tuple({name: None for name in others if INDEX.fullmatch(name) and name not in reserved})
    others = [name for name in others if name not in dropped]
    if label_values is not None and (inputs is None or inputs.has_names):
        _check_parts([name for name in others if name not in reserved], group, label_values)
    if inputs is not None:
        known = known or inputs.labels
        if _are_samples(others, inputs, known, declared.scores):
            samples = tuple(inputs.table_columns if own else others)
            return Columns(samples, inputs.member, inputs.labels, label, group, weight)
    values, rows = ([], 0) if known is not None or label_values is None else label_values(label)
    of_classes = class_columns(others, known or values)
    without: Mapping[str, str] = {}
    if known is None or not set(others) <= set(of_classes):
        held = texts()
        _check_numbers(of_classes, held)
        without = {name: held[name] for name in others if name in held}
        dropped += tuple(without)
        others = [name for name in others if name not in without]
    if known is None:
        wanted, known = _classes_among(others, values, without, declared.scores)
        _check_no_features(wanted, values, rows)
    else:
        wanted = _scores_by_class(others, known, declared.scores)
    named = next((one for one in SCORES if all(name.startswith(f"{one}.") for name in wanted)), None)
    kind = kind_of(named or LOGITS, declared, is_named=named is not None)
    in_order = [name for name in others if name in set(wanted)]
    return Columns(
        tuple(wanted), kind, known, label, group, weight, in_order != list(wanted), tuple(sorted(dropped))
    )


def kind_of(name: str, declared: Declared, *, is_named: bool = True) -> str:
    """Return what an array or column of scores holds: what its name says, or what the sender says of it."""
    if is_named and name == PROBABILITIES and declared.scores == LOGITS:
        raise InvalidUpload(f"The scores are named `{name}`, but scores={declared.scores}.")
    return declared.scores or name


def _check_names(names: Sequence[str], label: str) -> None:
    """Refuse columns that are repeated or too many, and a table without labels."""
    if len(names) > MAX_COLUMNS:
        raise InvalidUpload(f"The table has {len(names):,} columns; the limit is {MAX_COLUMNS:,}.")
    if label not in names:
        shown = ", ".join(f"`{name:.50}`" for name in names[:20])
        meant = next((name for name in names if name.strip().lower() in LABEL_NAMES), None)
        said = f" If `{meant:.50}` is it, set label={meant:.50}." if meant else " Name it: label=NAME."
        if all(_is_number(name) for name in names):
            said = " Its first line holds numbers: add a line that names the columns, such as 0,1,label."
        raise InvalidUpload(f"The table needs one column `{label}`; it has the columns {shown}.{said}")
    check_distinct(names)


def check_distinct(names: Sequence[str]) -> None:
    """Refuse a table with two columns of one name."""
    named = [name for name in names if name]  # those without a name are left out
    if len(set(named)) < len(named):
        name = Counter(named).most_common(1)[0][0]
        raise InvalidUpload(f"The table has more than one column {name!r:.100}.")


def _group_column(names: Sequence[str], declared: str | None, others: Collection[str]) -> str | None:
    """Find the column of groups, which is none of `others`."""
    if declared is None:
        return next((name for name in GROUP_COLUMNS if name in names and name not in others), None)
    if declared not in names:
        columns = f"its columns are {shown(names)}."
        raise InvalidUpload(
            f"The table has no column `{declared:.100}` of groups{hint(declared, names, columns)}"
        )
    if declared in others:
        raise InvalidUpload(
            f"The column `{declared:.100}` is that of the labels, of a class or of a feature, not of groups."
        )
    return declared


def _check_numbers(columns: Sequence[str], without: Mapping[str, str]) -> None:
    """Refuse texts in the column of a class; columns of texts that are no class are left out."""
    if name := next((name for name in columns if name in without), None):
        raise InvalidUpload(
            f"The column {name!r:.100} is that of a class, but not all of its cells are numbers: it holds "
            f"{without[name]}."
        )


def _check_parts(
    names: Iterable[str], group: str | None, label_values: Callable[[str], tuple[list[str], int]]
) -> None:
    """Refuse rows of several parts of the data, or of several units without a column that says so.

    Rows that the model was trained with make a calibrator too sure, and rows of one patient that are judged
    by a fit to others of the same make it look better than it is.
    """
    found = [name for name in names if PART.fullmatch(name) or (group is None and SHARED.fullmatch(name))]
    # Each takes a pass over the table.
    for name in sorted(found, key=lambda name: PART.fullmatch(name) is None)[:MAX_LISTED]:
        is_part, is_shared = PART.fullmatch(name), group is None and SHARED.fullmatch(name)
        try:
            values, rows = label_values(name)
        except InvalidUpload:  # it has gaps, or other numbers than integers
            continue
        of_training = {"1", "true"} if "train" in name.lower() else TRAINING
        if is_part and not of_training.isdisjoint(map(str.lower, values)):
            raise InvalidUpload(
                f"The column {name!r:.100} says of which part of the data a row is ({shown(values)}). A "
                "calibrator needs rows that the model was not trained with: send those alone, with "
                f"ignore={name:.100}."
            )
        if is_shared and 1 < len(values) < rows:
            raise InvalidUpload(
                f"The {rows:,} rows have {len(values):,} values of {name!r:.100}. Where those of one value "
                f"belong together, set group={name:.100}; else leave it out with ignore={name:.100}."
            )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return not text
    return True


def _classes_among(
    others: Sequence[str], values: Sequence[str], without: Mapping[str, str], scores: str | None
) -> tuple[list[str], list[str]]:
    """Find the columns of the classes by the values of the labels.

    `without`: the columns that hold no numbers, and what they hold. `scores`: what the sender says they are.
    Returns the columns, and the names of their classes.
    """
    found = _named_like(others, values)
    is_one_of_two = found is None and len(others) == 1 and len(values) == 2
    if is_one_of_two and (one := _score_of_two(others[0], values, scores)):
        return one
    if found is None:
        texts = "".join(f"; `{name:.50}` holds {held}" for name, held in [*without.items()][:5])
        said = " Name those of the classes in the order of their indices: classes=a,b,c."
        of_one = [name for name in others if SCORE.fullmatch(name)]
        given = [value for value in values if value.lower() not in MISSING]
        if 1 < len(given) < len(values) and (len(others) == 1 or _named_like(others, given)):
            missing = next(value for value in values if value not in given)
            said = f" If {missing!r} says that a label is missing, leave out those rows."
        elif len(values) == 1:
            said += f" All labels are {values[0]!r:.100}, which leaves open what the other columns are."
        elif values and {value.casefold() for value in values} <= {name.casefold() for name in others}:
            said = " They differ from the labels in upper and lower case alone; write both alike."
        elif percent := next((name for name, held in without.items() if PERCENT_SIGN.search(held)), None):
            said = f" Write the numbers of `{percent:.50}` without %, and set scores=percent."
        elif is_one_of_two:
            said = (
                f" If `{others[0]:.50}` is the score of {values[1]!r:.50}, set scores=probabilities or "
                "scores=logits."
            )
        elif len(values) == 2 and len(of_one) == 1:
            said = f" {_ignore_all_but(of_one[0], others, values)}."
        elif len(others) >= 2 * len(values) > 0:
            said += f" {FEATURES_ALONE}"
        elif len(others) < len(values):
            said = (
                " Each row needs the scores of all classes. Where only that of the predicted class is known, "
                "calibrate it as the score of two classes: the label is 1 if the prediction is right, or 0."
            )
        raise InvalidUpload(
            "The table needs a column `logits` or `probabilities`, or one column for each class, named as "
            f"the labels name it ({', '.join(map(repr, values[:5])) or 'none'}). Its other columns of "
            f"numbers are {', '.join(f'`{name:.50}`' for name in others[:20]) or 'none'}{texts}.{said}"
        )
    start, end, names = found
    columns = [f"{start}{name}{end}" for name in names]
    if unknown := [name for name in others if name not in columns]:
        every = ",".join([*columns, unknown[0]])
        if len(columns) > MAX_LISTED or every.count(",") > len(columns):
            every = "FILE, with one in each line"
        raise InvalidUpload(
            f"The column {unknown[0]!r:.100} holds numbers, and no label names it. {_leave_out(unknown)}; or "
            f"name all columns of classes: classes={every:.1000}."
        )
    return columns, names


def _check_no_features(wanted: Sequence[str], values: Sequence[str], rows: int) -> None:
    """Refuse numbered columns, most of which no label names although there are enough: they are features."""
    count = len(wanted)
    if count < 2 * len(values) or may_miss_classes(rows, count) or all(map(SCORE.fullmatch, wanted)):
        return
    raise InvalidUpload(
        f"The columns `{wanted[0]:.50}` to `{wanted[-1]:.50}` would be the scores of {count:,} classes, of "
        f"which the labels of {rows:,} rows name {len(values):,}. {FEATURES_ALONE} If they are scores, name "
        "their classes: classes=a,b,c."
    )


def _named_like(others: Sequence[str], values: Sequence[str]) -> tuple[str, str, list[str]] | None:
    """Find what stands before and after the values in the names of columns, and the classes so named.

    They are in the order of the columns. Consecutive integers belong together, with a label or without, and
    are in their own order, which is that of the indices where they begin at 0.
    """
    there = set(others)
    texts = sorted(set(map(without_decimals, values)))
    booleans = [str(BOOLEANS[value.lower()]) for value in values if value.lower() in BOOLEANS]
    for value in (values, texts, booleans if len(booleans) == len(values) else ()):
        for start, end in affixes(others, value):
            if all(f"{start}{one}{end}" in there for one in value):
                run = _consecutive(others, start, end, value)
                names = run or [
                    name[len(start) : len(name) - len(end)]
                    for name in others
                    if name in {f"{start}{one}{end}" for one in value}
                ]
                if len(names) > 1:
                    return start, end, names
    return None


def _consecutive(others: Sequence[str], start: str, end: str, values: Sequence[str]) -> list[str]:
    """List the classes that are consecutive integers, if all values are, in their order."""
    if any(integer_of(value) is None for value in values):
        return []
    inner = [
        name[len(start) : len(name) - len(end)]
        for name in others
        if name.startswith(start) and name.endswith(end) and len(name) > len(start) + len(end)
    ]
    numbers = {int(name): name for name in inner if re.fullmatch(r"[-+]?\d+", name)}
    if not numbers or sorted(numbers) != list(range(min(numbers), max(numbers) + 1)):
        return []
    return [numbers[number] for number in sorted(numbers)]


def _ignore_all_but(score: str, others: Sequence[str], classes: Sequence[str]) -> str:
    ignored = ",".join(name for name in others if name != score)
    return f"If `{score:.50}` is the score of {classes[1]!r:.50}, set ignore={ignored:.1000}"


def _leave_out(names: Sequence[str]) -> str:
    those = "it" if len(names) == 1 else f"it and {len(names) - 1:,} more"
    return f"Leave {those} out with ignore={','.join(names):.1000}"


def _score_of_two(name: str, values: Sequence[str], scores: str | None) -> tuple[list[str], list[str]] | None:
    """Take one column as the score of one of two classes: the one that it names, or else the second."""
    first, second = sorted(
        values, key=lambda value: (integer_of(value) is None, integer_of(value) or 0, value)
    )
    if (named := class_of_score(name, [first, second])) is not None:
        return [name], [second, first] if named == 0 else [first, second]
    return ([name], [first, second]) if scores or SCORE.fullmatch(name) else None


def _scores_by_class(others: Sequence[str], classes: Sequence[str], scores: str | None) -> list[str]:
    """Order the columns by class."""
    if _is_one_score(others, classes, scores):
        return list(others)
    wanted = class_columns(others, classes)
    missing = [name for name in wanted if name not in others]
    if unknown := [name for name in others if name not in wanted]:
        if not missing and _go_on(others, wanted):
            raise InvalidUpload(
                f"The columns go on to {unknown[-1]!r:.100}, and the model has {len(classes):,} classes "
                f"({shown(classes)}). {FEATURES_ALONE}"
            )
        advice = f"Missing: {missing[0]!r:.100}" if missing else _leave_out(unknown)
        of_one = [name for name in others if SCORE.fullmatch(name)]
        if len(classes) == 2 and len(missing) == 2 and len(of_one) == 1:
            advice = _ignore_all_but(of_one[0], others, classes)
        raise InvalidUpload(
            f"The column {unknown[0]!r:.100} is no class of the model"
            f"{hint(unknown[0], wanted) or f' ({shown(classes)}).'} {advice}."
        )
    if missing:
        raise InvalidUpload(
            f"The table needs one column for each of the {len(classes)} classes; {missing[0]!r:.100} is "
            f"missing" + (f", and {len(missing) - 1} more." if len(missing) > 1 else ".")
        )
    return wanted


def _is_one_score(others: Sequence[str], classes: Sequence[str], scores: str | None) -> bool:
    """Whether the only column is the score of the second of two classes: by its name, or as is said."""
    if len(classes) != 2 or len(others) != 1 or others[0] == classes[0]:
        return False
    return others[0] == classes[1] or bool(scores or SCORE.fullmatch(others[0]))


def _are_samples(
    others: Sequence[str], inputs: ModelInputs, classes: Sequence[str], scores: str | None
) -> bool:
    """Tell the columns of features or texts from those of logits, by their names."""
    if inputs.table_columns != tuple(others) and _is_one_score(others, classes, scores):
        return False
    of_classes, there = set(class_columns(others, classes)), set(others)
    own = set(inputs.table_columns)
    if not (inputs.has_names or own <= there or scores):
        if _are_scores(others, of_classes, inputs, classes):
            return False
        if len(others) != len(own):
            raise InvalidUpload(_neither(others, inputs, classes))
        own = there
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


def _are_scores(
    others: Sequence[str], of_classes: set[str], inputs: ModelInputs, classes: Sequence[str]
) -> bool:
    """Whether the columns of the classes are scores where nothing names the features: f0 is one of either."""
    if not of_classes <= set(others):
        return False
    if of_classes == set(classes) or all(SCORE.fullmatch(name) for name in of_classes):
        return True
    return len(others) != len(inputs.names) and not _go_on(others, of_classes)


def _go_on(others: Iterable[str], of_classes: Iterable[str]) -> bool:
    """Whether other columns are numbered like those of the classes: f10 like f0 to f9."""
    numbered = {re.sub(r"\d+", "#", name) for name in of_classes}
    return any(re.sub(r"\d+", "#", name) in numbered for name in set(others).difference(of_classes))


def _neither(others: Sequence[str], inputs: ModelInputs, classes: Sequence[str]) -> str:
    """Say which columns are missing, as samples and as logits."""
    if not inputs.has_names:
        count = len(inputs.names)
        advice = (
            "Leave out what is no feature with ignore=NAME" if len(others) > count else "Send all of them"
        )
        return (
            f"The columns are neither logits of the classes of {inputs.model} nor its {count:,} features, "
            f"which have no names: {count:,} columns are read in their order, but the table has "
            f"{len(others):,} beside those of labels, groups and weights. {advice}, or declare the names as "
            '"features" in the JSON file of the model.'
        )
    absent = []
    for wanted in (inputs.table_columns, class_columns(others, classes)):
        missing = [name for name in wanted if name not in others]
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        absent.append(
            f"{missing[0]!r:.100}{more}{hint(missing[0], [one for one in others if one not in wanted])}"
        )
    what = "the text" if inputs.member == TEXTS else "the features"
    return (
        f"The columns are neither {what} that {inputs.model} reads (missing: {absent[0]}) nor logits of its "
        f"classes (missing: {absent[1]})."
    )


def refuse_weights(names: Sequence[str]) -> None:
    """Refuse weights by another name than `sample_weight`, under which nothing would read them."""
    for name in names:
        if name.lower() in WEIGHTS:
            raise InvalidUpload(f"`{name}` is not read; send the weights of samples as `{SAMPLE_WEIGHT}`.")
