"""From observed attention to eviction metrics: pooling, and one metric per KV head.

Source: KV-Compress, equations 8–11. The paper leaves the order open; as in the authors' system,
pooling comes first, per query head, and the sum over the query group last.
"""

from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

GroupReduction = Literal["sum", "max", "mean"]
PoolKind = Literal["max", "avg"]


def pool_metric(
    metric: Float[Array, "*rows T"], width: int, kind: PoolKind = "max"
) -> Float[Array, "*rows T"]:
    """Max or mean over the `width` (odd) keys around each key, for keys at consecutive positions.

    Past the ends the mean counts zeros.
    """
    if width == 1:
        return metric
    window = (1,) * (metric.ndim - 1) + (width,)
    pad = ((0, 0),) * (metric.ndim - 1) + ((width // 2, width // 2),)
    strides = (1,) * metric.ndim
    if kind == "avg":
        return lax.reduce_window(metric, 0.0, lax.add, window, strides, pad) / width
    return lax.reduce_window(metric, -jnp.inf, lax.max, window, strides, pad)


def pool_metric_at(
    metric: Float[Array, "H r T"],
    position: Int32[Array, "H T"],
    width: int,
    kind: PoolKind = "max",
) -> Float[Array, "H r T"]:
    """Max or mean over the keys at most ⌊width / 2⌋ token positions away, in whatever order.

    Keys with position −1 neither give nor take. The mean counts zeros for absent keys.
    """
    if width == 1:
        return metric
    order = jnp.argsort(position, axis=-1)
    sorted_position = jnp.take_along_axis(position, order, axis=-1)
    sorted_metric = jnp.take_along_axis(metric, order[:, None], axis=-1)
    num_keys, reach = position.shape[-1], width // 2
    # Positions of a head are distinct, so a neighbour in reach lies at most `reach` places away.
    far = jnp.pad(sorted_position, ((0, 0), (reach, reach)), constant_values=-width - 1)
    values = jnp.pad(sorted_metric, ((0, 0), (0, 0), (reach, reach)))
    pooled = jnp.zeros_like(sorted_metric) if kind == "avg" else sorted_metric
    for offset in range(2 * reach + 1):
        there = lax.slice_in_dim(far, offset, offset + num_keys, axis=-1)
        near = (there >= 0) & (jnp.abs(there - sorted_position) <= reach)
        value = lax.slice_in_dim(values, offset, offset + num_keys, axis=-1)
        joined = pooled + value / width if kind == "avg" else jnp.maximum(pooled, value)
        pooled = jnp.where(near[:, None], joined, pooled)
    back = jnp.argsort(order, axis=-1)
    return jnp.take_along_axis(pooled, back[:, None], axis=-1)


def fading_pool(
    metric: Float[Array, "*rows T"], ahead: int, fade: float
) -> Float[Array, "*rows T"]:
    """The largest of each key's metric and those of the `ahead` keys before it, faded.

    Args:
        metric: metrics (≥ 0) of keys at consecutive positions.
        ahead: how far a key's metric reaches towards later keys.
        fade: factor for every key of distance.
    """
    pooled = metric
    for distance in range(1, min(ahead, metric.shape[-1] - 1) + 1):
        pad = ((0, 0),) * (metric.ndim - 1) + ((distance, 0),)
        before = jnp.pad(metric[..., :-distance], pad)
        pooled = jnp.maximum(pooled, before * jnp.float32(fade**distance))
    return pooled


def reduce_group(
    metric: Float[Array, "*rows r T"], reduction: GroupReduction
) -> Float[Array, "*rows T"]:
    """One metric per KV head from those of its r query heads (equations 9–11: the sum)."""
    return {"sum": jnp.sum, "max": jnp.max, "mean": jnp.mean}[reduction](metric, axis=-2)
