"""Blocks with several owners: what they hold is written by none of them.

`PagedCache.shared` counts the owners of each block beside its first. Sharing copies table rows and
counts; who writes to a block of several owners copies that block first (`unshare`). A cache whose
`shared` is None shares nothing, and its steps are compiled without any of this.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from kvjax.cache.store.counting import running_count
from kvjax.cache.store.paged import PagedCache, claim, drop_blocks, free_blocks, with_fine
from kvjax.cache.store.pool import gathered, scattered
from kvjax.cache.store.shard import agreed

COPIED_AT_ONCE = 64
"""Blocks that are copied together; as many rounds follow as are needed, none where none is."""


def share(
    cache: PagedCache, source: Int32[Array, ""] | int, target: Int32[Array, ""] | int
) -> tuple[PagedCache, Bool[Array, ""]]:
    """Let an empty slot hold what another one holds. No KV of the pool is copied and no block is
    taken.

    Args:
        cache: a cache that shares (donate it).
        source: the slot that holds something.
        target: the slot that will, too.

    Returns:
        The cache and ``ok``: False, and the cache unchanged, when there is no such slot or the
        target is not empty.

    Raises:
        ValueError: the cache was made without `sharing`.
    """
    owners = _counted(cache)
    slots = cache.num_slots
    source, target = (jnp.asarray(x, jnp.int32) for x in (source, target))
    ok = (source >= 0) & (source < slots) & (target >= 0) & (target < slots)
    ok &= cache.seq_len.at[target].get(mode="fill", fill_value=1) == 0
    ok &= ~jnp.any(cache.context_len.at[target].get(mode="fill", fill_value=1))
    ok = agreed(cache.shard, ok)
    row = cache.block_table.at[source].get(mode="fill", fill_value=cache.num_blocks)
    at = jnp.where(ok, target, slots)

    def copied(rows: Array) -> Array:
        return rows.at[at].set(rows.at[source].get(mode="fill", fill_value=0), mode="drop")

    return dataclasses.replace(
        cache,
        block_table=cache.block_table.at[at].set(row, mode="drop"),
        context_len=copied(cache.context_len),
        seq_len=copied(cache.seq_len),
        shared=owners.at[jnp.where(ok, row, cache.num_blocks)].add(1, mode="drop"),
        window=None if cache.window is None else cache.window.copied(source, at),
    ), ok


def unshare(
    cache: PagedCache,
    table: Int32[Array, "*heads M"],
    touched: Bool[Array, "*heads M"],
    spare: Int[Array, ""] | int = 0,
) -> tuple[PagedCache, Int32[Array, "*heads M"], Bool[Array, ""]]:
    """Give some heads copies of those of their blocks that will be written to and have others.

    Args:
        cache: a cache that shares (donate it).
        table: block tables of the heads.
        touched: the entries whose blocks will be written to.
        spare: blocks that have to be free afterwards.

    Returns:
        The cache, the table that names the copies, and ``ok``: False, and both unchanged, when the
        blocks do not suffice. The table is not put into the cache.
    """
    owners = _counted(cache)
    wants = touched & (owners.at[table].get(mode="fill", fill_value=0) > 0)
    flat, n = wants.reshape(-1), cache.num_blocks
    count = jnp.sum(flat, dtype=jnp.int32)
    ok = agreed(cache.shard, count + spare <= free_blocks(cache))
    rank = (running_count(flat) - flat).reshape(wants.shape)
    wants &= ok
    new = jnp.where(wants, cache.free.peek(rank), n)
    old = jnp.where(wants, table, n)
    size = -(-flat.shape[0] // COPIED_AT_ONCE) * COPIED_AT_ONCE
    at = jnp.where(wants, rank, size).reshape(-1)
    source, target = (
        jnp.full(size, n, jnp.int32).at[at].set(ids.reshape(-1), mode="drop") for ids in (old, new)
    )
    cache, count = claim(cache, new), jnp.where(ok, count, 0)
    fine = cache.kv.fine
    if fine is not None:
        # Copies have finer codes, too, where there is room for them.
        fine = fine.grown(jnp.where(fine.of(old) < n, new, n), cache.free)
        cache = with_fine(cache, fine, cache.free)
        cache = _copied(cache, fine.of(source), fine.of(target), count)
    cache = _copied(cache, source, target, count)
    # Where all owners of a block take a copy at once, it ends here.
    return drop_blocks(cache, old), jnp.where(wants, new, table), ok


def unshare_slots(
    cache: PagedCache, slots: Bool[Array, " S"]
) -> tuple[PagedCache, Bool[Array, ""]]:
    """Give the marked slots copies of every block that others own too.

    Returns:
        The cache and ``ok``: False, and the cache unchanged, when the blocks do not suffice.
    """
    touched = jnp.broadcast_to(slots[:, None, None, None], cache.block_table.shape)
    cache, table, ok = unshare(cache, cache.block_table, touched)
    return dataclasses.replace(cache, block_table=table), ok


def unshare_last(
    cache: PagedCache,
    table: Int32[Array, "*heads M"],
    context_len: Int32[Array, "*heads"],
    grows: Bool[Array, "*#heads"],
    spare: Int[Array, ""],
) -> tuple[PagedCache, Int32[Array, "*heads M"], Bool[Array, ""]]:
    """Give the heads that grow copies of their last blocks, where these are partly filled and have
    other owners; otherwise as `unshare`."""
    b = cache.block_size
    column = jnp.minimum(context_len // b, table.shape[-1] - 1)[..., None]
    last = jnp.take_along_axis(table, column, axis=-1)
    touched = (grows & (context_len % b > 0))[..., None]
    cache, last, ok = unshare(cache, last, touched, spare)
    return cache, jnp.put_along_axis(table, column, last, axis=-1, inplace=False), ok


def _counted(cache: PagedCache) -> Int32[Array, " N"]:
    if cache.shared is None:
        raise ValueError("this cache shares no blocks: init_cache(sharing=True) makes one that can")
    return cache.shared


def _copied(
    cache: PagedCache,
    source: Int32[Array, " C"],
    target: Int32[Array, " C"],
    count: Int32[Array, ""],
) -> PagedCache:
    """The cache with the first `count` source blocks copied to the target blocks, all of them."""
    stored = cache.kv.stored_k, cache.kv.stored_v
    pools = (stored, cache.metric, cache.position, cache.state)

    def copy_some(step: Any) -> Any:
        first, pools = step
        these = [
            jax.lax.dynamic_slice_in_dim(ids, first, COPIED_AT_ONCE) for ids in (source, target)
        ]

        def copied(pool: Array) -> Array:
            return scattered(pool, (these[1],), gathered(pool, these[0]))

        return first + COPIED_AT_ONCE, jax.tree.map(copied, pools)

    first = (jnp.int32(0), pools)
    _, pools = jax.lax.while_loop(lambda step: step[0] < count, copy_some, first)
    (k, v), metric, position, state = pools
    kv = dataclasses.replace(cache.kv, stored_k=k, stored_v=v)
    return dataclasses.replace(cache, kv=kv, metric=metric, position=position, state=state)
