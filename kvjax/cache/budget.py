"""From a compression rate or a cap in tokens to blocks of cache.

Source: KV-Compress, section 5.2 (the cap; its "min" is a misprint for "max") and 4.2.2 (the budget
in blocks, global over the layers and KV heads of a sequence).
"""

import math

from kvjax.errors import UserError

FLOOR_TOKENS = 128
"""The least cap that a rate leads to."""


def cache_cap(length: int, rate: float, block_size: int = 16, floor: int = FLOOR_TOKENS) -> int:
    """Cache tokens that a sequence of `length` tokens may keep at a compression rate.

    max(floor, b, ⌊(⌊length / rate⌋ − 1) / b⌋ · b); a token's worth is a KV in each layer and head.

    Raises:
        UserError: the rate is not a finite number ≥ 1.
    """
    if not (math.isfinite(rate) and rate >= 1):
        raise UserError(f"rate {rate}: give a number of at least 1 (1 keeps everything)")
    return max(floor, block_size, (int(length / rate) - 1) // block_size * block_size)


def budget_blocks(cap: int, num_layers: int, num_kv_heads: int, block_size: int) -> int:
    """Blocks that a cap of so many tokens stands for, over all layers and KV heads.

    The cap is rounded up to whole blocks.
    """
    return -(-cap // block_size) * num_layers * num_kv_heads
