"""What a method sees of one layer of a prompt, as one eviction metric per KV.

Source: KV-Compress, section 4.3 (attention of an observation window); the other methods differ in
which queries they observe, how these count, and how neighbours and query heads are joined.
"""

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from kvjax.cache.methods import Method, Observation
from kvjax.cache.metrics import pool_metric, pool_metric_at, reduce_group
from kvjax.kernels import hit_intervals, window_metrics

BACKGROUND_DISTANCE = 10
"""Tokens between a key and the queries of `Observation.background`, as in KV-Compress, full."""


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Observed:
    """What a method sees of a prompt, where one metric per KV is not enough."""

    metric: Float[Array, "*L H T"]
    votes: Float[Array, "*L H r T"] | None = None
    """The metric of each query head by itself."""


def _window(
    observation: Observation,
    q: Float[Array, "T Hr d"],
    start: Int32[Array, ""],
    length: Int32[Array, ""],
) -> tuple[Float[Array, "w Hr d"], Int32[Array, " w"], Float[Array, " w"] | None]:
    """The observed queries, their positions (−1 for padding) and what each counts."""
    window = min(observation.window or q.shape[0], q.shape[0])
    first = jnp.maximum(length - window, 0)
    index = first + jnp.arange(window, dtype=jnp.int32)
    queries = lax.dynamic_slice_in_dim(q, first, window, axis=0)
    weight = None
    if observation.query_decay != 1:
        age = jnp.maximum(length - 1 - index, 0).astype(jnp.float32)
        weight = jnp.float32(observation.query_decay) ** age
    return queries, jnp.where(index < length, start + index, -1), weight


def intrinsic_metric(
    observation: Observation,
    layer: Int32[Array, ""] | int,
    k: Float[Array, "*rows H d"],
    position: Int[Array, "*rows H"],
) -> Float[Array, "*rows H"]:
    """Metrics of KVs that follow from their position, a seed or their key alone.

    Args:
        observation: one whose `source` is not attention.
        layer: index of the layer.
        k: keys, rotated.
        position: token position of each.
    """
    if observation.source == "position":
        return position.astype(jnp.float32)
    if observation.source == "key-norm":
        return -jnp.linalg.norm(k.astype(jnp.float32), axis=-1)
    head = jnp.arange(position.shape[-1], dtype=jnp.uint32)

    def mixed(x):  # the finaliser of MurmurHash3, so that nearby positions share nothing
        x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
        return x ^ (x >> 16)

    x = mixed(jnp.uint32(observation.seed) + jnp.uint32(0x9E3779B9))
    for part in (jnp.asarray(layer, jnp.uint32), head, position.astype(jnp.uint32)):
        x = mixed(x ^ mixed(part + jnp.uint32(0x9E3779B9)))
    # 24 bits: exact in float32.
    return (x >> 8).astype(jnp.float32) / (1 << 24)


def _pooled(
    observation: Observation,
    received: Float[Array, "H r T"],
    position: Int32[Array, "H T"] | None,
    window_start: Int32[Array, ""],
) -> Float[Array, "H r T"]:
    """Neighbouring keys joined; `position` None for 0 … T−1."""
    if observation.pool > 1:
        absent = 0.0 if observation.pool_kind == "avg" else -jnp.inf
        at = jnp.arange(received.shape[-1]) if position is None else position[:, None]
        alone = (at >= window_start) & (not observation.pool_window)
        outside = jnp.where(alone, absent, received)
        if position is None:
            pooled = pool_metric(outside, observation.pool, observation.pool_kind)
        else:
            pooled = pool_metric_at(outside, position, observation.pool, observation.pool_kind)
        received = jnp.where(alone, received, pooled)
    return received


def _joined(
    observation: Observation,
    received: Float[Array, "H r T"],
    position: Int32[Array, "H T"] | None,
    window_start: Int32[Array, ""],
) -> Float[Array, "H T"]:
    """Neighbouring keys and query heads joined, in the observation's order."""
    if observation.group_first:
        received = reduce_group(received, observation.group)[:, None]
        return _pooled(observation, received, position, window_start)[:, 0]
    received = _pooled(observation, received, position, window_start)
    return reduce_group(received, observation.group)


def _received(
    observation: Observation,
    q: Float[Array, "w Hr d"],
    k: Float[Array, "T H d"],
    query_position: Int32[Array, " w"],
    weight: Float[Array, " w"] | None,
    now: Int32[Array, ""],
    key_position: Int32[Array, "T H"] | None,
) -> Float[Array, "H r T"]:
    """What the observed queries give each key, per query head."""
    positions = {"query_position": query_position, "key_position": key_position}
    if observation.statistic == "recency":
        last, longest = hit_intervals(q, k, **positions, least=observation.least)
        longest = jnp.maximum(longest, 1).astype(jnp.float32)
        again = jax.nn.sigmoid((last - now).astype(jnp.float32) / longest)
        return 2 * (again + jax.nn.sigmoid(-1 / longest))[:, None]
    received = window_metrics(
        q,
        k,
        **positions,
        power=observation.power,
        excluded_distance=observation.excluded_distance,
        query_weight=weight,
        above=1.0 if observation.statistic == "hits" else None,
    )
    return received.reshape(k.shape[1], -1, k.shape[0])


def _background(
    observation: Observation,
    q: Float[Array, "T Hr d"],
    k: Float[Array, "P H d"],
    start: Int32[Array, ""],
    length: Int32[Array, ""],
    key_position: Int32[Array, "P H"] | None,
) -> Float[Array, "H P"]:
    """`Observation.background` of every key."""
    index = jnp.arange(q.shape[0], dtype=jnp.int32)
    received = window_metrics(
        q,
        k,
        query_position=jnp.where(index < length, start + index, -1),
        key_position=key_position,
        excluded_distance=BACKGROUND_DISTANCE,
    )
    received = received.reshape(k.shape[1], -1, k.shape[0])
    return observation.background * jnp.sum(received, axis=1)


def observe_prompt(
    method: Method,
    layer: Int32[Array, ""] | int,
    q: Float[Array, "T Hr d"],
    k: Float[Array, "T H d"],
    v: Float[Array, "T H d"],
    length: Int32[Array, ""] | int,
) -> Float[Array, "H T"] | Observed:
    """Eviction metric of every KV of one layer of a whole prompt.

    Returns [H, T], or an `Observed` for a method that needs more (`Method.votes`). Stacked over
    layers either is what `write_survivors` and `PromptKV.metric` take.

    Args:
        method: the method (static).
        layer: index of the layer.
        q: queries of the prompt, rotated.
        k: keys, rotated.
        v: values.
        length: tokens of the prompt; those from `length` on are padding.
    """
    num_tokens, num_heads, _ = k.shape
    observation, length = method.observation, jnp.asarray(length, jnp.int32)
    if observation is None:
        return jnp.zeros((num_heads, num_tokens), jnp.float32)
    if observation.intrinsic:
        token = jnp.arange(num_tokens, dtype=jnp.int32)
        position = jnp.broadcast_to(token[:, None], (num_tokens, num_heads))
        return intrinsic_metric(observation, layer, k, position).T
    queries, position, weight = _window(observation, q, jnp.int32(0), length)
    received = _received(observation, queries, k, position, weight, length - 1, None)
    window_start = length - queries.shape[0]
    metric = _joined(observation, received, None, window_start)
    if observation.background:
        metric = metric + _background(observation, q, k, jnp.int32(0), length, None)
    if observation.value_norm:
        metric = metric * jnp.linalg.norm(v.astype(jnp.float32), axis=-1).T
    if not method.votes:
        return metric
    return Observed(metric, _pooled(observation, received, None, window_start))


def observe_chunk(
    method: Method,
    layer: Int32[Array, ""] | int,
    q: Float[Array, "T Hr d"],
    k: Float[Array, "T H d"],
    v: Float[Array, "T H d"],
    length: Int32[Array, ""],
    start: Int32[Array, ""],
    held_k: Float[Array, "H P d"],
    held_position: Int32[Array, "H P"],
    held_v: Float[Array, "H P d"],
) -> Float[Array, "H P+T"]:
    """Eviction metric of what the heads of one layer hold already, and of a chunk after it.

    Args:
        method: the method (static).
        layer: index of the layer.
        q: queries of the chunk, rotated.
        k: keys of the chunk, rotated.
        v: values of the chunk.
        length: tokens of the chunk; those from `length` on are padding.
        start: position of the chunk's first token.
        held_k: keys that the heads hold.
        held_position: their token positions; −1 where nothing is held.
        held_v: values that the heads hold.
    """
    num_tokens, num_heads, _ = k.shape
    num_held = held_k.shape[1]
    observation = method.observation
    if observation is None:
        return jnp.zeros((num_heads, num_held + num_tokens), jnp.float32)
    held_k = jnp.swapaxes(jnp.where((held_position >= 0)[..., None], held_k, 0), 0, 1)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    new_position = jnp.where(token < length, start + token, -1)
    new_position = jnp.broadcast_to(new_position, (num_heads, num_tokens))
    key_position = jnp.concatenate([held_position, new_position], axis=1)
    keys = jnp.concatenate([held_k, k.astype(held_k.dtype)])
    if observation.intrinsic:
        return intrinsic_metric(observation, layer, keys, key_position.T).T
    queries, query_position, weight = _window(observation, q, start, length)
    now = start + length - 1
    received = _received(observation, queries, keys, query_position, weight, now, key_position.T)
    metric = _joined(observation, received, key_position, start + length - queries.shape[0])
    if observation.background:
        metric = metric + _background(observation, q, keys, start, length, key_position.T)
    if observation.value_norm:
        norm = jnp.linalg.norm(v.astype(jnp.float32), axis=-1).T
        held_norm = jnp.linalg.norm(held_v.astype(jnp.float32), axis=-1)
        held_norm = jnp.where(held_position >= 0, held_norm, 0)
        metric = metric * jnp.concatenate([held_norm, norm], axis=1)
    return metric


def newest_metric(
    method: Method,
    layer: Int32[Array, ""] | int,
    k: Float[Array, "S H d"],
    position: Int32[Array, " S"],
) -> Float[Array, "S H"]:
    """Metric of KVs that a decode step writes, for a method whose source is not attention."""
    assert method.observation is not None
    position = jnp.broadcast_to(position[:, None], k.shape[:2])
    return intrinsic_metric(method.observation, layer, k, position)


def decay_metrics(
    metric: Float[Array, "N b"],
    block_table: Int32[Array, "*rows M"],
    factor: float,
) -> Float[Array, "N b"]:
    """All metrics in some blocks times `factor`; entries out of range are passed over."""
    rows = jnp.full((*block_table.shape, metric.shape[1]), factor, jnp.float32)
    if factor == 0:
        return metric.at[block_table].set(rows, mode="drop")
    return metric.at[block_table].mul(rows, mode="drop")


def grows(method: Method) -> bool:
    """Whether chunk after chunk adds to a method's metrics, rather than measuring anew."""
    observation = method.observation
    if observation is None or observation.intrinsic or observation.statistic == "recency":
        return False
    return observation.window is None


def chunk_decay(method: Method, length: Int32[Array, ""]) -> Float[Array, ""]:
    """Factor of what was measured before a chunk of so many tokens."""
    assert method.observation is not None
    decay = jnp.float32(method.observation.query_decay)
    return decay ** length.astype(jnp.float32)


def plain_metric(
    observed: Float[Array, "*L H T"] | Observed,
) -> Float[Array, "*L H T"]:
    """The one metric per KV that the pool stores."""
    return observed.metric if isinstance(observed, Observed) else observed


__all__ = [
    "Observed",
    "chunk_decay",
    "decay_metrics",
    "grows",
    "intrinsic_metric",
    "newest_metric",
    "observe_chunk",
    "observe_prompt",
    "plain_metric",
]
