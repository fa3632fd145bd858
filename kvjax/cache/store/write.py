"""Writing to the paged cache: prompts, what survives of them, and one KV per head at a time."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Num

from kvjax.cache.store.counting import running_count
from kvjax.cache.store.fine import FineBlocks
from kvjax.cache.store.free import FreeBlocks
from kvjax.cache.store.grow import grow
from kvjax.cache.store.paged import PagedCache, check_shape, claim, free_blocks, with_fine
from kvjax.cache.store.pool import scattered
from kvjax.cache.store.shard import agreed
from kvjax.cache.store.sharing import unshare_last


def write_prompt(
    cache: PagedCache,
    slot: Int32[Array, ""] | int,
    k: Float[Array, "L T H d"],
    v: Float[Array, "L T H d"],
    metric: Float[Array, "L H T"],
    length: Int32[Array, ""] | int,
    *,
    kept_index: Int32[Array, "L H P"] | None = None,
    kept_len: Int32[Array, "L H"] | None = None,
    state: Mapping[str, Num[Array, "L H T w"]] | None = None,
    token: Int32[Array, "L T"] | None = None,
) -> tuple[PagedCache, Bool[Array, ""]]:
    """Append consecutive prompt tokens, or only their survivors, to what a slot holds.

    Args:
        cache: the cache.
        slot: index of the sequence slot. The tokens take the positions from its `seq_len` on.
        k: keys of T tokens, rotated at their positions. Tokens from `length` on are padding.
        v: values of the same tokens.
        metric: eviction metric of each KV.
        length: how many of the tokens count (≤ T).
        kept_index: ascending indices of the tokens whose KVs are written; by default all of them.
        kept_len: how many entries of `kept_index` count, per head. Needs `kept_index`.
        state: further numbers of each KV, for the planes of these names that the cache has; 0 in
            the others.
        token: where layers lack tokens, which of the `length` tokens each of a layer's rows is of,
            ascending; `kept_index` and `kept_len` then count rows. By default row i is token i.

    Returns:
        The cache and ``ok``: False, and the cache unchanged, when the blocks do not suffice, when
        there is no such slot, or when `length`, `kept_len` or `kept_index` is not what is said
        above.

    Raises:
        ValueError: a shape does not fit the cache.
    """
    num_layers, num_tokens, num_heads, _ = k.shape
    b, n, big_m = cache.block_size, cache.num_blocks, cache.max_blocks
    heads = (cache.num_layers, cache.num_kv_heads)
    check_shape("k", k, (heads[0], num_tokens, heads[1], cache.head_dim))
    check_shape("v", v, k.shape)
    check_shape("metric", metric, (*heads, num_tokens))
    if token is not None:
        check_shape("token", token, (heads[0], num_tokens))
    length = jnp.asarray(length, jnp.int32)
    good = (jnp.asarray(slot) >= 0) & (jnp.asarray(slot) < cache.num_slots)
    good &= (length >= 0) & (length <= num_tokens)
    everything = kept_index is None and kept_len is None
    if kept_index is None:
        tokens = jnp.arange(num_tokens, dtype=jnp.int32)
        kept_index = jnp.broadcast_to(tokens, (num_layers, num_heads, num_tokens))
    if kept_len is None:
        kept_len = cache.of_heads(length)
    check_shape("kept_index", kept_index, (*heads, kept_index.shape[-1]))
    check_shape("kept_len", kept_len, heads)
    if not everything:
        good &= _ascends(kept_index, kept_len, length)
    old_len, start = cache.context_len[slot], cache.seq_len[slot]
    new_len = old_len + kept_len
    # More than any head can hold, for what must not be written: a slot out of range would claim
    # blocks that nobody then owns.
    new_len = jnp.where(good, new_len, (big_m + 1) * b)
    cache, table, ok = grow(cache, cache.block_table[slot], old_len, new_len)
    if cache.kv.fine is not None:
        written = jnp.where(ok, kept_len, 0)
        cache = _refined(cache, table, metric, kept_index, old_len, written)

    # Planes that nobody gives stay 0, as their blocks came.
    state = {name: (state or {})[name] for name in cache.state if name in (state or {})}
    written = {name: cache.state[name] for name in state}

    layers = jnp.arange(num_layers, dtype=jnp.int32)

    def write_tokens(pools, layer):
        kv, numbers = pools
        number, k_l, v_l, metric_l, state_l, index, first, count, table_l, token_l = layer
        rank = jnp.arange(index.shape[-1], dtype=jnp.int32)
        logical = first[:, None] + rank
        block = jnp.take_along_axis(table_l, jnp.minimum(logical // b, big_m - 1), axis=-1)
        block = jnp.where(ok & (rank < count[:, None]), block, n)
        head = jnp.arange(num_heads)[:, None]
        at = (block, logical % b)
        rows = (
            jnp.take_along_axis(metric_l, index, axis=1),
            start + (index if token_l is None else token_l[index]),
            {name: x[head, index] for name, x in state_l.items()},
        )
        kv = kv.write(at, cache.stored_keys(number, k_l)[index, head], v_l[index, head])
        return (kv, jax.tree.map(lambda x, row: scattered(x, at, row), numbers, rows)), None

    (kv, (metrics, position, written)), _ = jax.lax.scan(
        write_tokens,
        (cache.kv, (cache.metric, cache.position, written)),
        (layers, k, v, metric, state, kept_index, old_len, kept_len, table, token),
    )
    window = cache.window
    if window is not None:
        at = jnp.where(ok, slot, cache.num_slots)
        of_window = jax.vmap(cache.stored_keys)(layers, k)
        window = window.with_prompt(at, of_window, v, kept_index, kept_len, old_len, start, token)
    return dataclasses.replace(
        cache,
        kv=kv,
        window=window,
        metric=metrics,
        position=position,
        state={**cache.state, **written},
        block_table=cache.block_table.at[slot].set(table),
        context_len=cache.context_len.at[slot].set(jnp.where(ok, new_len, old_len)),
        seq_len=cache.seq_len.at[slot].add(jnp.where(ok, length, 0)),
    ), ok


def _refined(
    cache: PagedCache,
    table: Int32[Array, "L H M"],
    metric: Float[Array, "L H T"],
    kept_index: Int32[Array, "L H P"],
    old_len: Int32[Array, "L H"],
    kept_len: Int32[Array, "L H"],
) -> PagedCache:
    """The cache with room for finer codes of the blocks whose KVs have the largest metrics, among
    those that have them and those that a prompt has just claimed (`write_prompt`)."""
    fine, n, b = cache.kv.fine, cache.num_blocks, cache.block_size
    assert fine is not None
    worth, rank = _worths(cache), jnp.arange(kept_index.shape[-1], dtype=jnp.int32)
    logical = old_len[..., None] + rank
    # Of a block that held KVs before these have no finer codes.
    new = (rank < kept_len[..., None]) & (logical // b * b >= old_len[..., None])
    block = jnp.take_along_axis(table, jnp.minimum(logical // b, cache.max_blocks - 1), axis=-1)
    of_kvs = jnp.take_along_axis(metric, kept_index, axis=-1)
    worth = worth.at[jnp.where(new, block, n)].max(of_kvs, mode="drop")
    return with_fine(cache, *fine.arranged(worth, cache.free))


def _refined_new(cache: PagedCache, ids: Int32[Array, "*n"]) -> PagedCache:
    """The cache with room for finer codes of some blocks that were just taken. The newest KVs lose
    more to codes than all others (docs/methods.md, a residual window): where there is no other
    room, they have that of the cheapest."""
    fine, free, n = cache.kv.fine, cache.free, cache.num_blocks
    assert fine is not None

    def arranged() -> tuple[FineBlocks, FreeBlocks]:
        return fine.arranged(_worths(cache).at[ids].set(jnp.inf, mode="drop"), free)

    vacant, wanted = free.count[0] - fine.count[0], jnp.sum(ids < n)
    short = (wanted > vacant) & (free.count[0] > 0)
    refined = jax.lax.cond(short, arranged, lambda: (fine.grown(ids, free), free))
    return with_fine(cache, *refined)


def _worths(cache: PagedCache) -> Float[Array, " N"]:
    """What the finer codes of each block are worth that has them: its largest metric; −inf of
    others."""
    fine = cache.kv.fine
    assert fine is not None
    owned = (fine.tag < cache.num_blocks) & ~cache.free.mask
    return jnp.where(owned, jnp.max(cache.metric, axis=-1), -jnp.inf)


def _ascends(
    index: Int32[Array, "L H P"], count: Int32[Array, "L H"], length: Int32[Array, ""]
) -> Bool[Array, ""]:
    """Whether the first `count` entries of each head ascend from 0 on and stay below `length`."""
    rank = jnp.arange(index.shape[-1], dtype=jnp.int32)
    before = jnp.pad(index[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=-1)
    good = (index > before) & (index < length)
    in_range = (count >= 0) & (count <= index.shape[-1])
    return jnp.all(in_range) & jnp.all(good | (rank >= count[..., None]))


def begin_append(
    cache: PagedCache, active: Bool[Array, " S"]
) -> tuple[PagedCache, Bool[Array, ""]]:
    """Make room for one more KV in every (layer, head) of the active slots.

    A partly filled last block that others own too is copied first.

    The new KV counts at once: its position is the sequence's length, its metric 0, and
    `context_len` and `seq_len` grow by one. Its key and value are written layer by layer with
    `KVPool.write_newest`, and where there is a window with `KVWindow.write_newest`.

    Returns:
        The cache and ``ok``: False, and the cache unchanged, when the blocks do not suffice.

    Raises:
        ValueError: `active` is not of the cache's slots.
    """
    b, n, big_m = cache.block_size, cache.num_blocks, cache.max_blocks
    check_shape("active", active, cache.seq_len.shape)
    length = cache.context_len
    active = active[:, None, None]
    there = True if cache.shard is None else cache.shard.present
    needs_block = active & there & (length % b == 0)
    rank = running_count(needs_block.reshape(-1)).reshape(length.shape) - needs_block
    ok = (jnp.sum(needs_block) <= free_blocks(cache)) & jnp.all(
        ~needs_block | (length // b < big_m)
    )
    ok = agreed(cache.shard, ok)
    table = cache.block_table
    if cache.shared is not None:
        grows = ok & active & there
        cache, table, copied = unshare_last(cache, table, length, grows, jnp.sum(needs_block))
        ok &= copied
    ids = jnp.where(ok & needs_block, cache.free.peek(rank), n)
    cache = claim(cache, ids)
    if cache.kv.fine is not None:
        cache = _refined_new(cache, ids)
    slot, layer, head = jnp.indices(length.shape, sparse=True)
    column = jnp.where(ok & needs_block, length // b, big_m)
    table = table.at[slot, layer, head, column].set(ids, mode="drop")

    runs = ok & active
    grows = runs & there
    block = jnp.take_along_axis(table, jnp.minimum(length // b, big_m - 1)[..., None], -1)[..., 0]
    block = jnp.where(grows, block, n)
    position = jnp.broadcast_to(cache.seq_len[:, None, None], length.shape)

    def cleared(plane):
        return scattered(plane, (block, length % b), 0)

    window = cache.window
    if window is not None:
        window = window.begun(grows, position, length)
    return dataclasses.replace(
        cache,
        window=window,
        block_table=table,
        context_len=length + grows,
        seq_len=cache.seq_len + runs[:, 0, 0],
        metric=cleared(cache.metric),
        position=scattered(cache.position, (block, length % b), position),
        state=jax.tree.map(cleared, cache.state),
    ), ok


def append(
    cache: PagedCache,
    k: Float[Array, "L S H d"],
    v: Float[Array, "L S H d"],
    active: Bool[Array, " S"],
) -> tuple[PagedCache, Bool[Array, ""]]:
    """Append one KV per (layer, head) to every active slot.

    Returns:
        The cache and ``ok``: False, and the cache unchanged, when the blocks do not suffice.

    Raises:
        ValueError: a shape does not fit the cache.
    """
    row = (cache.num_layers, cache.num_slots, cache.num_kv_heads, cache.head_dim)
    check_shape("k", k, row)
    check_shape("v", v, row)
    cache, ok = begin_append(cache, active)
    window, num_layers = cache.window, cache.num_layers
    k = jax.vmap(cache.stored_keys)(jnp.arange(num_layers), k)
    if window is not None:
        window = window.write_newest(
            jnp.arange(num_layers),
            jnp.where((active & ok)[:, None, None], cache.context_len, 0),
            jnp.swapaxes(k, 0, 1),
            jnp.swapaxes(v, 0, 1),
        )
    # All layers at once: (slot, layer) takes the part of the slot.
    num_slots = cache.num_slots

    def merged(x):
        return x.reshape(num_slots * num_layers, *x.shape[2:])

    kv = cache.kv.write_newest(
        merged(cache.block_table),
        merged(cache.context_len),
        merged(jnp.swapaxes(k, 0, 1)),
        merged(jnp.swapaxes(v, 0, 1)),
        jnp.repeat(active & ok, num_layers),
    )
    return dataclasses.replace(cache, kv=kv, window=window), ok
