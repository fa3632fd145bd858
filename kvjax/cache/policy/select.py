"""Selectors: which KVs go together, and which of a head's go first.

Eviction scores are compared within a head, or over the heads of a sequence; low ones go first,
−inf before all, +inf never, and what is no number never either.
"""

import dataclasses
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache.policy.allocate import Allocator
from kvjax.cache.policy.block_cost import smallest
from kvjax.cache.policy.checks import MOST_UNIT, check_gave, check_one_of, check_wholes, wanted

Scope = Literal["head", "layer"]


class Candidates(NamedTuple):
    """The KVs of the heads of one layer of one sequence, and what each head gives up."""

    scores: Float[Array, "H T"]
    """Eviction scores, +inf where a KV may not be evicted."""
    single: Float[Array, "H T"]
    """The same before pages were joined."""
    position: Int32[Array, "H T"]
    context_len: Int32[Array, " H"]
    count: Int32[Array, " H"]
    """KVs that each head gives up."""
    threshold: Float[Array, " H"]
    """The largest score that goes."""
    query_heads: Float[Array, "H r T"] | None = None
    """Scores of single query heads, where there are any (by token position)."""
    k: Float[Array, "H T d"] | None = None
    """Keys, for a selector that needs them."""


@dataclasses.dataclass(frozen=True)
class Selector:
    """The lowest scores go, ties by index."""

    unit: int = 1
    """Token positions that stay or go together, as aligned pages; 1 for single KVs. A page's score
    is the sum over its evictable KVs. The last page that goes may be cut, because heads keep whole
    blocks."""
    scope: Scope = "head"
    """layer: all heads of a layer keep the same tokens, by the mean of their scores."""

    needs_query_heads: ClassVar[bool] = False
    """Whether choosing survivors of a prompt needs the scores of single query heads."""
    needs_keys: ClassVar[bool] = False
    """Whether choosing survivors needs the keys themselves."""
    one_at_a_time: ClassVar[bool] = False
    """Whether layers are handled one after the other, because one alone takes much memory."""

    def __post_init__(self):
        check_wholes(self, 1, MOST_UNIT, "unit")
        check_one_of("scope", self.scope, Scope)

    def check_with(self, allocator: Allocator) -> None:
        """Raise `UserError` where the two cannot go together."""
        if self.scope == "layer" and not allocator.even_in_layer:
            raise wanted("scope", self.scope, uneven(allocator))

    def eviction_scores(
        self,
        rank: Float[Array, "*rows H T"],
        evictable: Bool[Array, "*rows H T"],
        position: Int32[Array, "*rows H T"],
    ) -> tuple[Float[Array, "*rows H T"], Float[Array, "*rows H T"]]:
        """The scores by which KVs are evicted, and the same before pages were joined.

        Args:
            rank: what each KV counts (`Scorer.rank`), by logical index.
            evictable: whether it may be evicted.
            position: its token position.
        """
        if self.scope == "layer":
            # Heads of a layer that share their choice hold the same tokens in the same order.
            mean = jnp.mean(jnp.where(evictable, rank, 0), axis=-2, keepdims=True)
            rank = jnp.broadcast_to(mean, rank.shape)
            evictable = jnp.broadcast_to(jnp.all(evictable, axis=-2, keepdims=True), rank.shape)
        single = jnp.where(evictable, rank, jnp.inf)
        if self.unit == 1:
            return single, single
        joined = page_sums(rank, position, evictable, self.unit)
        return jnp.where(evictable, joined, jnp.inf), single

    def choose(self, of: Candidates) -> Bool[Array, "H T"]:
        """Marks the `count` KVs of each head that go."""
        return smallest(of.scores, of.count, of.threshold)


def uneven(allocator: Allocator) -> str:
    """What is wanted where all heads of a layer have to keep as much."""
    return f"an allocator by layer, which {type(allocator).__name__} is not"


def evicted_kvs(selector: Selector, of: Candidates) -> Bool[Array, "*rows H T"]:
    """`Selector.choose` for any number of layers."""
    if type(selector).choose is Selector.choose:
        return smallest(of.scores, of.count, of.threshold)

    def chosen(layer: Candidates) -> Bool[Array, "H T"]:
        goes = selector.choose(layer)
        check_gave(selector, "choose", goes, jnp.bool_, layer.scores.shape, "[H, T]")
        return goes

    if of.scores.ndim == 2:
        return chosen(of)
    if selector.one_at_a_time:
        return jax.lax.map(chosen, of)
    return jax.vmap(chosen)(of)


def evictable_kvs(
    metric: Float[Array, "*rows T"],
    position: Int32[Array, "*rows T"],
    context_len: Int32[Array, "*rows"],
    seq_len: Int32[Array, "*rows"],
    protected: Int32[Array, "..."] | int,
    sinks: Int32[Array, ""] | int,
) -> Bool[Array, "*rows T"]:
    """Which KVs may be evicted at all.

    The `protected` newest token positions, positions below `sinks`, slots past the context length
    and unwritten slots never are, whatever their metric holds.
    """
    index = jnp.arange(metric.shape[-1], dtype=jnp.int32)
    newest = seq_len[..., None] - jnp.asarray(protected)[..., None]
    return (
        (index < context_len[..., None])
        & (position >= sinks)
        & (position >= 0)
        & (position < newest)
        & (metric < jnp.inf)
    )


def page_sums(
    metric: Float[Array, "*rows T"],
    position: Int32[Array, "*rows T"],
    counts: Bool[Array, "*rows T"],
    width: int,
) -> Float[Array, "*rows T"]:
    """Sum of the metrics that count over each aligned page of `width` token positions.

    Adds KVs in the order of their positions, wherever they lie.
    """
    num_keys = metric.shape[-1]

    def one(metric, position, counts):
        page = jnp.where(counts, position // width, jnp.iinfo(jnp.int32).max)
        order = jnp.argsort(jnp.where(counts, position, jnp.iinfo(jnp.int32).max))
        page = page[order]
        is_new = jnp.concatenate([jnp.zeros(1, bool), page[1:] != page[:-1]])
        segment = jnp.cumsum(is_new, dtype=jnp.int32)
        sums = jax.ops.segment_sum(
            jnp.where(counts, metric, 0)[order], segment, num_keys, indices_are_sorted=True
        )
        return jnp.zeros_like(metric).at[order].set(sums[segment])

    flat = one
    for _ in metric.shape[:-1]:
        flat = jax.vmap(flat)
    return flat(metric, position, counts)
