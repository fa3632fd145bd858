"""LazyEviction (Zhang et al. 2025): KVs whose last hit is old, measured by how far hits lie apart.

A hit is an attention above 10⁻⁴. With t the present, TS the last hit and MRI the longest interval
between two hits, KVs are ranked by 2σ(−1 − (t − TS) / MRI) + 2σ(1 − MRI): what was hit lately for
its interval stays, and what is hit often. The second term is 0 and the first next to nothing where
MRI is 0, which is without a hit: a KV counts as hit one token before its own position, so that its
own token's query makes an interval of 1. The newest 175 stay, about the 80th percentile of the
intervals, as in the authors' runs on MATH. This is the authors' code, where a group's query heads
have a cache each, hits are noted from the first decode step on, and KVs go every 175 steps.

Metrics are logarithms, so that small sums are not all 0. Decode steps go on noting hits, those of
the summed attention of a group, which is all that a step tells. Of a prompt that runs in parts the
hits of the last part's queries are known alone.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Num

from kvjax.cache.policy.allocate import ByLayer
from kvjax.cache.policy.attention import window_queries
from kvjax.cache.policy.checks import MOST_WINDOW, check_numbers, check_wholes
from kvjax.cache.policy.method import Method
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
from kvjax.cache.store import write_newest
from kvjax.kernels import hit_intervals


@dataclasses.dataclass(frozen=True)
class NoteHits(DecodeRule):
    """Notes the last step that hit a KV, and the longest time between two hits."""

    least: float

    power: ClassVar[int] = 1
    into: ClassVar[str] = "received"
    planes: ClassVar[tuple[Plane, ...]] = (
        Plane("received"),
        Plane("last", "int32"),
        Plane("longest", "int32"),
    )

    def after(self, planes: Planes, step: StepView, artefacts: Artefacts) -> Planes:
        newest = jnp.broadcast_to(step.position[:, None, None] - 1, (*step.k.shape[:2], 1))
        last = write_newest(
            planes["last"], step.block_table, step.context_len, newest, step.touched
        )
        at = step.rows(last.shape[0])

        def held(plane):
            return plane.at[at].get(mode="fill", fill_value=0)

        now = step.position[:, None, None, None, None]
        hit = held(planes["received"]) > self.least
        longest = held(planes["longest"])
        longest = jnp.where(hit, jnp.maximum(longest, now - held(last)), longest)
        return {
            **planes,
            "last": last.at[at].set(jnp.where(hit, now, held(last)), mode="drop"),
            "longest": planes["longest"].at[at].set(longest, mode="drop"),
            # For the next step, which adds to it.
            "received": planes["received"].at[at].set(0.0, mode="drop"),
        }


@dataclasses.dataclass(frozen=True)
class HitAgain(Scorer):
    """How likely a KV is hit again, from its last hit and the longest time between two."""

    window: int | None = None
    """Last queries that are observed; None for all."""
    least: float = 1e-4
    """Attention that is no hit yet."""

    def __post_init__(self):
        if self.window is not None:
            check_wholes(self, 1, MOST_WINDOW, "window")
        check_numbers(self, 0, float("inf"), "least")

    def with_window(self, window: int) -> "HitAgain":
        """The same with another observation window."""
        return dataclasses.replace(self, window=window)

    @property
    def decode(self) -> DecodeRule:
        return NoteHits(self.least)

    def score(self, view: LayerView, artefacts: Artefacts) -> Scores:
        queries, position, _ = window_queries(view, self.window)
        last, longest = hit_intervals(
            queries,
            view.k,
            query_position=position,
            key_position=None if view.position is None else view.position.T,
            least=self.least,
        )
        state = {"last": last[..., None], "longest": longest[..., None]}
        return Scores(_again(last, longest, view.end - 1), state=state)

    def rank(
        self,
        metric: Float[Array, "*rows T"],
        state: Mapping[str, Num[Array, "*rows T w"]],
        position: Int32[Array, "*rows T"],
        seq_len: Int32[Array, "*rows"],
    ) -> Float[Array, "*rows T"]:
        if "last" not in state:
            return metric
        return _again(state["last"][..., 0], state["longest"][..., 0], seq_len[..., None] - 1)


def _again(
    last: Int32[Array, "*rows T"], longest: Int32[Array, "*rows T"], now: Int32[Array, "..."]
) -> Float[Array, "*rows T"]:
    interval = longest.astype(jnp.float32)
    # The authors' 10⁻⁵: what was never hit has no interval.
    lately = jax.nn.log_sigmoid(-1 - (now - last).astype(jnp.float32) / (interval + 1e-5))
    often = jnp.where(longest > 0, jax.nn.log_sigmoid(1 - interval), -jnp.inf)
    return jnp.logaddexp(lately, often)


METHODS = (
    Method(
        "lazyeviction",
        "how recently a KV was hit, by the longest time between its hits",
        HitAgain(),
        allocator=ByLayer(),
        protected=175,
        query_aware=False,
        evidence="C",
    ),
)
