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
from kvjax.cache.metrics import fading_pool, pool_metric, pool_metric_at, reduce_group
from kvjax.kernels import hit_intervals, window_metrics

BACKGROUND_QUERIES = 256
"""Queries that `Observation.background` samples."""
BACKGROUND_DISTANCE = 10
"""Tokens between a key and those of them that count, as in KV-Compress, full."""
BACKGROUND_LEAST = 1 / 20
"""The mean is over at least this share of them, so that few queries cannot lift the newest KVs."""
READ = 1e4
"""Metric of a token that all heads keep: more than any attention, and small enough that whole
numbers above it are exact."""


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Observed:
    """What a method sees of a prompt, where one metric per KV is not enough."""

    metric: Float[Array, "*L H T"]
    votes: Float[Array, "*L H r T"] | None = None
    """The metric of each query head by itself."""
    window: Float[Array, "*L H n T"] | None = None
    """What each of the last n queries gives, the newest first, for `Observation.reads`."""
    position: Int32[Array, "*L H T"] | None = None
    """Token position of each KV, −1 for none, where these are not 0 … T−1."""


def unobserved(
    method: Method, heads: tuple[int, int, int], num_kvs: int, *, chunk: bool = False
) -> Float[Array, "L H T"] | Observed:
    """Room for what `observe_prompt` (or `observe_chunk`) returns of every layer.

    Args:
        method: the method (static).
        heads: L, H and r.
        num_kvs: T.
        chunk: for `observe_chunk`.
    """
    num_layers, num_heads, group = heads
    metric = jnp.zeros((num_layers, num_heads, num_kvs), jnp.float32)
    observation, votes = method.observation, method.votes and not chunk
    reads = None if observation is None else observation.reads
    if reads is None and not votes:
        return metric
    row = (num_layers, num_heads)
    return Observed(
        metric,
        jnp.zeros((*row, group, num_kvs), jnp.float32) if votes else None,
        None if reads is None else jnp.zeros((*row, reads.queries, num_kvs), jnp.float32),
        jnp.full(metric.shape, -1, jnp.int32) if reads is not None and chunk else None,
    )


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
    log_sum: Float[Array, "Hr n"] | None,
) -> Float[Array, "H r T"]:
    """What the observed queries give each key, per query head; `log_sum` is that of all queries,
    of use if all are observed."""
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
        log_sum=log_sum if observation.window is None else None,
    )
    return received.reshape(k.shape[1], -1, k.shape[0])


def _by_age(
    observation: Observation,
    q: Float[Array, "T Hr d"],
    k: Float[Array, "P H d"],
    start: Int32[Array, ""],
    length: Int32[Array, ""],
    key_position: Int32[Array, "P H"] | None,
) -> tuple[Float[Array, "H n P"], Float[Array, "H r P"]]:
    """What each of the last n queries gives, the newest first; all of the window, decayed."""
    window, reads = observation.window, observation.reads
    assert window is not None
    assert reads is not None
    window = min(window, q.shape[0])
    newest = min(reads.queries, window)
    common = {
        "key_position": key_position,
        "power": observation.power,
        "excluded_distance": observation.excluded_distance,
    }
    index = length - 1 - jnp.arange(window, dtype=jnp.int32)
    # Zeros from queries that a short prompt lacks.
    queries, position = q[jnp.maximum(index, 0)], jnp.where(index >= 0, start + index, -1)
    decay = jnp.float32(observation.query_decay) ** jnp.arange(window, dtype=jnp.float32)

    def one(query, position):
        return window_metrics(query[None], k, query_position=position[None], **common)

    given = jax.vmap(one)(queries[:newest], position[:newest])
    received = jnp.sum(given * decay[:newest, None, None], axis=0)
    if window > newest:
        # The rest of a wide window is not held query by query.
        received = received + window_metrics(
            queries[newest:],
            k,
            query_position=position[newest:],
            query_weight=decay[newest:],
            **common,
        )
    shape = (k.shape[1], -1, k.shape[0])
    given = jnp.max(given.reshape(newest, *shape), axis=2)
    # A prompt of fewer tokens (static) than reads count.
    given = jnp.pad(given, ((0, reads.queries - newest), (0, 0), (0, 0)))
    return jnp.swapaxes(given, 0, 1), received.reshape(shape)


def background(
    observation: Observation,
    q: Float[Array, "T Hr d"],
    k: Float[Array, "P H d"],
    start: Int32[Array, ""],
    length: Int32[Array, ""],
    key_position: Int32[Array, "P H"] | None,
    log_sum: Float[Array, "Hr T"] | None = None,
) -> Float[Array, "H P"]:
    """`Observation.background` of every key: what text in general, not the question, reads.

    The sample is half the last 128 queries, half 128 evenly spaced ones. A query counts for the
    keys at least 10 tokens before it; their mean, over at least a 20th of the sample, is taken.

    Args:
        observation: the observation (static).
        q: queries of the prompt, or of its last chunk.
        k: keys.
        start: position of the first query.
        length: queries; those from `length` on are padding.
        key_position: token position of each key, −1 for none; 0 … P−1 if None.
        log_sum: of each query's logits; spares two passes over those of the sample.
    """
    half = BACKGROUND_QUERIES // 2
    i = jnp.arange(half, dtype=jnp.int32)
    # Of short prompts some come twice and some (−1 here) are missing.
    spaced = (i + 1) * (length // half) + (i + 1) * (length % half) // half - 1
    index = jnp.concatenate([spaced, length - half + i])
    position = jnp.where(index >= 0, start + index, -1)
    index = jnp.maximum(index, 0)
    received = window_metrics(
        q[index],
        k,
        log_sum=None if log_sum is None else log_sum[:, index],
        own_keys_last=False,
        query_position=position,
        key_position=key_position,
        excluded_distance=BACKGROUND_DISTANCE,
    )
    received = jnp.sum(received.reshape(k.shape[1], -1, k.shape[0]), axis=1)
    if key_position is None:
        key_position = jnp.arange(k.shape[0], dtype=jnp.int32)[:, None]
    watched = position[:, None, None] - key_position.T >= BACKGROUND_DISTANCE
    watched = jnp.sum(watched & (position >= 0)[:, None, None], axis=0, dtype=jnp.float32)
    mean = received / jnp.maximum(watched, BACKGROUND_LEAST * BACKGROUND_QUERIES)
    return observation.background * mean


def keep_reads(
    method: Method,
    observed: Float[Array, "L H T"] | Observed,
    seq_len: Int32[Array, ""] | int,
    num_positions: int,
) -> Float[Array, "L H T"] | Observed:
    """What was observed of all layers, with `Observation.reads` put first in every head.

    Args:
        method: the method (static).
        observed: what `observe_prompt` or `observe_chunk` returned of each layer, stacked.
        seq_len: tokens of the prompt so far.
        num_positions: more than any token position (static).

    Returns:
        The metrics; as `Observed` only where a method needs more (`Method.votes`).
    """
    reads = method.observation.reads if method.observation is not None else None
    if reads is None:
        return observed
    assert isinstance(observed, Observed)
    assert observed.window is not None
    if observed.position is None:
        given = jnp.max(observed.window, axis=(0, 1))
    else:
        at = jnp.where(observed.position >= 0, observed.position, num_positions)
        by_query = jnp.moveaxis(observed.window, 2, 0)
        given = jnp.zeros((by_query.shape[0], num_positions), jnp.float32)
        given = jax.vmap(lambda row, value: row.at[at].max(value, mode="drop"))(given, by_query)
    token = jnp.arange(given.shape[1], dtype=jnp.int32)
    counts = (token >= reads.oldest) & (token < seq_len - reads.newest)
    given = jnp.where(counts, given, 0)
    assert method.observation is not None
    read = given[0]
    for age in range(1, min(given.shape)):
        moved = jnp.pad(given[age, :-age], (age, 0))
        read = read + moved * jnp.float32(method.observation.query_decay**age)
    read = jnp.where(token < seq_len, fading_pool(read, reads.ahead, reads.fade), 0)
    value, top = lax.top_k(read, min(reads.tokens, read.shape[0]))
    first = READ + reads.tokens - jnp.arange(top.shape[0], dtype=jnp.float32)
    least = read * jnp.where(read >= reads.sure, 1, jnp.float32(reads.unsure))
    least = least.at[top].max(jnp.where(value >= reads.sure, first, 0))
    if observed.position is not None:
        least = jnp.where(observed.position >= 0, least[jnp.maximum(observed.position, 0)], 0)
    metric = jnp.maximum(observed.metric, least)
    return metric if observed.votes is None else Observed(metric, observed.votes)


def observe_prompt(
    method: Method,
    layer: Int32[Array, ""] | int,
    q: Float[Array, "T Hr d"],
    k: Float[Array, "T H d"],
    length: Int32[Array, ""] | int,
    log_sum: Float[Array, "Hr T"] | None = None,
) -> Float[Array, "H T"] | Observed:
    """Eviction metric of every KV of one layer of a whole prompt.

    Returns [H, T], or an `Observed` for a method that needs more (`Method.votes`). Stacked over
    layers either is what `write_survivors` and `PromptKV.metric` take.

    Args:
        method: the method (static).
        layer: index of the layer.
        q: queries of the prompt, rotated.
        k: keys, rotated.
        length: tokens of the prompt; those from `length` on are padding.
        log_sum: of each query's logits, from the attention; worth having if `needs_log_sum`.
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
    window_start, window = length - queries.shape[0], None
    if observation.reads is None:
        received = _received(observation, queries, k, position, weight, length - 1, None, log_sum)
    else:
        window, received = _by_age(observation, q, k, jnp.int32(0), length, None)
    metric = _joined(observation, received, None, window_start)
    if observation.background:
        metric = metric + background(observation, q, k, jnp.int32(0), length, None, log_sum)
    votes = _pooled(observation, received, None, window_start) if method.votes else None
    if votes is None and window is None:
        return metric
    return Observed(metric, votes, window)


def observe_chunk(
    method: Method,
    layer: Int32[Array, ""] | int,
    q: Float[Array, "T Hr d"],
    k: Float[Array, "T H d"],
    length: Int32[Array, ""],
    start: Int32[Array, ""],
    held_k: Float[Array, "H P d"],
    held_position: Int32[Array, "H P"],
    log_sum: Float[Array, "Hr T"] | None = None,
) -> Float[Array, "H P+T"] | Observed:
    """Eviction metric of what the heads of one layer hold already, and of a chunk after it.

    Args:
        method: the method (static).
        layer: index of the layer.
        q: queries of the chunk, rotated.
        k: keys of the chunk, rotated.
        length: tokens of the chunk; those from `length` on are padding.
        start: position of the chunk's first token.
        held_k: keys that the heads hold.
        held_position: their token positions; −1 where nothing is held.
        log_sum: as for `observe_prompt`.
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
    window = None
    at = key_position.T
    if observation.reads is None:
        now = start + length - 1
        received = _received(observation, queries, keys, query_position, weight, now, at, log_sum)
    else:
        window, received = _by_age(observation, q, keys, start, length, at)
    metric = _joined(observation, received, key_position, start + length - queries.shape[0])
    if observation.background:
        metric = metric + background(observation, q, keys, start, length, at, log_sum)
    if window is None:
        return metric
    return Observed(metric, None, window, key_position)


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


def needs_log_sum(method: Method) -> bool:
    """Whether a method sums the attention of many queries: one pass over the logits is enough for
    it where the attention itself tells their log-sum-exp."""
    observation = method.observation
    if observation is None:
        return False
    return observation.background > 0 or (grows(method) and observation.statistic == "sum")


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
    "background",
    "chunk_decay",
    "decay_metrics",
    "grows",
    "intrinsic_metric",
    "keep_reads",
    "needs_log_sum",
    "newest_metric",
    "observe_chunk",
    "observe_prompt",
    "plain_metric",
    "unobserved",
]
