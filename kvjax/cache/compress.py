"""Compression of running sequences: schedule, move, free, as one function.

Source: KV-Compress, section 4.2.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from kvjax.cache.evict import MAX_KVS_PER_STEP, schedule_evictions
from kvjax.cache.move import move_cache
from kvjax.cache.paged import PagedCache, blocks_for


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
    protected: Int32[Array, ""] | int = 0,
    sinks: Int32[Array, ""] | int = 0,
    max_kvs_per_step: int = MAX_KVS_PER_STEP,
) -> tuple[PagedCache, CompressReport]:
    """Evict from each of `slots` until it owns at most `keep_blocks` blocks over all its heads.

    The freed blocks are allocatable at once. Sequences do not influence each other. Partial blocks
    count as whole ones. Where less is evictable than asked, everything evictable goes and the rest
    is reported as the shortfall.

    Args:
        cache: the cache (donate it).
        slots: sequence slots, each at most once; slots out of range are passed over.
        keep_blocks: the budget of each, from `kvjax.cache.budget.budget_blocks`.
        protected: newest token positions that are never evicted.
        sinks: oldest token positions that are never evicted.
        max_kvs_per_step: KVs handled at once (static); more are split, never skipped.
    """
    slots = jnp.asarray(slots, jnp.int32)
    context_len = cache.context_len.at[slots].get(mode="fill", fill_value=0)
    owned = jnp.sum(blocks_for(context_len, cache.block_size), axis=(1, 2))
    schedule = schedule_evictions(
        cache,
        slots,
        jnp.maximum(0, owned - jnp.asarray(keep_blocks, jnp.int32)),
        protected=protected,
        sinks=sinks,
        max_kvs_per_step=max_kvs_per_step,
    )
    cache = move_cache(cache, schedule, max_kvs_per_step=max_kvs_per_step)
    return cache, CompressReport(jnp.sum(schedule.blocks, axis=(1, 2)), schedule.shortfall)
