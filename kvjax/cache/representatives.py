"""Representatives: part of the budget goes to KVs that stand for those a method would drop.

Source: KVCrush, section 3, and OpenVINO's `kvcrush.cpp`; k-means over the keys is that paper's
baseline. The most important KVs are kept by the base method's own order. Of the rest, the
candidates, a few are kept that are spread over all candidates: sorted by the Hamming distance of
their bit vectors from an anchor, cut into equal bins, one of each bin. (One anchor gives no more
distances than bits, so the paper's "bucket per distance" cannot fill a larger budget.)

A candidate's bits say for which query heads of the layer it would have been important. On its way
in, that are the query heads; in the pool, where one metric per KV is kept, the KV heads.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, UInt32

from kvjax.cache.keys import page_sums
from kvjax.cache.methods.base import Method, Representatives
from kvjax.cache.prices import kth_smallest, smallest

CENTROIDS_AT_ONCE = 64
"""Centroids that every key is compared with at a time."""
TIE = 1e-3
"""Relative difference of distances from a centroid that counts as none."""


def evicted_kvs(
    method: Method | None,
    keys: Float[Array, "*rows H T"],
    raw: Float[Array, "*rows H T"],
    position: Int32[Array, "*rows H T"],
    context_len: Int32[Array, "*rows H"],
    count: Int32[Array, "*rows H"],
    threshold: Float[Array, "*rows H"],
    votes: Float[Array, "*rows H r T"] | None = None,
    k: Float[Array, "*rows H T d"] | None = None,
) -> Bool[Array, "*rows H T"]:
    """Marks the `count` KVs of each head that go.

    Args:
        method: the method (static); without representatives, the smallest keys go.
        keys: eviction keys, +inf where a KV may not be evicted.
        raw: the same before pages were joined.
        position: token position of each KV.
        context_len: KVs of each head.
        count: KVs that each head gives up.
        threshold: the largest key that goes.
        votes: metrics of single query heads, where there are any (by token position).
        k: keys of the KVs; needed by k-means.
    """
    if method is None or method.representatives is None:
        return smallest(keys, count, threshold)
    chosen = method.representatives

    def layer(args):
        return _layer(chosen, method.shared, *args)

    args = (keys, raw, position, context_len, count, votes, k)
    if keys.ndim == 2:
        return layer(args)
    over = jax.vmap(layer) if chosen.kind == "kvcrush" else lambda x: jax.lax.map(layer, x)
    return over(args)


def _layer(
    chosen: Representatives,
    shared: bool,
    keys: Float[Array, "H T"],
    raw: Float[Array, "H T"],
    position: Int32[Array, "H T"],
    context_len: Int32[Array, " H"],
    count: Int32[Array, " H"],
    votes: Float[Array, "H r T"] | None,
    k: Float[Array, "H T d"] | None,
) -> Bool[Array, "H T"]:
    """`evicted_kvs` of one layer of one sequence."""
    evictable = jnp.isfinite(keys)
    stay = jnp.sum(evictable, axis=-1, dtype=jnp.int32) - count
    budget = jnp.floor(chosen.share * (context_len - count)).astype(jnp.int32)
    budget = jnp.where(count > 0, jnp.minimum(budget, stay), 0) // chosen.unit * chosen.unit
    dropped = count + budget
    candidate = _lowest(keys, dropped)
    if chosen.kind == "k-means":
        assert k is not None
        picked = _near_centroids(chosen, shared, k, candidate, position, budget)
    else:
        if chosen.mode == "openvino":
            half = jnp.sum(jnp.isfinite(raw), axis=-1, dtype=jnp.int32) // 2
            bits = (jnp.isfinite(raw) & ~_lowest(raw, half))[:1]
            bits = jnp.broadcast_to(bits, (*raw.shape[:1], *bits.shape))
        elif votes is not None:
            guarded = jnp.where(evictable[:, None], votes, jnp.inf)
            bits = ~jax.vmap(_lowest)(guarded, jnp.broadcast_to(dropped[:, None], votes.shape[:2]))
            bits = bits.reshape(-1, bits.shape[-1])
            bits = jnp.broadcast_to(bits, (keys.shape[0], *bits.shape))
        else:
            bits = _bits_by_position(~_lowest(raw, dropped), position, context_len)
        distance = jax.vmap(lambda *x: _distances(chosen, *x))(bits, candidate, position)
        picked = jax.vmap(lambda *x: _one_per_bin(chosen, *x))(
            distance, candidate, position, budget // chosen.unit
        )
    return _lowest(jnp.where(picked, jnp.inf, keys), count)


def _lowest(keys: Float[Array, "*rows T"], count: Int32[Array, "*rows"]) -> Bool[Array, "*rows T"]:
    """Marks the `count` smallest keys of each row, ties by index."""
    last = kth_smallest(keys, count)
    return smallest(keys, count, jnp.where(count > 0, last, -jnp.inf))


def _bits_by_position(
    important: Bool[Array, "H T"], position: Int32[Array, "H T"], context_len: Int32[Array, " H"]
) -> Bool[Array, "H G T"]:
    """For each head's KVs, whether each head of the layer holds that token and finds it important.

    Heads may hold different tokens in a different order.
    """
    last = jnp.iinfo(jnp.int32).max
    held = jnp.arange(position.shape[-1]) < context_len[:, None]
    order = jnp.argsort(jnp.where(held, position, last), axis=-1)
    sorted_position = jnp.take_along_axis(jnp.where(held, position, last), order, axis=-1)
    sorted_bit = jnp.take_along_axis(important & held, order, axis=-1)

    def look_up(wanted, positions, bits):
        at = jnp.minimum(jnp.searchsorted(positions, wanted), positions.shape[0] - 1)
        return bits[at] & (positions[at] == wanted)

    of_all_heads = jax.vmap(look_up, in_axes=(None, 0, 0))
    return jax.vmap(of_all_heads, in_axes=(0, None, None))(position, sorted_position, sorted_bit)


def _distances(
    chosen: Representatives,
    bits: Bool[Array, "G T"],
    candidate: Bool[Array, " T"],
    position: Int32[Array, " T"],
) -> Float[Array, " T"]:
    """Hamming distance of each candidate's bits, or of its page's, from the anchor."""
    num_bits, unit = bits.shape[0], chosen.unit
    offset = jnp.maximum(position, 0) % unit
    if chosen.anchor == "mean":
        total = jax.ops.segment_sum((bits & candidate).T.astype(jnp.int32), offset, unit)
        size = jax.ops.segment_sum(candidate.astype(jnp.int32), offset, unit)
        anchor = 2 * total > size[:, None]
    else:
        anchor = {
            "random": np.random.default_rng(chosen.seed).integers(0, 2, (unit, num_bits)),
            "alternating": np.arange(unit * num_bits).reshape(unit, num_bits) % 2,
            "zeros": np.zeros((unit, num_bits)),
            "ones": np.ones((unit, num_bits)),
        }[chosen.anchor]
        anchor = jnp.asarray(anchor.astype(bool))
    distance = jnp.sum(anchor[offset] != bits.T, axis=-1).astype(jnp.float32)
    return distance if unit == 1 else page_sums(distance, position, candidate, unit)


def _one_per_bin(
    chosen: Representatives,
    distance: Float[Array, " T"],
    candidate: Bool[Array, " T"],
    position: Int32[Array, " T"],
    bins: Int32[Array, ""],
) -> Bool[Array, " T"]:
    """Marks one candidate, or the candidates of one page, out of each of some equal bins."""
    num_keys = position.shape[0]
    last = jnp.iinfo(jnp.int32).max
    leader = candidate
    if chosen.unit > 1:  # the first candidate of a page stands for the page
        page = jnp.where(candidate, position // chosen.unit, last)
        order = jnp.argsort(jnp.where(candidate, position, last))
        first = jnp.concatenate([jnp.ones(1, bool), page[order][1:] != page[order][:-1]])
        leader = candidate & jnp.zeros(num_keys, bool).at[order].set(first)
    order = jnp.lexsort((position, jnp.where(leader, distance, jnp.inf)))
    rank = jnp.arange(num_keys, dtype=jnp.uint32)
    amount = jnp.sum(leader, dtype=jnp.uint32)
    wanted = jnp.minimum(bins.astype(jnp.uint32), amount)
    if chosen.mode == "openvino":
        step = jnp.maximum(amount // jnp.maximum(wanted, 1), 1)
        taken = (rank % step == 0) & (rank // step < wanted)
    else:
        taken = rank == _member(chosen, rank, amount, wanted)
    taken = taken & (rank < amount) & (wanted > 0)
    picked = jnp.zeros(num_keys, bool).at[order].set(taken)
    if chosen.unit > 1:
        picked = page_sums(picked.astype(jnp.float32), position, candidate, chosen.unit) > 0
    return picked & candidate


def _member(
    chosen: Representatives,
    rank: UInt32[Array, " T"],
    amount: UInt32[Array, ""],
    wanted: UInt32[Array, ""],
) -> UInt32[Array, " T"]:
    """The rank that is taken out of the bin of each rank."""
    amount, wanted = jnp.maximum(amount, 1), jnp.maximum(wanted, 1)
    bin_of = (wanted * (rank + 1) - 1) // amount
    start, end = bin_of * amount // wanted, (bin_of + 1) * amount // wanted
    if chosen.pick == "middle":
        return (start + end - 1) // 2
    drawn = np.random.default_rng(chosen.seed).integers(0, 2**16, rank.shape[0])
    drawn = jnp.asarray(drawn.astype(np.uint32))[jnp.minimum(bin_of, rank.shape[0] - 1)]
    return start + drawn % jnp.maximum(end - start, 1)


def _near_centroids(
    chosen: Representatives,
    shared: bool,
    k: Float[Array, "H T d"],
    candidate: Bool[Array, "H T"],
    position: Int32[Array, "H T"],
    clusters: Int32[Array, " H"],
) -> Bool[Array, "H T"]:
    """Marks the candidate nearest to each centroid of k-means over the candidates' keys."""
    features = k.astype(jnp.float32)
    if shared:  # one clustering over the keys of all heads side by side
        features = jnp.moveaxis(features, 0, 1).reshape(1, k.shape[1], -1)
        picked = _k_means(chosen, features[0], candidate[0], position[0], clusters[0])
        return jnp.broadcast_to(picked, candidate.shape)
    args = (features, candidate, position, clusters)
    return jax.lax.map(lambda x: _k_means(chosen, *x), args)


def _k_means(
    chosen: Representatives,
    features: Float[Array, "T d"],
    candidate: Bool[Array, " T"],
    position: Int32[Array, " T"],
    clusters: Int32[Array, ""],
) -> Bool[Array, " T"]:
    """Lloyd's algorithm from centroids spread evenly over the positions; see `_near_centroids`."""
    num_keys, width = features.shape
    most = -(-num_keys // CENTROIDS_AT_ONCE) * CENTROIDS_AT_ONCE
    last = jnp.iinfo(jnp.int32).max
    order = jnp.argsort(jnp.where(candidate, position, last))
    amount = jnp.sum(candidate, dtype=jnp.uint32)
    index = jnp.arange(most, dtype=jnp.uint32)
    start = index * amount // jnp.maximum(clusters.astype(jnp.uint32), 1)
    features = jnp.where(candidate[:, None], features, 0)
    centroids = features[order[jnp.minimum(start, num_keys - 1)]]

    def nearest(centroids):
        def compare(i, best):
            first = i * CENTROIDS_AT_ONCE
            some = jax.lax.dynamic_slice_in_dim(centroids, first, CENTROIDS_AT_ONCE)
            number = first + jnp.arange(CENTROIDS_AT_ONCE, dtype=jnp.int32)
            products = jnp.matmul(features, some.T, precision=jax.lax.Precision.HIGHEST)
            far = jnp.sum(some**2, axis=-1) - 2 * products
            far = jnp.where(number < clusters, far, jnp.inf)
            at = jnp.argmin(far, axis=-1)
            value = jnp.take_along_axis(far, at[:, None], axis=-1)[:, 0]
            closer = value < best[0]
            return jnp.where(closer, value, best[0]), jnp.where(closer, number[at], best[1])

        none = (jnp.full(num_keys, jnp.inf, jnp.float32), jnp.zeros(num_keys, jnp.int32))
        return jax.lax.fori_loop(0, -(-clusters // CENTROIDS_AT_ONCE), compare, none)

    def improve(_, centroids):
        own = jnp.where(candidate, nearest(centroids)[1], most)
        size = jax.ops.segment_sum(jnp.ones(num_keys), own, most)[:, None]
        total = jax.ops.segment_sum(features, own, most)
        return jnp.where(size > 0, total / jnp.maximum(size, 1), centroids)

    centroids = jax.lax.fori_loop(0, chosen.iterations, improve, centroids)
    distance, own = nearest(centroids)
    size = jnp.sum(features**2, axis=-1)
    distance = jnp.maximum(distance + size, 0)
    own = jnp.where(candidate, own, most)
    closest = jax.ops.segment_min(distance, own, most + 1)
    # Two keys of a pair are equally near to its centroid but for rounding: the older one stays.
    near = distance <= (1 + TIE) * closest[own] + TIE / 100 * size
    ties = jnp.where(candidate & near, position, last)
    return candidate & (ties == jax.ops.segment_min(ties, own, most + 1)[own]) & (ties < last)
