"""Attention that each key receives from the last queries of a prompt."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.kernels.checks import check_dtype, check_prompt, wanted
from kvjax.kernels.window_metrics import reference

QUERY_BLOCK = 1024
"""Most queries whose attention rows exist at once: memory stays linear in the keys."""
BLOCK_ELEMENTS = 1 << 24
"""Attention weights that exist at once, about; long prompts take fewer queries at a time."""


def window_metrics(
    q: Float[Array, "w Hr d"],
    k: Float[Array, "T H d"],
    *,
    query_position: Int32[Array, " w"],
    key_position: Int32[Array, " T"] | Int32[Array, "T H"] | None = None,
    power: int = 2,
    excluded_distance: int = 0,
    query_weight: Float[Array, " w"] | None = None,
    scale: float | None = None,
    query_block: int | None = None,
) -> Float[Array, "Hr T"]:
    """Σ over the queries of weight · p^power, p the softmax of one query over all keys it may see.

    Source: KV-Compress, equations 6–10 and 19 before pooling and the sum over the query group.

    Args:
        q: observed queries, rotated at their positions.
        k: keys, rotated at theirs.
        query_position: token position of each query; −1 for one that does not count.
        key_position: token position of each key, per KV head or for all; −1 for an unwritten one;
            0 … T−1 by default. A query sees the keys up to its own position.
        power: 1 (sum) or 2 (sum of squares).
        excluded_distance: a pair counts only if query − key ≥ this.
        query_weight: what each query counts; 1 by default.
        scale: factor of the logits, 1/√d by default.
        query_block: queries handled at once (static); by default as many as memory allows.

    Raises:
        ValueError: an argument does not fit; names it, what it got and what is wanted.
    """
    num_keys, num_heads, d = _checked(q, k, query_position, key_position, power, query_block)
    if query_block is None:
        query_block = min(QUERY_BLOCK, max(8, BLOCK_ELEMENTS // (q.shape[1] * num_keys)))
    if key_position is None:
        key_position = jnp.arange(num_keys, dtype=jnp.int32)
    if key_position.ndim == 1:
        key_position = jnp.broadcast_to(key_position[:, None], (num_keys, num_heads))
    return reference.window_metrics(
        q,
        k,
        query_position=query_position,
        key_position=key_position,
        power=power,
        excluded_distance=excluded_distance,
        query_weight=query_weight,
        scale=1 / math.sqrt(d) if scale is None else scale,
        query_block=query_block,
    )


def _checked(q, k, query_position, key_position, power, query_block) -> tuple[int, int, int]:
    """T, H and d of a call whose arguments fit."""
    num_keys, num_heads, d = check_prompt(q, k, "w")
    if query_position.shape != q.shape[:1]:
        raise wanted("query_position shape", list(query_position.shape), list(q.shape[:1]))
    check_dtype("query_position", query_position, jnp.integer, "int32")
    if key_position is not None:
        if key_position.shape not in ((num_keys,), (num_keys, num_heads)):
            either = f"[{num_keys}] or [{num_keys}, {num_heads}]"
            raise wanted("key_position shape", list(key_position.shape), either)
        check_dtype("key_position", key_position, jnp.integer, "int32")
    if power not in (1, 2):
        raise wanted("power", power, "1 or 2")
    if query_block is not None and query_block < 1:
        raise wanted("query_block", query_block, "at least 1")
    return num_keys, num_heads, d
