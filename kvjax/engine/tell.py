"""What users are warned of: that they get something else than they may expect."""

import logging
import warnings

import jax

from kvjax.cache import PagedCache
from kvjax.engine.request import Request
from kvjax.kernels import Encoded, device, explain, paged_attention

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
    message = f"rate {asked:g} is {got:.1f} for a prompt of {len(request.prompt)} tokens: "
    if request.compression.floor > request.block_size:
        message += (
            f"caches keep at least floor={request.compression.floor} tokens; give a smaller floor "
            "for more"
        )
    else:
        message += (
            f"every head keeps a block of {request.block_size} KVs; give a smaller block_size "
            "for more"
        )
    log.warning("request %r: %s", request.id, message)
    if asked not in warned:
        warned.add(asked)
        warnings.warn(message, RateWarning, stacklevel=4)


def tell_of_codes(cache: PagedCache, group: int) -> None:
    """Say, in the log, where a device has kernels for attention and none reads a pool of codes.

    Args:
        cache: what attention will read.
        group: query heads per KV head.
    """
    keys, values = cache.kv.operands
    if not isinstance(keys, Encoded) or device.of(cache.metric).platform == "cpu":
        return
    table, lengths = (
        jax.ShapeDtypeStruct((x.shape[0], *x.shape[2:]), x.dtype)
        for x in (cache.block_table, cache.context_len)
    )
    shape = (table.shape[0], table.shape[1] * group, keys.shape[2])
    q = jax.ShapeDtypeStruct(shape, keys.dtype)
    window = cache.window
    exact = None if window is None else jax.eval_shape(window.of_layer, 0)
    chosen = explain(paged_attention, q, keys, values, table, lengths, exact=exact)
    if chosen.startswith("xla"):
        log.warning("keys and values in %s: decode attention is %s", cache.spec.codec.name, chosen)
