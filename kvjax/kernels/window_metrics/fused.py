"""Attention that keys receive from all queries of a prompt: calls of the device kernels.

They take whole tiles: queries and keys are filled up with such as do not count, and what a query
counts, and whether, goes into what is taken off its logits.
"""

from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.kernels.device import LOG2E


def window_metrics(
    kernel: ModuleType,
    q: Float[Array, "w Hr d"],
    k: Float[Array, "T H d"],
    *,
    log_sum: Float[Array, "Hr w"],
    num_own: int,
    query_position: Int32[Array, " w"],
    key_position: Int32[Array, "T H"],
    power: int,
    excluded_distance: int,
    query_weight: Float[Array, " w"] | None,
    scale: float,
    **options: Any,
) -> Float[Array, "Hr T"]:
    """See `kvjax.kernels.window_metrics.tiles`; `kernel` is a module with `received`, `KEYS` and
    `QUERIES`, `options` are further ones of its `received`."""
    held = k.shape[0] - num_own
    sizes = [size for size in (held, num_own) if size]

    def by_head(x: Array, fill: float = 0) -> Array:
        """[T, H, …] as [H, whole tiles, …]: held keys, then own ones."""
        parts = [x[:held], x[held:]] if held and num_own else [x]
        return jnp.swapaxes(jnp.concatenate([_filled(p, kernel.KEYS, fill) for p in parts]), 0, 1)

    offset = power * log_sum * LOG2E
    if query_weight is not None:
        offset = offset - jnp.log2(query_weight)
    offset = jnp.where(query_position >= 0, offset, jnp.inf)
    total = kernel.received(
        _filled(q, kernel.QUERIES),
        by_head(k),
        _filled(offset.T, kernel.QUERIES, jnp.inf).T,
        _filled(query_position, kernel.QUERIES, -1),
        by_head(key_position, -1),
        num_own=-(-num_own // kernel.KEYS) * kernel.KEYS,
        excluded_distance=excluded_distance,
        factor=power * scale * LOG2E,
        **options,
    )
    parts, begin = [], 0
    for size in sizes:
        parts.append(total[:, begin : begin + size])
        begin += -(-size // kernel.KEYS) * kernel.KEYS
    return jnp.concatenate(parts, axis=1)


def _filled(x: Array, tile: int, fill: float = 0) -> Array:
    """The first axis filled up to whole tiles."""
    pad = -x.shape[0] % tile
    if not pad:
        return x
    return jnp.pad(x, ((0, pad), *((0, 0) for _ in x.shape[1:])), constant_values=fill)
