"""The one exception that user input raises, exceptions in one line, and what is behind them."""

import contextlib
import re
from collections.abc import Iterator

from kvjax.startup import Terminated

MOST_TEXT = 300
"""Characters of an exception's message that a caller is told."""
_MASKED = re.compile(rf"^(?:[a-z.]+\.)?(KeyboardInterrupt|{Terminated.__name__})\b", re.MULTILINE)


class UserError(Exception):
    """Bad input: one line that names the value and the way out.

    Scripts print it as ``error: …`` on stderr and exit with code 2, without a traceback. Names in
    it come from files that strangers made: what would break the line or steer a terminal is
    written as its escape.
    """

    def __str__(self) -> str:
        text = super().__str__()
        if text.isprintable():
            return text
        line = " ".join(text.splitlines())
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


class NoWeights(UserError):
    """No weights of a model can be had; with others, or with random ones, all would be well."""


class QueueFull(UserError):
    """As many requests wait as may: the same request may do later."""


class ScratchTooSmall(UserError):
    """A prompt that has to run whole is longer than the scratch."""

    def __init__(self, what: str, tokens: int, setting: str = "prefill_scratch"):
        """
        Args:
            what: has to run whole, and how long it is.
            tokens: of the scratch.
            setting: that says so.
        """
        super().__init__(f"{what}, {setting} is {tokens}; give a larger one, or another method")
        self.what, self.tokens = what, tokens


def in_one_line(error: BaseException) -> str:
    """An exception as its caller is told of it: bad input in its own words, others by type."""
    text = " ".join(str(error).split())
    text = text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 1]}…"
    if isinstance(error, UserError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def interruption_of(error: BaseException | None) -> KeyboardInterrupt | None:
    """The interruption that JAX has made a ValueError of: it asks Python whether arguments are
    equal, and gives what is raised there as a cause or in its text alone."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        text = str(error) if isinstance(error, ValueError) else ""
        if "__eq__" in text and (found := _MASKED.search(text)):
            return Terminated() if found[1] == Terminated.__name__ else KeyboardInterrupt()
        error = error.__cause__
    return error


@contextlib.contextmanager
def unmasked() -> Iterator[None]:
    """An interruption that arrives as another error is one again."""
    try:
        yield
    except Exception as error:
        if (interruption := interruption_of(error)) is None:
            raise
        raise interruption from None
