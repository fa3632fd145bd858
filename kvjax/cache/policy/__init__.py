"""What decides which KVs stay: scores, budgets, choices, and methods that are made of them.

Here belongs what several methods share, and the protocols they fill in. A formula of one method
alone, its defaults and its paper stand in that method's file in `kvjax.cache.methods`. Nothing here
knows how KVs are stored.
"""

from kvjax.cache.policy.allocate import Allocator, BlockCosts, Budget, ByLayer, Global
from kvjax.cache.policy.merge import Merger
from kvjax.cache.policy.method import AttentionScorer, Method
from kvjax.cache.policy.observe import Observer
from kvjax.cache.policy.prune import Pruner
from kvjax.cache.policy.score import (
    Artefacts,
    DecodeRule,
    LayerView,
    Observation,
    Scorer,
    Scores,
    StepView,
)
from kvjax.cache.policy.select import Candidates, Selector
from kvjax.cache.policy.sparse import SparsePrefill

__all__ = [
    "Allocator",
    "Artefacts",
    "AttentionScorer",
    "BlockCosts",
    "Budget",
    "ByLayer",
    "Candidates",
    "DecodeRule",
    "Global",
    "LayerView",
    "Merger",
    "Method",
    "Observation",
    "Observer",
    "Pruner",
    "Scorer",
    "Scores",
    "Selector",
    "SparsePrefill",
    "StepView",
]
