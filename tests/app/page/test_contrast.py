"""Bars and brackets are distinct from what lies behind them, in both themes; axe-core checks text alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

STYLE = Path(__file__).parents[3] / "app" / "page" / "style.css"
LIGHT, DARK = ":root {", "@media (prefers-color-scheme: dark)"


def colours(theme: str) -> dict[str, tuple[float, ...]]:
    """The colours of a theme by name, red, green and blue in [0, 1]."""
    text = STYLE.read_text()
    block = text[text.index(theme) :].partition("}")[0]
    found = re.findall(r"--([a-z-]+): #([0-9a-f]{6});", block)
    return {name: tuple(int(value[at : at + 2], 16) / 255 for at in (0, 2, 4)) for name, value in found}


def luminance(colour: tuple[float, ...]) -> float:
    """Relative luminance of WCAG 2.2."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("mark", ["before", "calibrated", "answer", "bound", "good", "bad"])
@pytest.mark.parametrize("behind", ["surface", "allowed"])
def test_marks_have_a_contrast_of_three(theme: str, mark: str, behind: str) -> None:
    known = colours(theme)
    assert contrast(known[mark], known[behind]) >= 3.0
