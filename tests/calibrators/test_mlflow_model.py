"""Calibrators as MLflow models: the files, what MLflow calls, and MLflow itself where it is installed."""

import importlib
import json
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import yaml

from boxcal.calibrators import fit
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.errors import ExportError, InvalidDataError
from boxcal.calibrators.mlflow_model import PyfuncModel, to_mlflow
from tests.calibrators.samples import Array, drawn, everything

CLASSES = ["cat", "dog", "emu", "fox"]


def fitted(method: str, classes: int = 4) -> ArrayCalibrator:
    return fit(method, *drawn(400, classes)).on_arrays


def of_two_laws() -> tuple[Array, Array]:
    """Labels of which half follow the logits, and half softened and biased ones: `auto` finds a stack."""
    rng = np.random.default_rng(3)
    logits = 3.0 * rng.normal(size=(2000, 4))
    other = logits / 5 + [3.0, 0.0, 0.0, -3.0]
    law = np.where(rng.random((2000, 1)) < 0.5, logits, other)
    return logits, (law + rng.gumbel(size=law.shape)).argmax(axis=1)


def loaded(folder: Path) -> PyfuncModel:
    """Load a folder as MLflow does: the function of the module that `MLmodel` names, on the data."""
    flavour = yaml.safe_load((folder / "MLmodel").read_text())["flavors"]["python_function"]
    module: Any = importlib.import_module(flavour["loader_module"])
    model: PyfuncModel = module._load_pyfunc(str(folder / flavour["data"]))
    return model


def test_the_files_are_those_of_mlflow(tmp_path: Path) -> None:
    calibrator = fitted("ts+pb", 2)
    to_mlflow(calibrator, tmp_path / "model")
    files = {path.name: path.read_text("utf-8", "replace") for path in (tmp_path / "model").iterdir()}
    python = platform.python_version()
    requirements = ["mlflow", "boxcal[calibrators]==0.3.0"]
    assert (tmp_path / "model" / "calibrator.safetensors").read_bytes() == calibrator.to_bytes()
    assert files.pop("calibrator.safetensors")
    assert files.pop("requirements.txt").splitlines() == requirements
    assert {name: yaml.safe_load(text) for name, text in files.items()} == {
        "MLmodel": {
            "flavors": {
                "python_function": {
                    "data": "calibrator.safetensors",
                    "env": {"conda": "conda.yaml", "virtualenv": "python_env.yaml"},
                    "loader_module": "boxcal.calibrators.mlflow_model",
                    "python_version": python,
                }
            },
            "metadata": {"boxcal_method": "ts+pb"},
            "signature": {
                "inputs": '[{"type": "double", "required": true}, {"type": "double", "required": true}]',
                "outputs": '[{"type": "tensor", "tensor-spec": {"dtype": "float64", "shape": [-1, 2]}}]',
            },
        },
        "python_env.yaml": {
            "python": python,
            "build_dependencies": ["pip"],
            "dependencies": ["-r requirements.txt"],
        },
        "conda.yaml": {
            "name": "mlflow-env",
            "channels": ["conda-forge"],
            "dependencies": [f"python={python}", "pip", {"pip": requirements}],
        },
    }


def test_a_loaded_model_answers_to_the_last_bit_and_refuses_columns_of_other_classes(tmp_path: Path) -> None:
    calibrator, logits = replace(fitted("ts+pb"), classes=CLASSES), drawn(50, 4)[0]
    to_mlflow(calibrator, tmp_path)
    model, single = loaded(tmp_path), logits.astype(np.float32)
    frame = pandas.DataFrame(logits, columns=CLASSES)
    assert np.array_equal(model.predict(logits), calibrator(logits))
    assert np.array_equal(model.predict(single), calibrator(single))
    assert np.array_equal(model.predict(pandas.DataFrame(logits)), calibrator(logits))
    assert np.array_equal(model.predict(frame[["fox", "dog", "cat", "emu"]]), calibrator(logits))
    assert np.array_equal(model.predict(frame.add_prefix("logit of ")), calibrator(logits))
    other = pandas.DataFrame([[1.0, 2.0, 3.0, 4.0]], columns=["row", *CLASSES[:3]])
    with pytest.raises(InvalidDataError, match=r"the columns are \['row', .*name each column by its class"):
        model.predict(other)
    with pytest.raises(InvalidDataError, match=r"takes logits of shape \(N, 4\), not \(1, 3\)"):
        model.predict([[1.0, 2.0, 3.0]])


@pytest.mark.parametrize("classes", [("10", "20", "30", "40"), ("cat", "dog", "emu", "fox"), None])
def test_a_loaded_model_matches_columns_by_name(classes: tuple[str, ...] | None, tmp_path: Path) -> None:
    calibrator, logits = replace(fitted("ts+pb"), classes=classes), drawn(50, 4)[0]
    to_mlflow(calibrator, tmp_path)
    model, names = loaded(tmp_path), classes or ("0", "1", "2", "3")
    expected = calibrator(logits)
    for before in ("", "p_", " "):
        frame = pandas.DataFrame(logits, columns=[f"{before}{name}" for name in names])
        assert np.array_equal(model.predict(frame.iloc[:, [2, 0, 3, 1]]), expected)
    if names[0].isdecimal():
        frame = pandas.DataFrame(logits, columns=[int(name) for name in names])
        assert np.array_equal(model.predict(frame.iloc[:, [2, 0, 3, 1]]), expected)
    with pytest.raises(
        InvalidDataError, match=r"the columns are \['a', 'b', 'c', 'd'\], and the classes are"
    ):
        model.predict(pandas.DataFrame(logits, columns=list("abcd")))


def test_a_folder_with_files_is_kept(tmp_path: Path) -> None:
    (tmp_path / "MLmodel").write_text("another model")
    with pytest.raises(FileExistsError, match="is not empty"):
        to_mlflow(fitted("ts"), tmp_path)
    assert (tmp_path / "MLmodel").read_text() == "another model"


def test_a_method_that_changes_inputs_has_no_mlflow_form(tmp_path: Path) -> None:
    data = everything(60, 3)
    calibrator = fit("nc", data.logits, data.labels, **data.extras()).on_arrays
    with pytest.raises(ExportError, match="'nc' shifts the classifier's inputs"):
        to_mlflow(calibrator, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore")  # of mlflow
@pytest.mark.parametrize("method", ["auto", "ts+pb", "quadratic", "isotonic"])
def test_mlflow_gives_the_answers_of_the_calibrator(method: str, tmp_path: Path) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    if method == "auto":
        logits, labels = of_two_laws()
        calibrator = fit(method, logits, labels).on_arrays
        assert calibrator.method.startswith("stack(")
    else:
        logits = drawn(50, 2 if method == "quadratic" else 4)[0]
        calibrator = fitted(method, logits.shape[1])
    names = CLASSES[: logits.shape[1]]
    calibrator = replace(calibrator, classes=names)
    to_mlflow(calibrator, tmp_path)
    model = mlflow.pyfunc.load_model(str(tmp_path))
    frame, single = pandas.DataFrame(logits, columns=names), logits.astype(np.float32)
    mlflow.models.validate_schema(frame, model.metadata.get_input_schema())
    for given in (logits, frame, frame[names[::-1]], logits.tolist()):
        assert np.array_equal(model.predict(given), calibrator(logits))
    assert np.array_equal(model.predict(single), calibrator(single))
    with pytest.raises(mlflow.exceptions.MlflowException, match="missing inputs"):
        model.predict(logits[:, 1:])
    outputs = json.loads(model.metadata.signature.to_dict()["outputs"])
    assert outputs[0]["tensor-spec"]["shape"] == [-1, len(names)]
