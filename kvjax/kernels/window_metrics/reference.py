"""Attention that keys receive from some queries, without the L×L matrix, in plain JAX."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32


def window_metrics(
    q: Float[Array, "w Hr d"],
    k: Float[Array, "T H d"],
    *,
    query_position: Int32[Array, " w"],
    key_position: Int32[Array, "T H"],
    power: int,
    excluded_distance: int,
    query_weight: Float[Array, " w"] | None,
    scale: float,
    query_block: int,
) -> Float[Array, "Hr T"]:
    """See `kvjax.kernels.window_metrics`: `query_block` queries at a time.

    Queries and keys are multiplied as they are: products of 16-bit numbers are exact in float32.
    """
    num_queries, num_query_heads, d = q.shape
    num_keys, num_heads, _ = k.shape
    group = num_query_heads // num_heads
    query_block = min(query_block, num_queries)
    blocks = -(-num_queries // query_block)
    pad = blocks * query_block - num_queries
    q = jnp.pad(q, ((0, pad), (0, 0), (0, 0)))
    q = q.reshape(blocks, query_block, num_heads, group, d)
    query_position = jnp.pad(query_position, (0, pad), constant_values=-1)
    query_position = query_position.reshape(blocks, query_block)
    weight = None
    if query_weight is not None:
        weight = jnp.pad(query_weight, (0, pad)).reshape(blocks, query_block)
    keys = jnp.swapaxes(k, 0, 1)
    precision = lax.Precision.HIGHEST if k.dtype == jnp.float32 else None
    key_position = key_position.T[:, None, None, :]

    def add_block(total, block):
        q_b, position, weight_b = block
        position = position[None, None, :, None]
        seen = (key_position >= 0) & (key_position <= position)
        s = jnp.einsum(
            "whrd,htd->hrwt", q_b, keys, precision=precision, preferred_element_type=jnp.float32
        )
        s = jnp.where(seen, s * scale, -jnp.inf)
        top = jnp.max(s, axis=-1, keepdims=True)
        e = jnp.exp(s - jnp.where(jnp.isfinite(top), top, 0))
        p = e / jnp.maximum(jnp.sum(e, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        counts = seen & (position - key_position >= excluded_distance)
        p = jnp.where(counts, p**power, 0)
        if weight_b is not None:
            p = p * weight_b[:, None]
        return total + jnp.sum(p, axis=2).reshape(num_query_heads, num_keys), None

    total = jnp.zeros((num_query_heads, num_keys), jnp.float32)
    if blocks == 1:
        weight = None if weight is None else weight[0]
        return add_block(total, (q[0], query_position[0], weight))[0]
    return lax.scan(add_block, total, (q, query_position, weight))[0]
