"""`BoxCalibrator`: the calibration methods behind scikit-learn's interface, NumPy in and NumPy out."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from boxcal.calibrators.array_calibrator import Box, CalibratedArrays
from boxcal.calibrators.errors import InvalidDataError, ValidationDataWarning
from boxcal.calibrators.fitting import FitResult, fit
from boxcal.calibrators.fitting.selection import BUDGET_SECONDS
from boxcal.calibrators.operator.constants import check_entries, check_sums
from boxcal.calibrators.scores import KINDS, LOGITS, ScoreLook, as_logits, two_columns

if TYPE_CHECKING:
    from boxcal.calibrators.calibrator import Calibrator


class BoxCalibrator(ClassifierMixin, BaseEstimator):  # type: ignore[misc] # scikit-learn has no types
    """Calibrate logits or probabilities; the last step of a `Pipeline` whose step before returns them.

    Parameters
    ----------
    method : str
        A name of `boxcal.methods()`, or `auto`, which selects one by cross-validated NLL.
    classes : array_like of shape (K,), optional
        The class names in the order of the columns. By default the sorted values of `y`; then each class must
        occur in `y`.
    scores : {"auto", "logits", "probabilities", "percent"}
        What the columns hold. Probabilities are calibrated through their logarithms. `auto` takes logits, and
        refuses to guess where the columns look like probabilities or percentages, however rounded.
    lower, upper : float or array_like of shape (K,), optional
        Hard bounds on every probability that is returned.
    seed : int
        Seed of the folds and of the starting points.
    budget_seconds : float
        How long `auto` compares methods.

    Attributes
    ----------
    classes_ : ndarray of shape (K,)
        The class names.
    n_features_in_ : int
        K.
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

    def __init__(
        self,
        method: str = "auto",
        *,
        classes: ArrayLike | None = None,
        scores: Literal["auto", "logits", "probabilities", "percent"] = "auto",
        lower: Any = None,
        upper: Any = None,
        seed: int = 0,
        budget_seconds: float = BUDGET_SECONDS,
    ) -> None:
        self.method = method
        self.classes = classes
        self.scores = scores
        self.lower = lower
        self.upper = upper
        self.seed = seed
        self.budget_seconds = budget_seconds

    def __sklearn_tags__(self) -> Any:
        """Say that it does not learn to classify: it keeps the classes that the logits name."""
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True
        return tags

    @property
    def calibrator_(self) -> Calibrator:
        """The fitted calibrator, which takes tensors of torch."""
        return self.result_.calibrator

    def fit(self, logits: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fit the method to logits, or probabilities, of data that the model was not trained on.

        Each serious finding about the data is a `ValidationDataWarning`.

        Parameters
        ----------
        logits : array_like of shape (N, K)
            One column for each class: logits, or what `scores` names.
        y : array_like of shape (N,)
            Class names, or class indices.
        sample_weight : array_like of shape (N,), optional
            How much each sample counts, at least 0; only the ratios matter.

        Raises
        ------
        ValueError
            The number of columns is not that of the classes, the data are invalid, or `scores` is `auto` and
            the rows look like probabilities.
        """
        checked: tuple[NDArray[np.float64], NDArray[Any]] = validate_data(
            self, _two_dimensional(logits), y, dtype=np.float64
        )
        values, names = checked
        check_classification_targets(names)
        self.classes_ = np.unique(names) if self.classes is None else np.asarray(self.classes)
        self._order = self._order_of_columns()
        values = self._in_order(values)
        columns = values.shape[1]
        if len(self.classes_) != columns:
            raise ValueError(
                f"The logits have n_features = {columns} columns, but there are {len(self.classes_)} classes"
                f"{' in y; give all of them as `classes`' if self.classes is None else ''}."
            )
        order = np.argsort(self.classes_)
        found = np.searchsorted(self.classes_, names, sorter=order)
        indices = order[np.minimum(found, columns - 1)]
        unknown = self.classes_[indices] != names
        if unknown.any():
            row = int(unknown.argmax())
            raise ValueError(f"y[{row}] is {names[row]!s}, which is none of `classes`.")
        self._bounds()
        if self.scores == "auto" and (refusal := ScoreLook.of([values]).refusal("logits")):
            raise InvalidDataError(refusal)
        result: FitResult = fit(
            self.method,
            self._as_logits(values),
            indices,
            sample_weight=sample_weight,
            seed=self.seed,
            budget_seconds=self.budget_seconds,
        )
        named = result.on_arrays.named([str(name) for name in self.classes_])
        self.result_ = replace(result, on_arrays=named)
        for finding in result.warnings:
            if finding.severity == "serious":
                warnings.warn(f"{finding.code}: {finding.message}", ValidationDataWarning, stacklevel=2)
        return self

    def predict_proba(self, logits: ArrayLike) -> NDArray[np.float64]:
        """Return calibrated probabilities (N, K) inside the bounds."""
        return self._calibrated(logits).probabilities

    def predict(self, logits: ArrayLike) -> NDArray[Any]:
        """Return the most probable class of each row; ties go to the larger calibrated logit."""
        calibrated = self._calibrated(logits)
        probabilities, mapped = calibrated.probabilities, calibrated.logits
        ties = np.where(probabilities == probabilities.max(axis=1, keepdims=True), mapped, -np.inf)
        return np.asarray(self.classes_[ties.argmax(axis=1)])

    def _calibrated(self, logits: ArrayLike) -> CalibratedArrays:
        check_is_fitted(self)
        names = getattr(self, "feature_names_in_", None)
        if names is not None and set(getattr(logits, "columns", ())) == set(names):
            logits = logits[list(names)]  # type: ignore[index, call-overload] # a DataFrame, by name
        elif self.n_features_in_ == 1:
            logits = _two_dimensional(logits)
        values = self._in_order(validate_data(self, logits, dtype=np.float64, reset=False))
        return self.result_.on_arrays.calibrate(self._as_logits(values), self._bounds())

    def _order_of_columns(self) -> list[int] | None:
        """Match the named columns of a DataFrame with the classes; None where nothing is named by them."""
        columns = [str(name) for name in getattr(self, "feature_names_in_", ())]
        classes = [str(name) for name in self.classes_]
        named = set(columns) & set(classes)
        if not named or (len(columns) == 1 and len(classes) == 2):
            return None
        if named != set(columns) or named != set(classes):
            raise ValueError(
                f"The columns are {columns}, and the classes are {classes}: name each column by its class."
            )
        return [columns.index(name) for name in classes]

    def _in_order(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Give the columns in the order of the classes; both of them where one was sent for two classes."""
        if values.shape[1] == 1 and len(self.classes_) == 2:
            kind = LOGITS if self.scores == "auto" else self.scores
            if self.scores == "auto" and values.min() >= 0 and values.max() <= 1:
                raise InvalidDataError(
                    "One column of scores for two classes, all between 0 and 1. Set scores=probabilities if "
                    "they are probabilities of the second class, or scores=logits."
                )
            return two_columns(values, kind)
        return values if self._order is None else values[:, self._order]

    def _as_logits(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what the calibrator reads."""
        if self.scores not in ("auto", *KINDS):
            raise InvalidDataError(f'scores is {self.scores!r}; use "auto" or one of {", ".join(KINDS)}.')
        return as_logits(values, self.scores)[0]

    def _bounds(self) -> Box | None:
        if self.lower is None and self.upper is None:
            return None
        shape = len(self.classes_)
        sides = ((self.lower, 0.0), (self.upper, 1.0))
        lower, upper = (
            np.broadcast_to(np.asarray(default if side is None else side, np.float64), shape)
            for side, default in sides
        )
        check_entries(lower, upper)
        check_sums(lower, upper, shape)
        return lower, upper


def _two_dimensional(scores: Any) -> Any:
    """Give one score for each sample, (N,), as one column (N, 1)."""
    return scores.reshape(-1, 1) if isinstance(scores, np.ndarray) and scores.ndim == 1 else scores
