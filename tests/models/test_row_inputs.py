"""Rows of features: values that an input of the model cannot hold are refused, and not rounded or wrapped."""

from typing import Any

import numpy as np
import pytest

from boxcal.models.errors import UnusableInput
from boxcal.models.inputs.rows import Column, RowInputs

TOO_LARGE: dict[str, tuple[float | int, str]] = {
    "float32": (1e39, "3.4028234663852886e+38"),
    "float64": (10**400, "1.7976931348623157e+308"),
    "int32": (2**31, "2147483647"),
    "int64": (2**53, "9007199254740991"),
    "bool": (10**400, "1.7976931348623157e+308"),
}


def inputs(dtype: str) -> RowInputs:
    return RowInputs([Column("x", dtype, 2)], ["a", "b"], has_missing=False)


@pytest.mark.parametrize("dtype", TOO_LARGE)
@pytest.mark.parametrize("sign", [1, -1])
def test_values_beyond_the_type_of_the_input_are_refused(dtype: str, sign: int) -> None:
    value, limit = TOO_LARGE[dtype]
    with pytest.raises(UnusableInput) as caught:
        inputs(dtype).decode("features", [0, sign * value], 0)
    assert f"The feature 'b' is {sign * value!s:.100}; " in str(caught.value)
    assert f"{dtype}, at most {limit} in magnitude" in str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "int32", "int64"])
def test_so_are_those_of_arrays(dtype: str) -> None:
    value, limit = TOO_LARGE[dtype]
    with pytest.raises(UnusableInput, match=r"'b' .* in magnitude") as caught:
        inputs(dtype).check(np.array([[0, 0], [0, value]], np.float64))
    assert f"at most {limit}" in str(caught.value)


@pytest.mark.parametrize("dtype", TOO_LARGE)
def test_the_largest_values_reach_the_model_as_they_are(dtype: str) -> None:
    rows = inputs(dtype)
    largest: Any = rows.columns[0].largest
    sample = rows.decode("features", [largest, -largest], 0)[None]
    np.testing.assert_array_equal(rows.check(sample), sample)
    np.testing.assert_array_equal(rows.batch(sample)["x"], np.array([[largest, -largest]], dtype))
