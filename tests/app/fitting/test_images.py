"""A zip of labelled images is fitted like the logits that the backbone gives for them."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from boxcal.app.fitting.worker.fit import run_backbone
from boxcal.app.fitting.worker.validation_set import StoredSet
from boxcal.app.http.problems import BoxcalError, InvalidUpload
from boxcal.app.tables.labels import Declared
from boxcal.models.digits_data import load_digits_split
from boxcal.models.loading.specifications import load_backbone
from tests.app.fitting.files import read_bytes

BACKBONE = load_backbone("digits", device="cpu")
DIGITS = load_digits_split().validation
COUNT = 60


def archive(**extra: bytes) -> bytes:
    """Real digits, a folder for each class, with what file managers leave behind; and more members."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as out:
        out.writestr("digits/", b"")
        for index in range(COUNT):
            out.writestr(f"digits/{DIGITS.labels[index]}/{index}.png", DIGITS.png(index))
        out.writestr("__MACOSX/digits/._0.png", b"resource fork")
        out.writestr("digits/.DS_Store", b"folder view")
        for name, content in extra.items():
            out.writestr(name, content)
    return file.getvalue()


def test_images_become_the_logits_that_the_backbone_gives(tmp_path: Path) -> None:
    stored = read_bytes(archive(), tmp_path / "upload", 10**6)
    assert (stored.samples, stored.holds_images) == (COUNT, True)
    # Replicas share validation sets in a folder of their own.
    images = StoredSet((tmp_path / "upload").rename(tmp_path / "shared"))
    stages: list[tuple[float, str]] = []
    run_backbone(images, BACKBONE, 10**6, lambda fraction, stage: stages.append((fraction, stage)))
    logits, labels = images.arrays()
    expected = np.asarray(BACKBONE(DIGITS.levels[:COUNT]))
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    np.testing.assert_array_equal(labels, DIGITS.labels[:COUNT])
    assert stages[-1] == (1.0, f"running digits on {COUNT} images")


def test_folders_are_classes_in_composed_and_decomposed_unicode(tmp_path: Path) -> None:
    """As archives from macOS have them."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as out:
        for index in range(COUNT):
            folder = ("cafe\u0301", "caf\xe9", "bar")[index % 3]
            out.writestr(f"{folder}/{index}.png", DIGITS.png(index))
    stored = read_bytes(file.getvalue(), tmp_path, 10**6, classes=["bar", "caf\xe9"])
    assert np.load(stored.folder / "labels.npy").tolist() == [1, 1, 0] * 20
    assert stored.classes == ["bar", "caf\xe9"]


def test_hidden_files_are_left_out_but_not_those_of_a_class(tmp_path: Path) -> None:
    hidden = {
        "0/.ipynb_checkpoints/1.png": b"",
        "__MACOSX/0/1.png": b"",
        "0/Thumbs.db": b"",
        "0/._1.png": b"",
    }
    images = {f".net/{index}.png": DIGITS.png(index) for index in range(20)} | {"0/1.png": DIGITS.png(1)}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as out:
        for name, content in (images | hidden).items():
            out.writestr(name, content)
    stored = read_bytes(file.getvalue(), tmp_path, 10**6, classes=["0", ".net"])
    assert np.load(stored.folder / "labels.npy").tolist() == [1] * 20 + [0]


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("scores", "probabilities", "scores=probabilities"),
        ("label", "target", "label=target"),
        ("ignore", ("id", "fold"), "ignore=id,fold"),
        ("labels_as", "index", "labels_as=index"),
        ("classes", ("a", "b"), "classes=a,b"),
        ("group", "patient", "group=patient"),
    ],
)
def test_what_nothing_reads_of_images_is_refused(name: str, given: Any, said: str, tmp_path: Path) -> None:
    images = read_bytes(archive(), tmp_path, 10**6)
    with pytest.raises(InvalidUpload, match=said):
        images.keep_declared(Declared(**{name: given}))
    images.keep_declared(Declared(class_mix="as_traffic"))


@pytest.mark.parametrize(
    ("extra", "status", "message"),
    [
        ({"digits/ten/x.png": DIGITS.png(0)}, 422, "'ten', which is no class .* begin with '0', '1'"),
        ({"x.png": DIGITS.png(0)}, 422, "'x.png' is in no folder of a class of the backbone"),
        ({"labels.csv": b"file,label\n"}, 422, "'labels.csv' is in no folder of a class of the backbone"),
        (
            {"data/Train/7/x.png": DIGITS.png(0)},
            422,
            "lie in 'data/Train' and in 'digits'.* not trained with",
        ),
        ({"7/x.png": b"hello, world"}, 422, "'7/x.png': .* expected JPEG, PNG or WebP"),
        ({"7/x.png": b""}, 422, "'7/x.png': The image is empty"),
        pytest.param(
            {f"digits/{DIGITS.labels[0]}/0.png": DIGITS.png(1)},
            422,
            r"holds 2 entries of the name 'digits/\d/0\.png'",
            marks=pytest.mark.filterwarnings("ignore:Duplicate name"),
        ),
        ({"7/x.png": bytes(10**6)}, 413, "unpack to 1,0.* bytes; the limit is 1,000,000"),
        ({"7/x.txt": b"notes"}, 422, "'7/x.txt'"),
        (
            {f"{n}/notes.txt": b"notes" for n in range(7)} | {"ten/x.png": DIGITS.png(0)},
            422,
            "'0/notes.txt': .* Nor can '1/notes.txt', .*, '5/notes.txt' and 2 more be used",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    tmp_path: Path, extra: dict[str, bytes], status: int, message: str
) -> None:
    with pytest.raises(BoxcalError, match=message) as caught:
        read_bytes(archive(**extra), tmp_path, 10**6)
    assert caught.value.status == status


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    images = read_bytes(archive(**{"3/broken.png": DIGITS.png(0)[:40]}), tmp_path, 10**6)
    with pytest.raises(ValueError, match=r"3/broken\.png: The PNG image of 40 bytes is damaged: [^.]*\.$"):
        run_backbone(images, BACKBONE, 10**6, lambda *_: None)


def test_all_damaged_images_are_named_at_once(tmp_path: Path) -> None:
    broken = {f"3/{name}.png": DIGITS.png(0)[:40] for name in "abc"}
    images = read_bytes(archive(**broken, **{"4/good.png": DIGITS.png(0)}), tmp_path, 10**6)
    with pytest.raises(ValueError, match=r"3/a\.png: .* Nor can '3/b\.png', '3/c\.png' be used\.$"):
        run_backbone(images, BACKBONE, 10**6, lambda *_: None)
