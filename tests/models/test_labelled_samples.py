"""Labelled rows and texts in place of logits: every form gives the logits that the model gives for them."""

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from boxcal.app.cli import bulk
from boxcal.app.cli.output import UsageError
from boxcal.app.client import BoxcalClient
from boxcal.app.client.bodies import upload_part
from boxcal.app.client.errors import InvalidRequestError
from boxcal.app.fitting.backbones import BackboneSummary
from boxcal.app.fitting.messages import TASK, CheckTask
from boxcal.app.fitting.worker.check import read_file
from boxcal.app.fitting.worker.fit import run_backbone
from boxcal.app.fitting.worker.validation_set import StoredSet
from boxcal.app.http.problems import BoxcalError
from boxcal.app.tables.columns import choose_columns
from boxcal.app.tables.file_part import FilePart
from boxcal.app.tables.labels import Declared
from boxcal.app.tables.sample_schema import ModelInputs
from tests.app.fitting.files import npy
from tests.app.running import running
from tests.models.files import CLASS_NAMES as CLASSES
from tests.models.files import TEXTS, declare, linear, load
from tests.models.test_onnx_exports import of_columns, of_text

COUNT = 30
NAMES = ["height", "width", "weight", "age"]
Samples = Mapping[str, Any]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("mixed") / "model.onnx"
    of_columns(path)
    return load(path)


@pytest.fixture(scope="module")
def numeric(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = linear(tmp_path_factory.mktemp("numeric") / "model.onnx", "Identity", 3)
    declare(path, output="scores", features=NAMES, labels=CLASSES)
    return load(path)


@pytest.fixture(scope="module")
def unnamed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = linear(tmp_path_factory.mktemp("unnamed") / "model.onnx", "Identity", 3)
    declare(path, output="scores")
    return load(path)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("text") / "model.onnx"
    of_text(path)
    return load(path)


def read(data: bytes, folder: Path, backbone: Any, **options: Any) -> StoredSet:
    (folder / "body").write_bytes(data)
    part = FilePart(folder / "body", 0, len(data))
    arguments = {"classes": backbone.labels, "max_bytes": 10**6, "inputs": ModelInputs.of(backbone)}
    return read_file(part, folder, **(arguments | options))


def table(backbone: Any) -> pd.DataFrame:
    generator = np.random.default_rng(3)
    labels = np.resize(backbone.labels, COUNT)
    if backbone.inputs.kind == "texts":
        texts = [f'{text}\n{n}, "film"' for n, text in enumerate(np.resize(TEXTS, COUNT))]
        return pd.DataFrame({"text": texts, "label": labels})
    frame = pd.DataFrame({"label": labels})
    for column, name in zip(backbone.inputs.by_feature, backbone.inputs.names, strict=True):
        values = np.round(generator.normal(size=COUNT) * 9, 0 if column.holds_integers else 2)
        frame[name] = values.astype(column.dtype) if column.holds_integers else values
        if column.is_text:
            frame[name] = np.resize(["Oslo", "Rome"], COUNT)
    return frame


def as_json(frame: pd.DataFrame, *, by_name: bool = True) -> bytes:
    labels = frame["label"].tolist()
    if "text" in frame:
        return upload_part({"texts": frame["text"].tolist(), "labels": labels})[1]
    rows = frame.drop(columns="label")
    features = rows.to_dict("records") if by_name else rows.to_numpy(object)
    return upload_part({"features": features, "labels": labels})[1]


def as_parquet(frame: pd.DataFrame, *, categories: bool = False) -> bytes:
    file = io.BytesIO()
    texts = [name for name in frame if pd.api.types.is_string_dtype(frame[name])]
    changed = {name: frame[name].astype("category") for name in texts}
    assert bool(changed) >= categories
    (frame.assign(**changed) if categories else frame).to_parquet(file, index=False)
    return file.getvalue()


def as_arrow(frame: pd.DataFrame) -> bytes:
    file = io.BytesIO()
    found = pa.Table.from_pandas(frame, preserve_index=False)
    with pa.ipc.new_stream(file, found.schema) as out:
        out.write_table(found, max_chunksize=7)
    return file.getvalue()


def as_npz(frame: pd.DataFrame, **more: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, features=frame[NAMES].to_numpy(float), labels=frame["label"].to_numpy(str), **more)
    return file.getvalue()


def as_csv(frame: pd.DataFrame) -> bytes:
    text: str = frame.to_csv(index=False)
    return text.encode()


FORMS: dict[str, Callable[[pd.DataFrame], bytes]] = {
    "JSON": as_json,
    "JSON, lists": lambda frame: as_json(frame, by_name=False),
    "CSV": as_csv,
    "CSV, other order": lambda frame: frame[frame.columns[::-1]].to_csv(index=False, sep=";").encode(),
    "Parquet": as_parquet,
    "Parquet, categories": lambda frame: as_parquet(frame, categories=True),
    "Arrow": as_arrow,
    "npz": as_npz,
}


def of_model(frame: pd.DataFrame, backbone: Any) -> np.ndarray[Any, Any]:
    inputs = backbone.inputs
    samples = inputs.blank(len(frame))
    for row, one in enumerate(frame.to_dict("records")):
        value = one["text"] if "text" in one else {name: one[name] for name in inputs.names}
        samples[row] = inputs.decode("text" if "text" in one else "features", value, 0)
    return np.asarray(backbone(inputs.batch(samples)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", ["mixed", "numeric", "texts"])
def test_every_form_gives_the_logits_of_the_model(
    form: str, model: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    backbone = request.getfixturevalue(model)
    frame = table(backbone)
    if form == "npz" and model != "numeric":
        pytest.skip("an array has no strings")
    data = read(FORMS[form](frame), tmp_path, backbone)
    assert data.needs_backbone
    stages: list[tuple[float, str]] = []
    run_backbone(data, backbone, 0, lambda *stage: stages.append(stage))
    logits, labels = data.arrays()
    np.testing.assert_allclose(logits, of_model(frame, backbone), atol=1e-5)
    assert [backbone.labels[label] for label in labels] == frame["label"].tolist()
    assert stages[-1] == (1.0, f"running {backbone.name} on 30 {'texts' if model == 'texts' else 'rows'}")


def test_groups_and_weights_are_kept_beside_samples(texts: Any, numeric: Any, tmp_path: Path) -> None:
    groups, weights = np.arange(COUNT) // 3, np.arange(COUNT) / 2
    beside = {"group": groups, "sample_weight": weights}
    frame = table(numeric).assign(**beside)
    document = json.loads(as_json(table(texts))) | {
        "groups": groups.tolist(),
        "sample_weight": weights.tolist(),
    }
    for number, (backbone, body) in enumerate(
        [
            (numeric, as_csv(frame)),
            (numeric, as_npz(frame, groups=groups, sample_weight=weights)),
            (texts, as_csv(table(texts).assign(**beside))),
            (texts, json.dumps(document).encode()),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        kept = read(body, folder, backbone).grouping
        np.testing.assert_array_equal(kept["groups"], groups)
        np.testing.assert_array_equal(kept["sample_weight"], weights)


def changed(row: int, column: str, value: Any) -> Callable[[pd.DataFrame], pd.DataFrame]:
    def change(frame: pd.DataFrame) -> pd.DataFrame:
        frame = frame.astype({column: object})
        frame.loc[row, column] = value
        return frame

    return change


def without(name: str) -> Callable[[pd.DataFrame], pd.DataFrame]:
    return lambda frame: frame.drop(columns=name)


def renamed(**names: str) -> Callable[[pd.DataFrame], pd.DataFrame]:
    return lambda frame: frame.rename(columns=names)


def given(**columns: Any) -> Callable[[pd.DataFrame], pd.DataFrame]:
    return lambda frame: frame.assign(**columns)


NEITHER = r"neither .* \(missing: 'age'; did you mean 'Age'\?\) nor .* \(missing: 'cat' and 2 more\)"
DGO = r"labels\[5\] is 'dgo', which is no class of the model; did you mean 'dog'\?$"
CHANGES: dict[str, list[tuple[Callable[[pd.DataFrame], Any], Callable[[pd.DataFrame], bytes], str]]] = {
    "numeric": [
        (changed(7, "age", "old"), as_csv, r"features\[7\]: .* 'age' is 'old'; it is a number"),
        (changed(9, "width", None), as_csv, r"features\[9\]: The feature 'width' is missing"),
        (changed(7, "age", "old"), as_json, r"features\[7\]: The feature 'age' is 'old'"),
        (without("age"), as_json, r"features\[0\]: .* 'age' is missing"),
        (changed(3, "age", np.inf), as_npz, r"features\[3\]: The feature 'age' is inf"),
        (given(), lambda frame: as_npz(frame, logits=np.zeros((30, 3))), "both `logits` and `features`"),
        (given(age=pd.Timestamp(0)), as_parquet, "The column 'age' must hold numbers, got timestamp"),
        (changed(5, "label", "dgo"), as_csv, DGO),
        (given(id=1), as_csv, "The column 'id' is nothing that onnx:model.onnx reads"),
        (renamed(age="Age"), as_csv, NEITHER),
        (given(logits="[1, 2, 3]"), as_csv, "both `logits` and the columns of features"),
        (
            lambda frame: given(text="a")(frame)[["text", "label"]],
            as_json,
            "has a member 'texts', which this model does not read",
        ),
    ],
    "mixed": [
        (given(age=0.5), as_parquet, r"features\[0\]: The feature 'age' is .*; it is an integer"),
        (given(city=3), as_parquet, "The column 'city' must hold strings, got int64"),
        (changed(4, "city", None), as_parquet, r"features\[4\]: The feature 'city' is None; it is a string"),
    ],
    "texts": [
        (renamed(text="review"), as_csv, r"neither the text .* \(missing: 'text'\) nor logits"),
        (changed(2, "text", None), as_parquet, r"text\[2\] is missing"),
        (given(text=5), as_parquet, "The column `text` must hold texts, got int64"),
        (changed(2, "text", 5), as_json, r"texts\[2\] is 5; it must be a string"),
        (changed(2, "text", "a" * (2**20 + 1)), as_json, r"texts\[2\] has 1,048,577 bytes"),
        (lambda frame: frame[:9], as_json, "has 9 samples"),
    ],
}


@pytest.mark.parametrize(
    ("model", "number"), [(model, number) for model, cases in CHANGES.items() for number in range(len(cases))]
)
def test_what_cannot_be_used_is_refused_by_name(
    model: str, number: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    change, form, message = CHANGES[model][number]
    backbone = request.getfixturevalue(model)
    with pytest.raises(BoxcalError, match=message):
        read(form(change(table(backbone))), tmp_path, backbone, max_bytes=10**7)


def test_columns_of_classes_are_logits_and_what_could_be_both_is_refused(
    numeric: Any, tmp_path: Path
) -> None:
    scores = pd.DataFrame(3 * np.eye(3)[np.arange(COUNT) % 3] - 1, columns=list(CLASSES)).assign(label="dog")
    data = read(as_csv(scores), tmp_path, numeric)
    assert not data.needs_backbone
    same = linear(tmp_path / "same.onnx", "Identity", 4)
    declare(same, output="scores")
    backbone = load(same)
    frame = pd.DataFrame(np.ones((COUNT, 4)), columns=NAMES).assign(label=1)
    body = as_csv(frame.set_axis([*"0123", "label"], axis=1))
    with pytest.raises(BoxcalError, match=r"are the features that onnx:same\.onnx reads, and also"):
        read(body, tmp_path, backbone)
    assert not read(body, tmp_path, backbone, declared=Declared("logits")).needs_backbone


@pytest.mark.parametrize(
    "names", [NAMES, ["f0", "f1", "f2", "f3"], ["x1", "x0", "x2", "y"], [" a", "b", "c", "d"]]
)
def test_features_without_names_are_columns_in_their_order(
    names: list[str], unnamed: Any, numeric: Any, tmp_path: Path
) -> None:
    frame = table(numeric)[[*NAMES, "label"]].assign(label=1)
    data = read(
        as_csv(frame.set_axis([*names, "label"], axis=1).assign(group=range(COUNT))), tmp_path, unnamed
    )
    assert data.columns == "read as features in the order of the file: the model has no names of them"
    run_backbone(data, unnamed, 0, lambda *_: None)
    np.testing.assert_allclose(data.arrays()[0], of_model(frame, numeric), atol=1e-5)
    by_name = frame.set_axis([*"0123", "label"], axis=1)[["3", "1", "2", "0", "label"]]
    data = read(as_csv(by_name), tmp_path, unnamed)
    assert data.columns == "read as features"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([*NAMES, "id"], r"its 4 features, which have no names: 4 columns .* has 5 .* with ignore=NAME"),
        (["f0", "f1", "f2", "f3", "f4"], r"its 4 features, which have no names: .* has 5 "),
        (["a", "b", "c"], r"its 4 features, which have no names: .* has 3 .* Send all of them, or declare"),
        (["prob_0", "prob_1", "prob_2", "age"], "The column 'age' is no class of the model"),
        (["0", "1", "2", "age"], "The column 'age' is no class of the model"),
    ],
)
def test_other_columns_are_no_features_without_names(
    names: list[str], message: str, unnamed: Any, tmp_path: Path
) -> None:
    frame = pd.DataFrame(np.ones((COUNT, len(names))), columns=names).assign(label=2)
    with pytest.raises(BoxcalError, match=message):
        read(as_csv(frame), tmp_path, unnamed)


def test_scores_stay_scores_where_features_have_no_names(unnamed: Any, tmp_path: Path) -> None:
    for names in ("012", ["model_0", "model_1", "model_2"]):
        frame = pd.DataFrame(np.eye(COUNT, 3), columns=list(names)).assign(label=2)
        assert not read(as_csv(frame), tmp_path, unnamed).needs_backbone
    path = linear(tmp_path / "same.onnx", "Identity", 4)
    declare(path, output="scores")
    same = load(path)
    frame = pd.DataFrame(np.eye(COUNT, 4), columns=["f0", "f1", "f2", "f3"]).assign(label=1)
    with pytest.raises(BoxcalError, match=r"are the features that onnx:same\.onnx reads, and also"):
        read(as_csv(frame), tmp_path, same)
    assert not read(as_csv(frame), tmp_path, same, declared=Declared("logits")).needs_backbone


def test_space_around_the_names_of_features_does_not_count(numeric: Any, tmp_path: Path) -> None:
    frame = table(numeric)
    data = read(as_csv(frame.rename(columns={"age": " age "})), tmp_path, numeric)
    run_backbone(data, numeric, 0, lambda *_: None)
    np.testing.assert_allclose(data.arrays()[0], of_model(frame, numeric), atol=1e-5)


def test_a_model_of_tokens_refuses_texts(tmp_path: Path, texts: Any) -> None:
    inputs = ModelInputs("onnx:m.onnx", "texts", CLASSES, has_tokenizer=False)
    with pytest.raises(BoxcalError, match=r"takes tokens: no tokenizer\.json"):
        read(as_json(table(texts)), tmp_path, texts, inputs=inputs)


def test_a_sample_on_which_the_model_fails_is_named(mixed: Any, tmp_path: Path) -> None:
    frame = table(mixed)
    frame.loc[17, "city"] = "Bergen"  # the encoder knows two cities
    data = read(as_csv(frame), tmp_path, mixed)
    with pytest.raises(ValueError, match=r"rows\[17\]: the model fails on it"):
        run_backbone(data, mixed, 0, lambda *_: None)


LIMITED = """
import sys
from pathlib import Path
import numpy as np
from boxcal.app.fitting.resources import limit_memory
from boxcal.app.fitting.worker.validation_set import SampleWriter
from boxcal.app.tables.sample_schema import ModelInputs
texts = np.array(["1" * 2**20] * 60, object)
with SampleWriter(Path(sys.argv[1]), ModelInputs("m", "texts", ("a", "b"))) as writer:
    limit_memory(50 * 2**20)
    try:
        writer.append(texts)
    except MemoryError:
        print("refused")
"""


def test_texts_for_which_memory_is_missing_end_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


def test_the_worker_gets_what_the_model_reads(mixed: Any, tmp_path: Path) -> None:
    summary = BackboneSummary.of(mixed, tmp_path)
    task = CheckTask(tmp_path, "text/csv", summary, {}, (), [], 1, 1)
    assert TASK.validate_json(TASK.dump_json(task)) == task


@pytest.fixture
def predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str, bytes], Any]:
    """Predict a file in bulk with a model, in parts of 20 rows; give the probabilities."""
    monkeypatch.setattr(bulk, "ROWS", 20)
    monkeypatch.setattr(bulk, "TEXTS", 20)
    monkeypatch.setenv("BOXCAL_MODEL", "onnx:model.onnx")

    def predict(backbone: Any, name: str, content: bytes) -> Any:
        monkeypatch.setattr("boxcal.app.fitting.backbones.BackboneSource.load", lambda _: backbone)
        (tmp_path / name).write_bytes(content)
        output = tmp_path / "out.parquet"
        assert bulk.run(tmp_path / name, output, lower=None, upper=None, calibrator=None) == COUNT
        return pq.read_table(output)["probabilities"].to_pylist()

    return predict


@pytest.mark.parametrize("model", ["mixed", "numeric", "texts"])
def test_bulk_prediction_of_tables(
    model: str, predicted: Callable[[Any, str, bytes], Any], request: pytest.FixtureRequest
) -> None:
    backbone = request.getfixturevalue(model)
    frame = table(backbone)
    logits = of_model(frame, backbone).astype(np.float64)
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    files = {"in.parquet": as_parquet(frame.assign(id=1))}
    if model == "numeric":
        files |= {"in.npz": as_npz(frame), "in.npy": npy(frame[NAMES].to_numpy(float))}
    for name, content in files.items():
        np.testing.assert_allclose(predicted(backbone, name, content), expected, atol=1e-5)
    renamed_columns = as_parquet(frame.rename(columns={"age": "Age", "text": "review"}))
    with pytest.raises(UsageError, match=r"in\.parquet: The columns are neither the (text|features) that"):
        predicted(backbone, "in.parquet", renamed_columns)


def test_bulk_prediction_of_features_without_names(
    unnamed: Any,
    numeric: Any,
    predicted: Callable[[Any, str, bytes], Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    frame = table(numeric)[[*NAMES, "label"]]
    expected = torch.as_tensor(of_model(frame, numeric)).double().softmax(1)
    for name, form in (("in.parquet", as_parquet), ("in.csv", as_csv)):
        np.testing.assert_allclose(predicted(unnamed, name, form(frame)), expected, atol=1e-5)
        assert (
            "columns read as features in the order of the file: the model has no" in capsys.readouterr().err
        )
    with pytest.raises(UsageError, match=r"its 4 features, which have no names: .* has 5 .*--ignore NAME"):
        predicted(unnamed, "in.csv", as_csv(frame.assign(id=1)))


def test_one_column_called_score_is_that_of_the_second_class() -> None:
    inputs = ModelInputs("onnx:model.onnx", "features", ("no", "yes"), names=tuple(NAMES))
    found = choose_columns(["score", "label"], ("no", "yes"), Declared(), inputs)
    assert (found.names, found.kind, found.classes) == (("score",), "logits", ("no", "yes"))


def test_a_text_without_tokens_is_named_by_its_row(
    texts: Any, predicted: Callable[[Any, str, bytes], Any]
) -> None:
    with pytest.raises(UsageError, match=r"in.parquet: texts\[25\]: The text has no tokens\."):
        predicted(texts, "in.parquet", as_parquet(changed(25, "text", "")(table(texts))))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("service")
    of_text(folder / "model.onnx")
    with running(folder / "data", model=f"onnx:{folder / 'model.onnx'}", device="cpu") as one:
        yield one.url


@pytest.mark.long
def test_the_client_fits_and_compares_with_texts(service: str, texts: Any, tmp_path: Path) -> None:
    frame = table(texts)
    path = tmp_path / "texts.csv"
    frame.to_csv(path, index=False)
    document = {"texts": frame["text"].tolist(), "labels": frame["label"].to_numpy()}
    with BoxcalClient(service) as client:
        stages: list[str] = []
        queued = client.fit(path, method="ts", activate="never")
        done = client.wait_for_fit(queued.id, lambda fit: stages.append(fit.stage or ""))
        assert (done.state, done.samples) == ("succeeded", COUNT)
        compared = client.compare(document, versions=[0, done.version])
        assert compared["fit_samples"] == COUNT
        assert any(stage.startswith("running onnx:model.onnx on 30 texts") for stage in stages)
        with pytest.raises(InvalidRequestError, match="`texts` has 1 rows but `labels` has 2"):
            client.fit({"texts": ["a"], "labels": [0, 1]})
