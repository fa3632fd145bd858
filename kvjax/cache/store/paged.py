"""The paged KV cache: one pool of blocks, one block table per (sequence slot, layer, KV head).

Source: KV-Compress, section 4.2.1 (block layout, on-device allocation). All functions are pure
(`cache -> cache`) and meant to be jitted with the cache donated. A failed allocation returns the
cache unchanged together with ``ok = False``.

Letters: S sequence slots, L layers, H KV heads, N blocks in the pool, b KVs in a block, d head
dimension, M blocks a head can own at most.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32, Num

from kvjax.cache.store.codec import Codec, Plain, Refined, Windowed
from kvjax.cache.store.fine import FineBlocks
from kvjax.cache.store.free import FreeBlocks
from kvjax.cache.store.pool import KVPool, lies_turned, scattered
from kvjax.cache.store.shard import HeadShard
from kvjax.cache.store.smooth import KeySmoothing
from kvjax.cache.store.spec import CacheSpec, Plane
from kvjax.cache.store.window import KVWindow
from kvjax.kernels.checks import wanted

UNWRITTEN = -1
"""Token position of a KV slot that nothing was written to."""


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """All state of the cache, on the device.

    Logical KV i of head (s, l, h) lies in block ``block_table[s, l, h, i // b]`` at offset
    ``i % b``. Entries of the block table without a block hold N: out of range on purpose, so that
    a scatter through them is dropped.
    """

    kv: KVPool
    """Keys and values."""
    metric: Float[Array, "N b"]
    """Eviction metric of each KV, float32."""
    position: Int32[Array, "N b"]
    """Token position of each KV, −1 where unwritten."""
    block_table: Int32[Array, "S L H M"]
    context_len: Int32[Array, "S L H"]
    """KVs that each head holds."""
    seq_len: Int32[Array, " S"]
    """Tokens that each sequence has seen: the position of its next token."""
    free: FreeBlocks
    state: dict[str, Num[Array, "N b w"]] = dataclasses.field(default_factory=dict)
    """Further numbers of each KV, by the names of the planes that methods declare; 0 where
    unwritten."""
    shared: Int32[Array, " N"] | None = None
    """Owners of each block beside its first; None in a cache that shares nothing."""
    shard: HeadShard | None = None
    """Which of the model's heads these are, where others lie on other devices."""
    window: KVWindow | None = None
    """The newest KVs of each head as they were computed, where a codec asks for them
    (`Windowed`)."""
    smoothing: KeySmoothing | None = None
    """What codes hold of keys, where it is not the keys themselves."""

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
    def all_kv_heads(self) -> int:
        """KV heads of a layer, those on other devices included."""
        return self.num_kv_heads if self.shard is None else self.shard.total

    def of_heads(self, length: Int32[Array, ""]) -> Int32[Array, "L H"]:
        """As many KVs of each head; none in the empty places of a shard."""
        length = jnp.broadcast_to(length, self.context_len.shape[1:])
        return length if self.shard is None else jnp.where(self.shard.present, length, 0)

    @property
    def max_blocks(self) -> int:
        """M, the most blocks that one head can own."""
        return self.block_table.shape[3]

    @property
    def num_blocks(self) -> int:
        return self.metric.shape[0]

    @property
    def block_size(self) -> int:
        return self.metric.shape[1]

    @property
    def head_dim(self) -> int:
        return self.kv.shape[2]

    @property
    def k(self) -> Any:
        """Keys [N, b, d] as attention takes them: an array, unless a codec stores something else
        (`kvjax.kernels.Encoded`)."""
        return self.kv.operands[0]

    @property
    def v(self) -> Any:
        """Values, as `k`."""
        return self.kv.operands[1]

    def stored_keys(self, layer: Int32[Array, "*R"], k: Float[Array, "..."]) -> Float[Array, "..."]:
        """What is stored of keys [… H d] of one layer, or of several (their axis comes first)."""
        return k if self.smoothing is None else self.smoothing.of_layer(layer).stored(k)

    def asked(self, layer: Int32[Array, ""], q: Float[Array, "*n Hr d"]) -> Float[Array, "*n Hr d"]:
        """What queries of one layer ask what is stored of its keys."""
        return q if self.smoothing is None else self.smoothing.of_layer(layer).asked(q)

    def read_keys(
        self, layer: Int32[Array, "*R"], k: Float[Array, "*R H T d"]
    ) -> Float[Array, "*R H T d"]:
        """The keys of one layer, or of several, of which these are stored."""
        return k if self.smoothing is None else self.smoothing.of_layer(layer, rows=True).read(k)

    def changed_keys(
        self,
        layer: Int32[Array, "*R"],
        stored: Float[Array, "*R H T d"],
        old: Float[Array, "*R H T d"],
        new: Float[Array, "*R H T d"],
    ) -> Float[Array, "*R H T d"]:
        """What is stored of keys of which some have changed since `read_keys`; of those that have
        not, what was."""
        if self.smoothing is None:
            return new
        same = jnp.all(new == old, axis=-1, keepdims=True)
        return jnp.where(same, stored, self.smoothing.of_layer(layer, rows=True).stored(new))

    @property
    def spec(self) -> CacheSpec:
        """What is kept of each KV, and in blocks of which size."""
        planes = (Plane(name, x.dtype.name, x.shape[2]) for name, x in self.state.items())
        codec = self.kv.codec
        if self.kv.fine is not None:
            codec = Refined(codec.dtype, codec)
        if self.window is not None:
            codec = Windowed(codec.dtype, codec, self.window.size)
        return CacheSpec(
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            codec,
            self.block_size,
            tuple(planes),
            self.kv.joins,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block; see `CacheSpec.block_bytes`."""
        return self.spec.block_bytes


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
    codec: Codec | None = None,
    sharing: bool = False,
    shard: HeadShard | None = None,
    smoothing: KeySmoothing | None = None,
) -> PagedCache:
    """An empty cache of ``num_blocks`` blocks, with room for the planes that methods declare.

    Keys and values are stored in `dtype`, or as a codec says. With `sharing`, slots can hold the
    same blocks (`kvjax.cache.share`). With a `shard`, heads and blocks are those of one device.
    Keys are stored as `smoothing` says; the cache has a copy of it.

    Raises:
        ValueError: a size is not a positive integer.
        UserError: the codec cannot store rows of this head dimension.
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
    pool = (num_blocks, block_size)
    codec = codec or Plain(jnp.dtype(dtype).name)
    codec.check(head_dim)
    window = None
    if codec.window:
        window = KVWindow.empty((*heads, codec.window, head_dim), codec.dtype)
    return PagedCache(
        kv=KVPool.empty(codec, *pool, head_dim),
        metric=jnp.zeros(pool, jnp.float32),
        position=jnp.full(pool, UNWRITTEN, jnp.int32),
        block_table=jnp.full((*heads, max_blocks_per_head), num_blocks, jnp.int32),
        context_len=jnp.zeros(heads, jnp.int32),
        seq_len=jnp.zeros(num_slots, jnp.int32),
        free=FreeBlocks.every(num_blocks),
        state={plane.name: jnp.zeros((*pool, plane.width), plane.dtype) for plane in planes},
        shared=jnp.zeros(num_blocks, jnp.int32) if sharing else None,
        shard=shard,
        window=window,
        smoothing=jax.tree.map(jnp.copy, smoothing),
    )


def blocks_for(context_len: Int[Array, "*dims"], block_size: int) -> Int[Array, "*dims"]:
    """Blocks that hold so many KVs: ⌈context_len / b⌉."""
    return (context_len + block_size - 1) // block_size


def free_blocks(cache: PagedCache) -> Int32[Array, ""]:
    """How many blocks of the pool nobody owns."""
    return jnp.sum(cache.free.count)


def refined_blocks(cache: PagedCache) -> Int32[Array, "S L H"]:
    """How many blocks of each head have finer codes in other blocks."""
    fine = cache.kv.fine
    if fine is None:
        return jnp.zeros_like(cache.context_len)
    return jnp.sum(fine.of(cache.block_table) < cache.num_blocks, axis=-1, dtype=jnp.int32)


def claim(cache: PagedCache, ids: Int32[Array, "*dims"]) -> PagedCache:
    """Take the blocks on top of the free ones, in any order, as `FreeBlocks.peek` tells them; ids
    of N are passed over. Whatever a former owner left in their metadata goes."""
    taken = jnp.sum(ids < cache.num_blocks)
    return _parted(_cleared(cache, ids), ids, cache.free.without(taken))


def drop_blocks(cache: PagedCache, ids: Int32[Array, "*dims"], alone: bool = False) -> PagedCache:
    """Give blocks back and clear their metadata; ids of N are passed over.

    A block that is shared loses an owner for each time that it is named, and goes with the last.
    `alone`: whether the step does nothing else with these numbers.
    """
    if cache.shared is not None:
        cache, ids = _disowned(cache, ids)
    return _parted(_cleared(cache, ids, alone), ids, cache.free.with_blocks(ids))


def _parted(cache: PagedCache, ids: Int32[Array, "*dims"], free: FreeBlocks) -> PagedCache:
    """The cache with other free blocks, in which some that change hands are no part of a pair."""
    fine = cache.kv.fine
    return with_fine(cache, None if fine is None else fine.parted(ids, free), free)


def with_fine(cache: PagedCache, fine: FineBlocks | None, free: FreeBlocks) -> PagedCache:
    """The cache with other free blocks, and other tags of those that hold finer codes."""
    return dataclasses.replace(cache, kv=dataclasses.replace(cache.kv, fine=fine), free=free)


def _disowned(
    cache: PagedCache, ids: Int32[Array, "*dims"]
) -> tuple[PagedCache, Int32[Array, "*dims"]]:
    """The cache in which shared blocks have lost an owner for each time that they are named, and
    the ids of those that have none left, once each; N instead of the others."""
    assert cache.shared is not None
    n, owners = cache.num_blocks, cache.shared.at[ids].add(-1, mode="drop")
    gone = owners.at[ids].get(mode="fill", fill_value=0) < 0
    # Where all owners go at once a block is named several times, and the last one stands for it:
    # each leaves its mark, in the counts themselves.
    mark = -2 - jnp.arange(ids.size, dtype=jnp.int32).reshape(ids.shape)
    these = jnp.where(gone, ids, n)
    owners = owners.at[these].min(mark, mode="drop")
    once = gone & (owners.at[ids].get(mode="fill", fill_value=0) == mark)
    cache = dataclasses.replace(cache, shared=owners.at[these].set(0, mode="drop"))
    return cache, jnp.where(once, ids, n)


def _cleared(cache: PagedCache, ids: Int32[Array, "*dims"], alone: bool = False) -> PagedCache:
    def cleared(plane: Array, number: int = 0) -> Array:
        if alone and lies_turned(plane):
            # For a scatter to whole blocks, and no other, XLA would turn all of it.
            named = jnp.zeros(cache.num_blocks, bool).at[ids].set(True, mode="drop")
            return jnp.where(named[:, None], number, plane).astype(plane.dtype)
        return scattered(plane, (ids,), number)

    return dataclasses.replace(
        cache,
        metric=cleared(cache.metric),
        position=cleared(cache.position, UNWRITTEN),
        state=jax.tree.map(cleared, cache.state),
    )


def release(cache: PagedCache, slots: Bool[Array, " S"]) -> PagedCache:
    """Free every block of the marked slots and empty them.

    Raises:
        ValueError: `slots` is not of the cache's slots.
    """
    check_shape("slots", slots, cache.seq_len.shape)
    chosen = slots[:, None, None]
    ids = jnp.where(chosen[..., None], cache.block_table, cache.num_blocks)
    cache = drop_blocks(cache, ids, alone=True)
    return dataclasses.replace(
        cache,
        block_table=jnp.where(chosen[..., None], cache.num_blocks, cache.block_table),
        context_len=jnp.where(chosen, 0, cache.context_len),
        seq_len=jnp.where(slots, 0, cache.seq_len),
        window=None if cache.window is None else cache.window.without(slots),
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
