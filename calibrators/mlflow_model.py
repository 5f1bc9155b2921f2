"""A calibrator as a model folder of MLflow, for `mlflow.pyfunc`; neither side of it imports mlflow.

MLflow imports this module by the name in the file `MLmodel`, and calls `_load_pyfunc`.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators.array_calibrator import ArrayCalibrator, TwoStages
from boxcal.calibrators.class_columns import class_order
from boxcal.calibrators.errors import ExportError

ARTIFACT = "calibrator.safetensors"
MLMODEL = """\
flavors:
  python_function:
    data: {artifact}
    env:
      conda: conda.yaml
      virtualenv: python_env.yaml
    loader_module: {module}
    python_version: {python}
metadata:
  boxcal_method: {method}
signature:
  inputs: '{inputs}'
  outputs: '{outputs}'
"""
REQUIREMENTS = ("mlflow", "boxcal[calibrators]=={boxcal}")
PYTHON_ENV = """\
python: {python}
build_dependencies:
- pip
dependencies:
- -r requirements.txt
"""
CONDA = """\
name: mlflow-env
channels:
- conda-forge
dependencies:
- python={python}
- pip
- pip:
{requirements}
"""


def to_mlflow(calibrator: TwoStages, folder: str | os.PathLike[str]) -> None:
    """Write a calibrator as a model folder of MLflow; equal calibrators give equal files.

    `mlflow.pyfunc.load_model(folder).predict(logits)` returns the probabilities (N, K) of the calibrator on
    arrays, float64 and equal to the last bit. It takes an array (N, K), float32 or float64, or a DataFrame,
    whose columns are ordered by the names of the classes if they have names. A method that reads
    features takes them, (N, D), in place of logits.

    Parameters
    ----------
    calibrator
        A `Calibrator`, or a calibrator on arrays such as `FitResult.on_arrays`.
    folder
        What to write: a new or an empty folder.

    Raises
    ------
    ExportError
        For `nc`, which changes the classifier's inputs.
    FileExistsError
        The folder is not empty.
    """
    if calibrator.reads == "inputs":
        raise ExportError(
            f"the method {calibrator.method!r} shifts the classifier's inputs, which an MLflow model of the"
            " calibrator alone does not see"
        )
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise FileExistsError(f"{path} is not empty")
    versions = {"python": platform.python_version(), "boxcal": version("boxcal")}
    requirements = [one.format(**versions) for one in REQUIREMENTS]
    probabilities = {"dtype": "float64", "shape": [-1, calibrator.num_classes]}
    model = MLMODEL.format(
        artifact=ARTIFACT,
        module=__name__,
        method=json.dumps(calibrator.method),
        # Without names: MLflow then takes arrays too, and converts float32.
        inputs=json.dumps([{"type": "double", "required": True}] * calibrator.width),
        outputs=json.dumps([{"type": "tensor", "tensor-spec": probabilities}]),
        **versions,
    )
    nested = "\n".join(f"  - {one}" for one in requirements)
    (path / ARTIFACT).write_bytes(calibrator.to_bytes())
    (path / "requirements.txt").write_text("".join(f"{one}\n" for one in requirements))
    (path / "python_env.yaml").write_text(PYTHON_ENV.format(**versions))
    (path / "conda.yaml").write_text(CONDA.format(requirements=nested, **versions))
    (path / "MLmodel").write_text(model)


@dataclass(frozen=True)
class PyfuncModel:
    """What MLflow calls."""

    calibrator: ArrayCalibrator

    def predict(self, model_input: Any) -> NDArray[np.float64]:
        """Return probabilities (N, K) for an array or a DataFrame of logits.

        Raises
        ------
        InvalidDataError
            The number of columns is another one, or they have names that are not those of the classes.
        """
        rows = np.asarray(model_input, np.float64)
        order = self._order([*getattr(model_input, "columns", ())])
        return self.calibrator(rows if order is None else rows[:, order])

    def _order(self, columns: list[Any]) -> list[int] | None:
        """Match the columns with the classes by name; None where they have no names."""
        calibrator = self.calibrator
        if calibrator.reads == "features" or not columns:
            return None
        return class_order(columns, calibrator.classes or range(calibrator.num_classes))


def _load_pyfunc(path: str) -> PyfuncModel:
    """Load the calibrator of a model folder; MLflow gives the path of the artifact."""
    return PyfuncModel(ArrayCalibrator.from_bytes(Path(path).read_bytes()))
