"""Real exports of tabular and text models: posted input gives the library's own probabilities, then a fit."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto

from boxcal.app.cli import bulk
from boxcal.app.cli.output import UsageError
from boxcal.models import BackboneError, UnusableInput
from boxcal.models.loading.inspection import inspect_model
from tests.app.running import running
from tests.models.files import CLASS_NAMES as CLASSES
from tests.models.files import (
    TEXTS,
    declare,
    linear,
    load,
    logits_of,
    node,
    save_graph,
    value,
    word_tokenizer,
)
from tests.models.posting import TOLERANCE, Export, check_answers, check_clients, check_fit

RNG = np.random.default_rng(11)


def features(count: int = 300) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rows = RNG.normal(size=(count, 4)).astype(np.float32)
    noise = RNG.normal(size=count)
    return rows, ((rows[:, 0] + noise > 0.3).astype(int) + (rows[:, 1] + noise > 0.8).astype(int))


def posted(rows: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
    return [{"features": [None if np.isnan(v) else float(v) for v in row]} for row in rows]


def of_scikit_learn(path: Path, *, zipmap: bool) -> Export:
    from skl2onnx import to_onnx
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rows, labels = features()
    model = make_pipeline(StandardScaler(), LogisticRegression()).fit(rows, np.array(CLASSES)[labels])
    path.write_bytes(to_onnx(model, rows[:1], options={"zipmap": zipmap}).SerializeToString())
    return Export(posted(rows[:7]), CLASSES, model.predict_proba(rows[:7]))


def of_columns(path: Path) -> Export:
    """A pipeline of columns, each an input of its own: numbers, integers and text."""
    import pandas as pd
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import FloatTensorType, Int64TensorType, StringTensorType
    from sklearn.compose import ColumnTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    rows, labels = features()
    table = pd.DataFrame({"height": rows[:, 0], "age": (10 * rows[:, 1]).astype(int)})
    table["city"] = np.array(["Oslo", "Rome"])[(rows[:, 2] > 0).astype(int)]
    split = ColumnTransformer(
        [("numbers", StandardScaler(), ["height", "age"]), ("names", OneHotEncoder(), ["city"])]
    )
    model = make_pipeline(split, LogisticRegression()).fit(table, labels)
    types = [
        ("height", FloatTensorType([None, 1])),
        ("age", Int64TensorType([None, 1])),
        ("city", StringTensorType([None, 1])),
    ]
    path.write_bytes(to_onnx(model, initial_types=types, options={"zipmap": False}).SerializeToString())
    inputs = [
        {"features": {"city": row.city, "height": float(row.height), "age": int(row.age)}}
        for row in table[:7].itertuples()
    ]
    return Export(inputs, ("0", "1", "2"), model.predict_proba(table[:7]))


def of_lightgbm(path: Path) -> Export:
    import lightgbm
    from onnxmltools import convert_lightgbm
    from onnxmltools.convert.common.data_types import FloatTensorType

    rows, labels = features()
    rows[::3, 1] = np.nan
    model = lightgbm.LGBMClassifier(
        n_estimators=10, num_leaves=7, min_child_samples=5, verbosity=-1, n_jobs=1
    )
    model.fit(rows, labels)
    exported = convert_lightgbm(model, initial_types=[("rows", FloatTensorType([None, 4]))], zipmap=True)
    path.write_bytes(exported.SerializeToString())
    return Export(posted(rows[:7]), ("0", "1", "2"), np.asarray(model.predict_proba(rows[:7])))


def of_xgboost(path: Path) -> Export:
    import xgboost
    from onnxmltools import convert_xgboost
    from onnxmltools.convert.common.data_types import FloatTensorType

    rows, labels = features()
    rows[::3, 1] = np.nan
    model = xgboost.XGBClassifier(n_estimators=10, max_depth=3, n_jobs=1).fit(rows, labels)
    exported = convert_xgboost(model, initial_types=[("rows", FloatTensorType([None, 4]))])
    path.write_bytes(exported.SerializeToString())
    return Export(posted(rows[:7]), ("0", "1", "2"), model.predict_proba(rows[:7]))


class Reader(torch.nn.Module):
    """A transformer of one layer and random weights, with an attention mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(50, 16)
        self.queries, self.keys, self.values = (torch.nn.Linear(16, 16) for _ in range(3))
        self.feed = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
        self.head = torch.nn.Linear(16, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        scores = self.queries(hidden) @ self.keys(hidden).transpose(1, 2) / 4
        scores = scores + (1 - attention_mask[:, None, :].float()) * -1e9
        hidden = hidden + scores.softmax(-1) @ self.values(hidden)
        hidden = torch.nn.functional.layer_norm(hidden + self.feed(hidden), (16,))
        weight = attention_mask[..., None].float()
        logits: torch.Tensor = self.head((hidden * weight).sum(1) / weight.sum(1))
        return logits


def of_text(path: Path) -> Export:
    tokenizer = word_tokenizer()
    tokenizer.save(str(path.with_name("tokenizer.json")))
    network = Reader().eval()
    ids = torch.tensor([[2, 4, 0], [3, 4, 5]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network,
            (ids, (ids > 0).long()),
            path,
            input_names=["input_ids", "attention_mask"],
            output_names=["logits"],
            dynamic_axes={name: {0: "n", 1: "length"} for name in ("input_ids", "attention_mask")},
            dynamo=False,
        )
    declare(path, labels=CLASSES)
    ids_of = [tokenizer.encode(text).ids for text in TEXTS]
    rows = [torch.tensor([one]) for one in ids_of]
    expected = [network(row, torch.ones_like(row)).softmax(1)[0].detach().numpy() for row in rows]
    return Export([{"text": text} for text in TEXTS], CLASSES, np.array(expected), {"input_ids": ids_of})


EXPORTS: dict[str, Callable[[Path], Export]] = {
    "scikit-learn, ZipMap": lambda path: of_scikit_learn(path, zipmap=True),
    "scikit-learn, tensor": lambda path: of_scikit_learn(path, zipmap=False),
    "scikit-learn, columns": of_columns,
    "LightGBM, missing values": of_lightgbm,
    "XGBoost, missing values": of_xgboost,
    "text": of_text,
}


FITTED = ("scikit-learn, columns", "text")
"""The others take the same path."""


@pytest.fixture(params=EXPORTS)
def export(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Export]]:
    path = tmp_path / "model.onnx"
    made = EXPORTS[request.param](path)
    with running(tmp_path / "data", model=f"onnx:{path}", device="cpu") as service:
        yield service.url, made


def test_posted_inputs_give_the_librarys_probabilities_then_a_fit_then_bounds(
    export: tuple[str, Export], request: pytest.FixtureRequest
) -> None:
    check_answers(*export)
    check_clients(*export)
    if request.node.callspec.params["export"] in FITTED:
        check_fit(*export)


@pytest.mark.parametrize("batch", ["n", 1, 3])
def test_rows_and_tokens_pass_through_a_free_or_fixed_batch_dimension(
    batch: int | str, tmp_path: Path
) -> None:
    """The features [x, y] and z give the logits 0, 2 x + z and y; the token t gives t and -t, summed up."""
    columns = save_graph(
        tmp_path / "columns.onnx",
        [node("Concat", "xy z", "row", axis=1), node("MatMul", "row w", "s")],
        [value("xy", batch, 2), value("z", batch, 1)],
        [value("s", batch, 3)],
        w=np.array([[0, 2, 0], [0, 0, 1], [0, 1, 0]], np.float32),
    )
    rows = np.array([[1, 2, 3], [0, 0, 0], [-1, 4, 0], [0, 5, 7]])
    for count in (1, 3, 4):
        logits = logits_of(load(columns), rows[:count])
        np.testing.assert_array_equal(logits, [[0, 5, 2], [0, 0, 0], [0, -2, 4], [0, 7, 5]][:count])
    tokens = save_graph(
        tmp_path / "tokens.onnx",
        [node("Gather", "table input_ids", "found"), node("ReduceSum", "found axes", "logits", keepdims=0)],
        [value("input_ids", batch, "length", dtype=TensorProto.INT64)],
        [value("logits", batch, 2)],
        table=np.arange(9, dtype=np.float32)[:, None] * np.array([1, -1], np.float32),
        axes=[1],
    )
    served = load(tokens)
    samples = served.inputs.blank(4)
    for row, ids in enumerate([[1, 2], [8], [3, 3, 3], [5, 2]]):
        samples[row] = served.inputs.decode("tokens", {"input_ids": ids}, 0)
    np.testing.assert_array_equal(served(served.inputs.batch(samples)), [[3, -3], [8, -8], [9, -9], [7, -7]])
    assert inspect_model(tokens).outputs[0].found == ((2 if batch == "n" else batch), 2)


@pytest.mark.parametrize("zipmap", [True, False])
def test_exports_of_scikit_learn_with_a_fixed_batch_dimension(zipmap: bool, tmp_path: Path) -> None:
    from skl2onnx import convert_sklearn
    from skl2onnx.common.data_types import FloatTensorType
    from sklearn.ensemble import RandomForestClassifier

    rows, labels = features()
    model = RandomForestClassifier(5, random_state=0).fit(rows, np.array(CLASSES)[labels])
    for batch in (1, 4):
        exported = convert_sklearn(
            model, initial_types=[("rows", FloatTensorType([batch, 4]))], options={"zipmap": zipmap}
        )
        path = tmp_path / f"{batch}.onnx"
        path.write_bytes(exported.SerializeToString())
        served = load(path)
        logits = logits_of(served, rows[:7])
        assert served.labels == CLASSES
        np.testing.assert_allclose(logits.softmax(1), model.predict_proba(rows[:7]), atol=1e-6)


def load_exported(path: Path, model: Any, rows: np.ndarray[Any, Any], **options: Any) -> Any:
    from skl2onnx import to_onnx

    path.write_bytes(to_onnx(model, rows[:1], options={id(model): options}).SerializeToString())
    return load(path)


@pytest.mark.parametrize("classes", [2, 3])
def test_scores_beside_a_label_are_logits(classes: int, tmp_path: Path) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.svm import LinearSVC

    rows, labels = features()
    names = np.array(CLASSES)[np.minimum(labels, classes - 1)]
    machine, regression = LinearSVC().fit(rows, names), LogisticRegression().fit(rows, names)
    for model, options in ((machine, {}), (regression, {"raw_scores": True})):
        served = load_exported(tmp_path / "m.onnx", model, rows, **options)
        logits = logits_of(served, rows[:7])
        scores = model.decision_function(rows[:7])
        if classes == 2:  # skl2onnx gives one column for the one, and two for the other
            scores = np.stack([0 * scores if model is machine else -scores, scores], axis=1)
        assert served.labels == CLASSES[:classes]
        np.testing.assert_allclose(logits, scores, atol=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_scores_that_contradict_the_label_are_refused(tmp_path: Path) -> None:
    """Scores of pairs of classes."""
    from sklearn.svm import SVC

    rows, labels = features()
    model = SVC(decision_function_shape="ovo").fit(rows, labels)
    message = r'not that of the label beside it.*declare "outputs": "logits"'
    with pytest.raises(BackboneError, match=message):
        load_exported(tmp_path / "m.onnx", model, rows, zipmap=False)
    assert "check that each score is of one class" in " ".join(inspect_model(tmp_path / "m.onnx").notes)
    declare(tmp_path / "m.onnx", outputs="logits", labels=["1", "0", "2"])
    assert load(tmp_path / "m.onnx").labels == ("1", "0", "2")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("zipmap", [True, False])
def test_two_scores_in_the_reverse_order_of_the_labels_are_turned_round(zipmap: bool, tmp_path: Path) -> None:
    """As skl2onnx writes those of SVC: `[s, -s]`, with s the score of the second class."""
    from sklearn.svm import SVC

    path, (rows, labels) = tmp_path / "m.onnx", features()
    model = SVC().fit(rows, np.array(CLASSES)[np.minimum(labels, 1)])
    served = load_exported(path, model, rows, zipmap=zipmap)
    assert served.labels == CLASSES[:2]
    scores = model.decision_function(rows)
    np.testing.assert_allclose(logits_of(served, rows), np.stack([-scores, scores], axis=1), atol=1e-5)
    found = inspect_model(path)
    assert found.declaration["labels"] == [*CLASSES[1::-1]]
    declare(path, **found.declaration)
    declared = load(path)
    assert declared.labels == CLASSES[1::-1]
    np.testing.assert_allclose(logits_of(declared, rows), np.stack([scores, -scores], axis=1), atol=1e-5)


NAMED = {"texts": ("zeta", "alpha", "mid"), "from 1": (1, 2, 3), "others": (5, 15, 25), "indices": (0, 1, 2)}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("zipmap", [True, False])
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("kind", NAMED)
def test_answers_have_the_labels_of_the_file(kind: str, classes: int, zipmap: bool, tmp_path: Path) -> None:
    """Also where the last classifier of the graph is one of several, which number their classes."""
    from onnxruntime import InferenceSession
    from sklearn.ensemble import BaggingClassifier
    from sklearn.linear_model import LogisticRegression, SGDClassifier
    from sklearn.multiclass import OneVsOneClassifier
    from sklearn.naive_bayes import GaussianNB

    path, (rows, labels) = tmp_path / "m.onnx", features()
    names = np.array(NAMED[kind][:classes])[np.minimum(labels, classes - 1)]
    models: list[Any] = [SGDClassifier(random_state=0), GaussianNB()]
    models.append(BaggingClassifier(LogisticRegression(), 2))
    if kind != "texts":  # of which skl2onnx writes a file that onnxruntime does not open
        models.append(OneVsOneClassifier(LogisticRegression()))
    for model in models:
        path.with_suffix(".json").unlink(missing_ok=True)
        served = load_exported(path, model.fit(rows, names), rows, zipmap=zipmap)
        session = InferenceSession(path)
        said = session.run(None, {session.get_inputs()[0].name: rows})[0].astype(str).ravel()
        if not isinstance(model, OneVsOneClassifier):  # whose labels are numbers in the file
            assert served.labels == tuple(map(str, model.classes_)), model
        assert (np.array(served.labels)[logits_of(served, rows).argmax(1)] == said).mean() > 0.98, model
        declare(path, **inspect_model(path).declaration)
        declared = load(path)
        assert (np.array(declared.labels)[logits_of(declared, rows).argmax(1)] == said).mean() > 0.98, model


def labelled(path: Path, last: str, labels: str, domain: str = "", **attributes: Any) -> Path:
    """A linear network of two classes: its scores, and the label that an operator makes of their index."""
    weight = np.random.default_rng(5).normal(size=(4, 2)).astype(np.float32)
    nodes = [node("MatMul", "x w", "raw"), node(last, "raw", "scores")]
    nodes += [node("ArgMax", "raw", "index", axis=1, keepdims=0)]
    nodes += [
        node(labels, "names index" if labels == "Gather" else "index", "label", domain=domain, **attributes)
    ]
    outputs = [value("label", "N", dtype=TensorProto.STRING), value("scores", "N", 2)]
    names = np.array(["no", "yes"], object)
    return save_graph(path, nodes, [value("x", "N", 4)], outputs, w=weight, names=names)


@pytest.mark.parametrize("last", ["Identity", "Softmax"])
@pytest.mark.parametrize(
    ("labels", "attributes"),
    [
        ("Gather", {}),
        (
            "LabelEncoder",
            {"domain": "ai.onnx.ml", "keys_int64s": [0, 1], "values_strings": ["no", "yes"]},
        ),
    ],
)
def test_labels_of_a_network_are_those_beside_its_scores(
    last: str, labels: str, attributes: dict[str, Any], tmp_path: Path
) -> None:
    path = labelled(tmp_path / "m.onnx", last, labels, **attributes)
    rows = np.random.default_rng(2).normal(size=(20, 4)).astype(np.float32)
    raw = rows @ np.random.default_rng(5).normal(size=(4, 2)).astype(np.float32)
    said = np.array(["no", "yes"])[raw.argmax(1)].tolist()
    for declared in ({}, {"labels": ["no", "yes"]}, {"labels": ["yes", "no"]}, {"labels": ["a", "b"]}):
        declare(path, **declared)
        if last == "Softmax" and declared == {"labels": ["yes", "no"]}:
            with pytest.raises(
                BackboneError, match="2 probabilities, whose largest is not that of the label"
            ):
                load(path)
            continue
        served = load(path)
        found = [served.labels[index] for index in logits_of(served, rows).argmax(1)]
        assert found == ([{"no": "a", "yes": "b"}[one] for one in said] if "a" in served.labels else said)
    declare(path, outputs="logits" if last == "Identity" else "probabilities")
    assert load(path).labels == ("no", "yes")


def test_an_encoder_of_labels_encodes_no_feature(tmp_path: Path) -> None:
    """So the trial rows differ, and show two sigmoids that sum to 1 for one row alone."""
    encoder: dict[str, Any] = {"domain": "ai.onnx.ml", "keys_int64s": [0, 1], "values_strings": ["no", "yes"]}
    path = labelled(tmp_path / "m.onnx", "Sigmoid", "LabelEncoder", **encoder)
    with pytest.raises(BackboneError, match="2 independent sigmoids"):
        load(path)


def test_labels_that_no_list_names_are_to_be_declared(tmp_path: Path) -> None:
    """Index plus 1, of three classes of which random rows show two."""
    nodes = [node("MatMul", "x w", "product"), node("Add", "product b", "raw")]
    nodes += [node("Softmax", "raw", "scores"), node("ArgMax", "raw", "index", axis=1, keepdims=0)]
    nodes += [node("Add", "index one", "label")]
    outputs = [value("label", "N", dtype=TensorProto.INT64), value("scores", "N", 3)]
    constants = {"w": np.eye(4, 3, -1, np.float32), "b": np.array([-1e9, 0.0, 0.0], np.float32)}
    constants |= {"one": np.array([1])}
    path = save_graph(tmp_path / "m.onnx", nodes, [value("x", "N", 4)], outputs, None, **constants)
    with pytest.raises(BackboneError, match=r'label beside it, such as 2: declare "labels" in the order'):
        load(path)
    declare(path, labels=["1", "2", "3"])
    assert load(path).labels == ("1", "2", "3")


@pytest.mark.parametrize("shape", [[0, 0, 1, 1], [0, 1, 1, -1]])
def test_dimensions_of_size_1_are_dropped(shape: list[int], tmp_path: Path) -> None:
    path = linear(tmp_path / "m.onnx", "Identity", 3)
    model = onnx.load(path)
    model.graph.node[1].CopyFrom(
        onnx.helper.make_node("Reshape" if shape[1] else "Unsqueeze", ["raw", "shape"], ["scores"])
    )
    constant = np.array(shape if shape[1] else [2, 3])
    model.graph.initializer.append(onnx.numpy_helper.from_array(constant, "shape"))
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    onnx.save(model, path)
    rows = np.random.default_rng(2).normal(size=(5, 4)).astype(np.float32)
    logits: list[Any] = []
    for output in ("scores", "raw_logits"):
        declare(path, output=output)
        logits.append(logits_of(load(path), rows))
    np.testing.assert_array_equal(*logits)
    path.with_suffix(".json").unlink()
    assert inspect_model(path).declaration["output"] == "scores"


def test_one_sigmoid_is_two_classes(tmp_path: Path) -> None:
    path = linear(tmp_path / "m.onnx", "Sigmoid", 1)
    rows = np.random.default_rng(2).normal(size=(5, 4)).astype(np.float32)
    declare(path, output="scores", activation="sigmoid")
    served = load(path)
    declare(path, output="raw_logits", activation="sigmoid", outputs="logits")
    raw = load(path)
    logits, before = logits_of(served, rows), logits_of(raw, rows)
    assert logits.shape == before.shape == (5, 2)
    np.testing.assert_allclose(logits.softmax(1), before.softmax(1), atol=1e-6)
    np.testing.assert_allclose(before.softmax(1)[:, 1], before[:, 1].sigmoid(), atol=1e-6)
    assert served.fingerprint != raw.fingerprint


def test_a_network_that_averages_its_inputs_is_no_set_of_sigmoids(tmp_path: Path) -> None:
    """Of noise without a mean, these logits stay next to the biases, between 0 and 1."""
    path = save_graph(
        tmp_path / "m.onnx",
        [
            node("GlobalAveragePool", "x", "mean"),
            node("Flatten", "mean", "flat"),
            node("Gemm", "flat w b", "z"),
        ],
        [value("x", "N", 1, 4000)],
        [value("z", "N", 3)],
        w=np.array([[0.1, -0.2, 0.05]], np.float32),
        b=np.array([0.3, 0.5, 0.6], np.float32),
    )
    assert load(path).labels == ("0", "1", "2")


def test_a_label_alone_is_refused(tmp_path: Path) -> None:
    path = save_graph(
        tmp_path / "m.onnx",
        [node("ArgMax", "x", "label", axis=1, keepdims=0)],
        [value("x", "N", 4)],
        [value("label", "N", dtype=TensorProto.INT64)],
    )
    with pytest.raises(BackboneError, match=r"no output of floats \(label\): labels alone"):
        load(path)


@pytest.mark.parametrize(
    ("last", "classes", "declared", "message"),
    [
        ("Sigmoid", 3, {"output": "scores"}, r"3 independent sigmoids.*multi-label"),
        ("Sigmoid", 1, {"output": "scores"}, r'Declare "activation": "sigmoid"'),
        ("Identity", 1, {"output": "scores"}, r'Declare "activation": "sigmoid", "outputs": "logits"'),
        ("Identity", 1, {"output": "scores", "activation": "sigmoid"}, "no sigmoid"),
        ("Sigmoid", 3, {"output": "scores", "activation": "sigmoid"}, "has 3 columns"),
        ("Softmax", 3, {"output": "scores", "outputs": "logits"}, "sums to 1"),
        ("Identity", 3, {}, "has the outputs scores, raw_logits; call the one"),
        ("Identity", 3, {"output": "score"}, "has no output 'score'; it has the outputs scores, raw_logits"),
        ("Identity", 3, {"output": "scores", "features": ["a", "b"]}, "features has 2 names"),
    ],
)
def test_outputs_that_are_not_what_is_declared_are_refused(
    last: str, classes: int, declared: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = linear(tmp_path / "m.onnx", last, classes)
    declare(path, **declared)
    with pytest.raises(BackboneError, match=message):
        load(path)


def test_a_tokenizer_in_another_folder_is_refused(tmp_path: Path) -> None:
    of_text(path := tmp_path / "m.onnx")
    declare(path, tokenizer="../tokenizer.json")
    message = r"m\.onnx: tokenizer is '\.\./tokenizer\.json'; it must be the name of a file in the folder"
    with pytest.raises(BackboneError, match=message):
        load(path)


def test_rows_by_name_as_arrays_and_as_csv(tmp_path: Path) -> None:
    import io

    names = ["height", "width", "depth", "age"]
    path = linear(tmp_path / "m.onnx", "Identity", 3)
    spec = declare(path, output="scores", features=names)
    rows = np.round(np.random.default_rng(2).normal(size=(5, 4)), 3)
    with (
        running(tmp_path / "data", model=spec, device="cpu") as service,
        httpx.Client(base_url=service.url) as http,
    ):
        assert http.get("/model").json()["inputs"] == "rows"
        by_name = [dict(reversed(list(zip(names, row, strict=True)))) for row in rows.tolist()]
        inputs = [{"features": row} for row in by_name]
        expected = http.post("/predict", json={"inputs": inputs}).json()["predictions"]
        array = io.BytesIO()
        np.save(array, rows)
        csv = "\n".join([",".join(by_name[0]), *(",".join(map(str, row.values())) for row in by_name)])
        csvs = (csv, csv.replace(",", "\t"), csv.replace(",", ";").replace(".", ","))
        bodies = [("application/x-npy", array.getvalue()), *(("text/csv", text.encode()) for text in csvs)]
        for kind, body in bodies:
            answer = http.post("/predict", content=body, headers={"content-type": kind})
            assert answer.json()["predictions"] == expected, answer.text
        wrong = {
            "no feature 'hight'": {"features": {**by_name[0], "hight": 1}},
            "'age' is missing; write null": {"features": dict(list(by_name[0].items())[1:])},
            "has 3 values; the model takes 4": {"features": [1, 2, 3]},
            "'height' is 'x'; it is a number": {"features": ["x", 1, 2, 3]},
            "'height' is missing; the model reads finite": {"features": [None, 1, 2, 3]},
            "takes `features`": {"text": "hello"},
        }
        for message, one in wrong.items():
            answer = http.post("/predict", json={"inputs": [inputs[0], one]})
            assert answer.status_code == 422
            assert message in answer.json()["detail"], answer.text
            assert "inputs[1]" in answer.json()["detail"]
        for message, text in {
            "no feature 'hight'": csv.replace("height", "hight"),
            "line 2 does not have 4 values": csv.replace("\n", "\n1,", 2),
            "has no rows": csv.partition("\n")[0],
            "'height' is '1_000'; it is a number": ",".join(names) + "\n1_000,2,3,4",
            "'height' is '1.000,5'; it is a number": ";".join(names) + "\n1.000,5;2,5;3;4",
            "has more than one column 'age'": ",".join([*names, "age"]) + "\n1,2,3,4,5",
        }.items():
            answer = http.post("/predict", content=text.encode(), headers={"content-type": "text/csv"})
            assert answer.status_code == 422, answer.text
            assert message in answer.json()["detail"], answer.text


def test_a_file_that_names_a_feature_twice_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = declare(linear(tmp_path / "m.onnx", "Identity", 3), output="scores", features=list("abcd"))
    monkeypatch.setenv("BOXCAL_MODEL", spec)
    (tmp_path / "rows.csv").write_text("a,b,c,d,a\n1,2,3,4,5\n")
    with pytest.raises(UsageError, match="The table has more than one column 'a'"):
        bulk.run(tmp_path / "rows.csv", tmp_path / "out.csv", lower=0.0, upper=1.0, calibrator=None)


def test_csv_of_features_without_names_is_read_in_order(tmp_path: Path) -> None:
    served = load(Path(declare(linear(tmp_path / "m.onnx", "Identity", 3), output="scores")[5:])).inputs
    for names in (["a", "b", "c", "d"], ["0", "1", "2", "3"], ["3", "2", "1", "0"]):
        order = [1.0, 2.0, 3.0, 4.0][:: -1 if names[0] == "3" else 1]
        np.testing.assert_array_equal(served.decode("cells", (names, ["1", "2", "3", "4"], "."), 0), order)
    with pytest.raises(UnusableInput, match=r"no feature 'a'\. Its features have no names; send a list"):
        served.decode("features", {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}, 0)
    with pytest.raises(UnusableInput, match="The row has 3 values; the model takes 4 features"):
        served.decode("cells", (["a", "b", "c"], ["1", "2", "3"], "."), 0)


def test_an_output_for_each_class_is_refused_with_what_to_do(tmp_path: Path) -> None:
    from sklearn.linear_model import LogisticRegression

    rows, labels = features()
    with pytest.raises(BackboneError, match=r'output for each class \(i0, i1, i2\).*\{"zipmap": False\}'):
        load_exported(tmp_path / "m.onnx", LogisticRegression().fit(rows, labels), rows, zipmap="columns")


def test_texts_change_their_case_without_an_installed_locale(tmp_path: Path) -> None:
    from skl2onnx import convert_sklearn
    from skl2onnx.common.data_types import StringTensorType
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    texts = ["Hot Summer", "COLD winter", "long summer", "short winter", "SUMMER", "Winter"]
    model = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(texts, [1, 0, 1, 0, 1, 0])
    exported = convert_sklearn(model, initial_types=[("text", StringTensorType([None, 1]))])
    path = tmp_path / "m.onnx"
    path.write_bytes(exported.SerializeToString())
    served = load(path)
    rows = [served.inputs.decode("features", [text], 0) for text in texts]
    got = np.exp(np.asarray(served(served.inputs.batch(np.stack(rows)))))
    np.testing.assert_allclose(got, model.predict_proba(texts), atol=1e-6)


def test_tokens_are_padded_and_checked(tmp_path: Path) -> None:
    made = of_text(tmp_path / "model.onnx")
    backbone = load(tmp_path / "model.onnx")
    inputs = backbone.inputs
    tokens = {"input_ids": [2, 4]}
    sample = inputs.decode("tokens", tokens, 0)
    samples = inputs.blank(3)
    samples[0], samples[1] = sample, inputs.decode("text", TEXTS[1], 0)
    logits = torch.as_tensor(backbone(inputs.batch(samples)))
    np.testing.assert_allclose(logits[:2].softmax(1), made.probabilities[:2], atol=TOLERANCE)
    for message, given in {
        "0 tokens": {"input_ids": []},
        "513 tokens; it must have 1 to 512": {"input_ids": [1] * 513},
        "attention_mask must be a list of 2": {"input_ids": [1, 2], "attention_mask": [1]},
        "must hold integers": {"input_ids": [1.5, 2]},
        "no input 'ids'": {"ids": [1]},
    }.items():
        with pytest.raises(BackboneError, match=message):
            inputs.decode("tokens", given, 0)
