"""Which implementation serves a call, and why not another.

An implementation says what it does not serve by raising `NotImplementedError` with the reason.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from kvjax.kernels import device
from kvjax.kernels.checks import wanted


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation that will run, its static configuration, and why others do not."""

    name: str
    config: Any
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return ": ".join([self.name, "; ".join(self.reasons)]) if self.reasons else self.name


def choose(
    asked: str | None, candidates: Mapping[str, Callable[[device.Device], Any]], argument: object
) -> Choice:
    """The first candidate that serves the call, or the one that was asked for.

    Args:
        asked: the caller's `implementation`.
        candidates: in order of preference, functions from the device to a configuration that raise
            `NotImplementedError` for what they do not serve. The last one serves everything.
        argument: an array of the call, whose device it will run on.

    Raises:
        ValueError: the implementation asked for is unknown or does not serve the call.
    """
    if asked is not None and asked not in candidates:
        names = ", ".join(repr(name) for name in candidates)
        raise wanted("implementation", repr(asked), f"one of {names}, or None")
    where = device.of(argument)
    reasons = []
    for name, configure in candidates.items():
        if asked not in (None, name):
            continue
        try:
            return Choice(name, configure(where), tuple(reasons))
        except NotImplementedError as reason:
            if asked is not None:
                raise wanted("implementation", repr(name), f"one that serves {reason}") from None
            reasons.append(f"{name} does not serve {reason}")
    raise AssertionError("the last implementation serves everything")


def explain(kernel: Callable, *args: Any, **kwargs: Any) -> str:
    """Which implementation a call would use and why not a faster one, in one line.

    Args:
        kernel: a public function of `kvjax.kernels` with several implementations.
        args, kwargs: what it would be called with; `jax.ShapeDtypeStruct`s will do.

    Example:
        >>> explain(paged_attention, q, k, v, block_table, context_len)  # doctest: +SKIP
        'numba: mosaic_gpu does not serve device cpu (wanted: …); tpu does not serve device cpu'
    """
    chosen = getattr(kernel, "choice", None)
    if chosen is None:
        raise wanted("kernel", repr(kernel), "one with several implementations")
    return str(chosen(*args, **kwargs))
