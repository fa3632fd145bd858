"""Blocks that hold more bits of others for as long as they are free.

What a pool of codes of few bits misses of its rows is coded in the same way and stored in a second
block, one that is free. Rows are the sum of both, of twice the bits. A block's tag names the block
with its finer codes, and the tag of that one names the first. Such a block stays on the stack of
free ones, so that whoever needs it takes it from there as any other: a block is demoted to the
fewer bits by losing its tag, and no row is coded again. The cheapest are taken first.

So what is held in all is the pool's bytes: KVs of many bits where few are held, of fewer where more
are, and those that compression frees become more bits of others. Sources: DiffKV (2024), section
4.1 (tiers of precision by a KV's significance, and none for the least), ZipCache and MiKV (2024);
the sum of two codes is residual quantisation, as of Juang and Gray (1982).
"""

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.cache.store.counting import running_count
from kvjax.cache.store.free import FreeBlocks


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FineBlocks:
    """Which block holds the finer codes of each."""

    tag: Int32[Array, " N"]
    """Of a block that somebody owns, the one with its finer codes; of that one, the first; of all
    others N."""
    count: Int32[Array, " 1"]
    """Free blocks, from the bottom of the stack, above which none holds finer codes."""

    @classmethod
    def none(cls, num_blocks: int) -> "FineBlocks":
        """No block has finer codes."""
        return cls(jnp.full(num_blocks, num_blocks, jnp.int32), jnp.zeros(1, jnp.int32))

    @property
    def num_blocks(self) -> int:
        return self.tag.shape[0]

    def of(self, blocks: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
        """Where the finer codes of some blocks are; N where there are none."""
        return self.tag.at[blocks].get(mode="fill", fill_value=self.num_blocks)

    def slots(self, slots: Int32[Array, "*n"], block_size: int) -> Int32[Array, "*n"]:
        """Where the finer codes of some slots of the pool are; N · b and more where there are
        none."""
        return self.of(slots // block_size) * block_size + slots % block_size

    def parted(self, blocks: Int32[Array, "*n"], free: FreeBlocks) -> "FineBlocks":
        """Without the finer codes of some blocks, or in them; `free` is what is free now."""
        tag = self.tag
        for ids in (blocks, self.of(blocks)):
            tag = tag.at[ids].set(self.num_blocks, mode="drop")
        return FineBlocks(tag, jnp.minimum(self.count, free.count))

    def grown(self, blocks: Int32[Array, "*n"], free: FreeBlocks) -> "FineBlocks":
        """With room for finer codes of some blocks, in free blocks that have none, as many as there
        are. What lies there counts until something else is written."""
        n = self.num_blocks
        blocks = blocks.reshape(-1)
        upto = running_count(blocks < n)
        at = self.count + upto - 1
        at = jnp.where((blocks < n) & (at < free.count), at, n)
        ids = free.stack.at[at].get(mode="fill", fill_value=n)
        blocks = jnp.where(ids < n, blocks, n)
        tag = self.tag.at[blocks].set(ids, mode="drop").at[ids].set(blocks, mode="drop")
        return FineBlocks(tag, self.count + jnp.sum(ids < n, dtype=jnp.int32))

    def arranged(
        self, worth: Float[Array, " N"], free: FreeBlocks
    ) -> tuple["FineBlocks", FreeBlocks]:
        """With room for finer codes of the blocks that are worth most, as many as are free, and the
        free ones in the order in which they are to be taken: those without, then those of the
        blocks that are worth least.

        Args:
            worth: of each block that somebody owns and that has finer codes or shall have them; of
                all others −inf.
            free: the free blocks.
        """
        n = self.num_blocks
        rank = jnp.arange(n, dtype=jnp.int32)
        worth = jnp.where(jnp.isnan(worth), -jnp.inf, worth)
        order = jnp.argsort(-worth).astype(jnp.int32)
        wins = (rank < free.count) & (worth[order] > -jnp.inf)
        block = jnp.where(wins, order, n)
        has = self.of(block)
        used = jnp.zeros(n, bool).at[has].set(True, mode="drop")
        vacant = (rank < free.count) & ~used[free.stack]
        at = jnp.where(vacant, running_count(vacant) - 1, n)
        spare = jnp.full(n, n, jnp.int32).at[at].set(free.stack, mode="drop")
        new = wins & (has == n)
        taken = running_count(new)
        ids = jnp.where(new, spare[taken - 1], has)
        count = jnp.sum(wins, dtype=jnp.int32)
        left = spare.at[rank - count + taken[-1]].get(mode="fill", fill_value=n)
        tag = jnp.full(n, n, jnp.int32)
        tag = tag.at[block].set(ids, mode="drop").at[ids].set(block, mode="drop")
        stack = jnp.where(rank < count, ids, left)
        return FineBlocks(tag, count[None]), dataclasses.replace(free, stack=stack)
