"""The shape of a cache, and every formula of its bytes."""

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from kvjax.cache.store.codec import Codec, Plain
from kvjax.cache.store.joined import joins_rows, joint, stored_shapes


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
        return jnp.dtype(self.dtype).itemsize * self.width


METADATA = (Plane("metric"), Plane("position", "int32"))
"""What every cache keeps of each KV."""
METADATA_BYTES = sum(plane.kv_bytes for plane in METADATA)


@runtime_checkable
class KVShape(Protocol):
    """What a model says of its KVs."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """What a cache keeps of each KV, and in blocks of which size."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    codec: Codec
    block_size: int = 16
    planes: tuple[Plane, ...] = ()
    """Further numbers of each KV, as methods declare them."""
    joined: bool = False
    """Whether arrays of keys and of values are one where rows are short, as on TPUs."""

    def __post_init__(self):
        """
        Raises:
            UserError: the codec cannot store rows of this head dimension.
        """
        self.codec.check(self.head_dim)

    @classmethod
    def of(
        cls,
        model: KVShape,
        codec: Codec,
        block_size: int = 16,
        planes: tuple[Plane, ...] = (),
    ) -> "CacheSpec":
        """That of a model's KVs on the device at hand."""
        sizes = (1, block_size, model.head_dim)
        joined = joins_rows() and bool(joint(*stored_shapes(codec, *sizes, True)[:2]))
        shape = model.num_layers, model.num_kv_heads, model.head_dim
        return cls(*shape, codec, block_size, planes, joined)

    @property
    def plain(self) -> "CacheSpec":
        """The same of KVs that are stored as they are computed."""
        return dataclasses.replace(self, codec=Plain(self.codec.dtype))

    @property
    def heads(self) -> int:
        """KV heads of all layers."""
        return self.num_layers * self.num_kv_heads

    @property
    def kv_bytes(self) -> int:
        """Bytes of one KV: key and value, without what else is kept of it."""
        if not self.joined:
            return self.codec.kv_bytes(self.head_dim)
        k, v, _ = stored_shapes(self.codec, 1, self.block_size, self.head_dim, True)
        leaves = jax.tree.leaves((k, v))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) // self.block_size

    @property
    def number_bytes(self) -> int:
        """Bytes of the numbers beside each KV: metric, position and planes."""
        return METADATA_BYTES + sum(plane.kv_bytes for plane in self.planes)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token: its KVs in all layers and heads, with their numbers."""
        return self.heads * (self.kv_bytes + self.number_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys, values and the numbers of its KVs."""
        return self.block_size * (self.kv_bytes + self.number_bytes)

    def blocks_per_head(self, tokens: int) -> int:
        """Blocks in which a head holds all of so many tokens."""
        return -(-tokens // self.block_size)

    def full_bytes(self, tokens: int) -> int:
        """Bytes of the blocks that hold every KV of so many tokens."""
        return self.heads * self.blocks_per_head(tokens) * self.block_bytes

    def pool_bytes(self, num_blocks: int, sharing: bool = False) -> int:
        """Bytes of a pool: its blocks, the stack of free ones, with `sharing` counts of owners,
        and tags where blocks have finer codes."""
        number, tagged = jnp.dtype("int32").itemsize, int(self.codec.refines)
        numbers = 1 + int(sharing) + tagged
        return number * (1 + tagged) + num_blocks * (self.block_bytes + number * numbers)

    def blocks_in(self, size: int, sharing: bool = False) -> int:
        """Most blocks of a pool that takes at most `size` bytes."""
        nothing = self.pool_bytes(0, sharing)
        return max(0, size - nothing) // (self.pool_bytes(1, sharing) - nothing)

    def table_bytes(self, num_slots: int, max_blocks_per_head: int) -> int:
        """Bytes of the slots: block tables, context lengths and sequence lengths, int32, and
        windows."""
        entries = self.heads * (max_blocks_per_head + 1) + 1
        return num_slots * (entries * jnp.dtype("int32").itemsize + self.window_bytes)

    @property
    def window_bytes(self) -> int:
        """Bytes of a slot's exact newest KVs, held or not, with where each is among its head's."""
        rows = 2 * Plain(self.codec.dtype).row_bytes(self.head_dim)
        numbers = 2 * jnp.dtype("int32").itemsize
        return self.heads * self.codec.window * (rows + numbers)

    def scratch_bytes(self, tokens: int) -> int:
        """Bytes of a prompt of so many tokens before it is encoded, with what was observed of it:
        up to three numbers of each KV, and the planes."""
        computed = 2 * Plain(self.codec.dtype).row_bytes(self.head_dim)
        further = sum(plane.kv_bytes for plane in self.planes)
        return tokens * self.heads * (computed + 3 * METADATA[0].kv_bytes + further)

    def attention_bytes(self, tokens: int) -> int:
        """Bytes of one layer's KVs of so many tokens as attention takes them: rows as computed,
        and again in float32."""
        rows = (Plain(dtype).row_bytes(self.head_dim) for dtype in (self.codec.dtype, "float32"))
        return 2 * tokens * self.num_kv_heads * sum(rows)
