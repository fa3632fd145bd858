"""The block eviction schedule: which blocks each head gives up, decided by sorting.

Source: KV-Compress, section 4.2.2, equations 13–18. A head that gives up e blocks loses its
a + (e−1)·b smallest metrics, where a = context_len mod b (b if that is 0): the first block to go
is the ragged one. So the price of a head's e-th block is its (a + (e−1)·b)-th smallest metric, and
a sequence gives up its cheapest blocks over all layers and heads. Protected, sink and unwritten
KVs cost +inf, and a head keeps its last block (equation 16).
"""

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache.paged import PagedCache, blocks_for, valid_slots

MAX_KVS_PER_STEP = 5_000_000
"""KVs whose metrics are sorted at once; more are sorted in several rounds, none is left out."""


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EvictionSchedule:
    """What each head of some sequences gives up.

    `threshold` is the largest metric evicted: every smaller one goes too, and of the KVs equal to
    it those of the lowest logical index, until `count` are gone.
    """

    slots: Int32[Array, " G"]
    blocks: Int32[Array, "G L H"]
    """Blocks that each head gives up."""
    count: Int32[Array, "G L H"]
    """KVs that each head gives up: a + (blocks − 1)·b, or 0."""
    threshold: Float[Array, "G L H"]
    shortfall: Int32[Array, " G"]
    """Blocks that were asked for but are not evictable."""
    protected: Int32[Array, ""]
    """Newest token positions that stay."""
    sinks: Int32[Array, ""]
    """Oldest token positions that stay."""


def eviction_keys(
    metric: Float[Array, "*rows T"],
    position: Int32[Array, "*rows T"],
    context_len: Int32[Array, "*rows"],
    seq_len: Int32[Array, "*rows"],
    protected: Int32[Array, ""] | int,
    sinks: Int32[Array, ""] | int,
) -> Float[Array, "*rows T"]:
    """The metrics by which KVs are evicted, +inf where a KV may not be.

    The `protected` newest token positions, positions below `sinks`, slots past the context length
    and unwritten slots are never evicted, whatever their metric holds.
    """
    index = jnp.arange(metric.shape[-1], dtype=jnp.int32)
    evictable = (
        (index < context_len[..., None])
        & (position >= sinks)
        & (position >= 0)
        & (position < seq_len[..., None] - protected)
        & jnp.isfinite(metric)
    )
    return jnp.where(evictable, metric, jnp.inf)


def block_prices(
    keys: Float[Array, "*rows T"], context_len: Int32[Array, "*rows"], block_size: int
) -> Float[Array, "*rows M"]:
    """Price of the 1st, 2nd, … block of each head, non-decreasing; +inf where it must stay."""
    num_blocks = keys.shape[-1] // block_size
    owned = blocks_for(context_len, block_size)[..., None]
    e = jnp.arange(1, num_blocks + 1, dtype=jnp.int32)
    lost = context_len[..., None] - (owned - e) * block_size
    price = jnp.take_along_axis(
        jnp.sort(keys, axis=-1), jnp.clip(lost - 1, 0, keys.shape[-1] - 1), axis=-1
    )
    return jnp.where(e < owned, price, jnp.inf)


def select_blocks(
    prices: Float[Array, "L H M"],
    context_len: Int32[Array, "L H"],
    evict: Int32[Array, ""],
    block_size: int,
) -> tuple[Int32[Array, "L H"], Int32[Array, "L H"], Float[Array, "L H"], Int32[Array, ""]]:
    """The `evict` cheapest blocks of one sequence, globally over layers and heads.

    Equal prices go in (layer, head, block) order, so what a head gives up is always a prefix of
    its schedule.

    Returns:
        Blocks per head, KVs per head, the largest metric evicted per head (−inf if none), and the
        shortfall: blocks asked for beyond the evictable ones.
    """
    flat = prices.reshape(-1)
    evictable = jnp.sum(jnp.isfinite(flat), dtype=jnp.int32)
    taken = jnp.clip(evict, 0, evictable)
    limit = jnp.sort(flat)[jnp.maximum(taken - 1, 0)]
    limit = jnp.where(taken > 0, limit, -jnp.inf)
    cheaper, equal = flat < limit, flat == limit
    room = taken - jnp.sum(cheaper, dtype=jnp.int32)
    chosen = cheaper | (equal & (jnp.cumsum(equal, dtype=jnp.int32) <= room))
    blocks = jnp.sum(chosen.reshape(prices.shape), axis=-1, dtype=jnp.int32)
    kept_blocks = blocks_for(context_len, block_size) - blocks
    count = jnp.where(blocks > 0, context_len - kept_blocks * block_size, 0)
    threshold = jnp.take_along_axis(prices, jnp.maximum(blocks - 1, 0)[..., None], -1)[..., 0]
    threshold = jnp.where(blocks > 0, threshold, -jnp.inf)
    return blocks, count, threshold, jnp.maximum(evict, 0) - taken


def smallest(
    keys: Float[Array, "*rows T"],
    count: Int32[Array, "*rows"],
    threshold: Float[Array, "*rows"],
) -> Bool[Array, "*rows T"]:
    """Marks the `count` smallest keys of each row, ties by index, given the count-th smallest."""
    threshold = threshold[..., None]
    below, equal = keys < threshold, keys == threshold
    room = count - jnp.sum(below, axis=-1, dtype=jnp.int32)
    return below | (equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= room[..., None]))


def head_rows(
    cache: PagedCache, slot: Int32[Array, " R"], layer: Int32[Array, " R"]
) -> tuple[Int32[Array, "R H M"], Int32[Array, "R H"], Int32[Array, "R H"]]:
    """Block tables, context lengths and sequence lengths of some (slot, layer) pairs.

    A slot out of range yields heads that hold nothing.
    """
    table = cache.block_table.at[slot, layer].get(mode="fill", fill_value=cache.num_blocks)
    context_len = cache.context_len.at[slot, layer].get(mode="fill", fill_value=0)
    seq_len = cache.seq_len.at[slot].get(mode="fill", fill_value=0)
    return table, context_len, jnp.broadcast_to(seq_len[:, None], context_len.shape)


def row_keys(
    metric: Float[Array, "N b"],
    position: Int32[Array, "N b"],
    rows: tuple[Int32[Array, "R H M"], Int32[Array, "R H"], Int32[Array, "R H"]],
    protected: Int32[Array, ""] | int,
    sinks: Int32[Array, ""] | int,
) -> Float[Array, "R H T"]:
    """`eviction_keys` of some (slot, layer) pairs by logical index, T = M·b."""
    table, context_len, seq_len = rows
    pages = (*table.shape[:2], table.shape[2] * metric.shape[1])
    return eviction_keys(
        metric.at[table].get(mode="fill", fill_value=0).reshape(pages),
        position.at[table].get(mode="fill", fill_value=-1).reshape(pages),
        context_len,
        seq_len,
        protected,
        sinks,
    )


def row_batches(
    cache: PagedCache, slots: Int32[Array, " G"], max_kvs_per_step: int
) -> tuple[Int32[Array, "B R"], Int32[Array, "B R"], Int32[Array, "B R"]]:
    """All (slot, layer) pairs of `slots`, in batches of at most `max_kvs_per_step` KVs.

    Returns slot, layer and index into `slots` of each pair. The last batch is filled with slot S,
    which is out of range. One pair is the least a batch can hold.
    """
    num_layers = cache.num_layers
    rows = slots.shape[0] * num_layers
    per_row = cache.num_kv_heads * cache.max_blocks * cache.block_size
    size = max(1, min(rows, max_kvs_per_step // per_row))
    batches = -(-rows // size)
    row = jnp.arange(batches * size, dtype=jnp.int32).reshape(batches, size)
    group = jnp.minimum(row // num_layers, slots.shape[0] - 1)
    slot = jnp.where(row < rows, slots[group], cache.num_slots)
    return slot, row % num_layers, group


def schedule_evictions(
    cache: PagedCache,
    slots: Int32[Array, " G"],
    evict: Int32[Array, " G"],
    *,
    protected: Int32[Array, ""] | int = 0,
    sinks: Int32[Array, ""] | int = 0,
    max_kvs_per_step: int = MAX_KVS_PER_STEP,
) -> EvictionSchedule:
    """Decide which blocks some sequences give up. Changes nothing.

    Args:
        cache: the cache.
        slots: sequence slots to compress; each at most once. Slots out of range are passed over.
        evict: blocks that each of them shall give up.
        protected: the newest token positions that stay.
        sinks: the oldest token positions that stay.
        max_kvs_per_step: KVs sorted at once (static); bounds the temporaries, never the result.
    """
    slots = valid_slots(cache, slots)
    evict = jnp.asarray(evict, jnp.int32)

    def prices_of(batch):
        rows = head_rows(cache, batch[0], batch[1])
        keys = row_keys(cache.metric, cache.position, rows, protected, sinks)
        return block_prices(keys, rows[1], cache.block_size)

    slot, layer, _ = row_batches(cache, slots, max_kvs_per_step)
    shape = (slots.shape[0], cache.num_layers, cache.num_kv_heads, cache.max_blocks)
    prices = jax.lax.map(prices_of, (slot, layer)).reshape(-1, *shape[2:])
    prices = prices[: shape[0] * shape[1]].reshape(shape)
    context_len = cache.context_len.at[slots].get(mode="fill", fill_value=0)
    blocks, count, threshold, shortfall = jax.vmap(
        lambda p, c, e: select_blocks(p, c, e, cache.block_size)
    )(prices, context_len, evict)
    return EvictionSchedule(
        slots,
        blocks,
        count,
        threshold,
        shortfall,
        jnp.asarray(protected, jnp.int32),
        jnp.asarray(sinks, jnp.int32),
    )


def eviction_mask(cache: PagedCache, schedule: EvictionSchedule) -> Bool[Array, "G L H T"]:
    """The KVs that a schedule evicts, by logical index (T = M·b)."""
    groups, num_layers = schedule.count.shape[:2]
    slot = jnp.repeat(schedule.slots, num_layers)
    layer = jnp.tile(jnp.arange(num_layers, dtype=jnp.int32), groups)
    keys = row_keys(
        cache.metric,
        cache.position,
        head_rows(cache, slot, layer),
        schedule.protected,
        schedule.sinks,
    )
    return smallest(
        keys.reshape(*schedule.count.shape, keys.shape[-1]), schedule.count, schedule.threshold
    )
