"""How many blocks a sequence may keep."""

from __future__ import annotations

import math


def cache_cap(length: int, rate: float, block_size: int = 16, floor: int = 128) -> int:
    """Tokens' worth of KVs: whole blocks strictly below length / rate, at least `floor`."""
    if rate == 1:  # no compression: room for all of it
        return max(floor, block_size, math.ceil(length / block_size) * block_size)
    tokens = math.floor(length / rate)
    below = 0
    while below + block_size < tokens:
        below += block_size
    return max(below, floor, block_size)


def rate_blocks(length: int, rate: float, heads: int, block_size: int, floor: int = 0) -> int:
    """The most blocks that hold no more than the KVs of `length` tokens by `rate`."""
    whole = budget_blocks(length, 1, heads, block_size)
    if rate == 1:
        return whole
    most = 0
    while (most + 1) * block_size * rate <= length * heads:
        most += 1
    return max(most, heads, budget_blocks(floor, 1, heads, block_size))


def budget_blocks(cap_tokens: int, num_layers: int, num_kv_heads: int, block_size: int) -> int:
    """Blocks that hold `cap_tokens` in every head of every layer: partial blocks count whole."""
    per_head = 0
    while per_head * block_size < cap_tokens:
        per_head += 1
    return per_head * num_layers * num_kv_heads


def evictions_needed(allocated: int, keep: int) -> int:
    """E, the blocks to evict from a sequence that owns `allocated` and may keep `keep`."""
    return allocated - keep if allocated > keep else 0
