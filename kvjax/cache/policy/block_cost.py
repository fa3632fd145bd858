"""Costs of blocks, and the choice of the cheapest ones, over rows of eviction scores.

Source: KV-Compress, section 4.2.2, equations 13–18.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Num

from kvjax.cache.store import HeadShard, blocks_for, running_count, summed


def block_costs(
    scores: Float[Array, "*rows T"], context_len: Int32[Array, "*rows"], block_size: int
) -> Float[Array, "*rows M"]:
    """Cost of the 1st, 2nd, … block of each head to go, non-decreasing; +inf where it must stay."""
    num_blocks = scores.shape[-1] // block_size
    owned = blocks_for(context_len, block_size)[..., None]
    e = jnp.arange(1, num_blocks + 1, dtype=jnp.int32)
    lost = context_len[..., None] - (owned - e) * block_size
    cost = jnp.take_along_axis(
        jnp.sort(scores, axis=-1), jnp.clip(lost - 1, 0, scores.shape[-1] - 1), axis=-1
    )
    return jnp.where(e < owned, cost, jnp.inf)


def cheapest_blocks(
    cost: Float[Array, "*heads M"], evict: Int32[Array, ""], shard: HeadShard | None = None
) -> Int32[Array, "*heads"]:
    """How many of the `evict` cheapest blocks over some heads each of these gives up.

    Equal costs go in (head, block) order, so what a head gives up is always a prefix of its blocks.
    What cannot be evicted is not counted. With a shard, over the heads of all devices.
    """
    flat = cost.reshape(-1)
    finite = summed(shard, jnp.sum(jnp.isfinite(flat), dtype=jnp.int32))
    taken = jnp.clip(evict, 0, finite)
    if shard is not None:
        return least_of_each(cost, taken, shard)
    limit = jnp.sort(flat)[jnp.maximum(taken - 1, 0)]
    chosen = smallest(flat, taken, jnp.where(taken > 0, limit, -jnp.inf))
    return jnp.sum(chosen.reshape(cost.shape), axis=-1, dtype=jnp.int32)


def least_of_each(
    values: Float[Array, "*heads M"],
    count: Int32[Array, ""],
    shard: HeadShard,
    *,
    last_first: bool = False,
) -> Int32[Array, "*heads"]:
    """How many of the `count` smallest values over the heads of all devices each head has.

    Of equal values those of the first head count first, in the order of (layer, head) of the
    model, wherever the heads lie; with `last_first` those of the last. Devices tell each other
    no value: how many of each are below a number is summed for every bit of the last one that
    counts, and how many equal it for every head, once.
    """
    last = kth_smallest(values.reshape(-1), count, shard)
    last = jnp.where(count > 0, last, -jnp.inf)
    below, equal = (
        jnp.sum(which, axis=-1, dtype=jnp.int32) for which in (values < last, values == last)
    )
    of_all = shard.whole(jnp.stack([below, equal], axis=-1))
    room = count - jnp.sum(of_all[..., 0])
    ties = of_all[..., 1].reshape(-1)
    before = jnp.cumsum(ties) - ties
    if last_first:
        before = jnp.sum(ties) - before - ties
    return below + jnp.clip(room - shard.own(before.reshape(of_all.shape[:-1])), 0, equal)


def given_up(
    cost: Float[Array, "*heads M"],
    blocks: Int32[Array, "*heads"],
    context_len: Int32[Array, "*heads"],
    block_size: int,
) -> tuple[Int32[Array, "*heads"], Float[Array, "*heads"]]:
    """KVs that heads lose with so many of their blocks, and the largest score among them (−inf if
    none)."""
    kept = blocks_for(context_len, block_size) - blocks
    count = jnp.where(blocks > 0, context_len - kept * block_size, 0)
    threshold = jnp.take_along_axis(cost, jnp.maximum(blocks - 1, 0)[..., None], -1)[..., 0]
    return count, jnp.where(blocks > 0, threshold, -jnp.inf)


def kth_smallest(
    scores: Float[Array, "*rows T"], k: Int32[Array, "*rows"], shard: HeadShard | None = None
) -> Float[Array, "*rows"]:
    """The k-th smallest float32 score of each row (k from 1 on), without sorting the row.

    Its 32 bits are settled one by one, by counting the scores below; with a shard, on all devices.
    """
    bits = lax.bitcast_convert_type(scores.astype(jnp.float32) + 0.0, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    # Unsigned numbers in the order of the floats.
    ordered = jnp.where(bits & sign, ~bits, bits | sign)

    def settle(i, found):
        trial = found | (sign >> i.astype(jnp.uint32))
        below = summed(shard, jnp.sum(ordered < trial[..., None], axis=-1, dtype=jnp.int32))
        return jnp.where(below < k, trial, found)

    found = lax.fori_loop(0, 32, settle, jnp.zeros(scores.shape[:-1], jnp.uint32))
    found = jnp.where(found & sign, found ^ sign, ~found)
    return lax.bitcast_convert_type(found, jnp.float32)


def smallest(
    scores: Num[Array, "*rows T"],
    count: Int32[Array, "*rows"],
    threshold: Num[Array, "*rows"],
) -> Bool[Array, "*rows T"]:
    """Marks the `count` smallest scores of each row, ties by index, given the count-th smallest."""
    threshold = threshold[..., None]
    below, equal = scores < threshold, scores == threshold
    room = count - jnp.sum(below, axis=-1, dtype=jnp.int32)
    return below | (equal & (running_count(equal) <= room[..., None]))


def lowest(scores: Float[Array, "*rows T"], count: Int32[Array, "*rows"]) -> Bool[Array, "*rows T"]:
    """Marks the `count` smallest scores of each row, ties by index."""
    last = kth_smallest(scores, count)
    return smallest(scores, count, jnp.where(count > 0, last, -jnp.inf))
