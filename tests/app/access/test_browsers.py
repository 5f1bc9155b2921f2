"""`Host` and `Origin`, row by row, and CORS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from boxcal.app.http.browsers import BrowserRules, is_loopback
from boxcal.app.http.problems import MisdirectedRequest
from boxcal.app.settings.service import Settings
from tests.app.raising import raises_problem
from tests.app.running import Service, running

PARTNER = "https://partner.example"
OWN = "OWN"  # replaced by the address of the service


@pytest.fixture(scope="module")
def open_to_partner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(
        tmp_path_factory.mktemp("cors"), cors_origins=f"{PARTNER}, http://other.example:81"
    ) as service:
        yield service


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:8000", 200),
        ("localhost:1", 200),
        ("LOCALHOST", 200),
        ("[::1]:8000", 200),
        ("attacker.example", 421),
        ("attacker.example:8000", 421),
        ("127.0.0.1.attacker.example", 421),
        ("localhost.attacker.example", 421),
        ("127.0.0.1:80:80", 421),
        ("127.0.0.1:x", 421),
        ("127.0.0.2", 421),
        (":8000", 421),
        ("localhost@attacker.example", 421),
    ],
)
def test_only_names_of_the_service_are_accepted(http: httpx.Client, host: str, status: int) -> None:
    answer = http.get("/version", headers={"Host": host})
    assert answer.status_code == status
    if status == 421:
        assert answer.json()["type"] == "urn:boxcal:problem:misdirected-request"
        assert host in answer.json()["detail"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 409),
        ({"Origin": OWN}, 409),
        ({"Origin": OWN, "Sec-Fetch-Site": "same-origin"}, 409),
        ({"Origin": "https://gateway.example", "Sec-Fetch-Site": "same-origin"}, 409),
        ({"Sec-Fetch-Site": "none"}, 409),
        ({"Origin": "http://attacker.example"}, 403),
        ({"Origin": "http://attacker.example", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": OWN, "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "http://127.0.0.1:1", "Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "null", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": PARTNER, "Sec-Fetch-Site": "cross-site"}, 403),
    ],
)
def test_writes_of_other_origins_are_refused(
    http: httpx.Client, headers: dict[str, str], status: int
) -> None:
    own = str(http.base_url).rstrip("/")
    sent = {name: own if value == OWN else value for name, value in headers.items()}
    for method, path in (("POST", "/calibrators/rollback"), ("DELETE", "/fits/0000"), ("POST", "/predict")):
        answer = http.request(method, path, headers=sent)
        assert (answer.status_code == 403) == (status == 403), answer.text
    # Reading is harmless: without CORS, the browser does not show the response to the page.
    assert http.get("/version", headers=sent).status_code == 200


def test_listed_origins_may_write_and_read(open_to_partner: Service) -> None:
    with httpx.Client(base_url=open_to_partner.url) as http:
        asked = {"Origin": PARTNER, "Access-Control-Request-Method": "POST",
                 "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
        preflight = http.options("/predict", headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == PARTNER
        sent = {"Origin": PARTNER, "Sec-Fetch-Site": "cross-site"}
        answer = http.post("/calibrators/rollback", headers=sent)
        assert answer.status_code == 409
        assert answer.headers["access-control-allow-origin"] == PARTNER
        assert http.post("/calibrators/rollback", headers={"Origin": "http://a.example"}).status_code == 403
        foreign = http.options("/predict", headers=asked | {"Origin": "http://a.example"})
        assert foreign.status_code == 400
        assert "access-control-allow-origin" not in foreign.headers


def test_without_listed_origins_there_is_no_cors(http: httpx.Client) -> None:
    assert "access-control-allow-origin" not in http.get("/version", headers={"Origin": PARTNER}).headers


@pytest.mark.parametrize(
    ("settings", "host", "is_accepted"),
    [
        ({"host": "0.0.0.0"}, b"any.example", True),  # noqa: S104 - not listened on
        ({"host": "0.0.0.0", "allowed_hosts": "a.example, B.example"}, b"b.example:80", True),  # noqa: S104
        ({"host": "0.0.0.0", "allowed_hosts": "a.example"}, b"b.example", False),  # noqa: S104
        ({"host": "0.0.0.0", "allowed_hosts": "a.example"}, b"127.0.0.1:8000", True),  # noqa: S104
        ({"host": "0.0.0.0", "allowed_hosts": "a.example"}, b"[fd00::1]:8000", True),  # noqa: S104
        ({"host": "0.0.0.0", "allowed_hosts": "a.example"}, b"10.0.0.7.nip.io", False),  # noqa: S104
        ({"host": "0.0.0.0", "allowed_hosts": "a.example"}, b"fd00::1", False),  # noqa: S104
        ({"host": "0.0.0.0", "allowed_hosts": "a.example"}, b"[10.0.0.7]", False),  # noqa: S104
        ({"host": "127.0.0.1", "allowed_hosts": "*"}, b"any.example", True),
        ({"host": "127.0.0.5"}, b"127.0.0.5:80", True),
        ({"host": "127.0.0.5"}, b"any.example", False),
    ],
)
def test_the_setting_of_names(settings: dict[str, str], host: bytes, is_accepted: bool) -> None:
    rules = BrowserRules(Settings(data_dir=Path("unused"), **settings))  # type: ignore[arg-type]
    if is_accepted:
        rules.check("GET", host, b"", b"")
    else:
        with raises_problem(MisdirectedRequest):
            rules.check("GET", host, b"", b"")


def test_loopback_addresses() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.0.1", "::1", "localhost", "LOCALHOST")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))  # noqa: S104
