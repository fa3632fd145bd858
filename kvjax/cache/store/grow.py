"""Heads of the paged cache grow: blocks for more KVs than they hold."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from kvjax.cache.store.paged import PagedCache, blocks_for, claim, free_blocks
from kvjax.cache.store.shard import agreed
from kvjax.cache.store.sharing import unshare_last


def grow(
    cache: PagedCache,
    table: Int32[Array, "*heads M"],
    old_len: Int32[Array, "*heads"],
    new_len: Int32[Array, "*heads"],
) -> tuple[PagedCache, Int32[Array, "*heads M"], Bool[Array, ""]]:
    """Claim the blocks that take some heads from `old_len` to `new_len` KVs, on every device or
    on none.

    Heads that grow get a copy of their last block where it is partly filled and shared. Returns
    the cache with the blocks claimed, the grown table, and whether that was possible; if not,
    cache and table are as they were.
    """
    b, n = cache.block_size, cache.num_blocks
    m = jnp.arange(table.shape[-1], dtype=jnp.int32)
    # Clipped so that absurd requests overflow neither here nor in the sum below.
    want = blocks_for(jnp.minimum(new_len, (table.shape[-1] + 1) * b), b)
    have = blocks_for(old_len, b)
    added = want - have
    ok = (jnp.sum(added) <= free_blocks(cache)) & jnp.all(want <= table.shape[-1])
    ok = agreed(cache.shard, ok)
    if cache.shared is not None:
        grows = ok & (new_len > old_len)
        cache, table, copied = unshare_last(cache, table, old_len, grows, jnp.sum(added))
        ok &= copied
    first = (jnp.cumsum(added.reshape(-1)) - added.reshape(-1)).reshape(added.shape)
    is_new = ok & (m >= have[..., None]) & (m < want[..., None])
    ids = cache.free.peek(first[..., None] + m - have[..., None])
    ids = jnp.where(is_new, ids, n)
    return claim(cache, ids), jnp.where(is_new, ids, table), ok


def allocate(
    cache: PagedCache, context_len: Int32[Array, "S L H"]
) -> tuple[PagedCache, Bool[Array, ""]]:
    """Grow every head to at least `context_len` KVs.

    Blocks go to the heads in (slot, layer, head) order. The new KV slots
    count as unwritten (position −1, metric 0) until something is written to them.

    Returns:
        The cache and ``ok``. ``ok`` is False, and the cache unchanged, when too few blocks are
        free or a head would need more than M.
    """
    new_len = jnp.maximum(cache.context_len, context_len)
    cache, table, ok = grow(cache, cache.block_table, cache.context_len, new_len)
    new_len = jnp.where(ok, new_len, cache.context_len)
    return dataclasses.replace(cache, block_table=table, context_len=new_len), ok
