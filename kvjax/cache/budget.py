"""From a compression rate or a cap in tokens to blocks of cache.

Source: KV-Compress, section 5.2 (the cap; its "min" is a misprint for "max") and 4.2.2 (the budget
in blocks, global over the layers and KV heads of a sequence).
"""

from kvjax.checks import INT32_MAX, check_number, check_whole

FLOOR_TOKENS = 128
"""The least cap that a rate leads to."""
USUAL_BLOCK, SMALL_BLOCK = 16, 8
"""KVs of a block where nobody says another number: of most caches, and of small ones."""


def usual_block(least: float | None) -> int:
    """KVs of a block for caches that keep as few as `least` tokens; None where nothing is evicted.

    Every head has a block, and heads are given whole ones: of fewer than three of 16 too much is
    given to heads that need little (docs/methods.md, "What is protected, and how large blocks
    are").
    """
    return SMALL_BLOCK if least is not None and least < 3 * USUAL_BLOCK else USUAL_BLOCK


def cache_cap(
    length: int, rate: float, block_size: int = USUAL_BLOCK, floor: int = FLOOR_TOKENS
) -> int:
    """Cache tokens that a sequence of `length` tokens may keep at a compression rate.

    KV-Compress's rule: max(floor, b, ⌊(⌊length / rate⌋ − 1) / b⌋ · b); a token's worth is a KV in
    each layer and head. So whole blocks that hold fewer than length / rate tokens, and no fewer
    than `floor`. A rate of 1 is no compression: then the whole blocks that hold all of them.

    Raises:
        UserError: the rate is not a finite number ≥ 1, or a size no whole number in range.
    """
    check_number("rate", rate, 1)
    length = check_whole("length", length, 0)
    b, floor = check_whole("block_size", block_size, 1), check_whole("floor", floor, 0)
    tokens = -(-length // b) if rate == 1 else (int(length / rate) - 1) // b
    return max(floor, b, tokens * b)


def rate_blocks(
    length: int, rate: float, heads: int, block_size: int = USUAL_BLOCK, floor: int = 0
) -> int:
    """Blocks that a sequence of `length` tokens may keep at a rate, over all its heads.

    length · heads / (rate · block_size), rounded down once, but at least a block of each head, and
    the floor in whole blocks of each. No cap in whole blocks of a head comes between, as in
    `cache_cap`: of short prompts it makes another rate. A rate of 1 keeps all. At most 2³¹ − 1.

    Raises:
        UserError: the rate is not a finite number ≥ 1, or a size no whole number in range.
    """
    check_number("rate", rate, 1)
    length, heads = check_whole("length", length, 0), check_whole("heads", heads, 1)
    if rate == 1:
        return budget_blocks(length, 1, heads, block_size)
    least = max(heads, budget_blocks(floor, 1, heads, block_size))
    return min(max(least, int(length * heads / (rate * block_size))), INT32_MAX)


def budget_blocks(cap: int, num_layers: int, num_kv_heads: int, block_size: int) -> int:
    """Blocks that a cap of so many tokens stands for, over all layers and KV heads.

    The cap is rounded up to whole blocks. At most 2³¹ − 1, which is more than any pool: blocks are
    counted in int32 on the device.

    Raises:
        UserError: a size is no whole number in range.
    """
    cap = check_whole("cap", cap, 0)
    heads = check_whole("num_layers", num_layers, 1) * check_whole("num_kv_heads", num_kv_heads, 1)
    return min(-(-cap // check_whole("block_size", block_size, 1)) * heads, INT32_MAX)
