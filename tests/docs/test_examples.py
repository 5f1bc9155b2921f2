"""The examples run without a warning, and print what the documentation shows, up to the last digits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.docs.conversation import ROOT
from tools.docs.examples import SCRIPTS, printed

NUMBER = re.compile(r"\d+(?:\.\d+)?")
QUICK = {"thousand_classes"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, id=script.stem, marks=() if script.stem in QUICK else pytest.mark.long)
        for script in SCRIPTS
    ],
)
def test_an_example_prints_what_is_shown(script: Path) -> None:
    shown, said = script.with_suffix(".txt").read_text(), printed(script)
    assert NUMBER.sub("#", said).split() == NUMBER.sub("#", shown).split(), (
        "run python -m tools.docs.examples"
    )
    numbers = [[float(one) for one in NUMBER.findall(text)] for text in (said, shown)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.03, abs=0.005)


def test_every_example_is_on_the_page_with_its_output() -> None:
    text = (ROOT / "docs" / "examples.md").read_text()
    shown = re.findall(r'^--8<-- "docs/examples/(\w+)\.(py|txt)"$', text, re.MULTILINE)
    assert sorted(shown) == sorted((script.stem, kind) for script in SCRIPTS for kind in ("py", "txt"))
