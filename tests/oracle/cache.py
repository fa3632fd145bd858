"""The paged cache as dictionaries of lists: what every operation of kvjax.cache should do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tests.oracle.eviction import (
    Choice,
    cheapest_blocks,
    eviction_count,
    eviction_order,
    move_cache,
    num_blocks,
)
from tests.oracle.kv import KV, UNWRITTEN, cost

Address = tuple[int, int, int]  # (slot, layer, KV head)


class OracleCache:
    """Lists of KVs per (slot, layer, head) and a count of blocks. Operations change it in place.

    An operation that needs blocks returns False and changes nothing when the pool has too few or
    a head would own more than `max_blocks`.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_layers: int,
        num_kv_heads: int,
        num_blocks: int,
        max_blocks: int,
        block_size: int,
    ):
        self.num_slots = num_slots
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.total_blocks = num_blocks
        self.max_blocks = max_blocks
        self.block_size = block_size
        self.seq_len = [0] * num_slots
        self.heads: dict[Address, list[KV]] = {
            (s, layer, h): []
            for s in range(num_slots)
            for layer in range(num_layers)
            for h in range(num_kv_heads)
        }

    def of_slot(self, slot: int) -> dict[tuple[int, int], list[KV]]:
        """The heads of one sequence by (layer, head)."""
        return {(at[1], at[2]): kvs for at, kvs in self.heads.items() if at[0] == slot}

    def owned_blocks(self, slot: int) -> int:
        return sum(num_blocks(len(kvs), self.block_size) for kvs in self.of_slot(slot).values())

    def free_blocks(self) -> int:
        return self.total_blocks - sum(self.owned_blocks(s) for s in range(self.num_slots))

    def _fits(self, wanted: dict[Address, int]) -> bool:
        """Whether every head can hold its wanted number of KVs."""
        needed = {at: num_blocks(n, self.block_size) for at, n in wanted.items()}
        owned = {at: num_blocks(len(self.heads[at]), self.block_size) for at in wanted}
        more = sum(max(0, needed[at] - owned[at]) for at in wanted)
        return more <= self.free_blocks() and max(needed.values(), default=0) <= self.max_blocks

    def allocate(self, context_len: np.ndarray) -> bool:
        """Grow heads to context_len [S, L, H] KVs with unwritten slots; none shrinks."""
        wanted = {at: max(len(kvs), int(context_len[at])) for at, kvs in self.heads.items()}
        if not self._fits(wanted):
            return False
        for at, n in wanted.items():
            self.heads[at].extend(KV(UNWRITTEN) for _ in range(n - len(self.heads[at])))
        return True

    def write_prompt(
        self,
        slot: int,
        k: np.ndarray,
        v: np.ndarray,
        metric: np.ndarray,
        length: int,
        kept: Callable[[int, int], Sequence[int]] | None = None,
    ) -> bool:
        """Add `length` tokens, or those that `kept(layer, head)` lists, to what a slot holds.

        k, v [L, T, H, d]; metric [L, H, T]. Token t takes position seq_len + t.
        """
        start = self.seq_len[slot]
        new = {
            (slot, layer, h): [
                KV(start + t, k[layer, t, h], v[layer, t, h], float(metric[layer, h, t]))
                for t in (range(length) if kept is None else kept(layer, h))
            ]
            for layer, h in self.of_slot(slot)
        }
        if not self._fits({at: len(self.heads[at]) + len(kvs) for at, kvs in new.items()}):
            return False
        for at, kvs in new.items():
            self.heads[at] = self.heads[at] + kvs
        self.seq_len[slot] += length
        return True

    def write_survivors(
        self,
        slot: int,
        k: np.ndarray,
        v: np.ndarray,
        metric: np.ndarray,
        length: int,
        keep: int,
        protected: int = 0,
        sinks: int = 0,
    ) -> tuple[bool, Choice]:
        """Compress a prompt for an empty slot to `keep` blocks, then write what is left of it."""
        costs = {
            (layer, h): [
                cost(KV(t, k[layer, t, h], v[layer, t, h], x), length, protected, sinks)
                for t, x in enumerate(metric[layer, h, :length])
            ]
            for layer, h in self.of_slot(slot)
        }
        owned = len(costs) * num_blocks(length, self.block_size)
        choice = cheapest_blocks(costs, max(0, owned - keep), self.block_size)
        left = {}
        for name, row in costs.items():
            gone = eviction_count(length, choice.blocks[name], self.block_size)
            left[name] = sorted(eviction_order(row)[gone:])
        ok = self.write_prompt(slot, k, v, metric, length, lambda layer, h: left[layer, h])
        return ok, choice

    def append(self, k: np.ndarray, v: np.ndarray, active: Sequence[bool]) -> bool:
        """One KV per head of each active slot at position seq_len, metric 0. k, v [L, S, H, d]."""
        wanted = {at: len(kvs) + 1 for at, kvs in self.heads.items() if active[at[0]]}
        if not self._fits(wanted):
            return False
        for s, layer, h in wanted:
            self.heads[s, layer, h].append(KV(self.seq_len[s], k[layer, s, h], v[layer, s, h], 0.0))
        for s in range(self.num_slots):
            self.seq_len[s] += bool(active[s])
        return True

    def release(self, slots: Sequence[bool]) -> None:
        """Forget these sequences."""
        for at in self.heads:
            if slots[at[0]]:
                self.heads[at] = []
        for s in range(self.num_slots):
            self.seq_len[s] = 0 if slots[s] else self.seq_len[s]

    def costs(self, slot: int, protected: int, sinks: int) -> dict[tuple[int, int], list[float]]:
        """What evicting each KV of a sequence costs, by (layer, head) in logical order."""
        return {
            name: [cost(kv, self.seq_len[slot], protected, sinks) for kv in kvs]
            for name, kvs in self.of_slot(slot).items()
        }

    def schedule(self, slot: int, evict: int, protected: int = 0, sinks: int = 0) -> Choice:
        """Blocks to evict per head of one sequence."""
        return cheapest_blocks(self.costs(slot, protected, sinks), evict, self.block_size)

    def evicted(
        self, slot: int, choice: Choice, protected: int = 0, sinks: int = 0
    ) -> dict[tuple[int, int], set[int]]:
        """Logical indices of the KVs a choice evicts, by (layer, head)."""
        costs = self.costs(slot, protected, sinks)
        return {
            name: set(
                eviction_order(row)[
                    : eviction_count(len(row), choice.blocks[name], self.block_size)
                ]
            )
            for name, row in costs.items()
        }

    def move(self, slot: int, evicted: dict[tuple[int, int], set[int]]) -> None:
        """Drop the evicted KVs and close the gaps."""
        for (layer, h), gone in evicted.items():
            self.heads[slot, layer, h] = move_cache(self.heads[slot, layer, h], gone)

    def compress(self, slot: int, keep: int, protected: int = 0, sinks: int = 0) -> Choice:
        """Evict until the sequence owns `keep` blocks, or as near to it as can be."""
        evict = max(0, self.owned_blocks(slot) - keep)
        choice = self.schedule(slot, evict, protected, sinks)
        self.move(slot, self.evicted(slot, choice, protected, sinks))
        return choice

    def observe(self, metric: Callable[[Address, int], float]) -> None:
        """Replace the metric of every written KV by `metric(address, logical index)`."""
        for at, kvs in self.heads.items():
            self.heads[at] = [
                replace(kv, metric=metric(at, i)) if kv.written else kv for i, kv in enumerate(kvs)
            ]
