"""What the commands do, on this machine and through a service, for people and for scripts; `prune`."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import logsumexp

from boxcal.app.client import BoxcalClient
from boxcal.app.registry.records import ActivatePolicy, BackboneIdentity, Decision, FittedCalibrator
from boxcal.app.registry.store import Registry
from boxcal.calibrators import Calibrator, evaluate
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.data import check_validation_set
from boxcal.models.digits_data import Digits
from boxcal.models.loading.specifications import load_backbone
from tests.app.cli.conftest import Boxcal
from tests.app.fitting.validation_data import overconfident
from tests.app.tables.sets import softmax


def test_predict_answers_the_same_here_and_through_a_service(boxcal: Boxcal, image: Path, url: str) -> None:
    # One image: of two, the service may run each alone, and float32 varies by batch.
    options = ("--upper", "0.75", "--lower", "8=0.02", "--top-k", 3, "--json")
    here = boxcal("predict", image, *options).json
    there = boxcal("predict", image, *options, "--url", url, "--calibrator", 0).json
    assert here["predictions"] == there["predictions"]
    for place in ([], ["--url", url, "--calibrator", 0]):
        assert len(boxcal("predict", image, image, *options, *place).json["predictions"]) == 2
    assert here["predictions"][0]["probability"] <= 0.75
    assert (here["model"], there["calibrator"]["version"]) == ("digits", 0)
    shown = boxcal("predict", image, "--upper", "0.75", "--top-k", 2, "--url", url)
    assert [line.split() for line in shown.stdout.splitlines()[:2]] == [
        ["image", "label", "probability", "bound"], ["digit.png", "9", "0.7500", "upper"],
    ]  # fmt: skip
    assert len(shown.stdout.splitlines()) == 3
    assert "calibrator 0: uncalibrated" in shown.stderr


def test_many_images_are_one_answer(boxcal: Boxcal, image: Path, url: str) -> None:
    answer = boxcal("predict", *[image] * 70, "--top-k", 1, "--url", url, "--json").json
    found = {(p["label"], p["probability"]) for p in answer["predictions"]}
    assert len(found) <= 3  # float32 varies by batch
    assert len(answer["predictions"]) == 70


def test_fit_is_the_same_here_and_through_a_service(
    boxcal: Boxcal, validation_file: Path, url: str, tmp_path: Path
) -> None:
    here, there = tmp_path / "here.safetensors", tmp_path / "there.safetensors"
    report, diagram, page = (tmp_path / name for name in ("report.json", "diagram.svg", "report.html"))
    arguments = ("fit", validation_file, "--method", "ts", "--json")
    local = boxcal(*arguments, "--output", here, "--report", report, "--diagram", diagram, "--html", page)
    remote = boxcal(*arguments, "--output", there, "--url", url, "--activate", "never").json
    assert here.read_bytes() == there.read_bytes()
    assert local.json["fit"] is None
    assert remote["fit"]["state"] == "succeeded"
    assert local.json["report"]["metrics"] == remote["report"]["metrics"]
    assert b"<svg" in diagram.read_bytes()
    assert '"metrics"' in report.read_text()
    assert page.read_text().startswith("<!doctype html>")
    assert str(here) in local.stderr


def test_samples_drawn_by_class_are_weighed_here_and_by_a_service(
    boxcal: Boxcal, validation_file: Path, url: str
) -> None:
    arguments = ("fit", validation_file, "--method", "ts", "--class-mix", "resampled", "--json")
    local, remote = boxcal(*arguments).json, boxcal(*arguments, "--url", url, "--activate", "never").json
    assert local["report"]["effective_samples"] == remote["report"]["effective_samples"] < 400
    assert local["report"]["metrics"] == remote["report"]["metrics"]
    (warning,) = (one for one in local["report"]["warnings"] if one["code"] == "class_mix")
    assert warning["message"].startswith("weights make classes as frequent as the logits expect: class ")


def test_samples_drawn_by_class_are_judged_as_requests(
    boxcal: Boxcal, validation_file: Path, url: str
) -> None:
    """The NLL that the weights give, of which a test of the calibrators says what they are."""
    arrays = np.load(validation_file)
    checked = check_validation_set(arrays["logits"], arrays["labels"], class_mix="resampled")
    own = logsumexp(checked.logits, axis=1) - checked.logits[np.arange(400), checked.labels]
    expected = np.average(own, weights=checked.weights)
    assert abs(expected - own.mean()) > 0.01
    judged = boxcal("evaluate", validation_file, "--class-mix", "resampled", "--json").json
    assert judged["metrics"]["nll"]["value"] == pytest.approx(expected)
    table = boxcal("compare", validation_file, "--method", "ts", "--class-mix", "resampled", "--json").json
    with BoxcalClient(url) as client:
        served = client.compare(validation_file, methods=["ts"], class_mix="resampled")
    for methods in (table["methods"], served["methods"]):
        assert methods[0]["metrics"]["nll"]["value"] == pytest.approx(expected)


@pytest.mark.parametrize(
    "command",
    [
        ("fit", "--method", "ts", "--output"),
        ("fit", "--method", "ts", "--report"),
        ("fit", "--method", "ts", "--html"),
        ("compare", "--method", "ts", "--csv"),
        ("compare", "--method", "ts", "--markdown"),
    ],
    ids=" ".join,
)
def test_an_output_that_cannot_be_or_would_replace_the_source_is_refused(
    boxcal: Boxcal, command: tuple[str, ...], tmp_path: Path
) -> None:
    """Before the fit, and with the source as it was."""
    logits, labels = overconfident(100, 3)
    source = tmp_path / "v.svg"
    with source.open("wb") as file:
        np.savez(file, logits=logits, labels=labels)
    before = source.read_bytes()
    name, *options = command
    boxcal(name, source, *options, source).refuses("v.svg is the source itself; name another file")
    boxcal(name, source, *options, tmp_path).refuses(f"{tmp_path} is a folder; name a file in it")
    boxcal(name, source, *options, tmp_path / "none" / "x").refuses(f"x: there is no folder {tmp_path}/none")
    assert source.read_bytes() == before


def test_a_column_of_groups_can_be_named(boxcal: Boxcal, url: str, tmp_path: Path) -> None:
    logits, labels = overconfident(400)
    patients = np.arange(400) // 8
    table = pd.DataFrame(logits.astype(float), columns=list("0123456789")).assign(label=labels)
    table.assign(patient_id=patients).to_csv(tmp_path / "scans.csv", index=False)
    np.savez(tmp_path / "scans.npz", logits=logits.astype(float), labels=labels, groups=patients)
    boxcal("evaluate", tmp_path / "scans.csv").refuses("belong together, set --group patient_id; else leave")
    options = ("--method", "ts", "--json")
    expected = boxcal("fit", tmp_path / "scans.npz", *options).json["report"]["metrics"]
    named = ("fit", tmp_path / "scans.csv", "--group", "patient_id", *options)
    for done in (boxcal(*named), boxcal(*named, "--url", url, "--activate", "never")):
        assert done.json["report"]["metrics"] == expected


def test_weights_cannot_be_given_twice(boxcal: Boxcal, validation_file: Path, tmp_path: Path) -> None:
    arrays = np.load(validation_file)
    weighed = {**arrays, "sample_weight": np.ones(len(arrays["labels"]))}
    np.savez(tmp_path / "weighed.npz", **weighed)
    done = boxcal("fit", tmp_path / "weighed.npz", "--class-mix", "resampled")
    assert done.code == 2
    assert "The samples have either `sample_weight` or --class-mix resampled, which makes" in done.stderr


def test_fit_shows_people_what_changes(boxcal: Boxcal, validation_file: Path, url: str) -> None:
    shown = boxcal("fit", validation_file, "--method", "ts", "--url", url, "--activate", "never")
    assert shown.code == 0
    first, *lines = shown.stdout.splitlines()
    assert first == "Use it: NLL falls by 0.651 (0.492 to 0.822)."
    rows = {line.split("  ")[0]: line for line in lines}
    assert {"error rate", "NLL", "ECE (equal width)", "ECE (equal mass)"} <= rows.keys()
    assert "Not activated, as asked." in shown.stdout


def test_what_is_seriously_wrong_with_the_data_comes_before_the_verdict(
    boxcal: Boxcal, tmp_path: Path
) -> None:
    logits, labels = overconfident(400)
    np.savez(tmp_path / "shifted.npz", logits=logits, labels=(labels + 1) % logits.shape[1])
    first, second, *_ = boxcal("fit", tmp_path / "shifted.npz", "--method", "ts").stdout.splitlines()
    assert first.startswith("serious: error rate ")
    assert second.startswith("Correct the data first: NLL falls by ")


def test_images_are_data_too(boxcal: Boxcal, digits: Digits, tmp_path: Path) -> None:
    """A folder for each class: the model's logits of the images, as if they had been saved before."""
    logits = np.asarray(load_backbone("digits", device="cpu")(digits.levels[:60]))
    np.savez(tmp_path / "digits.npz", logits=logits, labels=digits.labels[:60])
    for i in range(60):
        folder = tmp_path / "digits" / str(digits.labels[i])
        folder.mkdir(exist_ok=True, parents=True)
        (folder / f"{i}.png").write_bytes(digits.png(i))
    by_logits = boxcal("evaluate", tmp_path / "digits.npz", "--json").json
    by_images = boxcal("evaluate", tmp_path / "digits", "--json").json
    assert by_images["samples"] == 60
    for metric in ("error_rate", "nll"):
        expected = by_logits["metrics"][metric]["value"]
        assert by_images["metrics"][metric]["value"] == pytest.approx(expected, rel=1e-5)


def test_evaluate_agrees_with_the_library_and_with_the_service(
    boxcal: Boxcal, validation_file: Path, url: str, tmp_path: Path
) -> None:
    saved = tmp_path / "c.safetensors"
    through = ("--url", url, "--activate", "never", "--json")
    fitted = boxcal("fit", validation_file, "--method", "ts", "--output", saved, *through).json
    here = boxcal("evaluate", validation_file, "--calibrator", saved, "--json").json
    version = fitted["fit"]["calibrator"]
    there = boxcal("evaluate", validation_file, "--calibrator", version, "--url", url, "--json").json
    shown = boxcal("evaluate", validation_file, "--calibrator", saved).stdout
    first, second, *_ = shown.splitlines()
    assert first.startswith("serious: about 100% of the rows are among those that the calibrator was")
    assert second == "Judge it on other data: NLL falls by 0.653 (0.495 to 0.825)."
    assert here["metrics"] == there["metrics"]
    for known in (here, there):
        assert [(one["code"], one["severity"]) for one in known["warnings"]] == [("known_rows", "serious")]
    logits, labels = overconfident(300, seed=9)
    np.savez(tmp_path / "other.npz", logits=logits, labels=labels)
    assert boxcal("evaluate", tmp_path / "other.npz", "--calibrator", saved).stdout.startswith("Use it: ")

    data = np.load(validation_file)
    probabilities = Calibrator.from_bytes(saved.read_bytes())(torch.from_numpy(data["logits"]))
    expected = evaluate(probabilities, data["labels"]).to_dict()
    assert expected["nll"] == pytest.approx(here["metrics"]["nll"]["after"]["value"], rel=1e-12)
    assert expected["ece_width"] == pytest.approx(here["metrics"]["ece_width"]["after"]["value"], rel=1e-12)


def test_evaluate_counts_a_group_once_and_leaves_out_what_weighs_nothing(
    boxcal: Boxcal, tmp_path: Path
) -> None:
    logits, labels = overconfident(200, 3)
    file = tmp_path / "v.npz"
    many = np.tile(logits, (4, 1)) + np.arange(800)[:, None] * 1e-9

    def nll(**columns: Any) -> tuple[float, float]:
        np.savez(file, logits=many, labels=np.tile(labels, 4), **columns)
        found = boxcal("evaluate", file, "--json").json["metrics"]["nll"]
        return found["value"], found["high"] - found["low"]

    groups = np.tile(np.arange(200), 4)
    independent, grouped = nll(), nll(groups=groups)
    assert grouped[0] == pytest.approx(independent[0])
    assert grouped[1] == pytest.approx(2 * independent[1], rel=0.1)
    first = nll(sample_weight=np.repeat([3.0, 0.0], [200, 600]))
    assert first == pytest.approx(grouped, rel=0.1)


def test_evaluate_without_a_calibrator_says_what_chance_would_give(
    boxcal: Boxcal, validation_file: Path
) -> None:
    shown = boxcal("evaluate", validation_file)
    assert "if calibrated" in shown.stdout
    document = boxcal("evaluate", validation_file, "--json").json
    assert document["calibrator"] is None
    assert document["metrics"]["ece_width"]["p_value"] < 0.05  # four times as sure as it should be


def test_evaluate_is_not_surer_than_its_groups(boxcal: Boxcal, tmp_path: Path) -> None:
    """Labels of 100 groups, drawn from the softmax, once for the 6 rows of a group: exactly calibrated."""
    random, saved = np.random.default_rng(1), tmp_path / "grouped.npz"
    logits = np.repeat(random.normal(size=(100, 2)) * 1.5, 6, axis=0) + random.normal(size=(600, 2)) * 0.02
    labels = np.repeat(random.random(100), 6) < 1.0 / (1.0 + np.exp(logits[:, 0] - logits[:, 1]))
    groups = np.repeat(np.arange(100), 6)
    np.savez(saved, logits=logits, labels=labels.astype(int), groups=groups)
    found = boxcal("evaluate", saved, "--json").json["metrics"]["smooth_ece"]
    assert found["p_value"] < 0.01
    assert found["low"] == 0
    shown = boxcal("evaluate", saved).stdout
    assert "The model shows no error of calibration: smooth ECE 0.0670" in shown
    assert "if samples were independent; the interval, which counts groups, begins at 0)" in shown
    np.savez(saved, logits=logits, labels=labels.astype(int), groups=np.arange(600))
    assert "The model is not calibrated: smooth ECE 0.0670" in boxcal("evaluate", saved).stdout


@pytest.mark.parametrize("command", [("fit", "--method", "ts"), ("evaluate",), ("compare", "--method", "ts")])
def test_labels_in_a_file_of_their_own_are_read_as_in_one(
    boxcal: Boxcal, validation_file: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    scores, labels = tmp_path / "scores.npy", tmp_path / "labels.npy"
    with np.load(validation_file) as arrays:
        own = arrays["labels"].copy()
        np.save(scores, arrays["logits"])
    np.save(labels, own)

    def metrics(*files: object) -> Any:
        found = boxcal(*command, *files, "--json").json
        return [row["metrics"] for row in found.get("methods", [found.get("report", found)])]

    assert metrics(scores, "--labels", labels) == metrics(validation_file)
    own[3] = 12
    np.save(labels, own)
    boxcal(*command, scores, "--labels", labels).refuses(f"{scores}: labels[3] is 12")
    boxcal(*command, validation_file, "--labels", labels).refuses(f"{validation_file} is an .npz")


def test_the_service_named_by_the_environment_is_used(
    boxcal: Boxcal, image: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOXCAL_URL", url)
    assert "calibrator 0" in boxcal("predict", image).stderr
    answer = f"(HTTP 422 from {url}, the service that BOXCAL_URL names)"
    assert answer in boxcal("predict", image, "--upper", "0.05").stderr
    assert "BOXCAL_URL" not in boxcal("predict", image, "--upper", "0.05", f"--url={url}").stderr
    with BoxcalClient() as client:
        assert client.url == url


@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "parquet"])
def test_feedback_sends_a_file_of_labels(boxcal: Boxcal, url: str, tmp_path: Path, suffix: str) -> None:
    with BoxcalClient(url) as client:
        ids = [p.id for p in client.calibrate(np.eye(10), feedback=True).predictions]
    table, file = pd.DataFrame({"id": ids, "label": range(10)}), tmp_path / f"labels.{suffix}"
    if suffix.startswith("csv"):
        table.to_csv(file, index=False)
    else:
        table.assign(source=None).to_parquet(file)
    assert boxcal("feedback", file, "--url", url, "--json").json["accepted"] == 10
    shown = boxcal("feedback", file, "--url", url)
    assert ["duplicates", "10"] in [line.split() for line in shown.stdout.splitlines()]


def test_feedback_of_a_small_table_is_read_without_a_thread_that_may_outlive_it(
    boxcal: Boxcal, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python aborts where such a thread still reads from it as it ends."""
    monkeypatch.setattr("pyarrow.csv.open_csv", None)
    file = tmp_path / "labels.csv"
    file.write_text("id,label\n")
    boxcal("feedback", file, "--url", url).refuses("labels.csv has no rows")
    file.write_text(f"id,label\n{'0' * 32},3\n")
    assert boxcal("feedback", file, "--url", url, "--json").json["unknown"] == 1


def test_feedback_of_an_infinite_propensity_names_the_row(boxcal: Boxcal, url: str, tmp_path: Path) -> None:
    file = tmp_path / "labels.parquet"
    pd.DataFrame({"id": ["0" * 32], "label": [1], "propensity": [np.inf]}).to_parquet(file)
    sent = boxcal("feedback", file, "--url", url)
    assert ["malformed", "1"] in [line.split() for line in sent.stdout.splitlines()]
    assert "items[0]: propensity" in sent.stderr


def test_feedback_sends_logits_of_another_model(boxcal: Boxcal, url: str, tmp_path: Path) -> None:
    rows = [f'{name},"{[float(k == n) for k in range(10)]}",{n}' for n, name in enumerate(("one", "two"))]
    file = tmp_path / "labels.csv"
    file.write_text("key,logits,label\n" + "\n".join(rows))
    assert boxcal("feedback", file, "--url", url, "--json").json["accepted"] == 2
    file.write_text("key,logits,label\none,zero,1\n")
    assert "items[0]: logits must be a list of 10" in boxcal("feedback", file, "--url", url).stderr


def test_a_file_of_labels_in_another_encoding_is_refused(boxcal: Boxcal, url: str, tmp_path: Path) -> None:
    file = tmp_path / "labels.csv"
    file.write_bytes("id,logits,label\na,[1],Ärger\n".encode("latin-1"))
    for command in (("feedback", file, "--url", url), ("monitor", file)):
        boxcal(*command).refuses("labels.csv: The file is no readable .csv")


def test_a_table_of_probabilities_with_an_identifier(boxcal: Boxcal, tmp_path: Path) -> None:
    """Each refusal names the option that settles it, as it is typed; the last command is right."""
    logits, labels = overconfident(200, 3)
    rows = softmax(logits)
    names = np.array(["ape", "bee", "cat"])
    file = tmp_path / "scores.csv"
    table = pd.DataFrame(rows, columns=["p_ape", "p_bee", "p_cat"])
    table.assign(target=names[labels], id=range(200)).to_csv(file, index=False, float_format="%.3f")
    boxcal("evaluate", file).refuses("If `target` is it, set --label target.")
    options: tuple[str, ...] = ("--label", "target")
    boxcal("evaluate", file, *options).refuses("Leave it out with --ignore id;")
    options += ("--ignore", "id")
    boxcal("evaluate", file, *options).refuses(
        "Set --scores probabilities; if these are logits all the same, set --scores logits."
    )
    found = boxcal("evaluate", file, *options, "--scores", "probabilities", "--json").json
    rounded = rows.round(3) / rows.round(3).sum(axis=1, keepdims=True)
    own = np.maximum(rounded[np.arange(200), labels], 2.0**-126)
    assert found["metrics"]["nll"]["value"] == pytest.approx(-np.log(own).mean(), abs=1e-9)
    assert found["columns"] == "named by the file"


def test_many_classes_are_named_in_a_file(boxcal: Boxcal, tmp_path: Path) -> None:
    """As those of ImageNet, which have commas; no label names the last one."""
    logits, labels = overconfident(300, 12)
    names = [f"n{k}, thing" for k in range(12)]
    given, classes, output = tmp_path / "in.csv", tmp_path / "classes.txt", tmp_path / "out.safetensors"
    kept = labels < 11
    table = {name: logits[kept, k] for k, name in enumerate(names)}
    pd.DataFrame(table | {"label": [names[k] for k in labels[kept]]}).to_csv(given, index=False)
    boxcal("fit", given, "--method", "ts", "--output", output).refuses(
        "name all columns of classes: --classes FILE, with one in each line."
    )
    classes.write_text("\n".join(names) + "\n")
    assert boxcal("fit", given, "--classes", classes, "--method", "ts", "--output", output).code == 0
    assert ArrayCalibrator.from_bytes(output.read_bytes()).classes == tuple(names)


def test_the_classes_of_a_model_that_runs_elsewhere_are_kept(
    boxcal: Boxcal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of arrays, which name none, so that the columns of a table are found in another order too."""
    names, rng = ["ant", "bee", "cat"], np.random.default_rng(3)
    logits = rng.normal(size=(400, 3)) * 2
    labels = (logits + np.array([1.5, 0.0, -1.0]) + rng.gumbel(size=logits.shape)).argmax(axis=1)
    np.savez(tmp_path / "in.npz", logits=logits, labels=labels)
    (tmp_path / "names.txt").write_text("\n".join(names))
    monkeypatch.setenv("BOXCAL_MODEL", "logits:3")
    monkeypatch.setenv("BOXCAL_LABELS", str(tmp_path / "names.txt"))
    output = tmp_path / "out.safetensors"
    assert boxcal("fit", tmp_path / "in.npz", "--method", "vector", "--output", output).code == 0
    assert ArrayCalibrator.from_bytes(output.read_bytes()).classes == tuple(names)
    frame = pd.DataFrame(logits, columns=names).assign(label=np.array(names)[labels])
    found = []
    for order in (names, names[::-1]):
        frame[[*order, "label"]].to_csv(tmp_path / "t.csv", index=False)
        answer = boxcal("evaluate", tmp_path / "t.csv", "--calibrator", output, "--json").json
        found.append(answer["metrics"]["nll"]["after"]["value"])
    assert found[0] == pytest.approx(found[1], abs=1e-12)
    assert found[0] < boxcal("evaluate", tmp_path / "t.csv", "--json").json["metrics"]["nll"]["value"] - 0.1


def test_prune_returns_the_space_to_the_disk(
    boxcal: Boxcal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOXCAL_DATA_DIR", str(tmp_path))
    file = tmp_path / "boxcal.sqlite3"
    registry = Registry(f"sqlite:///{file}", BackboneIdentity("digits", "ab" * 32, ("a", "b")), owner="me")
    fitted = FittedCalibrator("ts", bytes(1_000_000), {}, {"warnings": []}, b"", b"", 7)
    for number in range(5):
        fit = registry.fits.add(str(number), "ts", ActivatePolicy.NEVER, 7)
        registry.record_fit(fit, fitted, lambda _: Decision(False, "so"))
    registry.close()
    assert file.stat().st_size > 5_000_000
    assert boxcal("prune", "--keep-versions", 2, "--json").json == {"pruned": [1, 2, 3]}
    assert file.stat().st_size < 3_000_000
    assert boxcal("prune", "--keep-versions", 2).stdout == "Pruned 0 calibrators: none.\n"
    assert boxcal("prune", "--keep-versions", 0).code == 2


FIT = """
import sys
from boxcal.app.cli import main
try:
    main()
except SystemExit as ended:
    assert not ended.code
print([name for name in ("numba", "scipy", "boxcal.calibrators.fitting") if name in sys.modules])
"""


def test_a_fit_by_a_service_loads_nothing_that_fits(validation_file: Path, url: str) -> None:
    options = ["fit", str(validation_file), "--method=ts", "--activate=never", "--url", url]
    shown = subprocess.run([sys.executable, "-c", FIT, *options], capture_output=True, text=True, check=True)
    assert "NLL" in shown.stdout
    assert shown.stdout.splitlines()[-1] == "[]"
