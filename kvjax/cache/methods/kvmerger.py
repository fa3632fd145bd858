"""KVMerger (Wang et al. 2024, arXiv 2407.08454): neighbours of like keys become one KV.

From the newest token back, a token joins the next one's set where the cosine of their keys (after
RoPE) is above 0.75. A set becomes its pivot, the KV of most attention (H2O's): its key and value
are means of the set's, with weights e^(−‖k_pivot − k‖² / 2σ²), σ = 5. The newest tokens and the
most read ones stay as they are.

The paper's threshold fixes how much is saved; here the budget does. So of a head the least read KVs
go that are no pivots, into their pivots, and one that stays is not merged; where that does not do,
the least read pivots are dropped, and their sets with them. A KV that stands alone is its own
pivot.

Assumed, for the rule is known from third parties' code: the most read tokens that stay as they are
are a quarter of what the head keeps; σ is the value that their ablation favours, for the paper's
own formula refers to itself; and values are averaged as keys are, where one implementation
multiplies them by the size of the set, which without as much weight in the softmax makes outputs
too large. Sets that were merged before count as one KV. KVs written by decode steps have metric 0.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache.methods.h2o import Accumulated
from kvjax.cache.policy.allocate import ByLayer
from kvjax.cache.policy.block_cost import lowest
from kvjax.cache.policy.checks import check_numbers
from kvjax.cache.policy.merge import Merger
from kvjax.cache.policy.method import Method
from kvjax.cache.policy.score import Artefacts
from kvjax.cache.policy.select import Candidates, Selector

ALIKE, READ_MOST, SIGMA = 0.75, 0.25, 5.0


class Sets(NamedTuple):
    """The sets that the KVs of a head are in."""

    number: Int32[Array, " T"]
    """Which set each KV is in, from 0 on."""
    pivot: Bool[Array, " T"]
    """Whether it is the pivot of its set; also of those that stand alone."""


def merging_sets(
    k: Float[Array, "T d"],
    position: Int32[Array, " T"],
    score: Float[Array, " T"],
    held: Bool[Array, " T"],
    kept: Int32[Array, ""],
    alike: float,
    read_most: float,
) -> Sets:
    """The sets of one head.

    Args:
        k: keys.
        position: token positions.
        score: eviction scores; +inf where a KV stays in any case.
        held: KVs that there are.
        kept: how many of them stay.
        alike: cosine above which neighbours join.
        read_most: share of those that stay which stand alone for their scores.
    """
    free = held & jnp.isfinite(score)
    size = jnp.sum(free, dtype=jnp.int32)
    alone = jnp.minimum(jnp.floor(read_most * kept).astype(jnp.int32), size)
    free &= ~lowest(jnp.where(free, -score, jnp.inf), alone)
    order = jnp.argsort(jnp.where(held, position, jnp.iinfo(jnp.int32).max))
    row = jnp.where(held[:, None], k.astype(jnp.float32), 0)[order]
    row = row / jnp.maximum(jnp.linalg.norm(row, axis=-1, keepdims=True), 1e-12)
    like = jnp.sum(row[1:] * row[:-1], axis=-1) > alike
    joins = like & free[order][1:] & free[order][:-1]
    number = jnp.cumsum(jnp.concatenate([jnp.zeros(1, bool), ~joins]), dtype=jnp.int32)
    sorted_score = jnp.where(free, score, 0)[order]
    most = jax.ops.segment_max(sorted_score, number, len(k), indices_are_sorted=True)
    place = jnp.arange(len(k), dtype=jnp.int32)
    best = jnp.where(sorted_score == most[number], place, len(k))
    first = jax.ops.segment_min(best, number, len(k), indices_are_sorted=True)
    pivot = first[number] == place
    back = jnp.argsort(order)
    return Sets(number[back], pivot[back])


def _check(settings: "PivotsLast | GaussianMerged") -> None:
    check_numbers(settings, -1, 1, "alike")
    check_numbers(settings, 0, 1, "read_most")


@dataclasses.dataclass(frozen=True)
class PivotsLast(Selector):
    """What can be merged goes first, then pivots, the lowest scores of each."""

    alike: float = ALIKE
    """Cosine above which neighbours are in one set."""
    read_most: float = READ_MOST
    """Share of the KVs that stay which are merged with nothing."""

    needs_keys: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        _check(self)

    def choose(self, of: Candidates) -> Bool[Array, "H T"]:
        assert of.k is not None
        held = jnp.arange(of.scores.shape[-1]) < of.context_len[:, None]
        sets = jax.vmap(merging_sets, (0, 0, 0, 0, 0, None, None))(
            of.k, of.position, of.scores, held, of.context_len - of.count, self.alike,
            self.read_most,
        )  # fmt: skip
        free = held & jnp.isfinite(of.scores)
        merges = free & ~sets.pivot
        first = jnp.minimum(of.count, jnp.sum(merges, axis=-1, dtype=jnp.int32))
        others = jnp.where(free & sets.pivot, of.scores, jnp.inf)
        return lowest(jnp.where(merges, of.scores, jnp.inf), first) | lowest(
            others, of.count - first
        )


@dataclasses.dataclass(frozen=True)
class GaussianMerged(Merger):
    """What goes is folded into the pivot of its set, if that stays."""

    alike: float = ALIKE
    """As of `PivotsLast`."""
    read_most: float = READ_MOST
    """As of `PivotsLast`."""
    sigma: float = SIGMA
    """Distance from the pivot's key at which a KV counts e^(−½) of it."""

    def __post_init__(self):
        _check(self)
        check_numbers(self, 1e-6, 1e6, "sigma")

    def fold(
        self,
        k: Float[Array, "H T d"],
        v: Float[Array, "H T d"],
        position: Int32[Array, "H T"],
        score: Float[Array, "H T"],
        dropped: Bool[Array, "H T"],
        kept: Bool[Array, "H T"],
        seq_len: Int32[Array, ""],
        artefacts: Artefacts,
    ) -> tuple[Float[Array, "H T d"], Float[Array, "H T d"]]:
        return jax.vmap(self._merged)(k, v, position, score, dropped, kept)

    def _merged(
        self,
        k: Float[Array, "T d"],
        v: Float[Array, "T d"],
        position: Int32[Array, " T"],
        score: Float[Array, " T"],
        dropped: Bool[Array, " T"],
        kept: Bool[Array, " T"],
    ) -> tuple[Float[Array, "T d"], Float[Array, "T d"]]:
        size, held = len(k), dropped | kept
        number = jnp.sum(kept, dtype=jnp.int32)
        sets = merging_sets(k, position, score, held, number, self.alike, self.read_most)
        stays = sets.pivot & kept
        goes = dropped & ~sets.pivot

        def of_set(x):
            return jax.ops.segment_sum(x, sets.number, size)[sets.number]

        old = [jnp.where(held[:, None], x.astype(jnp.float32), 0) for x in (k, v)]
        centre = of_set(jnp.where(sets.pivot[:, None], old[0], 0))
        far = jnp.sum((old[0] - centre) ** 2, axis=-1)
        weight = jnp.where(goes | stays, jnp.exp(-far / (2 * self.sigma**2)), 0)
        # A pivot's own weight is 1, so nothing small is divided by.
        weight = weight / jnp.maximum(of_set(weight), 1)
        changed = (stays & (of_set(goes.astype(jnp.int32)) > 0))[:, None]
        new = [of_set(weight[:, None] * x) for x in old]
        return tuple(  # type: ignore[return-value]
            jnp.where(changed, x.astype(was.dtype), was) for x, was in zip(new, (k, v))
        )


METHODS = (
    Method(
        "kvmerger",
        "neighbours of like keys merged into the most read of them",
        Accumulated(),
        allocator=ByLayer(),
        selector=PivotsLast(),
        merger=GaussianMerged(),
        protected=8,
        query_aware=False,
        evidence="R",
    ),
)
