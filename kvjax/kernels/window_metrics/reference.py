"""Attention that keys receive from some queries, without the L×L matrix, in plain JAX."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32


def _in_blocks(
    q: Float[Array, "w Hr d"], query_position: Int32[Array, " w"], num_heads: int, query_block: int
) -> tuple[Float[Array, "B n H r d"], Int32[Array, "B n"]]:
    """The queries in blocks of n, filled up with ones that do not count."""
    num_queries, num_query_heads, d = q.shape
    query_block = min(query_block, num_queries)
    blocks = -(-num_queries // query_block)
    pad = blocks * query_block - num_queries
    q = jnp.pad(q, ((0, pad), (0, 0), (0, 0)))
    q = q.reshape(blocks, query_block, num_heads, num_query_heads // num_heads, d)
    query_position = jnp.pad(query_position, (0, pad), constant_values=-1)
    return q, query_position.reshape(blocks, query_block)


def _attention(
    q: Float[Array, "n H r d"],
    keys: Float[Array, "H T d"],
    position: Int32[Array, " n"],
    key_position: Int32[Array, "H T"],
    scale: float,
) -> tuple[Float[Array, "H r n T"], Bool[Array, "H 1 n T"]]:
    """Softmax of each query over the keys it sees, and which these are.

    Queries and keys are multiplied as they are: products of 16-bit numbers are exact in float32.
    """
    precision = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None
    key_position, position = key_position[:, None, None, :], position[:, None]
    seen = (key_position >= 0) & (key_position <= position)
    s = jnp.einsum(
        "whrd,htd->hrwt", q, keys, precision=precision, preferred_element_type=jnp.float32
    )
    s = jnp.where(seen, s * scale, -jnp.inf)
    top = jnp.max(s, axis=-1, keepdims=True)
    e = jnp.exp(s - jnp.where(jnp.isfinite(top), top, 0))
    return e / jnp.maximum(jnp.sum(e, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny), seen


def window_metrics(
    q: Float[Array, "w Hr d"],
    k: Float[Array, "T H d"],
    *,
    query_position: Int32[Array, " w"],
    key_position: Int32[Array, "T H"],
    power: int,
    excluded_distance: int | Int32[Array, ""],
    query_weight: Float[Array, " w"] | None,
    above: float | None,
    scale: float,
    query_block: int,
) -> Float[Array, "Hr T"]:
    """See `kvjax.kernels.window_metrics`: `query_block` queries at a time."""
    num_query_heads, (num_keys, num_heads, _) = q.shape[1], k.shape
    q, query_position = _in_blocks(q, query_position, num_heads, query_block)
    weight = None
    if query_weight is not None:
        pad = query_position.size - query_weight.shape[0]
        weight = jnp.pad(query_weight, (0, pad)).reshape(query_position.shape)
    keys, key_position = jnp.swapaxes(k, 0, 1), key_position.T

    def add_block(total, block):
        q_b, position, weight_b = block
        p, seen = _attention(q_b, keys, position, key_position, scale)
        distance = position[:, None] - key_position[:, None, None, :]
        counts = seen & (distance >= excluded_distance)
        if above is not None:
            p = (p * jnp.sum(seen, axis=-1, keepdims=True) >= above).astype(jnp.float32)
        p = jnp.where(counts, p**power, 0)
        if weight_b is not None:
            p = p * weight_b[:, None]
        return total + jnp.sum(p, axis=2).reshape(num_query_heads, num_keys), None

    total = jnp.zeros((num_query_heads, num_keys), jnp.float32)
    if q.shape[0] == 1:
        weight = None if weight is None else weight[0]
        return add_block(total, (q[0], query_position[0], weight))[0]
    return lax.scan(add_block, total, (q, query_position, weight))[0]


def hit_intervals(
    q: Float[Array, "w Hr d"],
    k: Float[Array, "T H d"],
    *,
    query_position: Int32[Array, " w"],
    key_position: Int32[Array, "T H"],
    least: float,
    scale: float,
    query_block: int,
) -> tuple[Int32[Array, "H T"], Int32[Array, "H T"]]:
    """See `kvjax.kernels.hit_intervals`: `query_block` queries at a time."""
    num_heads = k.shape[1]
    q, query_position = _in_blocks(q, query_position, num_heads, query_block)
    keys, key_position = jnp.swapaxes(k, 0, 1), key_position.T

    def add_block(state, block):
        last, longest = state
        q_b, position = block
        p, seen = _attention(q_b, keys, position, key_position, scale)
        hit = jnp.any((p > least) & seen, axis=1)  # [H, n, T]
        at = jnp.where(hit, position[:, None], -1)
        until = lax.cummax(jnp.concatenate([last[:, None], at], axis=1), axis=1)
        gap = jnp.where(hit, position[:, None] - until[:, :-1], 0)
        return (until[:, -1], jnp.maximum(longest, jnp.max(gap, axis=1))), None

    state = (jnp.maximum(key_position - 1, -1), jnp.zeros_like(key_position))
    return lax.scan(add_block, state, (q, query_position))[0]
