"""The states of a fit from its event stream and from polling, in order and each once.

A stream may never open (a buffering proxy), break (a restart) or fall silent. So the state is polled between
two streams, and after `STREAM_FAILURES` streams without an event it is only polled.
"""

from collections.abc import Iterator

from pydantic import ValidationError

from boxcal.app.schemas.fits import Fit

STREAM_FAILURES = 3
SILENCE_SECONDS = 45.0  # a stream that is silent for longer is closed
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 2.0


class Following:
    """The client's side of following one fit: what to do next, and which states are new."""

    def __init__(self) -> None:
        self.last: Fit | None = None
        self._failures = 0
        self._pause = FIRST_PAUSE

    @property
    def done(self) -> bool:
        """Whether the last state is final."""
        return self.last is not None and self.last.done

    def try_stream(self) -> bool:
        """Whether to open a stream now; one without an event counts as a failure."""
        self._failures += 1  # reset by the first event
        return self._failures <= STREAM_FAILURES

    def event(self, data: str) -> Iterator[Fit]:
        """Take an event of the stream; events of other kinds are skipped."""
        try:
            fit = Fit.model_validate_json(data)
        except ValidationError:
            return
        self._failures = 0
        yield from self.state(fit)

    def state(self, fit: Fit) -> Iterator[Fit]:
        """Take a state, and give it if it is new."""
        if fit != self.last:
            self.last = fit
            self._pause = FIRST_PAUSE
            yield fit

    def pause(self) -> float:
        """Seconds before the next round: longer each time, short again after a change."""
        pause, self._pause = self._pause, min(self._pause * 1.5, LONGEST_PAUSE)
        return pause
