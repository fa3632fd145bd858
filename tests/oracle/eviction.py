"""Which blocks go (equations 13-18) and how the survivors close ranks (algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np

Head = tuple[int, int]  # (layer, KV head)


@dataclass(frozen=True)
class Choice:
    """What one sequence evicts: blocks per (layer, head), and blocks asked for but not to be had.

    `bids` lists (price, layer, head, e) of every block evicted, cheapest first.
    """

    blocks: dict[Head, int]
    shortfall: int
    bids: list[tuple[float, int, int, int]]


def num_blocks(kvs: int, block_size: int) -> int:
    """Blocks that `kvs` KVs occupy."""
    return math.ceil(kvs / block_size)


def ragged(kvs: int, block_size: int) -> int:
    """a: the KVs in the last block, between 1 and the block size (0 for an empty head)."""
    return kvs - block_size * (num_blocks(kvs, block_size) - 1) if kvs else 0


def eviction_count(kvs: int, blocks: int, block_size: int) -> int:
    """KVs that must go before the last `blocks` blocks of a head with `kvs` KVs are free."""
    if blocks == 0:
        return 0
    return ragged(kvs, block_size) + (blocks - 1) * block_size


def eviction_order(costs: Sequence[float]) -> list[int]:
    """Logical indices from the cheapest to the dearest KV, equal ones by logical index."""
    return sorted(range(len(costs)), key=lambda i: (costs[i], i))


def prices(costs: Sequence[float], block_size: int) -> list[float]:
    """m(h, e) for e = 1 … ⌈C_h/b⌉ - 1: the dearest KV lost when e blocks are freed."""
    ordered = sorted(costs)
    total = num_blocks(len(costs), block_size)
    return [ordered[eviction_count(len(costs), e, block_size) - 1] for e in range(1, total)]


def paper_prices(costs: Sequence[float], block_size: int) -> list[float]:
    """The same prices by the paper's own construction, equation 17.

    The empty slots of the last block sort before every KV; the sorted row is cut into rows of b;
    the last column is the price. Equation 16 leaves out the head's last block.
    """
    total = num_blocks(len(costs), block_size)
    empty = total * block_size - len(costs)
    row = np.array([-math.inf] * empty + sorted(costs))
    return [float(x) for x in row.reshape(total, block_size)[:-1, block_size - 1]] if total else []


def cheapest_blocks(heads: Mapping[Head, Sequence[float]], evict: int, block_size: int) -> Choice:
    """The `evict` cheapest blocks over all heads of one sequence; infinite prices never go."""
    bids = [
        (price, layer, head, e)
        for (layer, head), costs in heads.items()
        for e, price in enumerate(prices(costs, block_size), start=1)
        if price < math.inf
    ]
    taken = sorted(bids)[:evict]
    blocks = dict.fromkeys(heads, 0)
    for _, layer, head, e in taken:
        assert e == blocks[layer, head] + 1, "a head's evicted blocks are a prefix"
        blocks[layer, head] = e
    return Choice(blocks, evict - len(taken), taken)


def brute_force_cost(
    heads: Mapping[Head, Sequence[float]], evict: int, block_size: int
) -> tuple[float, list[dict[Head, int]]]:
    """The least total price of freeing `evict` blocks, and every split that reaches it.

    Nothing is sorted: the price of a head's e-th block is found by trying all sets of KVs that
    free e blocks, and the split by trying all numbers of blocks per head. For tiny cases.
    """
    names = list(heads)
    table: list[list[float]] = []
    for name in names:
        costs = heads[name]
        row = []
        for e in range(1, num_blocks(len(costs), block_size)):
            size = eviction_count(len(costs), e, block_size)
            row.append(min(max(chosen) for chosen in combinations(costs, size)))
        table.append([price for price in row if price < math.inf])
    best, winners = math.inf, []
    for split in product(*(range(len(row) + 1) for row in table)):
        if sum(split) != evict:
            continue
        total = sum(sum(row[:e]) for row, e in zip(table, split, strict=True))
        if total < best:
            best, winners = total, []
        if total == best:
            winners.append(dict(zip(names, split, strict=True)))
    return best, winners


def move_cache(items: list, evicted: set[int]) -> list:
    """Algorithm 1 on one head: returns what is left of `items` once `evicted` indices are gone.

    j walks down the eviction range, i walks up below it; each survivor met by j replaces the next
    evicted item found by i.
    """
    items = list(items)
    end = len(items) - len(evicted)
    i, j = 0, len(items) - 1
    while j >= end:
        if j not in evicted:
            while i not in evicted:
                i += 1
            assert i < end
            items[i] = items[j]
            i += 1
        j -= 1
    return items[:end]
