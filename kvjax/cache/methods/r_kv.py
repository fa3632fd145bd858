"""R-KV (Cai et al. 2025): for reasoning that repeats itself, KVs that are read and have no like.

The authors' constants. Importance is the mean attention of the last 8 queries, also those of decode
steps, averaged over the group and max-pooled over 7 keys; redundancy is the softmax over the head's
keys of their mean cosine with the others, where the latest key with a cosine above 0.5 counts
nothing. The lowest 0.07 · importance − 0.93 · redundancy go, the newest 8 stay. Theirs joins the
query heads of a group before the softmax, by their maximum. Meant for `compress_every`.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Num

from kvjax.cache.policy.allocate import ByLayer
from kvjax.cache.policy.attention import window_queries
from kvjax.cache.policy.block_cost import lowest
from kvjax.cache.policy.checks import MOST_REACH, check_numbers, check_wholes, wanted
from kvjax.cache.policy.method import Method
from kvjax.cache.policy.pooling import pool_metric_at
from kvjax.cache.policy.score import (
    Artefacts,
    DecodeRule,
    LayerView,
    Plane,
    Planes,
    Scorer,
    Scores,
    StepView,
)
from kvjax.cache.policy.select import Candidates, Selector
from kvjax.kernels import window_metrics

QUERIES = 8
"""Last queries that are observed."""
AT_ONCE = 256
"""Keys whose cosines with all others stand in memory."""


@dataclasses.dataclass(frozen=True)
class NoteQueries(DecodeRule):
    """Notes what each of the last queries gave every KV, the mean over a group."""

    power: ClassVar[int] = 1
    into: ClassVar[str] = "received"
    planes: ClassVar[tuple[Plane, ...]] = (Plane("received"), Plane("recent", width=QUERIES))

    def after(self, planes: Planes, step: StepView, artefacts: Artefacts) -> Planes:
        at = step.rows(planes["recent"].shape[0])
        given = planes["received"].at[at].get(mode="fill", fill_value=0) / step.group
        recent = planes["recent"].at[at].get(mode="fill", fill_value=0)
        own = jnp.arange(QUERIES) == (step.position % QUERIES)[:, None]
        recent = jnp.where(own[:, None, None, None], given, recent)
        return {
            **planes,
            "recent": planes["recent"].at[at].set(recent, mode="drop"),
            # For the next step, which adds to it.
            "received": planes["received"].at[at].set(0.0, mode="drop"),
        }


@dataclasses.dataclass(frozen=True)
class LastQueries(Scorer):
    """Mean attention of the last 8 queries and of the query heads of a group."""

    @property
    def decode(self) -> DecodeRule:
        return NoteQueries()

    def score(self, view: LayerView, artefacts: Artefacts) -> Scores:
        queries, position, _ = window_queries(view, QUERIES)
        of_key = None if view.position is None else view.position.T

        def given_by(column):
            counts = (position % QUERIES == column) & (position >= 0)
            given = window_metrics(
                queries,
                view.k,
                query_position=jnp.where(counts, position, -1),
                key_position=of_key,
                power=1,
            )
            return jnp.mean(given.reshape(view.num_heads, -1, view.k.shape[0]), axis=1)

        recent = jax.lax.map(given_by, jnp.arange(QUERIES, dtype=jnp.int32))
        return Scores(jnp.mean(recent, axis=0), state={"recent": jnp.moveaxis(recent, 0, -1)})

    def rank(
        self,
        metric: Float[Array, "*rows T"],
        state: Mapping[str, Num[Array, "*rows T w"]],
        position: Int32[Array, "*rows T"],
        seq_len: Int32[Array, "*rows"],
    ) -> Float[Array, "*rows T"]:
        return jnp.mean(state["recent"], axis=-1) if "recent" in state else metric


@dataclasses.dataclass(frozen=True)
class WithoutLike(Selector):
    """KVs go that count little or that are like others of their head."""

    blend: float = 0.07
    """λ, what importance counts; redundancy counts 1 − λ."""
    pool: int = 7
    """Keys over which importance is max-pooled, odd."""
    alike: float = 0.5
    """Cosine from which on keys are near-duplicates."""

    needs_keys: ClassVar[bool] = True
    one_at_a_time: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        check_numbers(self, 0, 1, "blend", "alike")
        check_wholes(self, 1, MOST_REACH, "pool")
        if self.pool % 2 == 0:
            raise wanted("pool", self.pool, "an odd number")

    def choose(self, of: Candidates) -> Bool[Array, "H T"]:
        assert of.k is not None
        free = jnp.isfinite(of.scores)
        at = jnp.where(free, of.position, -1)
        pooled = pool_metric_at(jnp.where(free, of.scores, 0)[:, None], at, self.pool)[:, 0]
        there = jnp.arange(of.scores.shape[-1]) < of.context_len[:, None]
        like = lax.map(lambda x: self._redundancy(*x), (of.k, of.position, there))
        final = self.blend * pooled - (1 - self.blend) * like
        return lowest(jnp.where(free, final, jnp.inf), of.count)

    def _redundancy(
        self, k: Float[Array, "T d"], position: Int32[Array, " T"], there: Bool[Array, " T"]
    ) -> Float[Array, " T"]:
        """Softmax of the mean cosine of each key with the others of its head."""
        k = jnp.where(there[:, None], k.astype(jnp.float32), 0)
        unit = k / (jnp.linalg.norm(k, axis=-1, keepdims=True) + 1e-8)
        size = len(k)
        index = jnp.arange(size, dtype=jnp.int32)

        def of_rows(total, first):
            row = first + jnp.arange(AT_ONCE, dtype=jnp.int32)
            own = unit.at[row].get(mode="fill", fill_value=0)
            cosine = jnp.matmul(own, unit.T, precision=lax.Precision.HIGHEST)
            cosine = jnp.where(row[:, None] == index, 0, cosine)
            near = cosine > self.alike
            latest = jnp.max(jnp.where(near, position, -1), axis=-1, keepdims=True)
            cosine = jnp.where(near & (position == latest), 0, cosine)
            return total + jnp.sum(cosine, axis=0), None

        starts = jnp.arange(0, size, AT_ONCE, dtype=jnp.int32)
        total, _ = lax.scan(of_rows, jnp.zeros(size, jnp.float32), starts)
        mean = total / jnp.maximum(jnp.sum(there), 1)
        return jax.nn.softmax(jnp.where(there, mean, -jnp.inf))


METHODS = (
    Method(
        "r-kv",
        "attention of the last 8 queries, less what is like other keys; while decoding, too",
        LastQueries(),
        allocator=ByLayer(),
        selector=WithoutLike(),
        protected=QUERIES,
        evidence="C",
    ),
)
