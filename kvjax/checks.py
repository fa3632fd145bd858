"""Checks of what users hand in: each raises one line that names the value and what would do.

Public configurations call these when they are made, so that nothing that was accepted can fail
later, on the device, where other requests would suffer.
"""

import math
import operator
from typing import Any

from kvjax.errors import UserError

INT32_MAX = 2**31 - 1
"""Lengths, positions and block numbers are int32 on the device."""
SHOWN = 60
"""Most characters of a value that a message repeats."""


def shown(value: Any) -> str:
    """A value as messages repeat it: short, on one line, and never an error of its own."""
    try:
        text = repr(value)
    except Exception:
        # An int of thousands of digits refuses to be written; so may any object.
        text = f"a value of type {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def check_whole(name: str, value: Any, least: int, most: int = INT32_MAX) -> int:
    """The value as an int, if it is a whole number from `least` to `most`; no bool, no float.

    Raises:
        UserError: it is not.
    """
    if not isinstance(value, bool):
        try:
            number = operator.index(value)
        except TypeError:
            pass
        else:
            if least <= number <= most:
                return number
    raise UserError(f"{name} {shown(value)}: give a whole number from {least} to {most}")


def check_number(
    name: str, value: Any, least: float, most: float = math.inf, *, above: bool = False
) -> float:
    """The value as a float, if it is finite and from `least` to `most`.

    Args:
        name: what the message calls it.
        value: what was given.
        least: the least that is allowed.
        most: the most that is allowed.
        above: whether it must be more than `least`.

    Raises:
        UserError: it is not.
    """
    if not isinstance(value, bool | str | bytes):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            pass
        else:
            low = number > least if above else number >= least
            if math.isfinite(number) and low and number <= most:
                return number
    start = f"above {least:g}" if above else f"of at least {least:g}"
    end = "" if most == math.inf else f" and at most {most:g}"
    raise UserError(f"{name} {shown(value)}: give a number {start}{end}")


def check_flag(name: str, value: Any) -> bool:
    """The value, if it is True or False.

    Raises:
        UserError: it is not.
    """
    if not isinstance(value, bool):
        raise UserError(f"{name} {shown(value)}: give True or False")
    return value


def check_text(name: str, value: Any, wanted: str = "a text") -> str:
    """The value, if it is a str that UTF-8 can encode.

    Raises:
        UserError: it is not.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            pass
        else:
            return value
    raise UserError(f"{name} {shown(value)}: give {wanted}")
