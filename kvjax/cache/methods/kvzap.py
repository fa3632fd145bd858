"""KVzap (NVIDIA 2026): NVIDIA's published surrogates of KVzip's scores, as they are.

A linear map or an MLP of one hidden layer per layer, from what enters the attention block to the
logarithm of KVzip's score (with the weight of what is changed) of each KV head. Theirs drops KVs
below a threshold and keeps the newest 128; here the budget decides, one over all layers and heads,
and the newest 8 and the first 4 stay, as with `kvzip`. `kvjax.engine.calibrate.published` reads
their files. `predicted_reads` is the like of it for models that one calibrates oneself.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.cache.policy.method import Method
from kvjax.cache.policy.score import (
    Artefacts,
    DecodeRule,
    HeadAxis,
    LayerView,
    Planes,
    Scorer,
    Scores,
    StepView,
)
from kvjax.cache.store import write_newest

LINEAR = ("kvzap_weight", "kvzap_bias")
"""Calibrated arrays [L, D, H] and [L, H]."""
MLP = ("kvzap_in", "kvzap_in_bias", "kvzap_out", "kvzap_out_bias")
"""Calibrated arrays [L, D, M], [L, M], [L, M, H] and [L, H]; GELU, the exact one, in between."""


def linear_scores(artefacts: Artefacts, hidden: Float[Array, "*T D"]) -> Float[Array, "*T H"]:
    """What the linear surrogate says of one layer's tokens."""
    weight, bias = (artefacts[name].astype(jnp.float32) for name in LINEAR)
    return hidden.astype(jnp.float32) @ weight + bias


def mlp_scores(artefacts: Artefacts, hidden: Float[Array, "*T D"]) -> Float[Array, "*T H"]:
    """What the MLP says of one layer's tokens."""
    first, shift, last, bias = (artefacts[name].astype(jnp.float32) for name in MLP)
    inner = jax.nn.gelu(hidden.astype(jnp.float32) @ first + shift, approximate=False)
    return inner @ last + bias


@dataclasses.dataclass(frozen=True)
class GiveLinear(DecodeRule):
    """Each new KV gets its score when it is written."""

    artefacts: ClassVar[tuple[str, ...]] = LINEAR

    def scores(self, artefacts: Artefacts, hidden: Float[Array, "*T D"]) -> Float[Array, "*T H"]:
        """What the surrogate says of one layer's tokens."""
        return linear_scores(artefacts, hidden)

    def after(self, planes: Planes, step: StepView, artefacts: Artefacts) -> Planes:
        newest = self.scores(artefacts, step.hidden)
        metric = write_newest(
            planes["metric"], step.block_table, step.context_len, newest, step.touched
        )
        return {**planes, "metric": metric}


@dataclasses.dataclass(frozen=True)
class GiveMlp(GiveLinear):
    """The same by the MLP."""

    artefacts: ClassVar[tuple[str, ...]] = MLP

    def scores(self, artefacts: Artefacts, hidden: Float[Array, "*T D"]) -> Float[Array, "*T H"]:
        return mlp_scores(artefacts, hidden)


@dataclasses.dataclass(frozen=True)
class Surrogate(Scorer):
    """What a published surrogate says of each KV."""

    rule: GiveLinear = GiveLinear()

    head_axes: ClassVar[Mapping[str, HeadAxis]] = {
        **dict(zip(LINEAR, (HeadAxis(2), HeadAxis(1)))),
        **dict(zip(MLP[2:], (HeadAxis(2), HeadAxis(1)))),
    }

    @property
    def artefacts(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.rule.artefacts

    @property
    def decode(self) -> DecodeRule:
        return self.rule

    def carry(self, length: Int32[Array, ""]) -> Float[Array, ""] | None:
        # A score is given once; what a chunk adds to it is 0.
        return jnp.float32(1)

    def score(self, view: LayerView, artefacts: Artefacts) -> Scores:
        assert view.hidden is not None
        new = self.rule.scores(artefacts, view.hidden).T
        return Scores(jnp.pad(new, ((0, 0), (view.k.shape[0] - new.shape[1], 0))))


METHODS = tuple(
    Method(
        f"kvzap-{kind}",
        f"what NVIDIA's published {kind} surrogate predicts of the reads of a repetition",
        Surrogate(rule),
        protected=8,
        sinks=4,
        query_aware=False,
        evidence="C",
    )
    for kind, rule in (("linear", GiveLinear()), ("mlp", GiveMlp()))
)
