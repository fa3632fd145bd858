"""KV-Compress (Rehg 2024): squared attention, evicted block by block over all layers and heads.

Section 4.3 and 5.1. Names say the observation window and the norm: w8-L2 sums the squared
attention of the last 8 queries. Pooling 7 and protected = window as in the authors' runs; the
full-window variant leaves out the 10 queries after each key, does not pool and protects 32.
"""

import dataclasses
from typing import ClassVar

from kvjax.cache.policy.attention import pooled, received
from kvjax.cache.policy.checks import check_attention, check_one_of, check_wholes
from kvjax.cache.policy.decode import AddAttention
from kvjax.cache.policy.method import AttentionScorer, Method
from kvjax.cache.policy.pooling import GroupReduction, reduce_group
from kvjax.cache.policy.score import Artefacts, DecodeRule, LayerView, Observation, Scores
from kvjax.checks import INT32_MAX, check_flag


@dataclasses.dataclass(frozen=True)
class KVCompress(AttentionScorer):
    """Attention to the power of `power`, max-pooled per query head, then joined over the group
    (equations 6–11, 19)."""

    over_gaps: ClassVar[bool] = True

    window: int | None = 8
    """Last queries that are observed; None for all."""
    power: int = 2
    pool: int = 7
    """Keys that are pooled; 1 for none."""
    group: GroupReduction = "sum"
    excluded_distance: int = 0
    """A key–query pair counts only if they are at least so many tokens apart."""
    continual: bool = False
    """Whether decode steps add to the metrics (equation 20)."""

    def __post_init__(self):
        check_attention(self)
        check_wholes(self, 0, INT32_MAX, "excluded_distance")
        check_one_of("group", self.group, GroupReduction)
        check_flag("continual", self.continual)

    @property
    def decode(self) -> DecodeRule | None:
        return AddAttention(self.power) if self.continual else None

    @property
    def observation(self) -> Observation | None:
        if self.window is not None:
            return None
        return Observation(self.power, self.excluded_distance)

    def score(self, view: LayerView, artefacts: Artefacts) -> Scores:
        given = received(
            view, self.window, power=self.power, excluded_distance=self.excluded_distance
        )
        given = pooled(view, given, self.pool)
        return Scores(reduce_group(given, self.group), query_heads=given)


def _windowed(name: str, window: int, power: int, **scorer) -> Method:
    norm = "squared attention" if power == 2 else "attention"
    return Method(
        name,
        f"{norm} of the last {window} queries, global block budget"
        + (", decode steps add to it" if scorer.get("continual") else ""),
        KVCompress(window=window, power=power, **scorer),
        protected=window,
        evidence="C",
    )


METHODS = (
    _windowed("kv-compress", 8, 2),
    _windowed("kv-compress-w8-l1", 8, 1),
    _windowed("kv-compress-w32-l2", 32, 2),
    _windowed("kv-compress-w32-l1", 32, 1),
    Method(
        "kv-compress-full-l2",
        "squared attention of every query at least 10 tokens later, global block budget",
        KVCompress(window=None, pool=1, excluded_distance=10),
        protected=32,
        query_aware=False,
        evidence="C",
    ),
    _windowed("kv-compress-continual", 32, 2, continual=True),
)
