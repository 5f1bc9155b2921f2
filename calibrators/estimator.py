"""`BoxCalibrator` and `BoxCalibratedClassifier`: scikit-learn's interface to the methods."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, clone
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import check_cv, cross_val_predict
from sklearn.pipeline import Pipeline
from sklearn.utils import (
    check_array,
    check_consistent_length,
    column_or_1d,
    estimator_html_repr,
    get_tags,
    indexable,
)
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    check_is_fitted,
    has_fit_parameter,
    validate_data,
)

from boxcal.calibrators.array_calibrator import Box, CalibratedArrays
from boxcal.calibrators.class_columns import (
    SCORE,
    are_numbered,
    class_of_score,
    class_order,
    clean,
    without_decimals,
)
from boxcal.calibrators.data import ClassMix, check_validation_set
from boxcal.calibrators.errors import InvalidDataError
from boxcal.calibrators.evaluation.html_report import fit_fragment
from boxcal.calibrators.fitting.api import fit_warning
from boxcal.calibrators.fitting.result import FitResult
from boxcal.calibrators.fitting.selection import BUDGET_SECONDS
from boxcal.calibrators.method import parse
from boxcal.calibrators.operator.constants import check_entries, check_sums
from boxcal.calibrators.scores import (
    KINDS,
    LOGITS,
    ScoreLook,
    as_logits,
    refusal_of_batch,
    two_columns,
)

if TYPE_CHECKING:
    from boxcal.calibrators.calibrator import Calibrator


class _ShowsItsFit(BaseEstimator):  # type: ignore[misc]
    """Adds what the fit found to scikit-learn's diagram of an estimator in notebooks."""

    def _repr_html_(self) -> str:
        result: FitResult | None = getattr(self, "result_", None)
        return f"{estimator_html_repr(self)}{fit_fragment(result) if result else ''}"

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, str]:
        bundle: dict[str, str] = super()._repr_mimebundle_(**kwargs)
        if "text/html" in bundle:  # not where scikit-learn is set to show texts
            bundle["text/html"] = self._repr_html_()
        return bundle


@dataclass(repr=False, eq=False)
class BoxCalibrator(ClassifierMixin, _ShowsItsFit):  # type: ignore[misc] # scikit-learn has no types
    """Calibrate logits or probabilities; the last step of a `Pipeline` whose step before returns them.

    Parameters
    ----------
    method : str
        A name of `boxcal.methods()`, or `auto`, which mixes methods by cross-validated NLL.
    classes : array_like of shape (K,), optional
        The class names in the order of the columns. By default the sorted values of `y`; then each class must
        occur in `y`.
    scores : {"auto", "logits", "probabilities", "percent"}
        What the columns hold. Probabilities are calibrated through their logarithms. `auto` takes logits, and
        refuses to guess where the columns look like probabilities or percentages, however rounded.
    lower, upper : float, array_like of shape (K,), dict or pandas.Series, optional
        Hard bounds on every probability that is returned; a dict, or a Series with an index of its own,
        bounds the classes that it names.
    seed : int
        Seed of the folds and of the starting points.
    budget_seconds : float
        Processor seconds after which `auto` begins no further method.
    class_mix : {"as_traffic", "resampled"}, optional
        How the samples were drawn: with classes as frequent as in what is predicted later, or by class; see
        `boxcal.fit`.

    Attributes
    ----------
    classes_ : ndarray of shape (K,)
        The class names.
    n_features_in_ : int
        The number of columns in `fit`: K, or 1 where two classes have one.
    calibrator_ : boxcal.Calibrator
        The fitted calibrator, which takes tensors; `result_.on_arrays` needs no torch.
    result_ : boxcal.FitResult
        The fit, with its certificate and its warnings.

    Examples
    --------
    >>> import numpy as np
    >>> from boxcal import BoxCalibrator
    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(size=(200, 2))
    >>> y = np.array(["cat", "dog"])[(logits + rng.gumbel(size=(200, 2))).argmax(axis=1)]
    >>> calibrator = BoxCalibrator(method="ts", upper=0.9).fit(5 * logits, y)
    >>> calibrator.predict_proba([[20.0, 0.0]])
    array([[0.9, 0.1]])
    """

    method: str = "auto"
    _: KW_ONLY
    classes: ArrayLike | None = None
    scores: Literal["auto", "logits", "probabilities", "percent"] = "auto"
    lower: Any = None
    upper: Any = None
    seed: int = 0
    budget_seconds: float = BUDGET_SECONDS
    class_mix: ClassMix | None = None

    def __sklearn_tags__(self) -> Any:
        """Say that it does not learn to classify: it keeps the classes that the logits name."""
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True
        return tags

    @property
    def calibrator_(self) -> Calibrator:
        """The fitted calibrator, which takes tensors of torch."""
        return self.result_.calibrator

    def fit(
        self,
        logits: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        groups: ArrayLike | None = None,
    ) -> Self:
        """Fit the method to logits, or probabilities, of data that the model was not trained on.

        Each serious finding about the data is a `ValidationDataWarning`.

        Parameters
        ----------
        logits : array_like of shape (N, K)
            One column for each class: logits, or what `scores` names. Columns with names are matched with the
            classes by them.
        y : array_like of shape (N,)
            Class names, or class indices.
        sample_weight : array_like of shape (N,), optional
            How much each sample counts, at least 0; only the ratios matter.
        groups : array_like of shape (N,), optional
            Samples of one group, such as a patient's, share a fold where methods are cross-validated.

        Raises
        ------
        ValueError
            The number or the names of the columns are not those of the classes, the data are invalid, or
            `scores` is `auto` and the rows look like probabilities.
        """
        _check_present(y)
        checked: tuple[NDArray[np.float64], NDArray[Any]] = validate_data(
            self, _two_dimensional(_named_by_texts(logits)), y, dtype=np.float64
        )
        values, names = checked
        check_classification_targets(names)
        self.classes_ = np.unique(names) if self.classes is None else np.asarray(self.classes)
        is_one = values.shape[1] == 1 and len(self.classes_) == 2
        if is_one and self.scores == "auto" and (refusal := ScoreLook.of([values]).refusal(of_one=True)):
            raise InvalidDataError(_in_python(refusal))
        given = "" if self.classes is not None else ", and give classes that y does not have as `classes`"
        self._order = self._order_of(logits, given)
        values = self._in_order(values, self._order)
        columns = values.shape[1]
        if len(self.classes_) != columns:
            given = ""
            if self.classes is None:
                few = len(self.classes_) < columns
                shown = ", ".join(f"{name!s:.50}" for name in self.classes_[:10])
                given = " in y; give all of them as `classes`" if few else f" in y: {shown}"
            raise ValueError(
                f"The logits have n_features = {columns} columns, but there are {len(self.classes_)} classes"
                f"{given}."
            )
        order = np.argsort(self.classes_)
        if (twice := self.classes_[order][1:] == self.classes_[order][:-1]).any():
            raise ValueError(f"`classes` names {self.classes_[order][1:][twice][0]!s} twice.")
        found = np.searchsorted(self.classes_, names, sorter=order)
        indices = order[np.minimum(found, columns - 1)]
        unknown = self.classes_[indices] != names
        if unknown.any():
            row = int(unknown.argmax())
            raise ValueError(f"y[{row}] is {names[row]!s}, which is none of `classes`.")
        self._check_arguments(self.classes_)
        if self.scores == "auto" and (refusal := ScoreLook.of([values]).refusal()):
            raise InvalidDataError(_in_python(refusal))
        data = check_validation_set(
            self._as_logits(values),
            indices,
            groups=groups,
            sample_weight=sample_weight,
            classes=[str(name) for name in self.classes_],
            class_mix=self.class_mix,
        )
        self.result_ = fit_warning(self.method, data, seed=self.seed, budget_seconds=self.budget_seconds)
        return self

    def predict_proba(self, logits: ArrayLike) -> NDArray[np.float64]:
        """Return calibrated probabilities (N, K) inside the bounds.

        The columns of an array are in the order of those of `fit`; named ones are matched with the classes.
        """
        return self._calibrated(logits).probabilities

    def predict(self, logits: ArrayLike) -> NDArray[Any]:
        """Return the most probable class of each row; ties go to the larger calibrated logit."""
        calibrated = self._calibrated(logits)
        probabilities, mapped = calibrated.probabilities, calibrated.logits
        ties = np.where(probabilities == probabilities.max(axis=1, keepdims=True), mapped, -np.inf)
        return np.asarray(self.classes_[ties.argmax(axis=1)])

    def _calibrated(self, logits: ArrayLike) -> CalibratedArrays:
        check_is_fitted(self)
        names = list(getattr(self, "feature_names_in_", ()))
        logits = _named_by_texts(logits, names)
        order = self._order
        if names and set(getattr(logits, "columns", ())) == set(names):
            logits = logits[names]  # type: ignore[index, call-overload] # a DataFrame, by name
        elif columns := _names_of(logits):
            order = self._order_of(logits, fitted=names)
            is_matched = order is not None or len(columns) == 1
            if names and is_matched and len(columns) == self.n_features_in_:  # by other names than in `fit`
                return self._calibrated_rows(check_array(np.asarray(logits), dtype=np.float64), order)
        if self.n_features_in_ == 1:
            logits = _two_dimensional(logits)
        return self._calibrated_rows(validate_data(self, logits, dtype=np.float64, reset=False), order)

    def _calibrated_rows(self, rows: NDArray[np.float64], order: list[int] | None) -> CalibratedArrays:
        values = self._in_order(rows, order)
        if self.scores == "auto" and (refusal := refusal_of_batch(values)):
            raise InvalidDataError(f"{_in_python(refusal)} This calibrator was fitted to logits.")
        return self.result_.on_arrays.calibrate(self._as_logits(values), self._bounds(self.classes_))

    def _order_of(self, scores: Any, advice: str = "", fitted: Sequence[str] = ()) -> list[int] | None:
        """Match named columns with the classes; None where they have no names.

        One column for two classes counts as both of them: that of the class which it names comes second.
        """
        columns = _names_of(scores)
        if len(columns) == 1 and len(self.classes_) == 2:
            return self._order_of_one(columns[0])
        if len(columns) < 2:
            return None
        return class_order(columns, self.classes_.tolist(), advice, fitted)

    def _order_of_one(self, column: Any) -> list[int] | None:
        name, *classes = (without_decimals(clean(str(one))) for one in (column, *self.classes_.tolist()))
        if (named := class_of_score(name, classes)) is not None:
            return [1, 0] if named == 0 else None
        if self.scores == "auto" and not SCORE.fullmatch(name):
            raise InvalidDataError(
                f"the column {name!r:.100} is named as no score, and by none of the classes {classes}: if it "
                f'is the score of {classes[1]!r:.50}, set scores="logits" or scores="probabilities"'
            )
        return None

    def _in_order(self, values: NDArray[np.float64], order: list[int] | None) -> NDArray[np.float64]:
        """Give the columns in the order of the classes; both of them where one was sent for two classes."""
        if values.shape[1] == 1 and len(self.classes_) == 2:
            values = two_columns(values, LOGITS if self.scores == "auto" else self.scores)
        return values if order is None else values[:, order]

    def _as_logits(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what the calibrator reads."""
        if self.scores not in ("auto", *KINDS):
            raise InvalidDataError(f'scores is {self.scores!r}; use "auto" or one of {", ".join(KINDS)}.')
        try:
            return as_logits(values, self.scores)[0]
        except InvalidDataError as error:
            raise InvalidDataError(_in_python(str(error))) from error

    def _check_arguments(self, classes: NDArray[Any]) -> None:
        """Refuse a method that does not exist, and bounds that these classes (K,) cannot have."""
        if self.method != "auto":
            parse(self.method)
        self._bounds(classes)

    def _bounds(self, classes: NDArray[Any]) -> Box | None:
        if self.lower is None and self.upper is None:
            return None
        shape = len(classes)
        sides = []
        for name, side, default in (("lower", self.lower, 0.0), ("upper", self.upper, 1.0)):
            values = _by_class(name, default if side is None else side, default, classes.tolist())
            if values.shape not in ((), (shape,)):
                raise ValueError(
                    f"{name} has shape {values.shape}; it is a number, or one for each of {shape} classes."
                )
            sides.append(np.broadcast_to(values, shape))
        lower, upper = sides
        check_entries(lower, upper)
        check_sums(lower, upper, shape)
        return lower, upper


def _in_python(refusal: str) -> str:
    """Write an option that a message names as Python takes it."""
    return re.sub(r"scores=(\w+)", r'scores="\1"', refusal)


def _by_class(name: str, side: Any, default: float, classes: list[Any]) -> NDArray[np.float64]:
    """Give the bounds of one side in the order of the classes, those of a dict or Series by name."""
    if not hasattr(side, "items") or _is_positional(side, len(classes)):
        return np.asarray(side, np.float64)
    if unknown := [key for key, _ in side.items() if key not in classes]:
        raise ValueError(f"{name} names {unknown[0]!r}, which is none of the classes {classes}.")
    return np.array([side.get(one, default) for one in classes], np.float64)


@dataclass(repr=False, eq=False)
class BoxCalibratedClassifier(ClassifierMixin, MetaEstimatorMixin, _ShowsItsFit):  # type: ignore[misc]
    """Calibrate a classifier by cross-validation; it stands in the place of `CalibratedClassifierCV`.

    As with `CalibratedClassifierCV(ensemble=False)`, each sample is scored by a copy of the estimator that
    was not trained on it, one calibrator is fitted to these scores, and the estimator is fitted to all data.

    Parameters
    ----------
    estimator : estimator
        A classifier with `decision_function`, which is preferred, or `predict_proba`, whose probabilities are
        calibrated through their logarithms. A `FrozenEstimator` is not fitted: give `fit` data that it was
        not trained on.
    method : str
        A name of `boxcal.methods()`, or `auto`, which mixes methods by cross-validated NLL.
    cv : int, splitter or iterable of (train, test)
        The folds; an integer gives stratified ones. Each class must occur in each training part.
    n_jobs : int, optional
        How many folds are fitted at once.
    lower, upper : float, array_like of shape (K,), dict or pandas.Series, optional
        Hard bounds on every probability that is returned; a dict, or a Series with an index of its own,
        bounds the classes that it names.
    seed : int
        Seed of the calibrator's folds and of its starting points.
    budget_seconds : float
        Processor seconds after which `auto` begins no further method.

    Attributes
    ----------
    classes_ : ndarray of shape (K,)
        The class names, in the order of the columns.
    estimator_ : estimator
        The estimator, fitted to all data; the one that was given if it is frozen.
    box_calibrator_ : BoxCalibrator
        The calibrator of the estimator's scores.
    result_ : boxcal.FitResult
        The fit, with its certificate and its warnings.
    n_features_in_ : int
        The number of features, where the estimator has it.
    feature_names_in_ : ndarray of shape (n_features_in_,), dtype object
        The names of the features, where the estimator has them.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import LogisticRegression
    >>> from boxcal import BoxCalibratedClassifier
    >>> rows, y = load_iris(return_X_y=True)
    >>> classifier = BoxCalibratedClassifier(LogisticRegression(max_iter=500), "ts", upper=0.9).fit(rows, y)
    >>> float(classifier.predict_proba(rows).max())
    0.9
    """

    estimator: Any
    method: str = "auto"
    cv: Any = 5
    _: KW_ONLY
    n_jobs: int | None = None
    lower: Any = None
    upper: Any = None
    seed: int = 0
    budget_seconds: float = BUDGET_SECONDS

    def __sklearn_tags__(self) -> Any:
        """Take what the estimator takes."""
        tags = super().__sklearn_tags__()
        given = get_tags(self.estimator).input_tags
        tags.input_tags.sparse, tags.input_tags.allow_nan = given.sparse, given.allow_nan
        return tags

    @property
    def result_(self) -> FitResult:
        """The fit of the calibrator."""
        result: FitResult = self.box_calibrator_.result_
        return result

    def fit(
        self,
        X: Any,  # scikit-learn passes it by this name
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        groups: ArrayLike | None = None,
    ) -> Self:
        """Fit the estimator, and the calibrator to its scores of samples that it was not trained on.

        Parameters
        ----------
        X : array_like of shape (N, n_features)
            What the estimator takes.
        y : array_like of shape (N,)
            Class names, or class indices.
        sample_weight : array_like of shape (N,), optional
            How much each sample counts, for the calibrator and for an estimator whose `fit` takes it.
        groups : array_like of shape (N,), optional
            Given to the splitter `cv` and to the calibrator.

        Raises
        ------
        ValueError
            A class is not in a training part, the data are invalid, or the bounds leave no probabilities.
        """
        _check_present(y)
        rows, names = indexable(X, column_or_1d(y, warn=True))
        check_classification_targets(names)
        known = np.unique(names)
        if len(known) > 2:
            _check_columns(self.estimator)
        weights = None
        if sample_weight is not None:
            weights = check_array(sample_weight, ensure_2d=False, input_name="sample_weight")
            if weights.ndim != 1:
                raise ValueError(f"sample_weight has the shape {weights.shape}; it must be ({len(names)},).")
            check_consistent_length(weights, names)
        takes = weights is not None and has_fit_parameter(self.estimator, "sample_weight")
        params = {"sample_weight": weights} if takes else {}
        is_frozen = isinstance(self.estimator, FrozenEstimator)
        if is_frozen:
            check_is_fitted(self.estimator)
            self.estimator_ = self.estimator
        else:
            if weights is not None and not takes:
                warnings.warn(
                    f"{type(self.estimator).__name__}.fit takes no sample_weight; the calibrator does.",
                    stacklevel=2,
                )
            splits = self._splits(rows, names, groups)
            self._calibrator(known)._check_arguments(known)
            self.estimator_ = clone(self.estimator).fit(rows, names, **params)
        if len(known) > 2:
            _check_columns(self.estimator_)  # which a search has chosen only now
        if is_frozen:
            scores = self._scores(rows)
        else:
            scores = cross_val_predict(
                self.estimator,
                rows,
                names,
                cv=splits,
                method=self._source(),
                n_jobs=self.n_jobs,
                params=params,
            )
        self.classes_ = self.estimator_.classes_
        for name in ("n_features_in_", "feature_names_in_"):
            if hasattr(self.estimator_, name):
                setattr(self, name, getattr(self.estimator_, name))
        self.box_calibrator_ = self._calibrator(self.classes_).fit(scores, names, weights, groups)
        return self

    def _calibrator(self, classes: NDArray[Any]) -> BoxCalibrator:
        return BoxCalibrator(
            self.method,
            classes=classes,
            scores="logits" if self._source() == "decision_function" else "probabilities",
            lower=self.lower,
            upper=self.upper,
            seed=self.seed,
            budget_seconds=self.budget_seconds,
        )

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return calibrated probabilities (N, K) inside the bounds."""
        check_is_fitted(self)
        probabilities: NDArray[np.float64] = self.box_calibrator_.predict_proba(self._scores(X))
        return probabilities

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most probable class of each row, (N,); ties go to the larger calibrated logit."""
        check_is_fitted(self)
        names: NDArray[Any] = self.box_calibrator_.predict(self._scores(X))
        return names

    def _source(self) -> str:
        """Name the method of the estimator that gives the scores."""
        for name in ("decision_function", "predict_proba"):
            if hasattr(self.estimator, name):
                return name
        raise AttributeError(
            f"{type(self.estimator).__name__} has neither decision_function nor predict_proba."
        )

    def _scores(self, rows: Any) -> Any:
        return getattr(self.estimator_, self._source())(rows)

    def _splits(self, rows: Any, names: NDArray[Any], groups: Any) -> list[Any]:
        """Give the folds, whose training parts have every class."""
        classes, counts = np.unique(names, return_counts=True)
        if len(classes) < 2:
            raise ValueError(f"y has {'one class' if len(classes) else 'no sample'}; two classes are needed.")
        if isinstance(self.cv, int) and counts.min() < self.cv:
            raise ValueError(
                f"cv is {self.cv}, but class {classes[counts.argmin()]!s} has {counts.min()} samples: "
                "give more samples of it, or fewer folds."
            )
        if isinstance(self.cv, str):
            raise ValueError(
                f"cv is {self.cv!r}; for a model that is trained already give FrozenEstimator(model), of"
                " sklearn.frozen, as the estimator, and leave cv out."
            )
        splits = list(check_cv(self.cv, names, classifier=True).split(rows, names, groups))
        for number, (train, _) in enumerate(splits):
            if len(absent := np.setdiff1d(classes, names[train])):
                raise ValueError(f"The training part of fold {number} has no sample of class {absent[0]!s}.")
        return splits


def _is_positional(side: Any, num_classes: int) -> bool:
    """Whether a Series of pandas has the index that it has by default."""
    return not isinstance(side, Mapping) and list(side.keys()) == list(range(num_classes))


def _check_columns(estimator: Any) -> None:
    """Refuse scores of pairs of classes: three classes have as many as columns of their own."""
    while hasattr(estimator, "decision_function") and (inner := _scored_by(estimator)) is not None:
        estimator = inner
    if getattr(estimator, "decision_function_shape", None) == "ovo":
        raise ValueError(
            f"{type(estimator).__name__} has decision_function_shape='ovo': a score for each pair of classes."
            " Set it to 'ovr'."
        )


def _scored_by(estimator: Any) -> Any:
    """Return the estimator inside that gives the scores: the last step, the fitted one, the best of a search.

    None where there is none.
    """
    if isinstance(estimator, Pipeline):
        return estimator.steps[-1][1]
    if isinstance(estimator, FrozenEstimator):
        return estimator.estimator
    fitted = ("best_estimator_", "final_estimator_", "estimator_")
    return next((getattr(estimator, name) for name in fitted if hasattr(estimator, name)), None)


def _two_dimensional(scores: Any) -> Any:
    """Give one score for each sample, (N,), as one column (N, 1)."""
    is_list = isinstance(scores, list | tuple) and bool(scores) and not hasattr(scores[0], "__len__")
    is_one = is_list or len(getattr(scores, "shape", (0, 0))) == 1
    return np.asarray(scores).reshape(-1, 1) if is_one else scores


def _named_by_texts(scores: Any, known: Sequence[str] = ()) -> Any:
    """Name the columns of a DataFrame by texts where others name them: scikit-learn knows no other names.

    Integers that count the columns name nothing, unless they are the `known` names, in another order.
    """
    columns = list(getattr(scores, "columns", ()))
    names = [str(name) for name in columns]
    is_named = names == columns or (are_numbered(columns) and set(names) != set(known))
    return scores if is_named else scores.set_axis(names, axis=1)


def _names_of(scores: Any) -> list[Any]:
    """Give the names of the columns of a DataFrame, or that of a Series; none where they only count them."""
    columns = list(getattr(scores, "columns", ()))
    if columns:
        return [] if are_numbered(columns) else columns
    name = getattr(scores, "name", None)
    return [] if name is None or name == "" else [name]


def _check_present(labels: Any) -> None:
    """Name the first label that is None, or the NA or NaT of pandas, on which scikit-learn's checks fail."""
    values = np.asarray(labels)
    for row, one in enumerate(values.tolist() if values.dtype == object and values.ndim == 1 else ()):
        if one is None or type(one).__name__ in ("NAType", "NaTType"):
            raise ValueError(f"y[{row}] is missing: {one!r}. Leave out the samples without a label.")
