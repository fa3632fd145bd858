"""The one exception that user input raises, exceptions in one line, and what is behind them."""

import contextlib
from collections.abc import Iterator

MOST_TEXT = 300
"""Characters of an exception's message that a caller is told."""


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


class QueueFull(UserError):
    """As many requests wait as may: the same request may do later."""


def in_one_line(error: BaseException) -> str:
    """An exception as its caller is told of it: bad input in its own words, others by type."""
    text = " ".join(str(error).split())
    text = text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 1]}…"
    if isinstance(error, UserError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def interruption_of(error: BaseException | None) -> KeyboardInterrupt | None:
    """The interruption that an extension module has made another error of: JAX asks Python whether
    two things are equal, and gives what is raised there as the cause of its ValueError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
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
