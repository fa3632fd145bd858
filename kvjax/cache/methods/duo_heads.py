"""DuoAttention's split (Xiao et al. 2024) by KVzip's scores (Kim et al. 2025): heads keep all or
little.

A head's calibrated score is the mean over texts of its KVs' KVzip scores, with the weight of what
is changed (`kvjax calibrate`). Heads of high score keep
everything, the others their first tokens and the newest ones. The authors fix the share of whole
heads (60 %); here the budget does: the heads of highest score are filled one after the other, so
that a rate of 1.6 leaves about 60 % of them whole. The last one filled keeps its newest tokens.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int32

from kvjax.cache.methods.streaming_llm import Newest
from kvjax.cache.policy.allocate import Allocator, BlockCosts, Budget
from kvjax.cache.policy.method import Method
from kvjax.cache.policy.score import Artefacts
from kvjax.checks import check_text

HEAD_BUDGET = "head_budget"
"""Calibrated array [L, H]: mean score of each head, that of the teacher."""


@dataclasses.dataclass(frozen=True)
class WholeHeads(Allocator):
    """Heads keep all they have, the highest of a calibrated array first, while the budget lasts."""

    by: str = HEAD_BUDGET
    """The array, [L, H]."""

    def __post_init__(self):
        check_text("by", self.by)

    @property
    def artefacts(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.by,)

    def split(self, costs: BlockCosts, budget: Budget, artefacts: Artefacts) -> Int32[Array, "L H"]:
        low = costs.least.reshape(-1)
        order = jnp.argsort(-artefacts[self.by].reshape(-1))
        more = (costs.owned.reshape(-1) - low)[order]
        before = jnp.cumsum(more) - more
        given = jnp.clip(budget.blocks - jnp.sum(low) - before, 0, more)
        return low.at[order].add(given.astype(low.dtype)).reshape(costs.owned.shape)


METHODS = (
    Method(
        "duo-heads",
        "heads of high calibrated score whole, of the others the first 4 tokens and the newest 28",
        Newest(),
        allocator=WholeHeads(),
        protected=28,
        sinks=4,
        query_aware=False,
        evidence="P",
    ),
)
