"""Attention that keys receive from all queries of a prompt, where the softmax is known already.

The log-sum-exp of every query comes from the attention itself, so one pass over the logits
suffices, and tiles that no query of theirs may see are left out.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

TILE = 512
"""Queries, and keys, of one tile of logits: a tile of 32 heads stays in a large GPU's L2 cache."""


def window_metrics(
    q: Float[Array, "w Hr d"],
    k: Float[Array, "T H d"],
    *,
    log_sum: Float[Array, "Hr w"],
    num_own: int,
    query_position: Int32[Array, " w"],
    key_position: Int32[Array, "T H"],
    power: int,
    excluded_distance: int | Int32[Array, ""],
    query_weight: Float[Array, " w"] | None,
    scale: float,
) -> Float[Array, "Hr T"]:
    """See `kvjax.kernels.window_metrics`: the last `num_own` keys are those of the queries, in
    order; all or none."""
    num_queries, num_query_heads, d = q.shape
    num_keys, num_heads, _ = k.shape
    group, num_held = num_query_heads // num_heads, num_keys - num_own
    size = min(TILE, num_queries)
    blocks, held, own = (-(-n // size) for n in (num_queries, num_held, num_own))

    def tiled(x, axis: int, count: int, fill: float = 0):
        """[…, n, …] as [count, …, size, …], filled up at the end."""
        pad = [(0, 0)] * x.ndim
        pad[axis] = (0, count * size - x.shape[axis])
        x = jnp.pad(x, pad, constant_values=fill)
        x = x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    def key_tiles(x, fill: float = 0):
        """[T, H, …] as [n, size, H, …]: held keys, then own ones, each from a tile of its own."""
        parts = [(x[:num_held], held), (x[num_held:], own)]
        return jnp.concatenate([tiled(x, 0, count, fill) for x, count in parts if count])

    queries = tiled(q.reshape(num_queries, num_heads, group, d), 0, blocks)
    queries = queries.transpose(0, 2, 3, 1, 4).reshape(blocks, num_heads, group * size, d)
    # What a query counts goes into the exponent, nothing for those that do not count.
    offset = power * log_sum.reshape(num_heads, group, num_queries)
    if query_weight is not None:
        offset = offset - jnp.log(query_weight)
    offset = tiled(jnp.where(query_position >= 0, offset, jnp.inf), 2, blocks, jnp.inf)
    offset = offset.reshape(blocks, num_heads, group * size, 1)
    at = tiled(query_position, 0, blocks, -1)
    keys = jnp.moveaxis(key_tiles(k), 2, 1)
    key_at = jnp.moveaxis(key_tiles(key_position, -1), 2, 1)
    precision = lax.Precision.HIGHEST if k.dtype == jnp.float32 else None

    def add_tile(total, pair):
        i, j = pair
        s = jnp.einsum(
            "hqd,htd->hqt",
            queries[i],
            keys[j],
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        distance = at[i][:, None] - key_at[j][:, None]
        counts = (key_at[j][:, None] >= 0) & (distance >= excluded_distance)
        e = jnp.exp(s * (power * scale) - offset[i]).reshape(num_heads, group, size, size)
        received = jnp.sum(jnp.where(counts[:, None], e, 0), axis=2)
        here = lax.dynamic_slice_in_dim(total, j * size, size, axis=2)
        return lax.dynamic_update_slice_in_dim(total, here + received, j * size, axis=2), None

    pairs = [(i, j) for i in range(blocks) for j in range(held + min(i + 1, own))]
    total = jnp.zeros((num_heads, group, (held + own) * size), jnp.float32)
    total, _ = lax.scan(add_tile, total, tuple(np.asarray(pairs, np.int32).T))
    first = held * size
    parts = (total[..., :num_held], total[..., first : first + num_own])
    return jnp.concatenate(parts, axis=-1).reshape(num_query_heads, num_keys)
