"""The block eviction schedule: which blocks each head gives up, decided by sorting.

Source: KV-Compress, section 4.2.2, equations 13–18. A head that gives up e blocks loses its
a + (e−1)·b smallest metrics, where a = context_len mod b (b if that is 0): the first block to go
is the ragged one. So the cost of a head's e-th block is its (a + (e−1)·b)-th smallest metric, and
a sequence gives up its cheapest blocks over all layers and heads. Protected, sink and unwritten
KVs cost +inf, and a head keeps its last block (equation 16).
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Num

from kvjax.cache.policy.allocate import BlockCosts, Budget
from kvjax.cache.policy.block_cost import block_costs, given_up
from kvjax.cache.policy.checks import check_gave
from kvjax.cache.policy.method import PLAIN, Method
from kvjax.cache.policy.score import Artefacts
from kvjax.cache.policy.select import Candidates, evictable_kvs, evicted_kvs
from kvjax.cache.store import (
    HeadShard,
    PagedCache,
    blocks_for,
    gathered,
    summed,
    valid_slots,
)

NOTHING: Artefacts = MappingProxyType({})
"""No calibrated arrays."""
LOWEST = -1e30
"""The least eviction score."""
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
    """Newest token positions that stay, by the method and the budget."""
    method: Method
    """What it was decided by."""


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


class RowScores(NamedTuple):
    """What decides about the KVs of some (slot, layer) pairs, by logical index, T = M·b."""

    scores: Float[Array, "R H T"]
    single: Float[Array, "R H T"]
    """The scores before a method's pages were joined."""
    position: Int32[Array, "R H T"]


def row_scores(
    method: Method,
    numbers: tuple[Float[Array, "N b"], Int32[Array, "N b"], Mapping[str, Num[Array, "N b w"]]],
    rows: tuple[Int32[Array, "R H M"], Int32[Array, "R H"], Int32[Array, "R H"]],
    protected: Int32[Array, " R"],
) -> RowScores:
    """`eviction_scores` of some (slot, layer) pairs.

    Args:
        method: the method.
        numbers: pools of metrics, positions and planes.
        rows: from `head_rows`.
        protected: newest token positions of each pair that stay.
    """
    table, context_len, seq_len = rows
    shape = (*table.shape[:2], -1)
    metric, position, state = numbers
    position = gathered(position, table, -1).reshape(shape)
    metric = gathered(metric, table).reshape(shape)
    state = {
        plane.name: gathered(state[plane.name], table).reshape(*position.shape, plane.width)
        for plane in method.planes
        if plane.name in state
    }
    scores, single = eviction_scores(
        method, metric, state, position, context_len, seq_len, protected[:, None]
    )
    return RowScores(scores, single, position)


def eviction_scores(
    method: Method,
    metric: Float[Array, "*rows H T"],
    state: Mapping[str, Num[Array, "*rows H T w"]],
    position: Int32[Array, "*rows H T"],
    context_len: Int32[Array, "*rows H"],
    seq_len: Int32[Array, "*rows H"],
    protected: Int32[Array, "..."] | int,
) -> tuple[Float[Array, "*rows H T"], Float[Array, "*rows H T"]]:
    """The scores by which KVs are evicted, +inf where a KV may not be (`evictable_kvs`), −inf as
    `LOWEST`.

    The second axis from the right holds the heads of one layer. Returns the scores, and the same
    before a method's pages were joined.

    Args:
        method: the method.
        metric: metric of each KV by logical index.
        state: further numbers of each KV, by the names of its planes.
        position: token position of each.
        context_len: KVs that each head holds.
        seq_len: tokens that the sequence of each head has seen.
        protected: newest token positions that stay.
    """
    evictable = evictable_kvs(metric, position, context_len, seq_len, protected, method.sinks)
    rank = metric
    if method.scorer is not None:
        rank = method.scorer.rank(metric, state, position, seq_len)
        check_gave(method.scorer, "rank", rank, jnp.floating, metric.shape, "[…, H, T]")
    # What is no number tells no order; of −inf sums are made, and −inf stands for none that go.
    evictable = evictable & ~jnp.isnan(rank)
    rank = jnp.maximum(rank, LOWEST)
    joined, single = method.selector.eviction_scores(rank, evictable, position)
    for got in (joined, single):
        check_gave(method.selector, "eviction_scores", got, jnp.floating, rank.shape, "[…, H, T]")
    return joined, single


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


class Decision(NamedTuple):
    """What each head of a sequence gives up; see `EvictionSchedule`."""

    blocks: Int32[Array, "L H"]
    count: Int32[Array, "L H"]
    threshold: Float[Array, "L H"]
    shortfall: Int32[Array, ""]


def decide(
    method: Method,
    costs: BlockCosts,
    context_len: Int32[Array, "L H"],
    budget: Budget,
    artefacts: Artefacts,
    shard: HeadShard | None = None,
) -> Decision:
    """Split a budget by the costs of blocks; what a head cannot give up it keeps.

    With a shard, a budget of all heads, of which these are one device's.
    """
    of = method.allocator
    if shard is None:
        kept = of.split(costs, budget, artefacts)
    else:
        kept = of.split_of_shard(costs, budget, artefacts, shard)
    check_gave(of, "split", kept, jnp.integer, costs.owned.shape, "[L, H]")
    kept = jnp.clip(kept, costs.least, costs.owned)
    blocks = costs.owned - kept
    count, threshold = given_up(costs.cost, blocks, context_len, budget.block_size)
    over = summed(shard, jnp.sum(kept)) - of.allowed(budget, artefacts)
    return Decision(blocks, count, threshold, jnp.maximum(over, 0))


def shares_of(
    method: Method,
    scores: Float[Array, "R H T"],
    layer: Int32[Array, " R"],
    budget: Budget,
    artefacts: Artefacts,
    shard: HeadShard | None,
    budget_axis: int | None = 0,
) -> Float[Array, "R H"]:
    """What the allocator says of each head of some layers, with a budget for each or one for all
    (`budget_axis` None)."""
    of, own = method.allocator, None
    if shard is not None:
        own = jax.tree.map(lambda number: number[layer], shard)

    def one(s, l, b, o):
        got = (
            of.shares(s, l, b, artefacts)
            if o is None
            else of.shares_of_shard(s, l, b, artefacts, o)
        )
        check_gave(of, "shares", got, jnp.floating, s.shape[:1], "[H]")
        return got

    return jax.vmap(one, (0, 0, budget_axis, 0))(scores, layer, budget, own)


def schedule_evictions(
    cache: PagedCache,
    slots: Int32[Array, " G"],
    evict: Int32[Array, " G"],
    method: Method = PLAIN,
    *,
    artefacts: Artefacts = NOTHING,
    max_kvs_per_step: int = MAX_KVS_PER_STEP,
) -> EvictionSchedule:
    """Decide which blocks some sequences give up. Changes nothing.

    Args:
        cache: the cache.
        slots: sequence slots to compress; each at most once. Slots out of range are passed over.
        evict: blocks that each of them shall give up.
        method: what decides, and what stays whatever is decided; by default the globally cheapest
            blocks go and nothing is protected.
        artefacts: calibrated arrays, if the method reads any.
        max_kvs_per_step: KVs sorted at once (static); bounds the temporaries, never the result.
    """
    slots = valid_slots(cache, slots)
    shard = cache.shard
    shape = (cache.num_layers, cache.all_kv_heads, cache.block_size)
    context_len = cache.context_len.at[slots].get(mode="fill", fill_value=0)
    seq_len = cache.seq_len.at[slots].get(mode="fill", fill_value=0)
    evict = jnp.maximum(jnp.asarray(evict, jnp.int32), 0)
    owned = blocks_for(context_len, cache.block_size)
    budgets = jax.vmap(lambda k, s, p: Budget.of(k, s, p, method.shares, shape))(
        summed(shard, jnp.sum(owned, axis=(1, 2))) - evict,
        seq_len,
        jnp.broadcast_to(jnp.asarray(method.protected, jnp.int32), slots.shape),
    )

    def costs_of(batch):
        slot, layer, group = batch
        rows = head_rows(cache, slot, layer)
        budget = jax.tree.map(lambda x: x[group], budgets)
        numbers = (cache.metric, cache.position, cache.state)
        scores = row_scores(method, numbers, rows, budget.protected).scores
        shares = shares_of(method, scores, layer, budget, artefacts, shard)
        return block_costs(scores, rows[1], cache.block_size), shares

    slot, layer, group = row_batches(cache, slots, max_kvs_per_step)
    heads = (slots.shape[0], cache.num_layers, cache.num_kv_heads)

    def by_group(x):
        return x.reshape(-1, *x.shape[2:])[: heads[0] * heads[1]].reshape(*heads, *x.shape[3:])

    cost, shares = jax.tree.map(by_group, jax.lax.map(costs_of, (slot, layer, group)))
    same = method.selector.scope == "layer"
    decided = jax.vmap(
        lambda c, o, s, n, b: decide(method, BlockCosts(c, o, s, same), n, b, artefacts, shard)
    )(cost, owned, shares, context_len, budgets)
    return EvictionSchedule(slots, *decided, budgets.protected, method)


def row_evictions(
    method: Method,
    row: RowScores,
    context_len: Int32[Array, "R H"],
    count: Int32[Array, "R H"],
    threshold: Float[Array, "R H"],
    cache: PagedCache,
    layer: Int32[Array, " R"],
    table: Int32[Array, "R H M"],
) -> Bool[Array, "R H T"]:
    """The KVs of some (slot, layer) pairs that go, by logical index."""
    held_k = None
    if method.selector.needs_keys:
        held_k = cache.kv.read(table)[0].reshape(*row.scores.shape, -1)
        held_k = cache.read_keys(layer, held_k)
    of = Candidates(row.scores, row.single, row.position, context_len, count, threshold, k=held_k)
    return evicted_kvs(method.selector, of)


def eviction_mask(cache: PagedCache, schedule: EvictionSchedule) -> Bool[Array, "G L H T"]:
    """The KVs that a schedule evicts, by logical index (T = M·b)."""
    groups, num_layers, num_heads = schedule.count.shape
    slot = jnp.repeat(schedule.slots, num_layers)
    layer = jnp.tile(jnp.arange(num_layers, dtype=jnp.int32), groups)
    rows = head_rows(cache, slot, layer)
    guard = jnp.repeat(schedule.protected, num_layers)
    numbers = (cache.metric, cache.position, cache.state)
    found = row_scores(schedule.method, numbers, rows, guard)
    flat = (groups * num_layers, num_heads)
    count, threshold = schedule.count.reshape(flat), schedule.threshold.reshape(flat)
    mask = row_evictions(schedule.method, found, rows[1], count, threshold, cache, layer, rows[0])
    return mask.reshape(*schedule.count.shape, -1)
