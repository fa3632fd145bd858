"""What users are warned of: that they get something else than they may expect."""

import logging
import warnings

import jax

from kvjax.cache import PagedCache
from kvjax.engine.request import Request
from kvjax.kernels import Encoded

RATE_REACHED = 0.9
"""Share of the rate asked for below which a request's own rate is worth a warning."""

log = logging.getLogger(__name__)


class RateWarning(UserWarning):
    """A request is compressed less than its settings ask for."""


def tell_rate(request: Request, warned: set[float]) -> None:
    """Warn where a request's rate is not the one that was asked for.

    Args:
        request: the request; the caller's caller's caller is the one who asked.
        warned: rates that were warned of: each is once.
    """
    asked, got = request.compression.rate, request.stats.rate
    if asked is None or request.budget is None or got >= RATE_REACHED * asked:
        return
    message = (
        f"rate {asked:g} is {got:.1f} for a prompt of {len(request.prompt)} tokens: caches "
        f"keep at least floor={request.compression.floor} tokens; give a smaller floor to "
        "CompressionConfig for more"
    )
    log.warning("request %r: %s", request.id, message)
    if asked not in warned:
        warned.add(asked)
        warnings.warn(message, RateWarning, stacklevel=4)


def tell_of_codes(cache: PagedCache) -> None:
    """Say, in the log, where a device has kernels for attention and they do not read a pool."""
    where = jax.default_backend()
    if where != "cpu" and isinstance(cache.kv.operands[0], Encoded):
        log.warning(
            "keys and values in %s: the %s kernels read no codes, decode attention runs through "
            "XLA", cache.spec.codec.name, where,
        )  # fmt: skip
