"""EMS (Li et al. 2024, arXiv 2412.08521): of what goes, the least is dropped and the rest merged.

A KV's Global-Local score is the larger of what it receives from all queries and from those of a
local window, once the means of both over the keys are the same. The highest scores stay. Of those
that go, the irrelevant ones are evicted; the others are merged into class centres of their head,
each into the one that it is most like in key and value, and what is like none belongs to the zero
class: it is evicted, too. So each head merges as many as are worth it. A centre's key is a mean of
directions; norms are kept apart. Means are weighted by the scores.

The paper's text was not at hand. Its abstract gives the parts; its published reviews the aligned
means, that likeness is the product of the cosines of keys and of values, that centres are the
head's own, and that numbers differ by head; summaries by others the maximum, the weights and the
norms. No constant is known, nor the authors' code.

Assumed: the window of 32 queries; irrelevant are the lowest scores that together have a twentieth
of their head's; centres are all KVs that stay but the newest, and a KV joins one where the product
is above 0.5, with cosines below 0 taken for 0 (a review notes that two of them would make likes of
opposites); the norm is the weighted mean of norms. Keys are merged as they lie in the cache, after
RoPE. Budgets are even, and a centre counts as one KV however many it stands for. A prompt that runs
in parts is measured by the queries of the last part; KVs written by decode steps have metric 0, so
they are irrelevant until the prompt's are gone.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache.policy.allocate import ByLayer
from kvjax.cache.policy.attention import received, window_size
from kvjax.cache.policy.checks import MOST_WINDOW, check_numbers, check_wholes
from kvjax.cache.policy.merge import Merger
from kvjax.cache.policy.method import Method
from kvjax.cache.policy.pooling import reduce_group
from kvjax.cache.policy.score import Artefacts, LayerView, Observation, Scorer, Scores

WINDOW, IRRELEVANT, ALIKE = 32, 0.05, 0.5
AT_ONCE = 256
"""KVs whose likeness to all others of their head stands in memory."""


@dataclasses.dataclass(frozen=True)
class GlobalLocal(Scorer):
    """The larger of the mean attention from all queries and from the last ones, mean over a group.

    Each query gives 1 to all keys together, so that means per query have one mean over the keys.
    """

    window: int = WINDOW
    """Last queries that are local."""

    def __post_init__(self):
        check_wholes(self, 1, MOST_WINDOW, "window")

    def with_window(self, window: int) -> "GlobalLocal":
        """The same with another local window."""
        return dataclasses.replace(self, window=window)

    @property
    def needs_log_sum(self) -> bool:
        return True

    @property
    def observation(self) -> Observation | None:
        return Observation()

    def score(self, view: LayerView, artefacts: Artefacts) -> Scores:
        observed = jnp.minimum(view.length, window_size(view, self.window))
        everywhere = reduce_group(received(view, None), "mean") / jnp.maximum(view.length, 1)
        local = reduce_group(received(view, self.window), "mean") / jnp.maximum(observed, 1)
        return Scores(jnp.maximum(everywhere, local))


@dataclasses.dataclass(frozen=True)
class ToCentres(Merger):
    """What goes is merged into the KV that it is most like, unless irrelevant or like none."""

    irrelevant: float = IRRELEVANT
    """Share of its head's scores that the irrelevant have together, at most."""
    alike: float = ALIKE
    """Product of the cosines of keys and of values above which a KV is no zero class."""

    def __post_init__(self):
        check_numbers(self, 0, 1, "irrelevant", "alike")

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
        return lax.map(lambda head: self._merged(*head), (k, v, score, dropped, kept))

    def _merged(
        self,
        k: Float[Array, "T d"],
        v: Float[Array, "T d"],
        score: Float[Array, " T"],
        dropped: Bool[Array, " T"],
        kept: Bool[Array, " T"],
    ) -> tuple[Float[Array, "T d"], Float[Array, "T d"]]:
        size = len(k)
        there = (dropped | kept)[:, None]
        k_row, v_row = (jnp.where(there, x.astype(jnp.float32), 0) for x in (k, v))
        centre = kept & jnp.isfinite(score)
        weight = jnp.where(dropped | centre, jnp.maximum(score, 0), 0)
        to_merge = dropped & ~self._irrelevant(weight, dropped)
        norm = jnp.linalg.norm(k_row, axis=-1)
        direction, value = _unit(k_row), _unit(v_row)
        to, like = _most_like(direction, value, centre)
        joins = to_merge & (like > self.alike)
        # What joins nothing is its own class, where only centres count.
        place = jnp.arange(size, dtype=jnp.int32)
        number = jnp.where(joins, to, place)
        weight = jnp.where(joins | centre, weight, 0)

        def of_class(x):
            return jax.ops.segment_sum(x, number, size)

        total = jnp.maximum(of_class(weight), jnp.finfo(jnp.float32).tiny)
        new_norm = of_class(weight * norm) / total
        new_k = _unit(of_class(weight[:, None] * direction)) * new_norm[:, None]
        new_v = of_class(weight[:, None] * v_row) / total[:, None]
        changed = (of_class(joins.astype(jnp.int32)) > 0)[:, None]
        return (
            jnp.where(changed, new_k.astype(k.dtype), k),
            jnp.where(changed, new_v.astype(v.dtype), v),
        )

    def _irrelevant(
        self, weight: Float[Array, " T"], dropped: Bool[Array, " T"]
    ) -> Bool[Array, " T"]:
        """The lowest scores that go, as many as have no more than their share together."""
        order = jnp.argsort(jnp.where(dropped, weight, jnp.inf))
        together = jnp.cumsum(weight[order])
        few = together <= self.irrelevant * together[-1]
        return jnp.zeros_like(dropped).at[order].set(few)


def _unit(x: Float[Array, "T d"]) -> Float[Array, "T d"]:
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def _most_like(
    k: Float[Array, "T d"], v: Float[Array, "T d"], centre: Bool[Array, " T"]
) -> tuple[Int32[Array, " T"], Float[Array, " T"]]:
    """The centre that each KV is most like, the first of several, and how much.

    Args:
        k: directions of keys.
        v: directions of values.
        centre: which KVs are centres.
    """

    def cosine(rows, x):
        return jnp.maximum(jnp.matmul(rows, x.T, precision=lax.Precision.HIGHEST), 0)

    def of_rows(first):
        row = first + jnp.arange(AT_ONCE, dtype=jnp.int32)
        own = [x.at[row].get(mode="fill", fill_value=0) for x in (k, v)]
        like = jnp.where(centre, cosine(own[0], k) * cosine(own[1], v), -1)
        return jnp.argmax(like, axis=-1).astype(jnp.int32), jnp.max(like, axis=-1)

    starts = jnp.arange(0, len(k), AT_ONCE, dtype=jnp.int32)
    to, like = lax.map(of_rows, starts)
    return to.reshape(-1)[: len(k)], like.reshape(-1)[: len(k)]


METHODS = (
    Method(
        "ems",
        "the larger of global and local attention; of what goes, the best merged into what stays",
        GlobalLocal(),
        allocator=ByLayer(),
        merger=ToCentres(),
        protected=8,
        evidence="A",
    ),
)
