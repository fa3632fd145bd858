"""From metrics to the keys by which KVs are evicted: what a method's unit, scope and age make of
them.

Keys are compared within a head, or over the heads of a sequence; low ones go first, +inf never.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache.methods.base import Method


def evictable_kvs(
    metric: Float[Array, "*rows T"],
    position: Int32[Array, "*rows T"],
    context_len: Int32[Array, "*rows"],
    seq_len: Int32[Array, "*rows"],
    protected: Int32[Array, "..."] | int,
    sinks: Int32[Array, ""] | int,
) -> Bool[Array, "*rows T"]:
    """Which KVs may be evicted at all.

    The `protected` newest token positions, positions below `sinks`, slots past the context length
    and unwritten slots never are, whatever their metric holds.
    """
    index = jnp.arange(metric.shape[-1], dtype=jnp.int32)
    newest = seq_len[..., None] - jnp.asarray(protected)[..., None]
    return (
        (index < context_len[..., None])
        & (position >= sinks)
        & (position >= 0)
        & (position < newest)
        & jnp.isfinite(metric)
    )


def page_sums(
    metric: Float[Array, "*rows T"],
    position: Int32[Array, "*rows T"],
    counts: Bool[Array, "*rows T"],
    width: int,
) -> Float[Array, "*rows T"]:
    """Sum of the metrics that count over each aligned page of `width` token positions.

    Adds KVs in the order of their positions, wherever they lie.
    """
    num_keys = metric.shape[-1]

    def one(metric, position, counts):
        page = jnp.where(counts, position // width, jnp.iinfo(jnp.int32).max)
        order = jnp.argsort(jnp.where(counts, position, jnp.iinfo(jnp.int32).max))
        page = page[order]
        is_new = jnp.concatenate([jnp.zeros(1, bool), page[1:] != page[:-1]])
        segment = jnp.cumsum(is_new, dtype=jnp.int32)
        sums = jax.ops.segment_sum(
            jnp.where(counts, metric, 0)[order], segment, num_keys, indices_are_sorted=True
        )
        return jnp.zeros_like(metric).at[order].set(sums[segment])

    flat = one
    for _ in metric.shape[:-1]:
        flat = jax.vmap(flat)
    return flat(metric, position, counts)


def method_keys(
    method: Method | None,
    metric: Float[Array, "*rows H T"],
    position: Int32[Array, "*rows H T"],
    context_len: Int32[Array, "*rows H"],
    seq_len: Int32[Array, "*rows H"],
    protected: Int32[Array, "..."] | int,
    sinks: Int32[Array, ""] | int,
) -> tuple[Float[Array, "*rows H T"], Float[Array, "*rows H T"]]:
    """The metrics by which KVs are evicted, +inf where a KV may not be (`evictable_kvs`).

    The second axis from the right holds the heads of one layer. Returns the keys, and the same
    before a method's pages were joined.

    Args:
        method: the method (static); None for metrics as they are.
        metric: metric of each KV by logical index.
        position: token position of each.
        context_len: KVs that each head holds.
        seq_len: tokens that the sequence of each head has seen.
        protected: newest token positions that stay.
        sinks: oldest token positions that stay.
    """
    evictable = evictable_kvs(metric, position, context_len, seq_len, protected, sinks)
    keys = metric
    if method is not None and method.per_age:
        age = jnp.maximum(seq_len[..., None] - position, 1)
        keys = keys / age.astype(jnp.float32)
    if method is not None and method.shared:
        # Heads of a layer that share their choice hold the same tokens in the same order.
        mean = jnp.mean(jnp.where(evictable, keys, 0), axis=-2, keepdims=True)
        keys = jnp.broadcast_to(mean, keys.shape)
        evictable = jnp.broadcast_to(jnp.all(evictable, axis=-2, keepdims=True), keys.shape)
    raw = jnp.where(evictable, keys, jnp.inf)
    if method is None or method.unit == 1:
        return raw, raw
    joined = page_sums(keys, position, evictable, method.unit)
    return jnp.where(evictable, joined, jnp.inf), raw
