"""The pool of keys and values: reads, writes and moves, whatever a codec makes of them."""

import dataclasses
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Num

from kvjax.cache.store.codec import Codec, Plain
from kvjax.cache.store.fine import FineBlocks
from kvjax.cache.store.joined import (
    halves,
    is_none,
    joins_rows,
    joint,
    moved_both,
    of_numbers,
    stored_shapes,
    with_both,
)
from kvjax.kernels import append_and_attend, device, move_kvs, paged_attention
from kvjax.kernels.encoded import without_halves
from kvjax.kernels.paged_attention import reference


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVPool:
    """Keys, after RoPE at their original position, and values, as a codec stores them.

    Nobody outside this package looks into `stored_k` and `stored_v`.
    """

    stored_k: Any
    """Arrays with leading axes [N, b]."""
    stored_v: Any
    """The same; None in place of an array that is part of one of keys (`KVPool.joins`)."""
    codec: Codec = dataclasses.field(metadata={"static": True})
    joined: int | None = dataclasses.field(default=None, metadata={"static": True})
    """Numbers of a key and of a value, of which one row holds both, or those of several KVs; None
    if they lie apart."""
    paired: int | None = dataclasses.field(default=None, metadata={"static": True})
    """KVs of a block, where what is one number of each makes two rows; None if it does not."""
    fine: FineBlocks | None = None
    """Which blocks hold finer codes of others; None where none ever do (`Refined`)."""

    @classmethod
    def empty(
        cls,
        codec: Codec,
        num_blocks: int,
        block_size: int,
        head_dim: int,
        joined: bool | None = None,
    ) -> "KVPool":
        """A pool in which everything stored is 0, of blocks that a codec's pool has (`of_pool`).

        `joined`: whether arrays of keys and of values are one where rows are short; by default on
        TPUs.
        """
        joined = joins_rows() if joined is None else joined
        *shapes, width = stored_shapes(codec, num_blocks, block_size, head_dim, joined)
        paired = any(map(of_numbers, joint(*shapes)))
        k, v = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        fine = FineBlocks.none(num_blocks) if codec.refines else None
        return cls(k, v, codec.of_pool, width, block_size if paired else None, fine)

    @property
    def joins(self) -> bool:
        """Whether any arrays of keys and of values are one."""
        return self.joined is not None or self.paired is not None

    @property
    def _codecs(self) -> tuple[Codec, Codec]:
        """Those of keys and of values."""
        return self.codec.of_keys, self.codec.of_values

    @property
    def operands(self) -> tuple[Any, Any]:
        """Keys and values [N, b, d] as attention takes them; indexed by blocks they give rows."""
        keys, values = self._codecs
        k, v = self._apart(self.stored_k, self.stored_v)
        k, v = keys.operand(k), values.operand(v)
        if self.fine is None:
            return k, v
        return tuple(dataclasses.replace(pool, fine=self.fine.tag) for pool in (k, v))

    @property
    def shape(self) -> tuple[int, int, int]:
        """N, b and d."""
        return self.operands[0].shape

    def read(
        self, blocks: Int32[Array, "*n"]
    ) -> tuple[Float[Array, "... b d"], Float[Array, "... b d"]]:
        """Keys and values of some blocks, decoded; those of ids out of range decode zeros."""
        k, v = self._decoded(self._gathered(blocks))
        if self.fine is None:
            return k, v
        # Of blocks without finer codes what is gathered decodes zeros.
        more_k, more_v = self._decoded(self._gathered(self.fine.of(blocks)))
        return k + more_k, v + more_v

    def write(
        self,
        at: tuple[Int32[Array, "*n"], ...],
        k: Float[Array, "*n d"],
        v: Float[Array, "*n d"],
    ) -> "KVPool":
        """With rows written to some blocks, or to offsets in them; ids of N are passed over."""
        blocks, *offsets = at

        return self._with(blocks, offsets, self._encoded(k, v))

    def rewrite(
        self,
        blocks: Int32[Array, "*n"],
        old: tuple[Float[Array, "... b d"], Float[Array, "... b d"]],
        new: tuple[Float[Array, "... b d"], Float[Array, "... b d"]],
    ) -> "KVPool":
        """With new keys and values in some blocks; ids of N are passed over. Those that are what
        `read` gave of them, the old ones, stay as they are stored, and are not encoded a second
        time."""
        if isinstance(self.codec, Plain):
            return self.write((blocks,), *new)
        same = [jnp.all(new == old, axis=-1) for old, new in zip(old, new, strict=True)]

        def chosen(same, old, new):
            def of_array(old, new):
                mask = same.reshape(*same.shape, *(1,) * (old.ndim - same.ndim))
                return jnp.where(mask, old, new)

            return jax.tree.map(of_array, old, new)

        pool, places = self, [blocks] if self.fine is None else [blocks, self.fine.of(blocks)]
        for place, part in zip(places, self._encoded(*new), strict=True):
            # Of one place after the other: what was read before is written would be a copy.
            stored = map(chosen, same, pool._gathered(place), part)
            pool = pool._with_stored((place,), *stored)
        return pool

    def write_newest(
        self,
        block_table: Int32[Array, "S H M"],
        context_len: Int32[Array, "S H"],
        k: Float[Array, "S H d"],
        v: Float[Array, "S H d"],
        active: Bool[Array, " S"] | None = None,
    ) -> "KVPool":
        """With the newest KV of one layer written: the last one that `context_len` counts."""
        return self.write(newest_slots(block_table, context_len, self.shape[:2], active), k, v)

    def append_and_attend(
        self,
        q: Float[Array, "S Hr d"],
        k: Float[Array, "S H d"],
        v: Float[Array, "S H d"],
        block_table: Int32[Array, "S H M"],
        context_len: Int32[Array, "S H"],
        **options: Any,
    ) -> tuple["KVPool", Any]:
        """With the newest KV of one layer written, of heads that `context_len` counts any of, and
        what `paged_attention` (with its options) makes of queries and all KVs."""
        if isinstance(self.codec, Plain) and not self.joined:
            keys, values = self._codecs
            pools, attended = append_and_attend(
                q, keys.encode(k), values.encode(v), *self.operands, block_table, context_len,
                **options,
            )  # fmt: skip
            return KVPool(*pools, self.codec), attended
        pool = self.write_newest(block_table, context_len, k, v)
        attended = paged_attention(q, *pool.operands, block_table, context_len, **options)
        return pool, attended

    def move(
        self,
        source: Int32[Array, "rows U"],
        target: Int32[Array, "rows U"],
        count: Int32[Array, " rows"],
    ) -> "KVPool":
        """With KVs copied from slots of the pool to others, as `kvjax.kernels.move_kvs` does."""

        def moved(k, v):
            if k.ndim == 3 and (k.shape, k.dtype) == (v.shape, v.dtype):
                return move_kvs(k, v, source, target, count)
            return tuple(move_rows(x, source, target, count) for x in (k, v))

        stored = (self.stored_k, self.stored_v)
        kind = jax.tree.structure(self.stored_k)
        if kind == jax.tree.structure(self.stored_v):
            k, v = jax.tree.transpose(kind, None, jax.tree.map(moved, *stored))
        else:
            k, v = self._moved(*stored, source, target, count)
        if self.fine is not None:
            # Whose target has no finer codes loses its own; whose source has none brings zeros.
            b = self.shape[1]
            k, v = self._moved(k, v, self.fine.slots(source, b), self.fine.slots(target, b), count)
        return dataclasses.replace(self, stored_k=k, stored_v=v)

    def _moved(self, k: Any, v: Any, source: Array, target: Array, count: Array) -> tuple[Any, Any]:
        """What is stored of keys and of values after some moves, array by array."""
        moves, b = (source, target, count), self.shape[1]

        def of_keys(x, other):
            if other is None:
                return moved_both(x, *moves, b, self.joined)
            return move_rows(x, *moves)

        new_k = _map_keys(of_keys, k, v)
        return new_k, jax.tree.map(lambda x: move_rows(x, *moves), v)

    def _decoded(self, stored: tuple[Any, Any]) -> tuple[Array, Array]:
        keys, values = self._codecs
        return keys.decode(stored[0]), values.decode(stored[1])

    def _encoded(self, k: Float[Array, "*n d"], v: Float[Array, "*n d"]) -> list[tuple[Any, Any]]:
        """What is stored of rows of keys and values; where there are finer codes, these as well."""
        keys, values = self._codecs
        coarse = keys.encode(k), values.encode(v)
        if self.fine is None:
            return [coarse]

        def missing(codec: Codec, rows: Float[Array, "*n d"], stored: Any) -> Any:
            # In float32: of rows of fewer bits the sum of both would keep what these round away.
            decoded = codec.decoding_to("float32").decode(stored)
            return codec.encode(rows.astype(jnp.float32) - decoded)

        return [coarse, (missing(keys, k, coarse[0]), missing(values, v, coarse[1]))]

    def _with(
        self,
        blocks: Int32[Array, "*n"],
        offsets: list[Int32[Array, "*n"]],
        parts: list[tuple[Any, Any]],
    ) -> "KVPool":
        """With what is stored of the rows of some blocks, or of rows at offsets in them; and so
        what is stored of these rows' finer codes, in the blocks of these."""
        pool = self._with_stored((blocks, *offsets), *parts[0])
        if self.fine is not None:
            pool = pool._with_stored((self.fine.of(blocks), *offsets), *parts[1])
        return pool

    def _with_stored(self, at: tuple[Int32[Array, "*n"], ...], k: Any, v: Any) -> "KVPool":
        """With what is stored of the rows of some blocks, or of rows at offsets in them."""

        def of_keys(pool, held, one, other):
            return scattered(pool, at, one) if held is not None else with_both(pool, at, one, other)

        def of_values(pool, other):
            return None if pool is None else scattered(pool, at, other)

        return dataclasses.replace(
            self,
            stored_k=_map_keys(of_keys, self.stored_k, self.stored_v, k, v),
            stored_v=jax.tree.map(of_values, self.stored_v, v, is_leaf=is_none),
        )

    def _gathered(self, blocks: Int32[Array, "*n"]) -> tuple[Any, Any]:
        """What is stored of the keys and of the values of some blocks, 0 for ids out of range."""
        found = jax.tree.map(lambda x: gathered(x, blocks), (self.stored_k, self.stored_v))
        return without_halves(self._apart(*found))

    def _apart(self, k: Any, v: Any) -> tuple[Any, Any]:
        """What is stored of keys and of values, each array of both as its halves."""
        return halves(k, v, self.paired or 0, self.joined) if self.joins else (k, v)


def _map_keys(function: Any, keys: Any, *others: Any) -> Any:
    """`jax.tree.map` over what is stored of keys, with None for an array that is that of both."""
    leaves, tree = jax.tree.flatten(keys)
    rest = [jax.tree.flatten(x, is_leaf=is_none)[0] for x in others]
    return jax.tree.unflatten(tree, [function(*x) for x in zip(leaves, *rest, strict=True)])


def gathered(
    pool: Num[Array, "N b *w"], blocks: Int32[Array, "*n"], fill: float = 0
) -> Num[Array, "..."]:
    """What one array of the pool holds in some blocks, `fill` for ids out of range."""
    if lies_turned(pool):
        found = pool.T.at[:, blocks].get(mode="fill", fill_value=fill)
        return jnp.moveaxis(found, 0, -1)
    return pool.at[blocks].get(mode="fill", fill_value=fill)


def scattered(
    pool: Num[Array, "N b *w"], at: tuple[Int32[Array, "*n"], ...], rows: Num[Array, "..."] | int
) -> Num[Array, "N b *w"]:
    """One array of the pool with values at some blocks, or at offsets in them; ids of N are
    passed over."""
    rows = jnp.asarray(rows, pool.dtype)
    if lies_turned(pool):
        block, *offset = at
        if not offset:
            rows = jnp.moveaxis(jnp.broadcast_to(rows, (*block.shape, pool.shape[1])), -1, 0)
        return pool.T.at[*(offset or [slice(None)]), block].set(rows, mode="drop").T
    return pool.at[at].set(rows, mode="drop")


def lies_turned(pool: Num[Array, "N b *w"]) -> bool:
    """Whether blocks are the last axis of an array [N, b] for the device at hand. TPUs pad the last
    axis to 128 numbers, and so lay out few numbers per block the other way round; steps that index
    them as they are written would turn all of them first, eight times as large with b = 16."""
    return pool.ndim == 2 and device.of(None).platform == "tpu"


def move_rows(
    pool: Num[Array, "N b *w"],
    source: Int32[Array, "rows U"],
    target: Int32[Array, "rows U"],
    count: Int32[Array, " rows"],
) -> Num[Array, "N b *w"]:
    """One array of the pool after the first `count` moves of each row, slots as in `move_kvs`."""
    num_blocks, b = pool.shape[:2]
    moves = jnp.arange(source.shape[1]) < count[:, None]
    if lies_turned(pool):
        values = pool.T.at[source % b, source // b].get(mode="fill", fill_value=0)
    else:
        values = pool.at[source // b, source % b].get(mode="fill", fill_value=0)
    return scattered(pool, (jnp.where(moves, target // b, num_blocks), target % b), values)


def write_newest(
    pool: Num[Array, "N b *d"],
    block_table: Int32[Array, "S H M"],
    context_len: Int32[Array, "S H"],
    values: Num[Array, "S H *d"],
    active: Bool[Array, " S"] | None = None,
) -> Num[Array, "N b *d"]:
    """Write one pool's value of the newest KV of one layer; of all slots by default."""
    return scattered(pool, newest_slots(block_table, context_len, pool.shape[:2], active), values)


def newest_slots(
    block_table: Int32[Array, "S H M"],
    context_len: Int32[Array, "S H"],
    blocks: tuple[int, ...],
    active: Bool[Array, " S"] | None = None,
) -> tuple[Int32[Array, "S H"], Int32[Array, "S H"]]:
    """Block and offset of the newest KV of one layer in a pool of N blocks of b, N where there is
    none; of all slots by default."""
    if active is not None:
        context_len = jnp.where(active[:, None], context_len, 0)
    return reference.newest(block_table, context_len, *blocks)
