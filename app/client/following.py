"""A fit's progress without any input or output: server-sent events in, states out, else polling.

A stream may never open (a proxy that buffers), break (a restart) or fall silent. Whatever happens, the fit's
state is asked for between two streams, so that nothing is missed; after `STREAM_FAILURES` useless streams
only polling is left.
"""

from collections.abc import Iterator

import httpx
from pydantic import ValidationError

from boxcal.app.client.results import Fit

__all__ = ["SILENCE_SECONDS", "Following"]

STREAM_FAILURES = 3
SILENCE_SECONDS = 45.0  # a stream silent for longer is taken for dead
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 2.0


class Following:
    """The states of one fit in order, each once, until one is final.

    The transport loops until `done`: where `try_stream` says so it opens the event stream, shows its response
    to `is_stream` and passes its lines to `line`; after the stream it passes the polled state to `polled` and
    sleeps `pause` seconds.
    """

    def __init__(self) -> None:
        self.last: Fit | None = None
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._data: list[str] = []

    @property
    def done(self) -> bool:
        """Whether the last state seen is final."""
        return self.last is not None and self.last.done

    def try_stream(self) -> bool:
        """Whether to open a stream now; one that brings no event counts as a failure."""
        self._data.clear()
        self._failures += 1  # taken back by the first event
        return self._failures <= STREAM_FAILURES

    def is_stream(self, response: httpx.Response) -> bool:
        """Whether a response is the event stream that was asked for."""
        return response.is_success and response.headers.get("content-type", "").startswith(
            "text/event-stream"
        )

    def line(self, line: str) -> Iterator[Fit]:
        """Take one line of a stream; an empty line ends an event, and only `data` fields matter here."""
        if line:
            name, _, value = line.partition(":")
            if name == "data":
                self._data.append(value.removeprefix(" "))
            return
        data, self._data = "\n".join(self._data), []
        if not data:
            return
        try:
            fit = Fit.model_validate_json(data)
        except ValidationError:
            return  # another kind of event; the poll after the stream tells the state anyway
        self._failures = 0
        yield from self._new(fit)

    def polled(self, fit: Fit) -> Iterator[Fit]:
        """Take a state that was asked for."""
        yield from self._new(fit)

    def pause(self) -> float:
        """Seconds before the next round: longer each time, short again after a change."""
        pause = self._pause
        self._pause = min(self._pause * 1.5, LONGEST_PAUSE)
        return pause

    def _new(self, fit: Fit) -> Iterator[Fit]:
        if fit != self.last:
            self.last = fit
            self._pause = FIRST_PAUSE
            yield fit
