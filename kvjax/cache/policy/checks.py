"""Checks of the settings of scorers, allocators and selectors, in one line each."""

from typing import Any, get_args

import jax.numpy as jnp

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


KINDS = {jnp.integer: "whole numbers", jnp.floating: "floats", jnp.bool_: "booleans"}


def check_gave(of: Any, call: str, got: Any, kind: Any, shape: tuple[int, ...], axes: str) -> None:
    """An array of a kind and shape, from a part of a user's own; one that would broadcast is none.

    Of types alone, so that steps are as they were.

    Args:
        of: the part, a value of a class that may be a user's.
        call: the method of it that was called.
        got: what that returned.
        kind: one of `KINDS`.
        shape: what it should have.
        axes: what the shape's entries are, for the message.
    """
    found = getattr(got, "dtype", None)
    if found is not None and got.shape == shape and jnp.issubdtype(found, kind):
        return
    said = shown(got) if found is None else f"{found} {list(got.shape)}"
    raise UserError(
        f"{type(of).__name__}: {call} gave {said}: give {KINDS[kind]} {axes}, here {list(shape)}"
    )


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
