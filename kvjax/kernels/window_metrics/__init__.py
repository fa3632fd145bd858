"""Attention that each key receives from the last queries of a prompt."""

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.kernels.checks import check_dtype, check_prompt, wanted
from kvjax.kernels.choice import Choice, choose
from kvjax.kernels.device import Device, check_hopper
from kvjax.kernels.window_metrics import fused, reference, tiles

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
    excluded_distance: int | Int32[Array, ""] = 0,
    query_weight: Float[Array, " w"] | None = None,
    above: float | None = None,
    log_sum: Float[Array, "Hr w"] | None = None,
    own_keys_last: bool = True,
    scale: float | None = None,
    query_block: int | None = None,
    implementation: str | None = None,
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
        excluded_distance: a pair counts only if query − key ≥ this; an array with "xla" alone.
        query_weight: what each query counts; 1 by default.
        above: count the queries that give a key at least this times an even share, 1 / keys seen,
            in place of summing p.
        log_sum: log-sum-exp of each query's logits over all keys it sees
            (`prefill_attention_with_log_sum` returns it). One pass over the logits suffices then.
            Without effect on `above`.
        own_keys_last: with `log_sum`, whether the last w keys are those of the queries, in order:
            most of what a query does not see is then left out (static).
        scale: factor of the logits, 1/√d by default.
        query_block: queries handled at once (static); by default as many as memory allows.
        implementation: with `log_sum`, "mosaic_gpu" (Hopper), "tpu" or "xla"; None picks by device
            and shape (`kvjax.kernels.explain` says which and why).

    Raises:
        ValueError: an argument does not fit; names it, what it got and what is wanted.
    """
    _checked(q, k, query_position, key_position, query_weight, power, query_block)
    chosen = choice(q, k, log_sum=log_sum, above=above, implementation=implementation)
    key_position, query_block = _defaults(q, k, key_position, query_block)
    scale = 1 / math.sqrt(k.shape[-1]) if scale is None else scale
    common = {
        "query_position": query_position,
        "key_position": key_position,
        "power": power,
        "excluded_distance": excluded_distance,
        "query_weight": query_weight,
        "scale": scale,
    }
    if log_sum is None or above is not None:
        return reference.window_metrics(q, k, **common, above=above, query_block=query_block)
    if log_sum.shape != (q.shape[1], q.shape[0]):
        raise wanted("log_sum shape", list(log_sum.shape), [q.shape[1], q.shape[0]])
    if own_keys_last and q.shape[0] > k.shape[0]:
        raise wanted("q shape", list(q.shape), f"at most {k.shape[0]} queries with log_sum")
    num_own = q.shape[0] if own_keys_last else 0
    if chosen.name == "xla":
        return tiles.window_metrics(q, k, **common, log_sum=log_sum, num_own=num_own)
    if chosen.name == "tpu":
        from kvjax.kernels.window_metrics import tpu as kernel
    else:
        from kvjax.kernels.window_metrics import mosaic_gpu as kernel
    return fused.window_metrics(kernel, q, k, **common, log_sum=log_sum, num_own=num_own)


def choice(
    q,
    k,
    *,
    log_sum=None,
    above: float | None = None,
    implementation: str | None = None,
    **_: Any,
) -> Choice:
    """The implementation of a call of `window_metrics`."""

    def served() -> None:
        if log_sum is None or above is not None:
            raise NotImplementedError("a softmax that is not known")
        if q.dtype != k.dtype:
            raise NotImplementedError(f"q and k of {q.dtype} and {k.dtype}")

    def mosaic_gpu(where: Device) -> None:
        check_hopper(where)
        served()
        from kvjax.kernels.window_metrics import mosaic_gpu

        mosaic_gpu.check(k.shape[2], k.dtype)

    def tpu(where: Device) -> None:
        if where.platform != "tpu":
            raise NotImplementedError(f"device {where.kind}")
        served()
        from kvjax.kernels.window_metrics import tpu

        tpu.check(k.shape[2], k.dtype)

    candidates = {"mosaic_gpu": mosaic_gpu, "tpu": tpu, "xla": lambda _: None}
    return choose(implementation, candidates, k)


window_metrics.choice = choice  # type: ignore[attr-defined]


def hit_intervals(
    q: Float[Array, "w Hr d"],
    k: Float[Array, "T H d"],
    *,
    query_position: Int32[Array, " w"],
    key_position: Int32[Array, " T"] | Int32[Array, "T H"] | None = None,
    least: float,
    scale: float | None = None,
    query_block: int | None = None,
) -> tuple[Int32[Array, "H T"], Int32[Array, "H T"]]:
    """When each key was last hit, and the longest time between two hits.

    Source: LazyEviction. A query hits a key when one of its heads in the key's group gives it more
    than `least` of its attention. The first interval counts from one token before the key's own
    position, so that a hit by its own token's query makes one of 1.

    Args:
        q: queries in ascending order, rotated at their positions.
        k: keys, rotated at theirs.
        query_position: token position of each query; −1 for one that does not count.
        key_position: as in `window_metrics`.
        least: attention that is no hit yet.
        scale: factor of the logits, 1/√d by default.
        query_block: queries handled at once (static).

    Returns:
        Position of the last query that hit the key (one before the key's own without a hit), and
        the longest interval (0 without a hit).

    Raises:
        ValueError: an argument does not fit; names it, what it got and what is wanted.
    """
    _checked(q, k, query_position, key_position, None, 1, query_block)
    key_position, query_block = _defaults(q, k, key_position, query_block)
    return reference.hit_intervals(
        q,
        k,
        query_position=query_position,
        key_position=key_position,
        least=least,
        scale=1 / math.sqrt(k.shape[-1]) if scale is None else scale,
        query_block=query_block,
    )


def _defaults(
    q: Array, k: Array, key_position: Array | None, query_block: int | None
) -> tuple[Int32[Array, "T H"], int]:
    """A position of every key for each KV head, and how many queries are handled at once."""
    num_keys, num_heads, _ = k.shape
    if query_block is None:
        query_block = min(QUERY_BLOCK, max(8, BLOCK_ELEMENTS // (q.shape[1] * num_keys)))
    if key_position is None:
        key_position = jnp.arange(num_keys, dtype=jnp.int32)
    if key_position.ndim == 1:
        key_position = jnp.broadcast_to(key_position[:, None], (num_keys, num_heads))
    return key_position, query_block


def _checked(q, k, query_position, key_position, query_weight, power, query_block) -> None:
    """Raises ValueError unless the arguments fit."""
    num_keys, num_heads, _ = check_prompt(q, k, "w")
    if query_position.shape != q.shape[:1]:
        raise wanted("query_position shape", list(query_position.shape), list(q.shape[:1]))
    check_dtype("query_position", query_position, jnp.integer, "int32")
    if key_position is not None:
        if key_position.shape not in ((num_keys,), (num_keys, num_heads)):
            either = f"[{num_keys}] or [{num_keys}, {num_heads}]"
            raise wanted("key_position shape", list(key_position.shape), either)
        check_dtype("key_position", key_position, jnp.integer, "int32")
    if query_weight is not None and query_weight.shape != q.shape[:1]:
        raise wanted("query_weight shape", list(query_weight.shape), list(q.shape[:1]))
    if power not in (1, 2):
        raise wanted("power", power, "1 or 2")
    if query_block is not None and query_block < 1:
        raise wanted("query_block", query_block, "at least 1")
