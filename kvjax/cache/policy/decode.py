"""Rules of decode steps that several methods share."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Num

from kvjax.cache.policy.score import (
    Artefacts,
    DecodeRule,
    LayerView,
    Planes,
    Scorer,
    Scores,
    StepView,
)
from kvjax.cache.store import write_newest


@dataclasses.dataclass(frozen=True)
class AddAttention(DecodeRule):
    """Each step multiplies the metrics by `decay`, then adds its own attention."""

    power: int = 1
    decay: float = 1.0
    """0 keeps the last step alone."""

    def before(self, planes: Planes, step: StepView) -> Planes:
        if self.decay == 1:
            return planes
        metric = planes["metric"]
        return {**planes, "metric": scaled(metric, step.rows(metric.shape[0]), self.decay)}


@dataclasses.dataclass(frozen=True)
class GiveNewest(DecodeRule):
    """Each new KV gets the metric that an intrinsic scorer gives it."""

    scorer: "Intrinsic"
    held = False

    def after(self, planes: Planes, step: StepView, artefacts: Artefacts) -> Planes:
        position = jnp.broadcast_to(step.position[:, None], step.k.shape[:2])
        newest = self.scorer.of(step.layer, step.k, position)
        metric = write_newest(
            planes["metric"], step.block_table, step.context_len, newest, step.touched
        )
        return {**planes, "metric": metric}


class Intrinsic(Scorer):
    """A metric that follows from a KV's position, its key or a seed alone; needs no queries."""

    over_gaps: ClassVar[bool] = True

    def of(
        self,
        layer: Int32[Array, ""] | int,
        k: Float[Array, "*rows H d"],
        position: Int32[Array, "*rows H"],
    ) -> Float[Array, "*rows H"]:
        """The metric of each KV, by its key (rotated) and token position."""
        raise NotImplementedError

    @property
    def decode(self) -> DecodeRule:
        return GiveNewest(self)

    def score(self, view: LayerView, artefacts: Artefacts) -> Scores:
        return Scores(self.of(view.layer, view.k, view.key_position.T).T)


def scaled(
    plane: Num[Array, "N b *w"], rows: Int32[Array, "*rows M"], factor: float
) -> Num[Array, "N b *w"]:
    """A plane with all numbers of some blocks times `factor`; ids out of range are passed over."""
    values = jnp.full((*rows.shape, *plane.shape[1:]), factor, plane.dtype)
    if factor == 0:
        return plane.at[rows].set(values, mode="drop")
    return plane.at[rows].mul(values, mode="drop")
