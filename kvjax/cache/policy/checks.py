"""Checks of the settings of scorers, allocators and selectors, in one line each."""

from typing import Any, get_args

from kvjax.checks import check_number, check_whole, shown
from kvjax.errors import UserError

MOST_WINDOW = 4096
"""Most queries of an observation window that is not the whole prompt."""
MOST_REACH = 255
"""Most keys that pooling, or a read, may reach: programs grow with it."""
MOST_UNIT = 4096
"""Most token positions of a page."""


def wanted(name: str, value: Any, what: str) -> UserError:
    """The error that a setting is not what it should be."""
    return UserError(f"{name} {shown(value)}: wanted {what}")


def check_wholes(of: Any, least: int, most: int, *names: str) -> None:
    """Whole numbers in range, kept as plain ints."""
    for name in names:
        object.__setattr__(of, name, check_whole(name, getattr(of, name), least, most))


def check_numbers(of: Any, least: float, most: float, *names: str, above: bool = False) -> None:
    """Finite numbers in range; above `least` where it does not count itself."""
    for name in names:
        check_number(name, getattr(of, name), least, most, above=above)


def check_one_of(name: str, value: Any, kinds: Any) -> None:
    """One of the words of a `Literal`."""
    kinds = get_args(kinds)
    if not isinstance(value, str) or value not in kinds:
        raise wanted(name, value, f"one of {', '.join(kinds)}")


def check_a(name: str, value: Any, kind: type, *, none: bool = False) -> None:
    """A value of a kind, or None where that is allowed."""
    if not (isinstance(value, kind) or (none and value is None)):
        raise wanted(name, value, f"a {kind.__name__}{' or None' if none else ''}")


def check_constant(name: str, value: Any) -> None:
    """A part that steps can be compiled from, and told from others by."""
    try:
        hash(value)
    except TypeError as error:
        raise UserError(
            f"{name} {type(value).__name__}: {error}: give a frozen dataclass of plain values; "
            "arrays go into a calibration, by the names in `artefacts`"
        ) from None


def check_attention(scorer: Any) -> None:
    """The settings that scorers that go by attention share: `window`, `power`, `pool`."""
    if scorer.window is not None:
        check_wholes(scorer, 1, MOST_WINDOW, "window")
    if hasattr(scorer, "power"):
        check_wholes(scorer, 1, 2, "power")
    if hasattr(scorer, "pool"):
        check_wholes(scorer, 1, MOST_REACH, "pool")
        if scorer.pool % 2 == 0:
            raise wanted("pool", scorer.pool, "an odd number")
