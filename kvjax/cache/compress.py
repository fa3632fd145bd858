"""Compression: of running sequences (schedule, move, free), and of a prompt on its way in.

Source: KV-Compress, section 4.2.
"""

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache.allocate import Plan, choose_blocks, head_shares
from kvjax.cache.evict import MAX_KVS_PER_STEP, schedule_evictions
from kvjax.cache.keys import method_keys
from kvjax.cache.methods.base import Method
from kvjax.cache.move import move_cache
from kvjax.cache.observe import Observed
from kvjax.cache.paged import PagedCache, blocks_for, valid_slots, write_prompt
from kvjax.cache.prices import block_prices
from kvjax.cache.representatives import evicted_kvs


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CompressReport:
    """What a compression did, in blocks per compressed sequence."""

    freed: Int32[Array, " G"]
    shortfall: Int32[Array, " G"]
    """Blocks over the budget that could not be evicted (protected KVs, last blocks of heads)."""


def compress(
    cache: PagedCache,
    slots: Int32[Array, " G"],
    keep_blocks: Int32[Array, " G"],
    *,
    protected: Int32[Array, "*G"] | int = 0,
    sinks: Int32[Array, ""] | int = 0,
    method: Method | None = None,
    max_kvs_per_step: int = MAX_KVS_PER_STEP,
) -> tuple[PagedCache, CompressReport]:
    """Evict from each of `slots` until it owns at most `keep_blocks` blocks over all its heads.

    The freed blocks are allocatable at once. Sequences do not influence each other. Partial blocks
    count as whole ones. Where less is evictable than asked, everything evictable goes and the rest
    is reported as the shortfall.

    Args:
        cache: the cache (donate it).
        slots: sequence slots; those out of range, and any that comes again, are passed over.
        keep_blocks: the budget of each, from `kvjax.cache.budget.budget_blocks`.
        protected: newest token positions that are never evicted, of each sequence or of all.
        sinks: oldest token positions that are never evicted.
        method: whose allocation, unit and scope decide (static); None for the globally cheapest
            blocks.
        max_kvs_per_step: KVs handled at once (static); more are split, never skipped.
    """
    slots = valid_slots(cache, slots)
    context_len = cache.context_len.at[slots].get(mode="fill", fill_value=0)
    owned = jnp.sum(blocks_for(context_len, cache.block_size), axis=(1, 2))
    schedule = schedule_evictions(
        cache,
        slots,
        jnp.maximum(0, owned - jnp.maximum(jnp.asarray(keep_blocks, jnp.int32), 0)),
        protected=protected,
        sinks=sinks,
        method=method,
        max_kvs_per_step=max_kvs_per_step,
    )
    cache = move_cache(cache, schedule, method=method, max_kvs_per_step=max_kvs_per_step)
    return cache, CompressReport(jnp.sum(schedule.blocks, axis=(1, 2)), schedule.shortfall)


def write_survivors(
    cache: PagedCache,
    slot: Int32[Array, ""] | int,
    k: Float[Array, "L T H d"],
    v: Float[Array, "L T H d"],
    metric: Float[Array, "L H T"] | Observed,
    length: Int32[Array, ""] | int,
    keep_blocks: Int32[Array, ""] | int,
    *,
    protected: Int32[Array, ""] | int = 0,
    sinks: Int32[Array, ""] | int = 0,
    method: Method | None = None,
) -> tuple[PagedCache, CompressReport, Bool[Array, ""]]:
    """Compress a prompt that stands in a contiguous scratch and write only what survives.

    Leaves an empty slot with the same KVs as `write_prompt` followed by `compress`, but needs only
    the blocks of the survivors.

    Args:
        cache: the cache (donate it); `slot` must be empty.
        slot: index of the sequence slot.
        k: keys of tokens 0 … T−1; those from `length` on are padding.
        v: values of the same tokens.
        metric: eviction metric of each KV, or all that the method observed.
        length: tokens of the prompt (≤ T).
        keep_blocks: the budget in blocks.
        protected: newest token positions that are never evicted.
        sinks: oldest token positions that are never evicted.
        method: whose allocation, unit and scope decide (static); None for the globally cheapest
            blocks.

    Returns:
        The cache, what was evicted (G = 1), and ``ok``: False, and the cache unchanged, when the
        blocks do not suffice, when there is no such slot or it is not empty, or when `length` is
        out of range.

    Raises:
        ValueError: a shape does not fit the cache.
    """
    b = cache.block_size
    num_layers, num_tokens, num_heads, _ = k.shape
    given = jnp.asarray(length, jnp.int32)
    empty = cache.seq_len[slot] == 0
    length = jnp.clip(given, 0, num_tokens)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    heads = (num_layers, num_heads)
    context_len = jnp.broadcast_to(length, heads)
    observed = metric if isinstance(metric, Observed) else Observed(metric)
    metric = observed.metric
    owned = jnp.sum(blocks_for(context_len, b))
    evict = jnp.maximum(0, owned - jnp.maximum(keep_blocks, 0))
    plan = Plan.of(method, *heads, b, owned - evict, length, protected)
    position = jnp.broadcast_to(token, metric.shape)
    keys, raw = method_keys(
        method, metric, position, context_len, context_len, plan.protected, sinks
    )
    shares = jax.vmap(lambda k, t: head_shares(method, k, t, plan.protected))(keys, plan.tokens)
    padded = jnp.pad(keys, ((0, 0), (0, 0), (0, -num_tokens % b)), constant_values=jnp.inf)
    blocks, count, threshold, shortfall = choose_blocks(
        method, block_prices(padded, context_len, b), shares, plan.tokens, context_len, evict, b
    )
    held_k = jnp.swapaxes(k, 1, 2) if method is not None and method.needs_keys else None
    evicted = evicted_kvs(
        method, keys, raw, position, context_len, count, threshold, observed.votes, held_k
    )
    kept = ~evicted & (token < length)
    rank = jnp.where(kept, jnp.cumsum(kept, axis=-1, dtype=jnp.int32) - 1, num_tokens)
    layer, head = jnp.arange(num_layers)[:, None, None], jnp.arange(num_heads)[:, None]
    kept_index = jnp.zeros((*heads, num_tokens), jnp.int32)
    kept_index = kept_index.at[layer, head, rank].set(
        jnp.broadcast_to(token, rank.shape), mode="drop"
    )
    cache, ok = write_prompt(
        cache,
        slot,
        k,
        v,
        metric,
        jnp.where(empty, given, -1),
        kept_index=kept_index,
        kept_len=length - count,
    )
    return cache, CompressReport(jnp.sum(blocks)[None], shortfall[None]), ok
