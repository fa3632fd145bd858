"""MoveCache: survivors move out of the blocks that a schedule empties, and these become free.

Source: KV-Compress, section 4.2.2 and algorithm 1, as one cumulative sum, gather and scatter
instead of a loop over KVs. Nothing is rotated: every KV keeps its key and its token position.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache.evict import (
    MAX_KVS_PER_STEP,
    NOTHING,
    EvictionSchedule,
    RowScores,
    head_rows,
    row_batches,
    row_evictions,
    row_scores,
)
from kvjax.cache.policy.merge import Merger
from kvjax.cache.policy.observe import of_layer
from kvjax.cache.policy.score import Artefacts
from kvjax.cache.store import (
    KVWindow,
    PagedCache,
    agreed,
    blocks_for,
    drop_blocks,
    free_blocks,
    gathered,
    move_rows,
    running_count,
    unshare,
)
from kvjax.cache.store.paged import UNWRITTEN

Rows = tuple[Float[Array, "R H T d"], Float[Array, "R H T d"]]
"""Keys, as they are stored, and values of some (slot, layer) pairs, by logical index."""


def move_plan(
    evicted: Bool[Array, "*rows T"], context_len: Int32[Array, "*rows"]
) -> tuple[Int32[Array, "*rows U"], Int32[Array, "*rows U"], Bool[Array, "*rows U"]]:
    """Logical source and target of each move, and which of them count (U = ⌊T/2⌋).

    Targets are the evicted KVs below the new length, sources the survivors at or above it: as
    many of the one as of the other, so at most half of the row moves.
    """
    index = jnp.arange(evicted.shape[-1], dtype=jnp.int32)
    held = index < context_len[..., None]
    new_len = (context_len - jnp.sum(evicted, axis=-1, dtype=jnp.int32))[..., None]
    target = evicted & (index < new_len)
    source = held & ~evicted & (index >= new_len)
    half = max(1, evicted.shape[-1] // 2)

    def positions_of(mask):
        rank = jnp.where(mask, running_count(mask) - 1, half)
        flat = rank.reshape(-1, rank.shape[-1])
        row = jnp.arange(flat.shape[0])[:, None]
        found = jnp.zeros((flat.shape[0], half), jnp.int32)
        found = found.at[row, flat].set(jnp.broadcast_to(index, flat.shape), mode="drop")
        return found.reshape(*mask.shape[:-1], half)

    moves = jnp.arange(half) < jnp.sum(target, axis=-1, dtype=jnp.int32)[..., None]
    return positions_of(source), positions_of(target), moves


def move_cache(
    cache: PagedCache,
    schedule: EvictionSchedule,
    *,
    artefacts: Artefacts = NOTHING,
    max_kvs_per_step: int = MAX_KVS_PER_STEP,
) -> PagedCache:
    """Carry out a schedule: survivors move into the holes, the emptied tail blocks become free.

    Keys, values and all numbers of a KV move together and in place; a method's merger folds what
    goes into what stays before, and reads `artefacts` for it. `schedule` must have been made from
    this cache. `max_kvs_per_step` (static) bounds the temporaries, never the result.

    Blocks that are written to and that others own too are copied first; a sequence whose copies
    do not fit into the free blocks keeps everything.
    """
    if cache.shared is not None:
        cache, schedule = _unshared(cache, schedule, max_kvs_per_step)
    b, n, method = cache.block_size, cache.num_blocks, schedule.method

    def move_batch(pools, batch):
        kv, numbers, window = pools
        slot, layer, group = batch
        rows = head_rows(cache, slot, layer)
        table, context_len, seq_len = rows
        now = dataclasses.replace(cache, kv=kv, window=window)
        found = row_scores(method, numbers, rows, schedule.protected[group])
        in_range = (slot < cache.num_slots)[:, None]
        evictions = jnp.where(in_range, schedule.count[group, layer], 0)
        threshold = schedule.threshold[group, layer]
        evicted = row_evictions(method, found, context_len, evictions, threshold, now, layer, table)
        merged = None
        if method.merger is not None:
            held = jnp.arange(evicted.shape[-1], dtype=jnp.int32) < context_len[..., None]
            goes, stays = evicted & held, held & ~evicted
            merged, window = _merged(
                method.merger, artefacts, now, table, slot, layer, found, goes, stays, seq_len
            )  # fmt: skip
            # What is read of the pool is, before any of it moves: else it would be copied.
            kv, merged = jax.lax.optimization_barrier((kv, merged))
        plan = source, target, moves = move_plan(evicted, context_len)

        count = jnp.sum(moves, axis=-1, dtype=jnp.int32)

        def slot_of(index):
            block = jnp.take_along_axis(table, index // b, axis=-1)
            return (block * b + index % b).reshape(-1, index.shape[-1])

        source, target = slot_of(source), slot_of(target)
        moves = (source, target, count.reshape(-1))
        kv = kv.move(*moves)
        if merged is not None:
            # Not before: blocks that go may be others' as well.
            into = jnp.where(_written(cache, context_len, evictions), table, n)
            kv = kv.rewrite(into, *(_moved(rows, plan, into, b) for rows in merged))
        return (kv, jax.tree.map(lambda pool: move_rows(pool, *moves), numbers), window), None

    # Gathered keys and values are d times the size of a metric: keep them far below the pool.
    step = min(max_kvs_per_step, n * b // 32)
    batches = row_batches(cache, schedule.slots, step)
    numbers = (cache.metric, cache.position, cache.state)
    carry = (cache.kv, numbers, cache.window)
    (kv, (metric, position, state), window), _ = jax.lax.scan(move_batch, carry, batches)
    cache = dataclasses.replace(
        cache, kv=kv, metric=metric, position=position, state=state, window=window
    )
    cache = _free_tails(cache, schedule)
    return cache if window is None else _found_again(cache, batches)


def _unshared(
    cache: PagedCache, schedule: EvictionSchedule, max_kvs_per_step: int
) -> tuple[PagedCache, EvictionSchedule]:
    """The cache with copies of the shared blocks that a schedule writes to, and the schedule of
    those sequences for whose copies there is room."""
    b, n, method = cache.block_size, cache.num_blocks, schedule.method
    assert cache.shared is not None

    def written(batch):
        slot, layer, group = batch
        rows = head_rows(cache, slot, layer)
        count = jnp.where((slot < cache.num_slots)[:, None], schedule.count[group, layer], 0)
        stays = _written(cache, rows[1], count)
        if method.merger is None:
            numbers = (cache.metric, cache.position, cache.state)
            found = row_scores(method, numbers, rows, schedule.protected[group])
            threshold = schedule.threshold[group, layer]
            evicted = row_evictions(method, found, rows[1], count, threshold, cache, layer, rows[0])
            stays &= jnp.any(evicted.reshape(*stays.shape, b), axis=-1)
        return stays

    batches = row_batches(cache, schedule.slots, min(max_kvs_per_step, n * b // 32))
    table = cache.block_table.at[schedule.slots].get(mode="fill", fill_value=n)
    touched = jax.lax.map(written, batches).reshape(-1, *table.shape[2:])
    touched = touched[: table.shape[0] * table.shape[1]].reshape(table.shape)
    copies = touched & (cache.shared.at[table].get(mode="fill", fill_value=0) > 0)
    needed = jnp.sum(copies, axis=(1, 2, 3))

    def taken(left, needs):
        # One that does not fit takes nothing, so that those behind it may.
        return left - jnp.where(needs <= left, needs, 0), needs <= left

    _, fits = jax.lax.scan(taken, free_blocks(cache), needed)
    fits = agreed(cache.shard, fits)[:, None, None]
    cache, table, _ = unshare(cache, table, copies & fits[..., None])
    schedule = dataclasses.replace(
        schedule,
        blocks=jnp.where(fits, schedule.blocks, 0),
        count=jnp.where(fits, schedule.count, 0),
        threshold=jnp.where(fits, schedule.threshold, -jnp.inf),
    )
    table = cache.block_table.at[schedule.slots].set(table, mode="drop")
    return dataclasses.replace(cache, block_table=table), schedule


def _written(
    cache: PagedCache, context_len: Int32[Array, "R H"], count: Int32[Array, "R H"]
) -> Bool[Array, "R H M"]:
    """Which blocks may be written to of heads that give up so many KVs: what is left of those that
    lose any."""
    column = jnp.arange(cache.max_blocks, dtype=jnp.int32)
    left = blocks_for(context_len - count, cache.block_size)
    return (count > 0)[..., None] & (column < left[..., None])


def _merged(
    merger: Merger,
    artefacts: Artefacts,
    cache: PagedCache,
    table: Int32[Array, "R H M"],
    slot: Int32[Array, " R"],
    layer: Int32[Array, " R"],
    found: RowScores,
    goes: Bool[Array, "R H T"],
    stays: Bool[Array, "R H T"],
    seq_len: Int32[Array, "R H"],
) -> tuple[tuple[Rows, Rows], KVWindow | None]:
    """Keys and values of some (slot, layer) pairs, as they are stored and with what goes folded
    into what stays, and the window with the same."""
    rows = (*goes.shape, -1)
    kv, window = cache.kv, cache.window
    stored, v = (x.reshape(rows) for x in kv.read(table))
    if window is not None:
        stored, v = window.over(slot, layer, stored, v)
    k = cache.read_keys(layer, stored)

    def fold(row):
        layer, k, v, position, score, goes, stays, seq_len = row
        own = of_layer(merger.reads(artefacts), artefacts, layer)
        return merger.fold(k, v, position, score, goes, stays, seq_len, own)

    inputs = layer, k, v, found.position, found.scores, goes, stays, seq_len[:, 0]
    k_rows, v_rows = jax.lax.map(fold, inputs, batch_size=merger.layers_at_once)
    k_rows = cache.changed_keys(layer, stored, k, k_rows)
    if window is not None:
        window = window.changed(slot, layer, k_rows, v_rows)
    return ((stored, v), (k_rows, v_rows)), window


def _moved(
    rows: Rows,
    plan: tuple[Int32[Array, "R H U"], Int32[Array, "R H U"], Bool[Array, "R H U"]],
    table: Int32[Array, "R H M"],
    block_size: int,
) -> tuple[Float[Array, "R H M b d"], Float[Array, "R H M b d"]]:
    """Keys and values by where their KVs are after the moves of a plan (`move_plan`), in blocks."""
    source, target, moves = plan
    size = rows[0].shape[2]
    place = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), rows[0].shape[:3])
    row, head, _ = jnp.indices(target.shape, sparse=True)
    place = place.at[row, head, jnp.where(moves, target, size)].set(source, mode="drop")
    k, v = (jnp.take_along_axis(x, place[..., None], axis=2) for x in rows)
    blocks = (*table.shape, block_size, -1)
    return k.reshape(blocks), v.reshape(blocks)


def _found_again(
    cache: PagedCache, batches: tuple[Int32[Array, "B R"], Int32[Array, "B R"], Int32[Array, "B R"]]
) -> PagedCache:
    """The cache with the window's rows where the KVs of some (slot, layer) pairs are now."""

    def found(window, batch):
        slot, layer, _ = batch
        table, context_len, _ = head_rows(cache, slot, layer)
        position = gathered(cache.position, table, UNWRITTEN).reshape(*context_len.shape, -1)
        held = jnp.arange(position.shape[-1], dtype=jnp.int32) < context_len[..., None]
        return window.found_again(slot, layer, jnp.where(held, position, UNWRITTEN)), None

    window, _ = jax.lax.scan(found, cache.window, batches)
    return dataclasses.replace(cache, window=window)


def _free_tails(cache: PagedCache, schedule: EvictionSchedule) -> PagedCache:
    """Free the last `schedule.blocks` blocks of each head and shorten the heads."""
    n, slots = cache.num_blocks, schedule.slots
    table = cache.block_table.at[slots].get(mode="fill", fill_value=n)
    context_len = cache.context_len.at[slots].get(mode="fill", fill_value=0)
    new_len = context_len - schedule.count
    column = jnp.arange(cache.max_blocks, dtype=jnp.int32)
    emptied = column >= blocks_for(new_len, cache.block_size)[..., None]
    cache = drop_blocks(cache, jnp.where(emptied, table, n))
    return dataclasses.replace(
        cache,
        block_table=cache.block_table.at[slots].set(jnp.where(emptied, n, table), mode="drop"),
        context_len=cache.context_len.at[slots].set(new_len, mode="drop"),
    )
