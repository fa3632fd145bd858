"""Prices of blocks, and the choice of the cheapest ones, over rows of eviction keys.

Source: KV-Compress, section 4.2.2, equations 13–18.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Num

from kvjax.cache.paged import blocks_for


def block_prices(
    keys: Float[Array, "*rows T"], context_len: Int32[Array, "*rows"], block_size: int
) -> Float[Array, "*rows M"]:
    """Price of the 1st, 2nd, … block of each head, non-decreasing; +inf where it must stay."""
    num_blocks = keys.shape[-1] // block_size
    owned = blocks_for(context_len, block_size)[..., None]
    e = jnp.arange(1, num_blocks + 1, dtype=jnp.int32)
    lost = context_len[..., None] - (owned - e) * block_size
    price = jnp.take_along_axis(
        jnp.sort(keys, axis=-1), jnp.clip(lost - 1, 0, keys.shape[-1] - 1), axis=-1
    )
    return jnp.where(e < owned, price, jnp.inf)


def select_blocks(
    prices: Float[Array, "L H M"],
    context_len: Int32[Array, "L H"],
    evict: Int32[Array, ""],
    block_size: int,
) -> tuple[Int32[Array, "L H"], Int32[Array, "L H"], Float[Array, "L H"], Int32[Array, ""]]:
    """The `evict` cheapest blocks of one sequence, globally over layers and heads.

    Equal prices go in (layer, head, block) order, so what a head gives up is always a prefix of
    its schedule.

    Returns:
        Blocks per head, KVs per head, the largest metric evicted per head (−inf if none), and the
        shortfall: blocks asked for beyond the evictable ones.
    """
    flat = prices.reshape(-1)
    evictable = jnp.sum(jnp.isfinite(flat), dtype=jnp.int32)
    taken = jnp.clip(evict, 0, evictable)
    limit = jnp.sort(flat)[jnp.maximum(taken - 1, 0)]
    limit = jnp.where(taken > 0, limit, -jnp.inf)
    cheaper, equal = flat < limit, flat == limit
    room = taken - jnp.sum(cheaper, dtype=jnp.int32)
    chosen = cheaper | (equal & (jnp.cumsum(equal, dtype=jnp.int32) <= room))
    blocks = jnp.sum(chosen.reshape(prices.shape), axis=-1, dtype=jnp.int32)
    kept_blocks = blocks_for(context_len, block_size) - blocks
    count = jnp.where(blocks > 0, context_len - kept_blocks * block_size, 0)
    threshold = jnp.take_along_axis(prices, jnp.maximum(blocks - 1, 0)[..., None], -1)[..., 0]
    threshold = jnp.where(blocks > 0, threshold, -jnp.inf)
    return blocks, count, threshold, jnp.maximum(evict, 0) - taken


def kth_smallest(keys: Float[Array, "*rows T"], k: Int32[Array, "*rows"]) -> Float[Array, "*rows"]:
    """The k-th smallest float32 key of each row (k from 1 on), without sorting the row.

    Its 32 bits are settled one by one, by counting the keys below.
    """
    bits = lax.bitcast_convert_type(keys.astype(jnp.float32) + 0.0, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    # Unsigned numbers in the order of the floats.
    ordered = jnp.where(bits & sign, ~bits, bits | sign)

    def settle(i, found):
        trial = found | (sign >> i.astype(jnp.uint32))
        below = jnp.sum(ordered < trial[..., None], axis=-1, dtype=jnp.int32)
        return jnp.where(below < k, trial, found)

    found = lax.fori_loop(0, 32, settle, jnp.zeros(keys.shape[:-1], jnp.uint32))
    found = jnp.where(found & sign, found ^ sign, ~found)
    return lax.bitcast_convert_type(found, jnp.float32)


def smallest(
    keys: Num[Array, "*rows T"],
    count: Int32[Array, "*rows"],
    threshold: Num[Array, "*rows"],
) -> Bool[Array, "*rows T"]:
    """Marks the `count` smallest keys of each row, ties by index, given the count-th smallest."""
    threshold = threshold[..., None]
    below, equal = keys < threshold, keys == threshold
    room = count - jnp.sum(below, axis=-1, dtype=jnp.int32)
    return below | (equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= room[..., None]))
