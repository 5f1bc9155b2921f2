"""The files of the page: cached under their digest, under a strict policy, small; colours are distinct."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import httpx
import pytest

from boxcal.app.page.routes import CONTENT_SECURITY_POLICY, SWAGGER, assets


def test_the_root_redirects_to_the_page_beneath_any_prefix(http: httpx.Client) -> None:
    for path in ("/", "/ui"):
        answer = http.get(path)
        assert answer.status_code == 307
        assert answer.headers["location"] == "ui/"


def test_the_index_is_not_cached_and_names_assets_that_are_cached_for_ever(http: httpx.Client) -> None:
    index = http.get("/ui/")
    assert index.headers["cache-control"] == "no-cache"
    assert index.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    paths = re.findall(r'(?:href|src)="([0-9a-f]{16}/[^"]+)"', index.text)
    assert {path.partition("/")[2] for path in paths} == {"icon.svg", "style.css", "main.js"}
    for path in paths:
        asset = http.get(f"/ui/{path}")
        assert asset.status_code == 200
        assert asset.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert asset.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path", ["/ui/0000000000000000/main.js", "/ui/{digest}/none.js", "/ui/{digest}/index.html"]
)
def test_another_release_or_file_is_not_found(http: httpx.Client, path: str) -> None:
    answer = http.get(path.format(digest=assets()[0]))
    assert answer.status_code == 404
    assert answer.json()["type"] == "urn:boxcal:problem:route-not-found"


def test_the_assets_are_small() -> None:
    """At most 150 kB, and 48 kB compressed; Swagger UI comes from its own wheel."""
    own = [content for name, content in assets()[1].items() if name not in SWAGGER]
    assert sum(map(len, own)) <= 150_000
    assert sum(len(gzip.compress(content)) for content in own) <= 48_000


def test_the_page_parses_no_string_as_html_or_script() -> None:
    for name, content in assets()[1].items():
        if name.endswith(".js") and name not in SWAGGER:
            assert not re.search(
                rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", content
            )


def test_the_model_and_the_methods_are_described(http: httpx.Client) -> None:
    model = http.get("/model").json()
    assert model["labels"] == list("0123456789")
    assert model["limits"]["queue_samples"] == 1024
    assert len(model["examples"]) == 10
    methods = {method["name"]: method["reads"] for method in http.get("/methods").json()["methods"]}
    assert methods.items() >= {"ts+pb": "logits", "fc": "features", "nc": "inputs"}.items()


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
