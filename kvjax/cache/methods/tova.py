"""TOVA (Oren et al. 2024): the attention of the newest query alone, the same tokens in all heads.

The mean over the heads of a layer decides; the newest token stays. Theirs drops one token per step;
here whole blocks go whenever the sequence is compressed, by the last step's attention.
"""

import dataclasses

from kvjax.cache.policy.allocate import ByLayer
from kvjax.cache.policy.attention import received
from kvjax.cache.policy.checks import check_attention
from kvjax.cache.policy.decode import AddAttention
from kvjax.cache.policy.method import AttentionScorer, Method
from kvjax.cache.policy.pooling import reduce_group
from kvjax.cache.policy.score import Artefacts, DecodeRule, LayerView, Scores
from kvjax.cache.policy.select import Selector


@dataclasses.dataclass(frozen=True)
class NewestQuery(AttentionScorer):
    """Mean attention of a group to the last query, or the last few."""

    window: int | None = 1

    def __post_init__(self):
        check_attention(self)

    @property
    def decode(self) -> DecodeRule:
        return AddAttention(1, decay=0.0)

    def score(self, view: LayerView, artefacts: Artefacts) -> Scores:
        given = received(view, self.window)
        return Scores(reduce_group(given, "mean"), query_heads=given)


METHODS = (
    Method(
        "tova",
        "attention of the newest query, shared by the heads of a layer",
        NewestQuery(),
        allocator=ByLayer(),
        selector=Selector(scope="layer"),
        protected=1,
        evidence="U",
    ),
)
