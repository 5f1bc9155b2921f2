"""The files of the page: cached for ever under their digest, under a strict policy, small."""

import gzip
import re

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


def test_stats_are_small_and_have_a_history(http: httpx.Client) -> None:
    answer = http.get("/stats")
    assert len(answer.content) <= 4096
    document = answer.json()
    assert set(document["history"]) == {"requests_per_second", "failed_per_second", "p50_ms", "p99_ms"}


def test_the_model_and_the_methods_are_described(http: httpx.Client) -> None:
    model = http.get("/model").json()
    assert model["labels"] == list("0123456789")
    assert model["limits"]["queue_samples"] == 1024
    assert len(model["examples"]) == 10
    methods = {method["name"]: method["reads"] for method in http.get("/methods").json()["methods"]}
    assert methods["ts+pb"] == "logits"
    assert methods["fc"] == "features"
    assert methods["nc"] == "inputs"
