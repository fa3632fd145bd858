"""Blocks as the host counts them: NumPy vectors with an entry per shard of the pool.

A shard is a device's part of the pool with blocks and heads of its own. A sequence has blocks in
every shard, so there is room for it where every shard has room.
"""

from collections.abc import Sequence

import numpy as np

KEPT_FREE, KEPT_FOR_CODES = 100, 10
"""One block of so many of each shard is left free of prompts, so that those that run can grow; and
where free blocks hold finer codes of others: with a tenth of these most of what all are good for is
there (docs/results.md)."""


class Accounts:
    """Free blocks, and what the sequence in each slot holds and will need, as last reported."""

    def __init__(
        self,
        num_slots: int,
        num_blocks: Sequence[int],
        heads: Sequence[int] | None = None,
        kept_free: int = KEPT_FREE,
    ):
        self.num_blocks = np.asarray(num_blocks, np.int64)
        """Blocks of each shard [P]."""
        self.heads = np.asarray([1] * len(self.num_blocks) if heads is None else heads, np.int64)
        """KV heads of each shard, over all layers [P]; by default each has as many."""
        self.kept_free = kept_free
        """One block of so many stays free where others run."""
        self.free = self.num_blocks.copy()
        """Blocks that nobody owns [P]."""
        self.owned = np.zeros((num_slots, len(self.num_blocks)), np.int64)
        """Blocks that each slot holds [S, P]."""
        self.growth = np.zeros_like(self.owned)
        """Blocks that each slot needs for its next decode steps [S, P]."""
        self.longest = np.zeros(num_slots, np.int64)
        """Most KVs that a head of each slot holds [S]."""

    @property
    def num_free(self) -> int:
        """Free blocks of all shards."""
        return int(self.free.sum())

    @property
    def num_used(self) -> int:
        """Blocks in use of all shards."""
        return int((self.num_blocks - self.free).sum())

    def spread(self, blocks: int) -> np.ndarray:
        """Blocks of a sequence by shard [P], where its heads need as many each."""
        return -(-blocks * self.heads // self.heads.sum())

    def could_hold(self, blocks: int) -> bool:
        """Whether a sequence of so many blocks had room if it were alone."""
        return bool((self.num_blocks >= self.spread(blocks)).all())

    def by_shard(self, blocks: np.ndarray) -> np.ndarray:
        """Blocks of each place for a head [L, H] by shard [1, P]; each has as many, in order."""
        rows = (len(blocks), len(self.num_blocks), -1)
        return blocks.reshape(rows).sum((0, 2))[None]

    def have(self, blocks: int) -> bool:
        """Whether a sequence of so many blocks has room beside the growth of those that run.

        Of each shard one block of `kept_free` stays free.
        """
        spare = self.num_blocks // self.kept_free
        return bool((self.free >= self.spread(blocks) + self.growth.sum(0) + spare).all())

    def take(self, slot: int, blocks: int, longest: int) -> None:
        """A sequence of so many blocks is on its way to a slot."""
        self.owned[slot], self.longest[slot] = self.spread(blocks), longest
        self.free -= self.owned[slot]

    def give_back(self, slot: int, blocks: np.ndarray | int) -> None:
        """A slot gave back so many blocks [P]."""
        self.free += blocks
        self.owned[slot] -= blocks

    def empty(self, slot: int) -> None:
        """A slot holds nothing any more."""
        self.give_back(slot, self.owned[slot])
        self.growth[slot] = self.longest[slot] = 0

    def emptied(self, slots: Sequence[int], free: np.ndarray | int) -> None:
        """Some slots are empty, and the device counts so many free blocks: fewer than these slots
        held, where others hold the same blocks."""
        self.owned[list(slots)] = 0
        self.free[:] = free

    def report(
        self,
        slots: Sequence[int],
        owned: np.ndarray,
        longest: np.ndarray,
        growth: np.ndarray | int = 0,
    ) -> None:
        """What the device says that some slots [G] hold, and need next.

        Args:
            slots: the slots.
            owned: blocks of each, [G] or [G, P].
            longest: most KVs of a head, [G].
            growth: blocks of the next decode steps, as `owned`.
        """
        at, by_shard = list(slots), (len(slots), self.owned.shape[1])
        self.owned[at] = np.reshape(owned, by_shard)
        self.growth[at] = np.broadcast_to(growth, np.shape(owned)).reshape(by_shard)
        self.longest[at] = longest
