"""k-means over the keys: the baseline of the KVCrush paper, as representatives.

Of the KVs that a base method would drop, those nearest to the centroids of a clustering of their
keys stay. Lloyd's algorithm from centroids spread evenly over the positions.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

from kvjax.cache.policy.checks import check_wholes
from kvjax.cache.policy.method import Method
from kvjax.cache.policy.representatives import Representatives, times_over, wrapped
from kvjax.cache.policy.select import Candidates

CENTROIDS_AT_ONCE = 64
"""Centroids that every key is compared with at a time."""
TIE = 1e-3
"""Relative difference of distances from a centroid that counts as none."""


@dataclasses.dataclass(frozen=True)
class NearCentroids(Representatives):
    """Representatives nearest to the centroids of the candidates' keys."""

    iterations: int = 10

    needs_keys: ClassVar[bool] = True
    one_at_a_time: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        check_wholes(self, 1, 1000, "iterations")

    def stand_ins(
        self,
        of: Candidates,
        candidate: Bool[Array, "H T"],
        dropped: Int32[Array, " H"],
        budget: Int32[Array, " H"],
    ) -> Bool[Array, "H T"]:
        assert of.k is not None
        same = self.scope == "layer"
        return _near_centroids(self, same, of.k, candidate, of.position, budget)


def k_means(base: Method, name: str, **settings) -> Method:
    """`base` with a share of its budget for representatives by k-means.

    Args:
        base: a method that evicts and has no representatives yet.
        name: of the new method.
        **settings: of `NearCentroids`: share, iterations.

    Raises:
        UserError: the base cannot be wrapped.
    """
    selector = NearCentroids(unit=base.selector.unit, scope=base.selector.scope, **settings)
    return wrapped(base, selector, name, "k-means of the keys", "P")


def _near_centroids(
    chosen: NearCentroids,
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


def spread(
    most: int, amount: UInt32[Array, ""], clusters: Int32[Array, ""]
) -> UInt32[Array, " most"]:
    """Which of an amount of candidates each centroid begins at; of those that are wanted, evenly
    spaced ones."""
    index = jnp.arange(most, dtype=jnp.uint32)
    return times_over(index, amount, jnp.maximum(clusters.astype(jnp.uint32), 1))[0]


def _k_means(
    chosen: NearCentroids,
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
    start = spread(most, amount, clusters)
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
