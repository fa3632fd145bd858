"""FastGen (Ge et al. 2023, section 3): every head by the cheapest policy that keeps what it reads.

After the prompt, a head takes the first of four policies whose KVs receive at least T = 0.9 of its
attention, the mean over all queries: special tokens; and the 30 % most read of the others; and a
window of 30 % of the text, to each query what is newest behind it; everything. What a policy keeps
of the window in the end is the newest 30 %. A KV's metric is the mean attention a that it receives,
or −1/a if its head's policy does not keep it. Blocks are shared out in proportion to how many KVs
the policies keep, so that at an equal budget heads stand to each other as theirs do, and what does
not fit of a policy goes by its attention.

Assumed: the special tokens are the first 4 positions, for a cache knows no token ids; for the same
reason there is no policy of punctuation, which theirs has between the first two. The attention of
the query heads of a group is averaged. Shares and T are those of a third party's code
(cold-compress), to which the authors point; it looks for what is most read outside of the newest 30
% only, by the mean over the queries that see a KV, where here all KVs compete by the mean over all
queries. A prompt that runs in parts is profiled by the queries of each part anew. KVs written by
decode steps have metric 0, the least of what a policy keeps; theirs go on by the head's policy.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.cache.policy.allocate import Allocator, BlockCosts, Budget, apportion
from kvjax.cache.policy.attention import received, window_queries
from kvjax.cache.policy.block_cost import lowest
from kvjax.cache.policy.checks import check_attention, check_numbers, check_wholes
from kvjax.cache.policy.method import AttentionScorer, Method
from kvjax.cache.policy.pooling import reduce_group
from kvjax.cache.policy.score import Artefacts, LayerView, Scores
from kvjax.checks import INT32_MAX
from kvjax.kernels import window_metrics

LEAST = 1e-30
"""Attention below which KVs that no policy keeps are alike."""


@dataclasses.dataclass(frozen=True)
class ByPolicy(AttentionScorer):
    """Mean attention of the KVs that the head's policy keeps; less than 0 for the others."""

    window: int | None = None
    """Last queries that are observed; None for all."""
    recovered: float = 0.9
    """T, the share of its attention that a head's policy keeps."""
    special: int = 4
    """First positions, which every policy keeps."""
    frequent: float = 0.3
    """Share of the KVs that are kept for being read most."""
    local: float = 0.3
    """Share of the text that is kept for being newest."""

    def __post_init__(self):
        check_attention(self)
        check_numbers(self, 0, 1, "recovered", "frequent", "local")
        check_wholes(self, 0, INT32_MAX, "special")

    def carry(self, length: Int32[Array, ""]) -> Float[Array, ""] | None:
        return None

    def score(self, view: LayerView, artefacts: Artefacts) -> Scores:
        given = reduce_group(received(view, self.window), "mean")
        observed = view.length if self.window is None else jnp.minimum(view.length, self.window)
        mass = given / jnp.maximum(observed, 1)
        at, there = view.key_position, view.keys_from(0)
        special = there & (at < self.special)
        number = jnp.floor(self.frequent * jnp.sum(there, axis=-1)).astype(jnp.int32)
        others = jnp.where(there & ~special, -mass, jnp.inf)
        number = jnp.minimum(number, jnp.sum(jnp.isfinite(others), axis=-1, dtype=jnp.int32))
        frequent = special | lowest(others, number)
        reach = jnp.floor(self.local * view.end).astype(jnp.int32)
        local = frequent | (there & (at >= view.end - reach))
        # To a query what is newest is what is newest behind it.
        near = mass - self._beyond(view, reach) / jnp.maximum(observed, 1)
        keeps = there
        for policy, read in (
            (local, jnp.where(frequent, mass, near)),
            (frequent, jnp.where(frequent, mass, 0)),
            (special, jnp.where(special, mass, 0)),
        ):
            recovered = jnp.sum(read, axis=-1, keepdims=True)
            keeps = jnp.where(recovered >= self.recovered, policy, keeps)
        return Scores(jnp.where(keeps, mass, -1 / jnp.maximum(mass, LEAST)))

    def _beyond(self, view: LayerView, reach: Int32[Array, ""]) -> Float[Array, "H P"]:
        """Attention of queries that are so many tokens or more behind a key, summed over them."""
        queries, position, _ = window_queries(view, self.window)
        given = window_metrics(
            queries,
            view.k,
            query_position=position,
            key_position=None if view.position is None else view.position.T,
            power=1,
            excluded_distance=reach,
            log_sum=view.log_sum if self.window is None else None,
            implementation="xla",
        )
        return reduce_group(given.reshape(view.num_heads, -1, view.k.shape[0]), "mean")


@dataclasses.dataclass(frozen=True)
class ByNeed(Allocator):
    """Heads get blocks in proportion to the KVs that their policies keep."""

    def shares(
        self,
        scores: Float[Array, "H T"],
        layer: Int32[Array, ""],
        budget: Budget,
        artefacts: Artefacts,
    ) -> Float[Array, " H"]:
        kept = jnp.isfinite(scores) & (scores >= 0)
        return jnp.sum(kept, axis=-1, dtype=jnp.float32) + budget.protected

    def split(self, costs: BlockCosts, budget: Budget, artefacts: Artefacts) -> Int32[Array, "L H"]:
        shares, low, high = (x.reshape(-1) for x in (costs.shares, costs.least, costs.owned))
        found = apportion(shares, low, high, budget.blocks, costs.cost.shape[-1])
        return found.reshape(costs.owned.shape)


METHODS = (
    Method(
        "fastgen",
        "each head by the cheapest policy that keeps 90 % of what it reads",
        ByPolicy(),
        allocator=ByNeed(),
        protected=8,
        query_aware=False,
        evidence="R",
    ),
)
