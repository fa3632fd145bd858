"""The block eviction schedule: which blocks each head gives up, decided by sorting.

Source: KV-Compress, section 4.2.2, equations 13–18. A head that gives up e blocks loses its
a + (e−1)·b smallest metrics, where a = context_len mod b (b if that is 0): the first block to go
is the ragged one. So the price of a head's e-th block is its (a + (e−1)·b)-th smallest metric, and
a sequence gives up its cheapest blocks over all layers and heads. Protected, sink and unwritten
KVs cost +inf, and a head keeps its last block (equation 16).
"""

import dataclasses
from functools import partial
from typing import NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache.allocate import Plan, choose_blocks, head_shares
from kvjax.cache.keys import method_keys
from kvjax.cache.methods.base import Method
from kvjax.cache.paged import PagedCache, blocks_for, valid_slots
from kvjax.cache.prices import block_prices
from kvjax.cache.representatives import evicted_kvs

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
    protected: Int32[Array, " G"]
    """Newest token positions that stay."""
    sinks: Int32[Array, ""]
    """Oldest token positions that stay."""


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


class RowKeys(NamedTuple):
    """What decides about the KVs of some (slot, layer) pairs, by logical index, T = M·b."""

    keys: Float[Array, "R H T"]
    raw: Float[Array, "R H T"]
    """The keys before a method's pages were joined."""
    position: Int32[Array, "R H T"]


def row_keys(
    metric: Float[Array, "N b"],
    position: Int32[Array, "N b"],
    rows: tuple[Int32[Array, "R H M"], Int32[Array, "R H"], Int32[Array, "R H"]],
    protected: Int32[Array, " R"],
    sinks: Int32[Array, ""] | int,
    method: Method | None = None,
) -> RowKeys:
    """`method_keys` of some (slot, layer) pairs."""
    table, context_len, seq_len = rows
    pages = (*table.shape[:2], table.shape[2] * metric.shape[1])
    position = position.at[table].get(mode="fill", fill_value=-1).reshape(pages)
    metric = metric.at[table].get(mode="fill", fill_value=0).reshape(pages)
    keys, raw = method_keys(
        method, metric, position, context_len, seq_len, protected[:, None], sinks
    )
    return RowKeys(keys, raw, position)


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
    protected: Int32[Array, "*G"] | int = 0,
    sinks: Int32[Array, ""] | int = 0,
    method: Method | None = None,
    max_kvs_per_step: int = MAX_KVS_PER_STEP,
) -> EvictionSchedule:
    """Decide which blocks some sequences give up. Changes nothing.

    Args:
        cache: the cache.
        slots: sequence slots to compress; each at most once. Slots out of range are passed over.
        evict: blocks that each of them shall give up.
        protected: the newest token positions that stay, of each sequence or of all.
        sinks: the oldest token positions that stay.
        method: whose allocation, unit and scope decide (static); None for the globally cheapest
            blocks.
        max_kvs_per_step: KVs sorted at once (static); bounds the temporaries, never the result.
    """
    slots = valid_slots(cache, slots)
    num_layers, num_heads = cache.num_layers, cache.num_kv_heads
    context_len = cache.context_len.at[slots].get(mode="fill", fill_value=0)
    seq_len = cache.seq_len.at[slots].get(mode="fill", fill_value=0)
    evict = jnp.maximum(jnp.asarray(evict, jnp.int32), 0)
    keep = jnp.sum(blocks_for(context_len, cache.block_size), axis=(1, 2)) - evict
    plan = jax.vmap(
        lambda k, s, p: Plan.of(method, num_layers, num_heads, cache.block_size, k, s, p)
    )(keep, seq_len, jnp.broadcast_to(jnp.asarray(protected, jnp.int32), slots.shape))

    def prices_of(batch):
        slot, layer, group = batch
        rows = head_rows(cache, slot, layer)
        guard = plan.protected[group]
        keys = row_keys(cache.metric, cache.position, rows, guard, sinks, method).keys
        shares = jax.vmap(lambda k, base, p: head_shares(method, k, base, p))(
            keys, plan.tokens[group, layer], guard
        )
        return block_prices(keys, rows[1], cache.block_size), shares

    slot, layer, group = row_batches(cache, slots, max_kvs_per_step)
    shape = (slots.shape[0], num_layers, num_heads)

    def by_group(x):
        return x.reshape(-1, *x.shape[2:])[: shape[0] * shape[1]].reshape(*shape, *x.shape[3:])

    prices, shares = jax.tree.map(by_group, jax.lax.map(prices_of, (slot, layer, group)))
    blocks, count, threshold, shortfall = jax.vmap(
        partial(choose_blocks, method, block_size=cache.block_size)
    )(prices, shares, plan.tokens, context_len, evict)
    return EvictionSchedule(
        slots, blocks, count, threshold, shortfall, plan.protected, jnp.asarray(sinks, jnp.int32)
    )


def row_evictions(
    method: Method | None,
    row: RowKeys,
    context_len: Int32[Array, "R H"],
    count: Int32[Array, "R H"],
    threshold: Float[Array, "R H"],
    k: Float[Array, "N b d"],
    table: Int32[Array, "R H M"],
) -> Bool[Array, "R H T"]:
    """The KVs of some (slot, layer) pairs that go, by logical index."""
    held_k = None
    if method is not None and method.needs_keys:
        held_k = k.at[table].get(mode="fill", fill_value=0).reshape(*row.keys.shape, -1)
    return evicted_kvs(
        method, row.keys, row.raw, row.position, context_len, count, threshold, k=held_k
    )


def eviction_mask(
    cache: PagedCache, schedule: EvictionSchedule, method: Method | None = None
) -> Bool[Array, "G L H T"]:
    """The KVs that a schedule evicts, by logical index (T = M·b)."""
    groups, num_layers, num_heads = schedule.count.shape
    slot = jnp.repeat(schedule.slots, num_layers)
    layer = jnp.tile(jnp.arange(num_layers, dtype=jnp.int32), groups)
    rows = head_rows(cache, slot, layer)
    guard = jnp.repeat(schedule.protected, num_layers)
    found = row_keys(cache.metric, cache.position, rows, guard, schedule.sinks, method)
    flat = (groups * num_layers, num_heads)
    count, threshold = schedule.count.reshape(flat), schedule.threshold.reshape(flat)
    mask = row_evictions(method, found, rows[1], count, threshold, cache.k, rows[0])
    return mask.reshape(*schedule.count.shape, -1)
