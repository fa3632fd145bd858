"""H2O (Zhang et al. 2023): heavy hitters, the tokens that received the most attention so far.

`h2o` is the baseline of the KV-Compress and PyramidKV papers: one choice after the prompt, by the
column sums of the whole causal attention matrix, beside the last 8 tokens. `h2o-decode` is the
authors' own system (`modify_llama.py`): decode steps go on adding, half of the cache is for the
newest tokens, and the choice is made again and again. Here it is made whenever the sequence is
compressed (`compress_every`) and in whole blocks, where theirs drops one KV in every step. The
query heads of a KV head are added; the authors' models have one query head per KV head.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.cache.policy.allocate import ByLayer
from kvjax.cache.policy.attention import received
from kvjax.cache.policy.checks import check_attention, check_numbers
from kvjax.cache.policy.decode import AddAttention
from kvjax.cache.policy.method import AttentionScorer, Method
from kvjax.cache.policy.score import Artefacts, DecodeRule, LayerView, Observation, Scores
from kvjax.checks import check_flag


@dataclasses.dataclass(frozen=True)
class Accumulated(AttentionScorer):
    """Attention from all queries so far, the query heads of a group added."""

    over_gaps: ClassVar[bool] = True

    window: int | None = None
    """Last queries that are observed; None for all."""
    forget: float = 1.0
    """A query n tokens before the last one counts this to the power of n (A2SF's α)."""
    continual: bool = False
    """Whether decode steps go on adding."""

    def __post_init__(self):
        check_attention(self)
        check_numbers(self, 0, 1, "forget")
        check_flag("continual", self.continual)

    @property
    def decode(self) -> DecodeRule | None:
        return AddAttention(1, self.forget) if self.continual else None

    @property
    def observation(self) -> Observation | None:
        return Observation(decay=self.forget) if self.window is None else None

    def carry(self, length: Int32[Array, ""]) -> Float[Array, ""] | None:
        if self.window is not None:
            return None
        return jnp.float32(self.forget) ** length.astype(jnp.float32)

    def score(self, view: LayerView, artefacts: Artefacts) -> Scores:
        given = received(view, self.window, decay=self.forget)
        return Scores(jnp.sum(given, axis=1), query_heads=given)


METHODS = (
    Method(
        "h2o",
        "attention received from all queries of the prompt",
        Accumulated(),
        allocator=ByLayer(),
        protected=8,
        query_aware=False,
        evidence="C",
    ),
    Method(
        "h2o-decode",
        "attention received from all queries so far; half of the cache for the newest tokens",
        Accumulated(continual=True),
        allocator=ByLayer(),
        protected_share=0.5,
        query_aware=False,
        evidence="C",
    ),
)
