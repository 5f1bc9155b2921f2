"""Which requests the clients retry, how long they wait, and what they raise in the end."""

import email.utils
import inspect
import pickle
import random
import socket
import time
from typing import Any

import httpx
import pytest

from boxcal.app.client import (
    AnswerTimeoutError,
    AsyncBoxcalClient,
    BoxcalClient,
    ConnectionLostError,
    FitNotSucceededError,
    InvalidRequestError,
    NotFoundError,
    RetryPolicy,
    ServiceFaultError,
    UnavailableError,
    UnreachableError,
    UnreadableAnswerError,
)
from boxcal.app.client.exchange import REFUSED_BEFORE_WORK
from boxcal.app.http.problems import ConcurrencyLimited, FitQueueFull, NotReady, QueueFull, RateLimited
from boxcal.app.schemas.fits import Fit
from tests.app.client.both import Ask
from tests.app.client.scripted import FIT, Reply, scripted
from tests.app.fitting.service import free_port

ANSWER = {
    "model": "digits",
    "calibrator": {"version": 3, "method": "pb"},
    "bounds_relaxed": False,
    "predictions": [{"label": "7", "index": 7, "probability": 0.75, "top": []}],
    "timing_ms": {"total": 1.5},
}
DEEP = b"[" * 100_000
QUICK = RetryPolicy(retries=3, longest_wait=5.0, first_wait=0.01)


EFFECTS = [("rollback", "calibrators_rollback"), ("fit", "fit"), ("calibrate", "calibrate")]


def refusal(kind: str = "queue-full", **headers: str) -> Reply:
    problem = {
        "type": f"urn:boxcal:problem:{kind}",
        "title": "The queue is full",
        "detail": "1024 samples wait",
    }
    return Reply(503, problem, headers)


@pytest.mark.parametrize(
    ("first", "least"),
    [
        (refusal(**{"Retry-After": "1"}), 1.0),
        (Reply(503, body=b"<html>"), 0.0),
        (Reply(drop=True), 0.0),
    ],
    ids=["refused", "page of a proxy", "lost connection"],
)
def test_a_call_without_effects_is_retried_as_late_as_retry_after_says(
    ask: Ask, first: Reply, least: float
) -> None:
    with scripted(predict=[first, Reply(document=ANSWER)]) as script:
        begin = time.monotonic()
        answer = ask(script.url, "predict", b"x", retries=QUICK)
        assert time.monotonic() - begin >= least
    assert answer.predictions[0].probability == 0.75
    assert script.count("/predict") == 2


@pytest.mark.parametrize("kind", ["not-ready", "queue-full", "fit-queue-full"])
def test_a_call_with_effects_is_retried_where_the_service_refused_before_any_work(
    ask: Ask, kind: str
) -> None:
    with scripted(fit=[refusal(kind), Reply(202, FIT)]) as script:
        assert ask(script.url, "fit", b"npz", retries=QUICK).id == "f"
    assert script.count("/fit") == 2


@pytest.mark.parametrize(("name", "path"), EFFECTS)
@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (Reply(503, body=b"<html>upstream closed the connection</html>"), UnavailableError),
        (Reply(503, {"type": "about:blank", "title": "Service Unavailable"}), UnavailableError),
        (refusal("registry-unavailable", **{"Retry-After": "0"}), UnavailableError),
        (Reply(drop=True), ConnectionLostError),
    ],
    ids=["page of a proxy", "problem of a proxy", "service, after it began", "lost connection"],
)
def test_a_call_with_effects_is_not_retried_after_anything_else(
    ask: Ask, name: str, path: str, reply: Reply, error: type[Exception]
) -> None:
    arguments: dict[str, Any] = {"fit": b"npz", "calibrate": [[0.0, 1.0]]}
    sent = [arguments[name]] if name in arguments else []
    options = {"feedback": True} if name == "calibrate" else {}
    with scripted(**{path: [reply]}) as script, pytest.raises(error):
        ask(script.url, name, *sent, retries=QUICK, **options)
    assert len(script.asked) == 1


def test_the_refusals_that_are_retried_are_those_of_the_service() -> None:
    refusals = (NotReady, QueueFull, FitQueueFull, RateLimited, ConcurrencyLimited)
    types = {f"urn:boxcal:problem:{leaf.type}" for leaf in refusals}
    assert types == REFUSED_BEFORE_WORK


@pytest.mark.parametrize(("key", "sent"), [("abc\n", "Bearer abc"), (" \n", None)])
def test_a_key_is_sent_without_the_line_break_of_its_file(
    key: str, sent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BOXCAL_API_KEY", raising=False)
    assert BoxcalClient(api_key=key)._headers.get("Authorization") == sent
    monkeypatch.setenv("BOXCAL_API_KEY", key)
    assert BoxcalClient()._headers.get("Authorization") == sent


def test_the_number_of_retries_is_limited(ask: Ask) -> None:
    with scripted(fit=[refusal()]) as script, pytest.raises(UnavailableError, match="1024 samples wait"):
        ask(script.url, "fit", b"npz", retries=QUICK)
    assert script.count("/fit") == 1 + QUICK.retries


@pytest.mark.parametrize(
    ("first", "longest", "begun"),
    [
        (1.0, 10.0, [0.0, 1.1, 3.3, 7.7]),
        (8.0, 30.0, [0.0, 8.8, 26.4]),
        (0.9, 1.0, [0.0, 0.99]),
        (0.95, 1.0, [0.0]),
        (0.1, 0.0, [0.0]),
    ],
)
def test_waits_double_and_no_retry_begins_later_than_the_longest_wait(
    first: float, longest: float, begun: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[-1])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.append(clock[-1] + seconds))
    monkeypatch.setattr(random, "uniform", lambda _, high: high)
    policy = RetryPolicy(retries=9, longest_wait=longest, first_wait=first)
    refusing = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(503)))
    with pytest.raises(UnavailableError):
        BoxcalClient(http_client=refusing, retries=policy).metrics()
    assert clock == pytest.approx(begun)


@pytest.mark.parametrize("is_date", [False, True])
def test_a_retry_after_beyond_the_limit_raises_at_once(ask: Ask, is_date: bool) -> None:
    after = email.utils.formatdate(time.time() + 600, usegmt=True) if is_date else "600"
    with scripted(metrics=[refusal(**{"Retry-After": after})]) as script:
        begin = time.monotonic()
        with pytest.raises(UnavailableError) as caught:
            ask(script.url, "metrics")
        assert time.monotonic() - begin < 5.0
    assert caught.value.retry_after == pytest.approx(600.0, abs=6.0 if is_date else 0.0)
    assert script.count("/metrics") == 1


def test_a_service_that_is_not_there(ask: Ask) -> None:
    port = free_port()
    with pytest.raises(UnreachableError, match=f"cannot reach http://127.0.0.1:{port}/metrics"):
        ask(f"http://127.0.0.1:{port}", "metrics", retries=QUICK)


def test_a_timeout_is_not_retried(ask: Ask) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(AnswerTimeoutError, match="/metrics"):
            ask(url, "metrics", timeout=0.3, retries=QUICK)
        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):  # it connected once
            silent.accept()


def test_a_problem_keeps_every_member(ask: Ask) -> None:
    problem = {"type": "urn:x", "title": "No", "status": 422, "detail": "lower of 'cat' is 2", "class": "cat"}
    with scripted(predict=[Reply(422, problem)]) as script, pytest.raises(InvalidRequestError) as caught:
        ask(script.url, "predict", b"x")
    error = caught.value
    shown = (error.status, error.type, error.title, error.detail)
    assert shown == (422, "urn:x", "No", "lower of 'cat' is 2")
    assert error.members["class"] == "cat"
    assert str(error) == "lower of 'cat' is 2 (HTTP 422)"
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - as a process pool does
    assert (type(again), vars(again), str(again)) == (type(error), vars(error), str(error))
    assert script.count("/predict") == 1


@pytest.mark.parametrize(
    ("reply", "kind", "says"),
    [
        (Reply(404, {"detail": "d"}), NotFoundError, "d"),
        (Reply(500, {"detail": "d"}), ServiceFaultError, "d"),
        (Reply(504, {"detail": "d"}), ServiceFaultError, "d"),
        (Reply(200, {"predictions": "no"}), UnreadableAnswerError, "/predict answered"),
        (Reply(200, [1]), UnreadableAnswerError, "/predict answered"),
        (Reply(200, body=DEEP), UnreadableAnswerError, "/predict answered"),
        (Reply(500, body=DEEP), UnreadableAnswerError, "/predict answered HTTP 500, no problem document"),
        (Reply(200, body=b"<html>"), UnreadableAnswerError, "/predict answered"),
        (Reply(418, body=b"teapot"), UnreadableAnswerError, "/predict answered"),
    ],
)
def test_statuses_and_other_services_have_their_own_errors(
    ask: Ask, reply: Reply, kind: type[Exception], says: str
) -> None:
    with scripted(predict=[reply]) as script, pytest.raises(kind, match=says):
        ask(script.url, "predict", b"x")


@pytest.mark.parametrize(
    "reply", [Reply(200, {"fits": 5}), Reply(200, {"fits": None}), Reply(200, body=DEEP)]
)
def test_a_list_of_another_service_is_unreadable(ask: Ask, reply: Reply) -> None:
    with scripted(fits=[reply]) as script, pytest.raises(UnreadableAnswerError, match=r"/fits.* answered"):
        ask(script.url, "fits")


def test_a_page_of_a_proxy_is_no_artifact_and_no_metrics(ask: Ask) -> None:
    login = Reply(200, headers={"content-type": "text/html; charset=utf-8"}, body=b"<html>log in</html>")
    with scripted(metrics=[login], calibrators_1_artifact=[login]) as script:
        for arguments in (("metrics",), ("artifact", 1)):
            with pytest.raises(UnreadableAnswerError, match="an HTML page"):
                ask(script.url, *arguments)


def test_a_fit_that_failed_is_told_through_a_process_pool() -> None:
    fit = Fit.model_validate({**FIT, "state": "failed", "error": "too few samples"})
    again = pickle.loads(pickle.dumps(FitNotSucceededError(fit)))  # noqa: S301
    assert (str(again), again.fit) == (f"fit {fit.id} failed: too few samples", fit)


def test_a_value_that_a_newer_service_adds_to_an_enumeration_is_read_as_it_is(ask: Ask) -> None:
    """`docs/stability.md` allows it."""
    warning = {"code": "drift", "severity": "notice", "message": "Rows differ.", "rows": 3}
    fit = {**FIT, "state": "succeeded", "activate": "if_cheaper", "warnings": [warning]}
    activated = {"version": 2, "method": "ts", "reason": "schedule", "activated_at": "2026-11-21T03:00:00Z"}
    with scripted(fits_f=[Reply(document=fit)], calibrators_rollback=[Reply(document=activated)]) as script:
        answer = ask(script.url, "fit_state", "f")
        assert (answer.activate, answer.warnings[0].severity) == ("if_cheaper", "notice")
        assert ask(script.url, "rollback").reason == "schedule"


@pytest.mark.anyio
async def test_a_call_that_found_no_free_connection_was_not_sent() -> None:
    with scripted(metrics=[Reply(200, body=b"text")]) as script:
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=1)) as limited:
            client = AsyncBoxcalClient(script.url, http_client=limited, timeout=0.2, retries=RetryPolicy(0))
            async with limited.stream("GET", f"{script.url}/metrics"):
                with pytest.raises(UnreachableError, match="no connection became free in time to reach http"):
                    await client.metrics()
        assert script.count("/metrics") == 1


def test_not_ready_is_an_answer(ask: Ask) -> None:
    with scripted(health_ready=[refusal(), Reply(200, {"status": "ready"})]) as script:
        assert ask(script.url, "ready").ready is False
        assert ask(script.url, "wait_until_ready").ready is True


def test_waiting_for_readiness_ends(ask: Ask) -> None:
    with scripted(health_ready=[refusal()]) as script:
        for url, says in (
            (script.url, r"within 0\.3 s"),
            (nowhere := f"http://127.0.0.1:{free_port()}", nowhere),
        ):
            begin = time.monotonic()
            with pytest.raises(AnswerTimeoutError, match=says):
                ask(url, "wait_until_ready", 0.3)
            assert time.monotonic() - begin < 10.0
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begin = time.monotonic()
        with pytest.raises(AnswerTimeoutError, match="within 1 s"):
            ask(f"http://127.0.0.1:{silent.getsockname()[1]}", "wait_until_ready", 1.0)
        assert time.monotonic() - begin < 10.0  # and not as long as an answer may take, 30 s


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://[::1"])
def test_an_invalid_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        BoxcalClient(url)


def test_both_clients_offer_the_same_with_the_same_arguments_and_words() -> None:
    def surface(client: type) -> dict[str, tuple[str, str | None]]:
        members = {n: getattr(client, n) for n in dir(client) if not n.startswith("_")}
        methods = {n: m for n, m in members.items() if callable(m)}
        return {n: (str(inspect.signature(m).parameters), m.__doc__) for n, m in methods.items()}

    blocking, waiting = surface(BoxcalClient), surface(AsyncBoxcalClient)
    assert blocking.pop("close")
    assert waiting.pop("aclose")
    assert blocking.keys() == waiting.keys()
    own = {"send", "follow", "wait_for_fit", "wait_until_ready"}
    assert {n: blocking[n] for n in blocking.keys() - own} == {n: waiting[n] for n in waiting.keys() - own}
