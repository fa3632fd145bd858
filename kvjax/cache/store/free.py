"""The blocks that nobody owns, on a stack: who takes or gives some back pays for these alone."""

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from kvjax.cache.store.counting import running_count


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FreeBlocks:
    """A stack of block ids. A mask would have to be searched, all N of it, in every decode step."""

    stack: Int32[Array, " N"]
    """Free blocks from the bottom on; entries above the top mean nothing."""
    count: Int32[Array, " 1"]
    """How many are free. An axis of one, along which several devices put theirs."""

    @classmethod
    def every(cls, num_blocks: int) -> "FreeBlocks":
        """All blocks of a pool; the lowest are taken first."""
        return cls(
            jnp.arange(num_blocks - 1, -1, -1, dtype=jnp.int32), jnp.full(1, num_blocks, jnp.int32)
        )

    @property
    def mask(self) -> Bool[Array, " N"]:
        """Which blocks are free: for tests and for looking on, as it visits all N."""
        n = self.stack.shape[0]
        below = jnp.arange(n, dtype=jnp.int32) < self.count
        return jnp.zeros(n, bool).at[jnp.where(below, self.stack, n)].set(True, mode="drop")

    def peek(self, rank: Int[Array, "*dims"]) -> Int32[Array, "*dims"]:
        """Id of the block with `rank` (from 0) free ones above it; N where there is none."""
        n = self.stack.shape[0]
        at = self.count[0] - 1 - rank
        return self.stack.at[jnp.where(at < 0, n, at)].get(mode="fill", fill_value=n)

    def without(self, taken: Int[Array, ""]) -> "FreeBlocks":
        """With so many taken from the top."""
        return dataclasses.replace(self, count=self.count - taken.astype(jnp.int32))

    def with_blocks(self, ids: Int32[Array, "*dims"]) -> "FreeBlocks":
        """With some blocks put back, each of them once; ids of N are passed over.

        They are taken again in the order of `ids`.
        """
        ids, n = ids.reshape(-1), self.stack.shape[0]
        upto = running_count(ids < n)
        at = jnp.where(ids < n, self.count + upto[-1] - upto, n)
        return FreeBlocks(self.stack.at[at].set(ids, mode="drop"), self.count + upto[-1])
