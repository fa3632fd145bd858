"""Scorers at work in a prompt: what a prefill step asks of them, layer by layer and at its end."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.cache.policy.rotary import ROPE_FREQUENCY, turned_back
from kvjax.cache.policy.score import (
    Artefacts,
    LayerView,
    Observation,
    QuerySample,
    Scorer,
    Scores,
)
from kvjax.cache.store import Plane
from kvjax.checks import shown
from kvjax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Observer:
    """What prefill depends on of a method: a static argument of its steps.

    Methods that differ in what they do with the scores share compiled steps.
    """

    scorer: Scorer | None
    """None for a method that never evicts."""
    query_heads: bool = False
    """Whether the scores of single query heads are wanted, where the scorer has them."""
    queries: QuerySample | None = None
    """Queries that are wanted beside the scores."""

    @property
    def needs_log_sum(self) -> bool:
        return self.scorer is not None and self.scorer.needs_log_sum

    @property
    def observation(self) -> Observation | None:
        return None if self.scorer is None else self.scorer.observation

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The planes that a prompt's scores fill."""
        rule = None if self.scorer is None else self.scorer.decode
        return () if rule is None else tuple(p for p in rule.planes if p.name != rule.into)

    @property
    def without_query_heads(self) -> "Observer":
        return dataclasses.replace(self, query_heads=False)

    def observe(self, view: LayerView, artefacts: Artefacts) -> Scores:
        """Scores of every key of one layer.

        Args:
            view: the layer.
            artefacts: calibrated arrays of all layers.
        """
        if self.scorer is None:
            scores = Scores(jnp.zeros((view.num_heads, view.k.shape[0]), jnp.float32))
        else:
            scores = self.scorer.score(view, of_layer(self.scorer.artefacts, artefacts, view.layer))
            _check_scores(self.scorer, scores, (view.num_heads, view.k.shape[0]))
        if not self.query_heads:
            scores = dataclasses.replace(scores, query_heads=None)
        if self.queries is not None:
            rope = of_layer((ROPE_FREQUENCY,), artefacts, view.layer)[ROPE_FREQUENCY]
            scores = dataclasses.replace(scores, queries=_sampled(view, self.queries, rope))
        return scores

    def finish(
        self,
        scores: Scores,
        position: Int32[Array, "L H P"] | None,
        seq_len: Int32[Array, ""] | int,
        num_positions: int,
    ) -> Scores:
        """The scores of all layers, once the last one is through; see `Scorer.join_layers`."""
        queries = scores.queries
        if self.scorer is not None:
            seq_len = jnp.asarray(seq_len, jnp.int32)
            scores = self.scorer.join_layers(scores, position, seq_len, num_positions)
        return dataclasses.replace(scores, joint=None, queries=queries)

    def room(self, view: LayerView, artefacts: Artefacts, num_layers: int) -> Scores:
        """Zeros of the shapes that the scores of all layers have; `view` may be abstract."""
        shapes = jax.eval_shape(self.observe, view, dict(artefacts))
        return jax.tree.map(lambda x: jnp.zeros((num_layers, *x.shape), x.dtype), shapes)


def _check_scores(scorer: Scorer, scores: Any, shape: tuple[int, int]) -> None:
    """Raise `UserError` unless there is a number for each KV [H, P]."""
    got: Any = getattr(scores, "metric", None)
    kind = getattr(got, "dtype", None)
    if kind is not None and got.shape == shape and jnp.issubdtype(kind, jnp.floating):
        return
    said = shown(scores) if kind is None else f"a metric {kind} {list(got.shape)}"
    raise UserError(
        f"scorer {type(scorer).__name__}: score gave {said}: give Scores with a metric of floats "
        f"[H, P], here {list(shape)}"
    )


def _sampled(
    view: LayerView, sample: QuerySample, frequency: Float[Array, " half"]
) -> Float[Array, "Hr n d"]:
    """Some queries of a chunk, before RoPE; a short chunk's first one stands for those it lacks."""
    newest = view.length - 1 - jnp.arange(sample.newest, dtype=jnp.int32)
    spread = (2 * jnp.arange(sample.spread, dtype=jnp.int32) + 1) * view.length
    at = jnp.concatenate([jnp.maximum(newest, 0), spread // max(1, 2 * sample.spread)])
    queries = view.q[at]
    before = turned_back(queries, view.start + at, frequency)
    return jnp.swapaxes(before, 0, 1).astype(queries.dtype)


def of_layer(
    names: Iterable[str], artefacts: Artefacts, layer: Int32[Array, ""] | int
) -> dict[str, Array]:
    """A layer's part of the arrays of these names."""
    return {
        name: jax.lax.dynamic_index_in_dim(artefacts[name], layer, keepdims=False) for name in names
    }
