"""A few sequence slots as a cache of their own, so that a step works on those that take part.

The pool is not touched: the part shares it, and what a step does to it holds for the whole.
"""

import dataclasses

from jaxtyping import Array, Int32

from kvjax.cache.paged import PagedCache


def take_slots(
    cache: PagedCache, slots: Int32[Array, " G"], max_blocks: int | None = None
) -> PagedCache:
    """The cache with only the rows of `slots`, in that order.

    Args:
        cache: the cache.
        slots: sequence slots, each at most once; one out of range gives an empty row.
        max_blocks: columns of the block table (static); the slots' heads may own no more.
    """
    table = cache.block_table[..., :max_blocks]
    return dataclasses.replace(
        cache,
        block_table=table.at[slots].get(mode="fill", fill_value=cache.num_blocks),
        context_len=cache.context_len.at[slots].get(mode="fill", fill_value=0),
        seq_len=cache.seq_len.at[slots].get(mode="fill", fill_value=0),
    )


def put_slots(cache: PagedCache, slots: Int32[Array, " G"], part: PagedCache) -> PagedCache:
    """The cache after a step on `part`, which `take_slots` made of these slots."""
    columns = slice(0, part.max_blocks)
    return dataclasses.replace(
        part,
        block_table=cache.block_table.at[slots, ..., columns].set(part.block_table, mode="drop"),
        context_len=cache.context_len.at[slots].set(part.context_len, mode="drop"),
        seq_len=cache.seq_len.at[slots].set(part.seq_len, mode="drop"),
    )
