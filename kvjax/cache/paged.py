"""The paged KV cache: one pool of blocks, one block table per (sequence slot, layer, KV head).

Source: KV-Compress, section 4.2.1 (block layout, on-device allocation). All functions are pure
(`cache -> cache`) and meant to be jitted with the cache donated. A failed allocation returns the
cache unchanged together with ``ok = False``.

Letters: S sequence slots, L layers, H KV heads, N blocks in the pool, b KVs in a block, d head
dimension, M blocks a head can own at most.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, Num

from kvjax.kernels.checks import wanted

UNWRITTEN = -1
"""Token position of a KV slot that nothing was written to."""


@dataclasses.dataclass(frozen=True)
class Plane:
    """One more number (or `width` of them) per KV, beside its metric and its position.

    It begins at 0, moves with its KV, and goes with its block.
    """

    name: str
    dtype: str = "float32"
    width: int = 1

    @property
    def kv_bytes(self) -> int:
        """Bytes per KV."""
        return np.dtype(self.dtype).itemsize * self.width


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """All state of the cache, on the device.

    Logical KV i of head (s, l, h) lies in block ``block_table[s, l, h, i // b]`` at offset
    ``i % b``. Entries of the block table without a block hold N: out of range on purpose, so that
    a scatter through them is dropped.
    """

    k: Float[Array, "N b d"]
    """Keys after RoPE at their original position."""
    v: Float[Array, "N b d"]
    metric: Float[Array, "N b"]
    """Eviction metric of each KV, float32."""
    position: Int32[Array, "N b"]
    """Token position of each KV, −1 where unwritten."""
    block_table: Int32[Array, "S L H M"]
    context_len: Int32[Array, "S L H"]
    """KVs that each head holds."""
    seq_len: Int32[Array, " S"]
    """Tokens that each sequence has seen: the position of its next token."""
    free: Bool[Array, " N"]
    state: dict[str, Num[Array, "N b w"]] = dataclasses.field(default_factory=dict)
    """Further numbers of each KV, by the names of the planes that methods declare; 0 where
    unwritten."""

    @property
    def num_slots(self) -> int:
        return self.block_table.shape[0]

    @property
    def num_layers(self) -> int:
        return self.block_table.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.block_table.shape[2]

    @property
    def max_blocks(self) -> int:
        """M, the most blocks that one head can own."""
        return self.block_table.shape[3]

    @property
    def num_blocks(self) -> int:
        return self.k.shape[0]

    @property
    def block_size(self) -> int:
        return self.k.shape[1]

    @property
    def head_dim(self) -> int:
        return self.k.shape[2]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys, values, 8 bytes of metadata per KV, and the planes."""
        pools = (self.k, self.v, self.metric, self.position, self.state)
        return sum(x.size // x.shape[0] * x.dtype.itemsize for x in jax.tree.leaves(pools))


def init_cache(
    *,
    num_slots: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    num_blocks: int,
    max_blocks_per_head: int,
    block_size: int = 16,
    dtype: jax.typing.DTypeLike = jnp.float32,
    planes: Iterable[Plane] = (),
) -> PagedCache:
    """An empty cache of ``num_blocks`` blocks, with room for the planes that methods declare.

    Raises:
        ValueError: a size is not a positive integer.
    """
    sizes = {
        "num_slots": num_slots,
        "num_layers": num_layers,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "num_blocks": num_blocks,
        "max_blocks_per_head": max_blocks_per_head,
        "block_size": block_size,
    }
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}: got {value}, wanted at least 1")
    heads = (num_slots, num_layers, num_kv_heads)
    pool = (num_blocks, block_size, head_dim)
    return PagedCache(
        k=jnp.zeros(pool, dtype),
        v=jnp.zeros(pool, dtype),
        metric=jnp.zeros(pool[:2], jnp.float32),
        position=jnp.full(pool[:2], UNWRITTEN, jnp.int32),
        block_table=jnp.full((*heads, max_blocks_per_head), num_blocks, jnp.int32),
        context_len=jnp.zeros(heads, jnp.int32),
        seq_len=jnp.zeros(num_slots, jnp.int32),
        free=jnp.ones(num_blocks, bool),
        state={plane.name: jnp.zeros((*pool[:2], plane.width), plane.dtype) for plane in planes},
    )


def blocks_for(context_len: Int[Array, "*dims"], block_size: int) -> Int[Array, "*dims"]:
    """Blocks that hold so many KVs: ⌈context_len / b⌉."""
    return (context_len + block_size - 1) // block_size


def free_blocks(cache: PagedCache) -> Int32[Array, ""]:
    """How many blocks of the pool nobody owns."""
    return jnp.sum(cache.free, dtype=jnp.int32)


def _nth_free(free: Bool[Array, " N"], rank: Int[Array, "*dims"]) -> Int32[Array, "*dims"]:
    """Id of the free block with `rank` free blocks below it; N where there is none."""
    below = jnp.cumsum(free, dtype=jnp.int32)
    return jnp.searchsorted(below, rank.reshape(-1) + 1).reshape(rank.shape).astype(jnp.int32)


def _claim(cache: PagedCache, ids: Int32[Array, "*dims"]) -> PagedCache:
    """Take blocks from the free mask; whatever a former owner left in their metadata goes."""
    return _cleared(cache, ids, free=False)


def drop_blocks(cache: PagedCache, ids: Int32[Array, "*dims"]) -> PagedCache:
    """Give blocks back to the free mask and clear their metadata; ids of N are passed over."""
    return _cleared(cache, ids, free=True)


def _cleared(cache: PagedCache, ids: Int32[Array, "*dims"], *, free: bool) -> PagedCache:
    return dataclasses.replace(
        cache,
        free=cache.free.at[ids].set(free, mode="drop"),
        metric=cache.metric.at[ids].set(0.0, mode="drop"),
        position=cache.position.at[ids].set(UNWRITTEN, mode="drop"),
        state=jax.tree.map(lambda plane: plane.at[ids].set(0, mode="drop"), cache.state),
    )


def _grow(
    cache: PagedCache,
    table: Int32[Array, "*heads M"],
    old_len: Int32[Array, "*heads"],
    new_len: Int32[Array, "*heads"],
) -> tuple[PagedCache, Int32[Array, "*heads M"], Bool[Array, ""]]:
    """Claim the blocks that take some heads from `old_len` to `new_len` KVs.

    Returns the cache with the blocks claimed, the grown table, and whether that was possible;
    if not, cache and table are as they were.
    """
    b, n = cache.block_size, cache.num_blocks
    m = jnp.arange(table.shape[-1], dtype=jnp.int32)
    # Clipped so that absurd requests overflow neither here nor in the sum below.
    want = blocks_for(jnp.minimum(new_len, (table.shape[-1] + 1) * b), b)
    have = blocks_for(old_len, b)
    added = want - have
    ok = (jnp.sum(added) <= free_blocks(cache)) & jnp.all(want <= table.shape[-1])
    first = (jnp.cumsum(added.reshape(-1)) - added.reshape(-1)).reshape(added.shape)
    is_new = ok & (m >= have[..., None]) & (m < want[..., None])
    ids = _nth_free(cache.free, first[..., None] + m - have[..., None])
    ids = jnp.where(is_new, ids, n)
    return _claim(cache, ids), jnp.where(is_new, ids, table), ok


def allocate(
    cache: PagedCache, context_len: Int32[Array, "S L H"]
) -> tuple[PagedCache, Bool[Array, ""]]:
    """Grow every head to at least `context_len` KVs.

    Blocks with the lowest free ids go to the heads in (slot, layer, head) order. The new KV slots
    count as unwritten (position −1, metric 0) until something is written to them.

    Returns:
        The cache and ``ok``. ``ok`` is False, and the cache unchanged, when too few blocks are
        free or a head would need more than M.
    """
    new_len = jnp.maximum(cache.context_len, context_len)
    cache, table, ok = _grow(cache, cache.block_table, cache.context_len, new_len)
    new_len = jnp.where(ok, new_len, cache.context_len)
    return dataclasses.replace(cache, block_table=table, context_len=new_len), ok


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
    length = jnp.asarray(length, jnp.int32)
    good = (jnp.asarray(slot) >= 0) & (jnp.asarray(slot) < cache.num_slots)
    good &= (length >= 0) & (length <= num_tokens)
    everything = kept_index is None and kept_len is None
    if kept_index is None:
        tokens = jnp.arange(num_tokens, dtype=jnp.int32)
        kept_index = jnp.broadcast_to(tokens, (num_layers, num_heads, num_tokens))
    if kept_len is None:
        kept_len = jnp.full(heads, length, jnp.int32)
    check_shape("kept_index", kept_index, (*heads, kept_index.shape[-1]))
    check_shape("kept_len", kept_len, heads)
    if not everything:
        good &= _ascends(kept_index, kept_len, length)
    old_len, start = cache.context_len[slot], cache.seq_len[slot]
    new_len = old_len + kept_len
    # More than any head can hold, for what must not be written: a slot out of range would claim
    # blocks that nobody then owns.
    new_len = jnp.where(good, new_len, (big_m + 1) * b)
    cache, table, ok = _grow(cache, cache.block_table[slot], old_len, new_len)

    # Planes that nobody gives stay 0, as their blocks came.
    state = {name: (state or {})[name] for name in cache.state if name in (state or {})}
    written = {name: cache.state[name] for name in state}

    def write_tokens(pools, layer):
        k_l, v_l, metric_l, state_l, index, first, count, table_l = layer
        rank = jnp.arange(index.shape[-1], dtype=jnp.int32)
        logical = first[:, None] + rank
        block = jnp.take_along_axis(table_l, jnp.minimum(logical // b, big_m - 1), axis=-1)
        block = jnp.where(ok & (rank < count[:, None]), block, n)
        head = jnp.arange(num_heads)[:, None]
        rows = (
            k_l[index, head],
            v_l[index, head],
            jnp.take_along_axis(metric_l, index, axis=1),
            start + index,
            {name: x[head, index] for name, x in state_l.items()},
        )
        return jax.tree.map(
            lambda pool, row: pool.at[block, logical % b].set(row.astype(pool.dtype), mode="drop"),
            pools,
            rows,
        ), None

    pools, _ = jax.lax.scan(
        write_tokens,
        (cache.k, cache.v, cache.metric, cache.position, written),
        (k, v, metric, state, kept_index, old_len, kept_len, table),
    )
    return dataclasses.replace(
        cache,
        k=pools[0],
        v=pools[1],
        metric=pools[2],
        position=pools[3],
        state={**cache.state, **pools[4]},
        block_table=cache.block_table.at[slot].set(table),
        context_len=cache.context_len.at[slot].set(jnp.where(ok, new_len, old_len)),
        seq_len=cache.seq_len.at[slot].add(jnp.where(ok, length, 0)),
    ), ok


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

    The new KV counts at once: its position is the sequence's length, its metric 0, and
    `context_len` and `seq_len` grow by one. Its key and value are written layer by layer with
    `write_layer`.

    Returns:
        The cache and ``ok``: False, and the cache unchanged, when the blocks do not suffice.

    Raises:
        ValueError: `active` is not of the cache's slots.
    """
    b, n, big_m = cache.block_size, cache.num_blocks, cache.max_blocks
    check_shape("active", active, cache.seq_len.shape)
    length = cache.context_len
    active = active[:, None, None]
    needs_block = active & (length % b == 0)
    rank = jnp.cumsum(needs_block.reshape(-1)).reshape(length.shape) - needs_block
    ok = (jnp.sum(needs_block) <= free_blocks(cache)) & jnp.all(
        ~needs_block | (length // b < big_m)
    )
    ids = jnp.where(ok & needs_block, _nth_free(cache.free, rank), n)
    cache = _claim(cache, ids)
    slot, layer, head = jnp.indices(length.shape, sparse=True)
    column = jnp.where(ok & needs_block, length // b, big_m)
    table = cache.block_table.at[slot, layer, head, column].set(ids, mode="drop")

    grows = ok & active
    block = jnp.take_along_axis(table, jnp.minimum(length // b, big_m - 1)[..., None], -1)[..., 0]
    block = jnp.where(grows, block, n)
    position = jnp.broadcast_to(cache.seq_len[:, None, None], length.shape)

    def cleared(plane):
        return plane.at[block, length % b].set(0, mode="drop")

    return dataclasses.replace(
        cache,
        block_table=table,
        context_len=length + grows,
        seq_len=cache.seq_len + grows[:, 0, 0],
        metric=cleared(cache.metric),
        position=cache.position.at[block, length % b].set(position, mode="drop"),
        state=jax.tree.map(cleared, cache.state),
    ), ok


def write_layer(
    k_pool: Float[Array, "N b d"],
    v_pool: Float[Array, "N b d"],
    block_table: Int32[Array, "S H M"],
    context_len: Int32[Array, "S H"],
    k: Float[Array, "S H d"],
    v: Float[Array, "S H d"],
    active: Bool[Array, " S"],
) -> tuple[Float[Array, "N b d"], Float[Array, "N b d"]]:
    """Write the newest KV of one layer: the last one that `context_len` counts."""
    return (
        write_newest(k_pool, block_table, context_len, k, active),
        write_newest(v_pool, block_table, context_len, v, active),
    )


def write_newest(
    pool: Num[Array, "N b *d"],
    block_table: Int32[Array, "S H M"],
    context_len: Int32[Array, "S H"],
    values: Num[Array, "S H *d"],
    active: Bool[Array, " S"],
) -> Num[Array, "N b *d"]:
    """Write one pool's value of the newest KV of one layer."""
    num_blocks, b = pool.shape[:2]
    last = jnp.maximum(context_len - 1, 0)
    block = jnp.take_along_axis(block_table, (last // b)[..., None], axis=-1)[..., 0]
    block = jnp.where(active[:, None] & (context_len > 0), block, num_blocks)
    return pool.at[block, last % b].set(values.astype(pool.dtype), mode="drop")


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
    # All layers at once: (slot, layer) takes the part of the slot.
    num_slots, num_layers = cache.context_len.shape[:2]

    def merged(x):
        return x.reshape(num_slots * num_layers, *x.shape[2:])

    k_pool, v_pool = write_layer(
        cache.k,
        cache.v,
        merged(cache.block_table),
        merged(cache.context_len),
        merged(jnp.swapaxes(k, 0, 1)),
        merged(jnp.swapaxes(v, 0, 1)),
        jnp.repeat(active & ok, num_layers),
    )
    return dataclasses.replace(cache, k=k_pool, v=v_pool), ok


def release(cache: PagedCache, slots: Bool[Array, " S"]) -> PagedCache:
    """Free every block of the marked slots and empty them.

    Raises:
        ValueError: `slots` is not of the cache's slots.
    """
    check_shape("slots", slots, cache.seq_len.shape)
    chosen = slots[:, None, None]
    ids = jnp.where(chosen[..., None], cache.block_table, cache.num_blocks)
    cache = drop_blocks(cache, ids)
    return dataclasses.replace(
        cache,
        block_table=jnp.where(chosen[..., None], cache.num_blocks, cache.block_table),
        context_len=jnp.where(chosen, 0, cache.context_len),
        seq_len=jnp.where(slots, 0, cache.seq_len),
    )


def valid_slots(cache: PagedCache, slots: Int32[Array, " G"]) -> Int32[Array, " G"]:
    """The slots, with S (which every later scatter and gather passes over) for impossible ones.

    A slot that comes again is impossible: two steps on the same blocks would break them.
    """
    slots = jnp.asarray(slots, jnp.int32)
    again = jnp.any(jnp.tril(slots[:, None] == slots, -1), axis=1)
    return jnp.where((slots >= 0) & (slots < cache.num_slots) & ~again, slots, cache.num_slots)


def check_shape(name: str, x: Array, shape: tuple[int, ...]) -> None:
    """Raise `ValueError` unless an array has a shape; one that would broadcast has it not."""
    if jnp.shape(x) != shape:
        raise wanted(f"{name} shape", list(jnp.shape(x)), list(shape))
