"""CompressKV (Lin et al. 2025): what a few heads of each layer that read for meaning look at stays,
in all heads of the layer, and layers that lose more by it keep more.

Semantic retrieval heads are found once per model (`kvjax calibrate --heads`): where the model
copies what of a planted fact answers a question, the attention of a head to all of that, whichever
of its tokens is copied. Of each layer the 4 highest count: their attention of the last 8 queries,
mean-pooled over 5 keys, the mean of the four. Layers keep 32 KVs per head, and of the rest shares
in proportion to how far what their attention adds to the residual stream is off with 32 KVs
(calibrated, too), at most three times the mean.

Assumed: the errors are of made-up facts whose answers are given; theirs are of LongBench's test
rows, decoded freely. What the bounds leave over or take is shared out in proportion, where theirs
adds or takes single KVs. KVs written by decode steps have metric 0.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from kvjax.cache.policy.allocate import Budget, ByLayer, EvenLayers
from kvjax.cache.policy.attention import pooled, received, window_start
from kvjax.cache.policy.checks import check_attention, check_numbers, check_wholes
from kvjax.cache.policy.method import AttentionScorer, Method
from kvjax.cache.policy.score import Artefacts, LayerView, Scores
from kvjax.cache.policy.select import Selector
from kvjax.checks import INT32_MAX

SEMANTIC_HEAD = "semantic_head"
"""Calibrated array [L, Hr]: attention of each query head to what is copied of a fact."""
LAYER_ERROR = "layer_error"
"""Calibrated array [L]: relative error of what attention adds with few KVs, over an answer."""


@dataclasses.dataclass(frozen=True)
class SemanticHeads(AttentionScorer):
    """Mean attention of a layer's semantic retrieval heads, pooled over the keys before the window.

    A KV head's metric is the part of it that its own query heads have, times the number of KV
    heads: the mean over a layer is that of the chosen heads.
    """

    artefacts: ClassVar[tuple[str, ...]] = (SEMANTIC_HEAD,)
    across_heads: ClassVar[bool] = True

    window: int | None = 8
    """Last queries that are observed; None for all."""
    pool: int = 5
    """Keys whose mean counts."""
    heads: int = 4
    """Query heads of a layer that count; all where it has fewer."""

    def __post_init__(self):
        check_attention(self)
        check_wholes(self, 1, INT32_MAX, "heads")

    def carry(self, length: Int32[Array, ""]) -> Float[Array, ""] | None:
        return None

    def counts(self, how: Float[Array, " Hr"], num_heads: int) -> Float[Array, " Hr"]:
        """What each query head of a layer counts, of which `SEMANTIC_HEAD` says this; of so many
        KV heads."""
        how = how.astype(jnp.float32)
        _, best = lax.top_k(how, min(self.heads, how.shape[0]))
        return jnp.zeros(how.shape, jnp.float32).at[best].set(num_heads / best.shape[0])

    def weighed(self, view: LayerView, counts: Float[Array, " Hr"]) -> Float[Array, "H P"]:
        """The metric of some heads, of whose query heads each counts so much."""
        before = window_start(view, self.window)
        given = pooled(view, received(view, self.window), self.pool, "avg", before=before)
        return jnp.einsum("hrp,hr->hp", given, counts.reshape(given.shape[:2]))

    def score(self, view: LayerView, artefacts: Artefacts) -> Scores:
        return Scores(self.weighed(view, self.counts(artefacts[SEMANTIC_HEAD], view.num_heads)))


@dataclasses.dataclass(frozen=True)
class ErrorLayers(EvenLayers):
    """Layers keep in proportion to their error, between bounds."""

    least: int = 32
    """KVs of a head that every layer keeps, or the mean where that is less."""
    most: float = 3.0
    """Of the mean, what a layer keeps at most."""

    def __post_init__(self):
        check_wholes(self, 1, INT32_MAX, "least")
        check_numbers(self, 1, 2**20, "most")

    def tokens(self, budget: Budget, artefacts: Artefacts) -> Float[Array, " L"]:
        error = artefacts[LAYER_ERROR].astype(jnp.float32)
        least = jnp.minimum(budget.cap, self.least)
        share = error / jnp.maximum(jnp.sum(error), jnp.finfo(jnp.float32).tiny)
        rest = budget.num_layers * (budget.cap - least)
        return jnp.clip(least + share * rest, least, self.most * budget.cap)


@dataclasses.dataclass(frozen=True)
class ByError(ByLayer):
    """Over the layers by their error, evenly over the heads of each."""

    artefacts: ClassVar[tuple[str, ...]] = (LAYER_ERROR,)

    layers: EvenLayers = ErrorLayers()


METHODS = (
    Method(
        "compresskv",
        "attention of each layer's 4 semantic retrieval heads, layers by their error",
        SemanticHeads(),
        allocator=ByError(),
        selector=Selector(scope="layer"),
        protected=8,
        evidence="C",
    ),
)
