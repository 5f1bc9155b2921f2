"""`isotonic`: isotonic regression per class (Zadrozny and Elkan 2002), by scikit-learn."""

from __future__ import annotations

from boxcal.calibrators.logit_maps.per_class import Array, Curve, PerClassFunction


class IsotonicCalibration(PerClassFunction):
    """A non-decreasing piecewise linear function of each class's probability."""

    name = "isotonic"

    def curve(self, probabilities: Array, hits: Array) -> Curve:
        """Fit scikit-learn's isotonic regression."""
        from sklearn.isotonic import IsotonicRegression  # noqa: PLC0415 - only fits need it

        fitted = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(probabilities, hits)
        return fitted.X_thresholds_, fitted.y_thresholds_
