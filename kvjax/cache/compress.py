"""Compression: of running sequences (schedule, move, free), and of a prompt on its way in.

Source: KV-Compress, section 4.2.
"""

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache.evict import (
    MAX_KVS_PER_STEP,
    NOTHING,
    decide,
    eviction_scores,
    head_rows,
    schedule_evictions,
    shares_of,
)
from kvjax.cache.move import move_cache
from kvjax.cache.policy.allocate import BlockCosts, Budget
from kvjax.cache.policy.block_cost import block_costs
from kvjax.cache.policy.merge import PROMPT_QUERY, Merger
from kvjax.cache.policy.method import PLAIN, Method
from kvjax.cache.policy.observe import of_layer
from kvjax.cache.policy.score import Artefacts, LayerView, Scores
from kvjax.cache.policy.select import Candidates, evicted_kvs
from kvjax.cache.store import (
    PagedCache,
    blocks_for,
    gathered,
    running_count,
    scattered,
    summed,
    valid_slots,
    write_prompt,
)


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CompressReport:
    """What a compression did, in blocks per compressed sequence."""

    freed: Int32[Array, " G"]
    """Of this device's heads."""
    shortfall: Int32[Array, " G"]
    """Blocks over the budget that could not be evicted (protected KVs, last blocks of heads), over
    all devices."""


def compress(
    cache: PagedCache,
    slots: Int32[Array, " G"],
    keep_blocks: Int32[Array, " G"],
    method: Method = PLAIN,
    *,
    artefacts: Artefacts = NOTHING,
    max_kvs_per_step: int = MAX_KVS_PER_STEP,
) -> tuple[PagedCache, CompressReport]:
    """Evict from each of `slots` until it owns at most `keep_blocks` blocks over all its heads.

    The freed blocks are allocatable at once. Sequences do not influence each other. Partial blocks
    count as whole ones. Where less is evictable than asked, everything evictable goes and the rest
    is reported as the shortfall. What a method's scorer wants scored anew is, before anything goes
    (`Scorer.rescored`).

    Args:
        cache: the cache (donate it).
        slots: sequence slots; those out of range, and any that comes again, are passed over.
        keep_blocks: the budget of each, from `kvjax.cache.budget.budget_blocks`.
        method: what decides, and what stays whatever is decided (a pytree: its parts are static,
            what it protects is not); by default the globally cheapest blocks go and nothing is
            protected.
        artefacts: calibrated arrays, if the method reads any; and `PROMPT_QUERY` of one sequence,
            whose prompt is on its way in.
        max_kvs_per_step: KVs handled at once (static); more are split, never skipped.
    """
    slots = valid_slots(cache, slots)
    if not slots.shape[0]:
        # Nothing could be gathered for any of them.
        return cache, CompressReport(slots, slots)
    if method.rescored:
        cache = scored_anew(cache, slots, method, artefacts)
    context_len = cache.context_len.at[slots].get(mode="fill", fill_value=0)
    owned = jnp.sum(blocks_for(context_len, cache.block_size), axis=(1, 2))
    in_all = summed(cache.shard, owned)
    schedule = schedule_evictions(
        cache,
        slots,
        jnp.maximum(0, in_all - jnp.maximum(jnp.asarray(keep_blocks, jnp.int32), 0)),
        method,
        artefacts=artefacts,
        max_kvs_per_step=max_kvs_per_step,
    )
    cache = move_cache(cache, schedule, artefacts=artefacts, max_kvs_per_step=max_kvs_per_step)
    freed, shortfall = jnp.sum(schedule.blocks, axis=(1, 2)), schedule.shortfall
    if cache.shared is not None:
        # Those whose copies did not fit have kept everything.
        held = cache.context_len.at[slots].get(mode="fill", fill_value=0)
        given = owned - jnp.sum(blocks_for(held, cache.block_size), axis=(1, 2))
        freed, shortfall = given, shortfall + summed(cache.shard, freed - given)
    return cache, CompressReport(freed, shortfall)


def scored_anew(
    cache: PagedCache, slots: Int32[Array, " G"], method: Method, artefacts: Artefacts
) -> PagedCache:
    """The cache with a new metric of every KV that some sequences hold; see `Scorer.rescored`.

    Keys and values are gathered for one layer of one sequence at a time.
    """
    shape = (cache.num_kv_heads, cache.max_blocks * cache.block_size)

    def row(metric, at):
        table, context_len, seq_len = (x[0] for x in head_rows(cache, *(x[None] for x in at)))
        held = jnp.arange(shape[1], dtype=jnp.int32) < context_len[:, None]
        position = jnp.where(held, gathered(cache.position, table, -1).reshape(shape), -1)
        k, v = (x.reshape(*shape, -1) for x in cache.kv.read(table))
        k, v = (jnp.swapaxes(x, 0, 1) for x in (cache.read_keys(at[1], k), v))
        none = jnp.zeros((0, shape[0], k.shape[-1]), k.dtype)
        view = LayerView(at[1], none, k, jnp.int32(0), seq_len[0], position=position, v=v)
        found = jnp.where(held, method.observer.observe(view, artefacts).metric, 0)
        found = found.reshape(*table.shape, cache.block_size).astype(metric.dtype)
        return scattered(metric, (table,), found), None

    layers = jnp.arange(cache.num_layers, dtype=jnp.int32)
    rows = jnp.repeat(slots, cache.num_layers), jnp.tile(layers, slots.shape[0])
    metric, _ = jax.lax.scan(row, cache.metric, rows)
    return dataclasses.replace(cache, metric=metric)


def write_survivors(
    cache: PagedCache,
    slot: Int32[Array, ""] | int,
    k: Float[Array, "L T H d"],
    v: Float[Array, "L T H d"],
    scores: Scores | Float[Array, "L H T"],
    length: Int32[Array, ""] | int,
    keep_blocks: Int32[Array, ""] | int,
    method: Method = PLAIN,
    *,
    artefacts: Artefacts = NOTHING,
    token: Int32[Array, "L T"] | None = None,
    rows: Int32[Array, " L"] | None = None,
) -> tuple[PagedCache, CompressReport, Bool[Array, ""]]:
    """Compress a prompt that stands in a contiguous scratch and write only what survives.

    Leaves an empty slot with the same KVs as `write_prompt` followed by `compress`, but needs only
    the blocks of the survivors.

    Args:
        cache: the cache (donate it); `slot` must be empty.
        slot: index of the sequence slot.
        k: keys of tokens 0 … T−1; those from `length` on are padding.
        v: values of the same tokens.
        scores: what the method's scorer gave of all layers, or a metric of each KV.
        length: tokens of the prompt (≤ T).
        keep_blocks: the budget in blocks.
        method: as in `compress`.
        artefacts: as in `compress`.
        token: where layers lack tokens, which token each of a layer's rows is of, ascending.
        rows: how many rows each layer has then, in place of `length`.

    Returns:
        The cache, what was evicted (G = 1), and ``ok``: False, and the cache unchanged, when the
        blocks do not suffice, when there is no such slot or it is not empty, or when `length` is
        out of range.

    Raises:
        ValueError: a shape does not fit the cache.
    """
    b = cache.block_size
    num_layers, num_tokens, num_heads, _ = k.shape
    heads, shard = (num_layers, num_heads), cache.shard
    given = jnp.asarray(length, jnp.int32)
    empty = cache.seq_len[slot] == 0
    length = jnp.clip(given, 0, num_tokens)
    row = jnp.arange(num_tokens, dtype=jnp.int32)
    context_len = cache.of_heads(length if rows is None else rows[:, None])
    if not isinstance(scores, Scores):
        scores = Scores(scores)
    owned = blocks_for(context_len, b)
    keep = jnp.minimum(
        summed(shard, jnp.sum(owned)), jnp.maximum(jnp.asarray(keep_blocks, jnp.int32), 0)
    )
    shape = (num_layers, cache.all_kv_heads, b)
    budget = Budget.of(keep, length, method.protected, method.shares, shape)
    position = jnp.broadcast_to(row if token is None else token[:, None], scores.metric.shape)
    seq_len = jnp.broadcast_to(length, heads)
    order, single = eviction_scores(
        method, scores.metric, scores.state, position, context_len, seq_len, budget.protected
    )
    layer = jnp.arange(num_layers, dtype=jnp.int32)
    shares = shares_of(method, order, layer, budget, artefacts, shard, budget_axis=None)
    padded = jnp.pad(order, ((0, 0), (0, 0), (0, -num_tokens % b)), constant_values=jnp.inf)
    same = method.selector.scope == "layer"
    costs = BlockCosts(block_costs(padded, context_len, b), owned, shares, same)
    blocks, count, threshold, shortfall = decide(
        method, costs, context_len, budget, artefacts, shard
    )
    held_k = jnp.swapaxes(k, 1, 2) if method.selector.needs_keys else None
    evicted = evicted_kvs(
        method.selector,
        Candidates(
            order, single, position, context_len, count, threshold, scores.query_heads, held_k
        ),
    )
    kept = ~evicted & (row < context_len[..., None])
    if method.merger is not None:
        goes = evicted & (row < context_len[..., None])
        if scores.queries is not None:
            artefacts = {**artefacts, PROMPT_QUERY: scores.queries}
        k, v = _merged(method.merger, artefacts, k, v, position, order, goes, kept, length)
    rank = jnp.where(kept, running_count(kept) - 1, num_tokens)
    at, head = layer[:, None, None], jnp.arange(num_heads)[:, None]
    kept_index = jnp.zeros((*heads, num_tokens), jnp.int32)
    kept_index = kept_index.at[at, head, rank].set(jnp.broadcast_to(row, rank.shape), mode="drop")
    cache, ok = write_prompt(
        cache,
        slot,
        k,
        v,
        scores.metric,
        jnp.where(empty, given, -1),
        kept_index=kept_index,
        kept_len=context_len - count,
        state=scores.state,
        token=token,
    )
    return cache, CompressReport(jnp.sum(blocks)[None], shortfall[None]), ok


def _merged(
    merger: Merger,
    artefacts: Artefacts,
    k: Float[Array, "L T H d"],
    v: Float[Array, "L T H d"],
    position: Int32[Array, "L H T"],
    order: Float[Array, "L H T"],
    goes: Bool[Array, "L H T"],
    stays: Bool[Array, "L H T"],
    length: Int32[Array, ""],
) -> tuple[Float[Array, "L T H d"], Float[Array, "L T H d"]]:
    """A prompt with what goes folded into what stays, one layer at a time."""

    def fold(part):
        layer, k, v, position, order, goes, stays = part
        k, v = jnp.swapaxes(k, 0, 1), jnp.swapaxes(v, 0, 1)
        own = of_layer(merger.reads(artefacts), artefacts, layer)
        k_rows, v_rows = merger.fold(k, v, position, order, goes, stays, length, own)
        k_rows, v_rows = jnp.swapaxes(k_rows, 0, 1), jnp.swapaxes(v_rows, 0, 1)
        return k_rows.astype(k.dtype), v_rows.astype(v.dtype)

    layers = jnp.arange(k.shape[0], dtype=jnp.int32)
    inputs = layers, k, v, position, order, goes, stays
    return jax.lax.map(fold, inputs, batch_size=merger.layers_at_once)
