"""A few sequence slots as a cache of their own, so that a step works on those that take part.

The pool is not touched: the part shares it, and what a step does to it holds for the whole.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int32

from kvjax.cache.store.paged import PagedCache, valid_slots


def _present(cache: PagedCache, slots: Int32[Array, " G"], max_blocks: int) -> Int32[Array, " G"]:
    """The slots, with S for those that cannot be a row of a part with so many columns."""
    slots = valid_slots(cache, slots)
    held = cache.context_len.at[slots].get(mode="fill", fill_value=0)
    fits = jnp.max(held, axis=(1, 2)) <= max_blocks * cache.block_size
    return jnp.where(fits, slots, cache.num_slots)


def take_slots(
    cache: PagedCache, slots: Int32[Array, " G"], max_blocks: int | None = None
) -> PagedCache:
    """The cache with only the rows of `slots`, in that order.

    A slot out of range gives an empty row, and so does one that comes again or whose heads own
    more than `max_blocks`: what is done to that row is lost.

    Args:
        cache: the cache.
        slots: sequence slots.
        max_blocks: columns of the block table (static); all by default.
    """
    table = cache.block_table[..., :max_blocks]
    slots = _present(cache, slots, table.shape[-1])
    return dataclasses.replace(
        cache,
        block_table=table.at[slots].get(mode="fill", fill_value=cache.num_blocks),
        context_len=cache.context_len.at[slots].get(mode="fill", fill_value=0),
        seq_len=cache.seq_len.at[slots].get(mode="fill", fill_value=0),
        window=None if cache.window is None else cache.window.taken(slots),
    )


def put_slots(
    cache: PagedCache,
    slots: Int32[Array, " G"],
    part: PagedCache,
    most_new: int | None = None,
) -> PagedCache:
    """The cache after a step on `part`, which `take_slots` made of these slots.

    Args:
        cache: the cache as it was, but for the pool.
        slots: the slots.
        part: their rows.
        most_new: where nothing has changed of the block tables but that heads have got so many KVs
            more at most (static): of long tables little is written then.
    """
    slots, table, b = _present(cache, slots, part.max_blocks), cache.block_table, cache.block_size
    if most_new is None:
        columns = slice(0, part.max_blocks)
        table = table.at[slots, ..., columns].set(part.block_table, mode="drop")
    else:
        first = cache.context_len.at[slots].get(mode="fill", fill_value=0)[..., None] // b
        column = first + jnp.arange((b + most_new - 2) // b + 1, dtype=jnp.int32)
        at = jnp.minimum(column, part.max_blocks - 1)
        new = jnp.take_along_axis(part.block_table, at, axis=-1)
        row, layer, head, _ = jnp.indices(new.shape, sparse=True)
        table = table.at[slots[row], layer, head, column].set(new, mode="drop")
    window = part.window
    if cache.window is not None and window is not None:
        window = cache.window.put(slots, window)
    return dataclasses.replace(
        part,
        block_table=table,
        context_len=cache.context_len.at[slots].set(part.context_len, mode="drop"),
        seq_len=cache.seq_len.at[slots].set(part.seq_len, mode="drop"),
        window=window,
    )
