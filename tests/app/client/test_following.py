"""A fit's states by server-sent events and, where those fail, by asking: in order, each once."""

import json
from typing import Any

import pytest

from boxcal.app.client import FitNotSucceededError
from tests.app.client.both import Ask
from tests.app.client.scripted import FIT, Reply, scripted


def state(progress: float, name: str = "running", **more: Any) -> dict[str, Any]:
    return {**FIT, "state": name, "progress": progress, **more}


def events(*states: dict[str, Any], indent: int | None = None) -> Reply:
    lines = [json.dumps(one, indent=indent).replace("\n", "\r\ndata: ") for one in states]
    body = ": ping\r\n\r\n" + "".join(f"event: state\r\ndata: {one}\r\n\r\n" for one in lines)
    return Reply(headers={"content-type": "text/event-stream; charset=utf-8"}, body=body.encode())


DONE = state(1.0, "succeeded", calibrator=3, activated=True)


@pytest.mark.parametrize("indent", [None, 1], ids=["one line", "several lines"])
def test_a_stream_is_followed_to_the_end(ask: Ask, indent: int | None) -> None:
    stream = events(state(0.1), state(0.1), state(0.6), DONE, indent=indent)
    with scripted(fits_f_events=[stream]) as script:
        seen = ask(script.url, "follow", "f")
    assert [fit.progress for fit in seen] == [0.1, 0.6, 1.0]
    assert seen[-1].calibrator == 3
    assert script.asked == [("GET", "/fits/f/events")]


def test_a_stream_that_breaks_goes_on_by_asking_and_streaming_again(ask: Ask) -> None:
    with scripted(
        fits_f_events=[events(state(0.1)), events(state(0.7), DONE)], fits_f=[Reply(document=state(0.4))]
    ) as script:
        seen = ask(script.url, "follow", "f")
    assert [fit.progress for fit in seen] == [0.1, 0.4, 0.7, 1.0]
    assert script.count("/fits/f/events") == 2


@pytest.mark.parametrize(
    "stream", [Reply(404, {"detail": "no"}), Reply(200, {"not": "a stream"}), Reply(drop=True)]
)
def test_without_streams_it_is_asked_for(ask: Ask, stream: Reply) -> None:
    polled = [Reply(document=state(i / 10)) for i in range(5)] + [Reply(document=DONE)]
    with scripted(fits_f_events=[stream], fits_f=polled) as script:
        seen = ask(script.url, "follow", "f")
    assert [fit.progress for fit in seen] == [0.0, 0.1, 0.2, 0.3, 0.4, 1.0]
    assert script.count("/fits/f/events") == 3


def test_waiting_tells_progress_and_returns_the_final_state(ask: Ask) -> None:
    told: list[float] = []
    with scripted(fits_f_events=[events(state(0.5), DONE)]) as script:
        final = ask(script.url, "wait_for_fit", "f", lambda fit: told.append(fit.progress))
    assert final.calibrator == 3
    assert told == [0.5, 1.0]


def test_a_fit_that_failed_raises_with_its_reason(ask: Ask) -> None:
    failed = state(0.2, "failed", error="labels out of range")
    with (
        scripted(fits_f_events=[events(failed)]) as script,
        pytest.raises(FitNotSucceededError, match="fit f failed: labels out of range") as caught,
    ):
        ask(script.url, "wait_for_fit", "f")
    assert caught.value.fit.state == "failed"
