"""From the tokens of a request to the text that its caller gets."""

from collections.abc import Sequence

from kvjax.engine.request import Request, RequestOutput
from kvjax.models.tokenizer import Tokenizer


class StopStrings:
    """Passes text on until one of some strings appears, and never a part of it."""

    def __init__(self, stop: Sequence[str]):
        self._stop = tuple(stop)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that can be shown now; nothing any more once a stop string was found."""
        if self.found:
            return ""
        self._held += text
        found = [(i + len(s), i) for s in self._stop if (i := self._held.find(s)) >= 0]
        if found:
            # The first to be complete, of several that end there the longest: however the text
            # is cut into pieces, it ends at the same place.
            self.found = True
            return self._held[: min(found)[1]]
        hold = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._held)), hold, -1):
                if self._held.endswith(stop[:size]):
                    hold = size
                    break
        shown, self._held = (
            self._held[: len(self._held) - hold],
            self._held[len(self._held) - hold :],
        )
        return shown

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        shown, self._held = ("" if self.found else self._held), ""
        return shown


class RequestText:
    """The text of one request, and how much of it was emitted."""

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str], goes_on: bool = False):
        """Begin a text that is empty, which goes on from the prompt's or stands by itself."""
        self._tokenizer, self._stop, self._goes_on = tokenizer, stop, goes_on
        self._eos = frozenset() if tokenizer is None else tokenizer.eos_ids
        self._emitted = 0
        self.restart()

    def restart(self) -> None:
        """Read the request's tokens from the first again, after an interruption half way.

        What was emitted stays so.
        """
        self._decoder = None
        if self._tokenizer is not None:
            self._decoder = self._tokenizer.stream(goes_on=self._goes_on)
        self._stops = StopStrings(self._stop)
        self._read = 0
        self.text = ""

    def emit(self, request: Request, now: float) -> RequestOutput:
        """The request's next output, at time `now`. A stop text that is complete ends it."""
        if self._decoder is not None:
            for token in request.tokens[self._read :]:
                self._read += 1
                if token in self._eos and not request.sampling.ignore_eos:
                    break
                self.text += self._stops.push(self._decoder.push(token))
                if self._stops.found:
                    # What happened behind it does not matter any more.
                    request.finish_reason, request.error = "stop", None
                    del request.tokens[self._read :]
                    del request.logprobs[self._read :]
                    break
        self._read = len(request.tokens)
        if request.finish_reason is not None and self._decoder is not None:
            self.text += self._stops.push(self._decoder.flush()) + self._stops.flush()
        return self.output(request, now)

    def output(self, request: Request, now: float) -> RequestOutput:
        """The request's next output with the text that was read so far."""
        new, self._emitted = self.text[self._emitted :], len(self.text)
        if request.finish_reason is not None:
            request.stats.finished = now
        logprobs = None if request.sampling.logprobs is None else tuple(request.logprobs)
        return RequestOutput(
            request.id,
            request.prompt,
            tuple(request.tokens),
            self.text,
            new,
            request.finish_reason,
            request.error,
            logprobs,
            request.stats,
        )
