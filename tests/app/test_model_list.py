"""Lists of models in `BOXCAL_MODEL`: what they may say, and what is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from boxcal.app.settings.service import Settings

FILE = """
[small]
model = "digits"
share = 3
upper = 0.9

[big]
model = "torchvision:resnet18"
weights = "random"
max_batch_size = 4
"""


def test_a_list_gives_each_model_its_name_and_the_settings_of_the_service() -> None:
    settings = Settings(model="a=digits, b=timm:resnet18?checkpoint=x.pth", max_batch_size=7)
    found = [
        (one.name, one.settings.model, one.settings.max_batch_size, one.share) for one in settings.entries()
    ]
    assert found == [("a", "digits", 7, 1.0), ("b", "timm:resnet18?checkpoint=x.pth", 7, 1.0)]


def test_a_file_sets_what_each_model_has_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(FILE)
    small, big = Settings(model=str(path)).entries()
    assert (small.name, small.share, small.upper, small.settings.max_batch_size) == ("small", 3.0, 0.9, 32)
    assert (big.settings.model, big.settings.weights, big.settings.max_batch_size) == (
        "torchvision:resnet18", "random", 4,
    )  # fmt: skip


def test_without_a_list_there_is_the_one_model() -> None:
    (only,) = Settings(model="logits:3").entries()
    assert (only.name, only.settings.model) == ("", "logits:3")


@pytest.mark.parametrize(
    ("models", "reason"),
    [
        ("a=digits,digits", "'digits' is not NAME=MODEL"),
        ("a=digits,a=digits", "'a' names two models"),
        ("a/b=digits", "'a/b' cannot name a model"),
        ("a.calibrator=digits", "cannot name a model"),
        ("stats=digits", "'stats' cannot name a model: .* and is not 'stats'"),
        ("nowhere.toml", "nowhere.toml cannot be read"),
    ],
)
def test_a_list_that_cannot_be_read_is_refused(models: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        Settings(model=models)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[a", "is not TOML"),
        ("a = 1", "a = 1 is not a table"),
        ("[a]\nmodel = 'digits'\nqueue = 3", "a.queue: Extra inputs are not permitted, got 3"),
        ("[a]\nshare = 2", "a.model: Field required"),
        ("[a]\nmodel = 'digits'\nshare = 0", "a.share"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "models.toml"
    path.write_text(content)
    with pytest.raises(ValidationError, match=reason):
        Settings(model=str(path))


def test_settings_of_one_model_are_refused_beside_a_list() -> None:
    with pytest.raises(ValidationError, match="BOXCAL_LABELS is of one model"):
        Settings(model="a=digits", labels=Path("labels.txt"))
