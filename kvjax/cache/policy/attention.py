"""Pieces of scorers that go by attention: observed queries, what keys receive, pooling, groups."""

from typing import cast

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from kvjax.cache.policy.pooling import PoolKind, pool_metric, pool_metric_at
from kvjax.cache.policy.score import LayerView, Observation
from kvjax.kernels import window_metrics


def window_size(view: LayerView, window: int | None) -> int:
    """Queries that are observed: the last `window` of the chunk, or all; static."""
    return min(window or view.q.shape[0], view.q.shape[0])


def window_start(view: LayerView, window: int | None) -> Int32[Array, ""]:
    """Token position from which on tokens belong to the observed window."""
    size = window_size(view, window)
    if view.token is not None:
        return view.token[jnp.maximum(view.length - size, 0)]
    return view.end - size


def window_queries(
    view: LayerView, window: int | None
) -> tuple[Float[Array, "w Hr d"], Int32[Array, " w"], Int32[Array, " w"]]:
    """The observed queries, their token positions (−1 for padding) and their ages: 0 the last."""
    size = window_size(view, window)
    first = jnp.maximum(view.length - size, 0)
    index = first + jnp.arange(size, dtype=jnp.int32)
    queries = lax.dynamic_slice_in_dim(view.q, first, size, axis=0)
    at = view.start + index
    if view.token is not None:
        at = lax.dynamic_slice_in_dim(view.token, first, size)
    position = jnp.where(index < view.length, at, -1)
    return queries, position, jnp.maximum(view.length - 1 - index, 0)


def received(
    view: LayerView,
    window: int | None,
    *,
    power: int = 1,
    excluded_distance: int = 0,
    decay: float = 1.0,
    above: float | None = None,
) -> Float[Array, "H r P"]:
    """Attention that each key receives from each query head of its group, over a window.

    Args:
        view: the layer.
        window: last queries that are observed; None for all.
        power: 1 sums the attention, 2 its squares.
        excluded_distance: a key–query pair counts only if they are so many tokens apart.
        decay: a query n tokens before the last one counts this to the power of n.
        above: counts, in place of the sum, the queries that give a key at least this times an
            even share of their attention.
    """
    if window is None and above is None:
        asked = Observation(power, excluded_distance, decay)
        if view.received is not None and view.observation == asked:
            return view.received.reshape(view.num_heads, -1, view.k.shape[0])
    queries, position, age = window_queries(view, window)
    weight = None
    if decay != 1:
        weight = jnp.float32(decay) ** age.astype(jnp.float32)
    given = window_metrics(
        queries,
        view.k,
        query_position=position,
        key_position=None if view.position is None else view.position.T,
        power=power,
        excluded_distance=excluded_distance,
        query_weight=weight,
        above=above,
        # That of all queries: of use if all are observed.
        log_sum=view.log_sum if window is None else None,
    )
    return given.reshape(view.num_heads, -1, view.k.shape[0])


def pooled(
    view: LayerView,
    given: Float[Array, "H r P"],
    width: int,
    kind: PoolKind = "max",
    *,
    before: Int32[Array, ""] | None = None,
) -> Float[Array, "H r P"]:
    """Neighbouring keys joined, by token position.

    Args:
        view: the layer.
        given: what each key received.
        width: keys that are joined, odd; 1 for none.
        kind: their maximum or mean.
        before: only keys before this token position take part; by default all.
    """
    if width == 1:
        return given
    outside, alone = given, None
    if before is not None:
        at = jnp.arange(given.shape[-1]) if view.position is None else view.position[:, None]
        alone = at >= before
        outside = jnp.where(alone, 0.0 if kind == "avg" else -jnp.inf, given)
    if view.position is None:
        joined = pool_metric(outside, width, kind)
    else:
        joined = pool_metric_at(outside, view.position, width, kind)
    return joined if alone is None else jnp.where(cast(Array, alone), given, joined)
