"""Slots that share blocks: blocks as lists of KVs, which several heads may hold.

Who owns what is found by looking at all heads every time; nothing is counted along the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from tests.oracle.eviction import (
    Choice,
    cheapest_blocks,
    eviction_count,
    eviction_order,
    move_cache,
    num_blocks,
)
from tests.oracle.kv import KV, cost

Block = list[KV]
Address = tuple[int, int, int]  # (slot, layer, KV head)


class SharingOracle:
    """Each head a list of blocks, the last of them perhaps not full."""

    def __init__(self, slots: int, layers: int, heads: int, blocks: int, width: int, size: int):
        self.total, self.width, self.size = blocks, width, size
        self.seq_len = [0] * slots
        self.heads: dict[Address, list[Block]] = {
            (s, layer, h): [] for s in range(slots) for layer in range(layers) for h in range(heads)
        }

    def owners(self) -> Counter:
        """Heads that hold each block, by the block's identity."""
        return Counter(id(block) for blocks in self.heads.values() for block in blocks)

    def free(self) -> int:
        return self.total - len(self.owners())

    def of_slot(self, slot: int) -> dict[tuple[int, int], list[KV]]:
        """The KVs of a slot's heads."""
        return {
            at[1:]: [kv for block in blocks for kv in block]
            for at, blocks in self.heads.items()
            if at[0] == slot
        }

    def share(self, source: int, target: int) -> bool:
        if self.seq_len[target] or any(self.of_slot(target).values()):
            return False
        for at in list(self.heads):
            if at[0] == target:
                self.heads[at] = list(self.heads[source, at[1], at[2]])
        self.seq_len[target] = self.seq_len[source]
        return True

    def add(self, new: dict[Address, list[KV]]) -> bool:
        """Put KVs behind what some heads hold; nothing happens where there is no room."""
        owners, needed = self.owners(), 0
        for at, kvs in new.items():
            held = sum(map(len, self.heads[at]))
            wanted = num_blocks(held + len(kvs), self.size)
            if wanted > self.width:
                return False
            needed += wanted - len(self.heads[at])
            needed += bool(kvs) and held % self.size > 0 and owners[id(self.heads[at][-1])] > 1
        if needed > self.free():
            return False
        for at, kvs in new.items():
            blocks = self.heads[at]
            if kvs and blocks and len(blocks[-1]) < self.size and owners[id(blocks[-1])] > 1:
                blocks[-1] = list(blocks[-1])
            for kv in kvs:
                if not blocks or len(blocks[-1]) == self.size:
                    blocks.append([])
                blocks[-1].append(kv)
        return True

    def own(self, slots: Sequence[int]) -> bool:
        """Copies of all that others hold too."""
        owners = self.owners()
        theirs = [at for at in self.heads if at[0] in slots]
        needed = sum(owners[id(block)] > 1 for at in theirs for block in self.heads[at])
        if needed > self.free():
            return False
        for at in theirs:
            self.heads[at] = [
                list(block) if owners[id(block)] > 1 else block for block in self.heads[at]
            ]
        return True

    def release(self, slots: Sequence[int]) -> None:
        for at in self.heads:
            if at[0] in slots:
                self.heads[at] = []
        for slot in slots:
            self.seq_len[slot] = 0

    def compress(
        self,
        slots: Sequence[int],
        keep: Sequence[int],
        protected: int,
        actual: Callable[[], dict[Address, list[KV]]],
    ) -> tuple[list[int], list[int]]:
        """Evict from some slots; returns what each gave back, and what could not be evicted.

        `actual` gives the heads as the cache has them afterwards: the order in which survivors
        fill the holes is its own affair, once they are the same KVs.
        """
        owners, room = self.owners(), self.free()
        plans, copied = [], 0
        for slot, budget in zip(slots, keep, strict=True):
            held = self.of_slot(slot)
            owned = sum(num_blocks(len(kvs), self.size) for kvs in held.values())
            choice: Choice = cheapest_blocks(
                {
                    name: [cost(kv, self.seq_len[slot], protected, 0) for kv in kvs]
                    for name, kvs in held.items()
                },
                max(0, owned - budget),
                self.size,
            )
            left, written = {}, []
            for name, kvs in held.items():
                gone = eviction_order([cost(kv, self.seq_len[slot], protected, 0) for kv in kvs])
                gone = set(gone[: eviction_count(len(kvs), choice.blocks[name], self.size)])
                left[name] = move_cache(kvs, gone)
                written += [
                    (name, block)
                    for block in range(num_blocks(len(left[name]), self.size))
                    if any(i // self.size == block and i < len(left[name]) for i in gone)
                ]
            blocks = {name: self.heads[slot, *name] for name in held}
            shared = [x for x in written if owners[id(blocks[x[0]][x[1]])] > 1]
            fits = copied + len(shared) <= room
            copied += len(shared) if fits else 0
            plans.append((slot, choice, left, written, fits))
        found = actual()
        freed, short = [], []
        for slot, choice, left, written, fits in plans:
            wanted = sum(choice.blocks.values())
            freed.append(wanted if fits else 0)
            short.append(choice.shortfall + (0 if fits else wanted))
            if not fits:
                continue
            for name, kvs in left.items():
                got = found[slot, *name]
                same = sorted(map(repr, (kv.bits() for kv in kvs)))
                assert same == sorted(map(repr, (kv.bits() for kv in got))), f"{slot}, {name}"
                blocks = self.heads[slot, *name][: num_blocks(len(kvs), self.size)]
                for column, block in enumerate(blocks):
                    now = got[column * self.size : (column + 1) * self.size]
                    if (name, column) in written:
                        # A new list, whoever owned it: nobody else may see the change.
                        blocks[column] = now
                    else:
                        assert [x.bits() for x in block] == [x.bits() for x in now]
                self.heads[slot, *name] = blocks
        return freed, short


def recounted(table: np.ndarray, num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """From block tables alone: owners of each block beside its first, and which have none."""
    owners = np.zeros(num_blocks, int)
    for block in table.reshape(-1).tolist():
        if block < num_blocks:
            owners[block] += 1
    return np.maximum(owners - 1, 0), owners == 0
