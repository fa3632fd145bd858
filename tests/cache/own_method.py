"""A method of one's own, all of it: formula, budget by data, a calibrated array, a number per KV.

A KV counts the norm of its value, times what its head weighs (calibrated), and one more for every
decode step that gave it a tenth of its attention; layers keep blocks by how much their KVs count.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from kvjax.cache import Method, Plane, Scorer, Scores
from kvjax.cache.policy import Allocator, DecodeRule
from kvjax.cache.policy.allocate import apportion

READS = Plane("reads")


@dataclasses.dataclass(frozen=True)
class CountReads(DecodeRule):
    """Each step adds its attention to one plane; what reaches a tenth counts in the other."""

    power: ClassVar[int] = 1
    into: ClassVar[str] = "given"
    planes: ClassVar[tuple[Plane, ...]] = (READS, Plane("given"))

    def after(self, planes, step, artefacts):
        at = step.rows(len(planes["reads"]))
        given = planes["given"].at[at].get(mode="fill", fill_value=0)
        read = (given >= 0.1 * step.group).astype(jnp.float32)
        return {
            **planes,
            "reads": planes["reads"].at[at].add(read, mode="drop"),
            "given": planes["given"].at[at].set(0, mode="drop"),
        }


@dataclasses.dataclass(frozen=True)
class WeightedValues(Scorer):
    artefacts: ClassVar[tuple[str, ...]] = ("head_weight",)

    @property
    def decode(self):
        return CountReads()

    def score(self, view, artefacts):
        assert view.v is not None
        norm = jnp.linalg.norm(view.v.astype(jnp.float32), axis=-1).T
        metric = norm * artefacts["head_weight"][:, None]
        return Scores(metric, state={"reads": jnp.zeros((*metric.shape, 1))})

    def rank(self, metric, state, position, seq_len):
        return metric + state["reads"][..., 0] if "reads" in state else metric


@dataclasses.dataclass(frozen=True)
class ByWorth(Allocator):
    def shares(self, scores, layer, budget, artefacts):
        return jnp.sum(jnp.where(jnp.isfinite(scores), scores, 0), axis=-1)

    def split(self, costs, budget, artefacts):
        units = costs.cost.shape[-1]
        kept = apportion(
            costs.shares.reshape(-1),
            costs.least.reshape(-1),
            costs.owned.reshape(-1),
            budget.blocks,
            units,
        )
        return kept.reshape(costs.owned.shape)


MINE = Method("mine", "values by calibrated heads", WeightedValues(), ByWorth(), protected=4)
