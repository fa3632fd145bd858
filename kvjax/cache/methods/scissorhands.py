"""Scissorhands (Liu et al. 2023): what was important often will be important again.

Over the last 400 queries it counts how often a KV misses, that is, gets less than an even share of
the attention of a query that sees it; the KVs that miss most often go, the newest 10 stay. Each
head keeps as much, and counts of the query heads are averaged. The original gives later layers more
cache by weights that its paper does not list. Known from a third party's code (cold-compress) only.

Decode steps go on counting. What is counted is kept in nine parts of 50 steps, of which the oldest
goes as a whole, so while decoding the last 401 to 450 steps count; and a step counts for a group by
its mean attention, which is all that a step tells. With another window w a part has s = ⌈w / 8⌉
steps: of a prompt the last w queries count, while decoding the last 8 s + 1 to 9 s, so that a
window of 20 is one of 25 to 27 there, and one of up to 8 is one of 9.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Num

from kvjax.cache.policy.allocate import ByLayer
from kvjax.cache.policy.checks import MOST_WINDOW, check_wholes
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
from kvjax.kernels import window_metrics

PARTS = 9
"""Parts of a window and a bit, whose misses are counted apart."""


@dataclasses.dataclass(frozen=True)
class CountMisses(DecodeRule):
    """Counts the steps that give a KV less than an even share of their attention."""

    steps: int
    """Steps of a part."""

    power: ClassVar[int] = 1
    into: ClassVar[str] = "received"
    planes: ClassVar[tuple[Plane, ...]] = (Plane("received"), Plane("misses", width=PARTS))

    def after(self, planes: Planes, step: StepView, artefacts: Artefacts) -> Planes:
        at = step.rows(planes["misses"].shape[0])
        given = planes["received"].at[at].get(mode="fill", fill_value=0)[..., 0]
        share = step.group / jnp.maximum(step.context_len, 1)
        miss = (given < share[..., None, None]).astype(jnp.float32) * step.group
        part = step.position // self.steps % PARTS
        now = jax.nn.one_hot(part, PARTS, dtype=jnp.float32)
        fresh = (step.position % self.steps == 0)[:, None] & (now > 0)
        misses = planes["misses"].at[at].get(mode="fill", fill_value=0)
        misses = jnp.where(fresh[:, None, None, None], 0, misses)
        misses = misses + miss[..., None] * now[:, None, None, None]
        return {
            **planes,
            "misses": planes["misses"].at[at].set(misses, mode="drop"),
            # For the next step, which adds to it.
            "received": planes["received"].at[at].set(0.0, mode="drop"),
        }


@dataclasses.dataclass(frozen=True)
class OftenImportant(Scorer):
    """How many of the last queries give a KV less than an even share, the mean over a group; less
    than nothing: those that miss least count most."""

    window: int = 400

    def __post_init__(self):
        check_wholes(self, 1, MOST_WINDOW, "window")

    def with_window(self, window: int) -> "OftenImportant":
        """The same with another observation window."""
        return dataclasses.replace(self, window=window)

    @property
    def steps(self) -> int:
        """Steps of a part: the window and one part more are held."""
        return -(-self.window // (PARTS - 1))

    @property
    def decode(self) -> DecodeRule:
        return CountMisses(self.steps)

    def score(self, view: LayerView, artefacts: Artefacts) -> Scores:
        current = (view.end - 1) // self.steps
        group = view.q.shape[1] // view.num_heads

        def misses_of(part):
            index = part * self.steps + jnp.arange(self.steps, dtype=jnp.int32) - view.start
            counts = (index >= jnp.maximum(view.length - self.window, 0)) & (index < view.length)
            given = window_metrics(
                view.q[jnp.clip(index, 0, view.q.shape[0] - 1)],
                view.k,
                query_position=jnp.where(counts, view.start + index, -1),
                key_position=None if view.position is None else view.position.T,
                power=1,
                above=1.0,
            )
            hits = jnp.sum(given.reshape(view.num_heads, group, -1), axis=1)
            sees = (view.start + index >= view.key_position[..., None]) & counts
            seen = jnp.sum(sees, axis=-1, dtype=jnp.int32)
            return jnp.where(view.keys_from(0), group * seen - hits, 0)

        part = current - jnp.arange(PARTS, dtype=jnp.int32)
        misses = jax.lax.map(misses_of, part)
        misses = jnp.zeros_like(misses).at[part % PARTS].set(misses)
        kept = {"misses": jnp.moveaxis(misses, 0, -1)}
        return Scores(-jnp.sum(misses, axis=0) / group, state=kept)

    def rank(
        self,
        metric: Float[Array, "*rows T"],
        state: Mapping[str, Num[Array, "*rows T w"]],
        position: Int32[Array, "*rows T"],
        seq_len: Int32[Array, "*rows"],
    ) -> Float[Array, "*rows T"]:
        return -jnp.sum(state["misses"], axis=-1) if "misses" in state else metric


METHODS = (
    Method(
        "scissorhands",
        "how few of the last 400 queries gave a KV less than an even share",
        OftenImportant(),
        allocator=ByLayer(),
        protected=10,
        query_aware=False,
        evidence="R",
    ),
)
