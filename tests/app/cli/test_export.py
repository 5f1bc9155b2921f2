"""`boxcal export`: a saved calibrator as an MLflow model and as an ONNX model."""

from pathlib import Path

import numpy as np
import onnxruntime

from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.maps.constant_box import ConstantBounds
from boxcal.calibrators.maps.temperature import TemperatureScaling
from tests.app.cli.conftest import Boxcal
from tests.calibrators.test_mlflow_model import loaded


def saved(folder: Path) -> Path:
    map_ = TemperatureScaling(3, {"temperature": 2.0})
    calibrator = ArrayCalibrator("ts+pb", map_, ConstantBounds.of(3, 0.1, 0.6), 3)
    (folder / "calibrator.safetensors").write_bytes(calibrator.to_bytes())
    return folder / "calibrator.safetensors"


def test_both_models_give_the_probabilities_of_the_calibrator(boxcal: Boxcal, tmp_path: Path) -> None:
    folder, file = tmp_path / "a" / "model", tmp_path / "calibrator.onnx"
    ended = boxcal("export", saved(tmp_path), "--mlflow", folder, "--onnx", file)
    assert (ended.code, ended.stdout) == (0, "")
    assert ended.stderr.splitlines() == [f"saved {folder}", f"saved {file}"]
    logits = np.array([[8.0, 0.0, 0.0]], np.float32)
    np.testing.assert_allclose(loaded(folder).predict(logits), [[0.6, 0.2, 0.2]], rtol=0, atol=1e-15)
    (answer,) = onnxruntime.InferenceSession(file).run(None, {"logits": logits})
    np.testing.assert_allclose(answer, [[0.6, 0.2, 0.2]], rtol=0, atol=1e-6)


def test_mistakes_are_one_line(boxcal: Boxcal, tmp_path: Path) -> None:
    file = saved(tmp_path)
    nothing, taken = boxcal("export", file), boxcal("export", file, "--mlflow", tmp_path)
    assert nothing.stderr == "boxcal: error: name what to write: --mlflow FOLDER or --onnx FILE\n"
    assert taken.stderr == f"boxcal: error: {tmp_path} is not empty\n"
    assert nothing.code == taken.code == 2
    file.write_bytes(b"no calibrator")
    boxcal("export", file, "--mlflow", tmp_path / "new").refuses(f"{file}: not a calibrator")
    assert not (tmp_path / "new").exists()
