"""Allocators: how many blocks each head of a sequence keeps.

A sequence keeps the same number of blocks whatever the allocator, except where one `overruns`.
Budgets by layer are split in two steps, over layers and then over the heads of each, by Webster's
divisor method: blocks are given one after the other to whoever has the largest share / (blocks so
far + ½). So whole blocks come out, their total is exactly what may be kept, and bounds (what a head
protects, what it holds) are met by construction.
"""

import dataclasses
from typing import ClassVar, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.cache.policy.block_cost import cheapest_blocks, smallest
from kvjax.cache.policy.checks import check_a, check_numbers
from kvjax.cache.policy.score import Artefacts
from kvjax.cache.store import HeadShard, summed

MANY_KVS = 64
"""Tokens of a cap above which `Method.protected_more` counts."""


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Budget:
    """What a sequence may keep, before any score is looked at."""

    blocks: Int32[Array, ""]
    """Blocks over all its heads."""
    protected: Int32[Array, ""]
    """Newest token positions that every head keeps."""
    seq_len: Int32[Array, ""]
    """Tokens that it has seen."""
    num_layers: int = dataclasses.field(metadata={"static": True})
    num_heads: int = dataclasses.field(metadata={"static": True})
    """Heads of a layer, over all devices."""
    block_size: int = dataclasses.field(metadata={"static": True})

    @property
    def cap(self) -> Float[Array, ""]:
        """Tokens that a head keeps on average."""
        return _cap(self.blocks, self.num_layers * self.num_heads, self.block_size)

    @classmethod
    def of(
        cls,
        blocks: Int32[Array, ""],
        seq_len: Int32[Array, ""],
        protected: Int32[Array, ""] | int,
        shares: tuple[Float[Array, ""] | float, Float[Array, ""] | float],
        shape: tuple[int, int, int],
    ) -> "Budget":
        """The budget of a sequence; `shares` as `Method.shares`, `shape` is (L, H, b)."""
        cap = _cap(blocks, shape[0] * shape[1], shape[2])
        protected = jnp.maximum(jnp.asarray(protected, jnp.int32), 0)
        share = cap * shares[0] + jnp.maximum(cap - MANY_KVS, 0) * shares[1]
        share = jnp.floor(share).astype(jnp.int32)
        return cls(blocks, jnp.maximum(protected, share), seq_len, *shape)


def _cap(blocks: Int32[Array, ""], heads: int, block_size: int) -> Float[Array, ""]:
    return blocks.astype(jnp.float32) * block_size / heads


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockCosts:
    """What the blocks of a sequence cost."""

    cost: Float[Array, "L H M"]
    """The largest eviction score that goes with the 1st, 2nd, … block of each head to go; +inf
    where it must stay."""
    owned: Int32[Array, "L H"]
    """Blocks that each head owns."""
    shares: Float[Array, "L H"]
    """What `Allocator.shares` said of each head."""
    same_in_layer: bool = dataclasses.field(metadata={"static": True})
    """Whether all heads of a layer have to keep as much."""

    @property
    def least(self) -> Int32[Array, "L H"]:
        """Blocks that each head keeps at least."""
        return self.owned - jnp.sum(jnp.isfinite(self.cost), axis=-1, dtype=jnp.int32)

    def of_all(self, shard: HeadShard) -> "BlockCosts":
        """Those of the heads of all devices, of which only blocks that must stay cost anything."""
        owned, least, shares = jnp.moveaxis(
            shard.whole(jnp.stack([self.owned, self.least, _bits(self.shares)], axis=-1)), -1, 0
        )
        e = jnp.arange(1, self.cost.shape[-1] + 1, dtype=jnp.int32)
        cost = jnp.where(e > (owned - least)[..., None], jnp.inf, jnp.float32(0))
        return BlockCosts(cost, owned, _floats(shares), self.same_in_layer)


class Allocator:
    """Splits a budget over the heads of a sequence. Subclasses are frozen dataclasses."""

    artefacts: ClassVar[tuple[str, ...]] = ()
    """Names of the calibrated arrays that it reads, of all layers."""
    even_in_layer: ClassVar[bool] = False
    """Whether all heads of a layer get as much where they have to (`BlockCosts.same_in_layer`)."""

    @property
    def overruns(self) -> bool:
        """Whether a sequence may keep more blocks than its cap stands for."""
        return False

    def allowed(self, budget: Budget, artefacts: Artefacts) -> Int32[Array, ""]:
        """Blocks that may be kept: those of the budget, unless it overruns."""
        return budget.blocks

    def shares(
        self,
        scores: Float[Array, "H T"],
        layer: Int32[Array, ""],
        budget: Budget,
        artefacts: Artefacts,
    ) -> Float[Array, " H"]:
        """A number for each head of a layer from the eviction scores of its KVs (+inf where a KV
        may not be evicted), to be used in `split`; ones by default."""
        return jnp.ones(scores.shape[0], jnp.float32)

    def shares_of_shard(
        self,
        scores: Float[Array, "H T"],
        layer: Int32[Array, ""],
        budget: Budget,
        artefacts: Artefacts,
        shard: HeadShard,
    ) -> Float[Array, " H"]:
        """`shares` of one device's heads; `shard` has those of the layer. The same by default,
        which is right where a head's share follows from its own scores."""
        return self.shares(scores, layer, budget, artefacts)

    def split(self, costs: BlockCosts, budget: Budget, artefacts: Artefacts) -> Int32[Array, "L H"]:
        """Blocks that each head keeps. Taken to between `costs.least` and `costs.owned`."""
        raise NotImplementedError

    def split_of_shard(
        self, costs: BlockCosts, budget: Budget, artefacts: Artefacts, shard: HeadShard
    ) -> Int32[Array, "L H"]:
        """`split` of one device's heads. By default devices tell each other what each head owns,
        has to keep, and its share, and all of them split; that suffices where `split` looks at no
        costs."""
        return shard.own(self.split(costs.of_all(shard), budget, artefacts))


@dataclasses.dataclass(frozen=True)
class Global(Allocator):
    """The cheapest blocks go, wherever they are (KV-Compress, section 4.2.2)."""

    safe: float = 0.0
    """Share of an even split that every head keeps at least."""

    def __post_init__(self):
        check_numbers(self, 0, 1, "safe")

    def split(self, costs: BlockCosts, budget: Budget, artefacts: Artefacts) -> Int32[Array, "L H"]:
        return self._split(costs, budget, None)

    def split_of_shard(
        self, costs: BlockCosts, budget: Budget, artefacts: Artefacts, shard: HeadShard
    ) -> Int32[Array, "L H"]:
        return self._split(costs, budget, shard)

    def _split(
        self, costs: BlockCosts, budget: Budget, shard: HeadShard | None
    ) -> Int32[Array, "L H"]:
        even = jnp.full(budget.num_layers, budget.cap, jnp.float32)
        cost = guarded(costs, even, self.safe, budget.block_size)
        go = summed(shard, jnp.sum(costs.owned)) - budget.blocks
        return costs.owned - cheapest_blocks(cost, go, shard)


def guarded(
    costs: BlockCosts, tokens: Float[Array, " L"], safe: float, block_size: int
) -> Float[Array, "L H M"]:
    """The costs with a share of each head's even split out of reach for a choice by cost."""
    if not safe:
        return costs.cost
    even = jnp.floor(safe * tokens / block_size).astype(jnp.int32)
    e = jnp.arange(1, costs.cost.shape[-1] + 1, dtype=jnp.int32)
    return jnp.where(e > (costs.owned - even[:, None])[..., None], jnp.inf, costs.cost)


@dataclasses.dataclass(frozen=True)
class EvenLayers:
    """Each layer keeps as much."""

    @property
    def overruns(self) -> bool:
        return False

    def tokens(self, budget: Budget, artefacts: Artefacts) -> Float[Array, " L"]:
        """Tokens that each head of each layer should keep on average, the protected included."""
        return jnp.full(budget.num_layers, budget.cap, jnp.float32)


@dataclasses.dataclass(frozen=True)
class EvenHeads:
    """Each head of a layer keeps as much; subclasses give other shares."""

    def shares(
        self,
        scores: Float[Array, "H T"],
        tokens: Float[Array, ""],
        protected: Int32[Array, ""],
    ) -> Float[Array, " H"]:
        """Tokens that each head of a layer should keep, relative to the others.

        Args:
            scores: eviction scores, +inf where a KV may not be evicted.
            tokens: tokens that the layer's heads keep on average.
            protected: newest token positions that each head keeps anyway.
        """
        return jnp.ones(scores.shape[0], jnp.float32)

    def shares_of_shard(
        self,
        scores: Float[Array, "H T"],
        tokens: Float[Array, ""],
        protected: Int32[Array, ""],
        shard: HeadShard,
    ) -> Float[Array, " H"]:
        """`shares` of one device's heads, as of `Allocator`."""
        return self.shares(scores, tokens, protected)


@dataclasses.dataclass(frozen=True)
class CheapestBlocks(EvenHeads):
    """The cheapest blocks of a layer go, whichever head they are of."""

    safe: float = 0.0
    """Share of an even split that every head keeps at least."""

    def __post_init__(self):
        check_numbers(self, 0, 1, "safe")


@dataclasses.dataclass(frozen=True)
class ByLayer(Allocator):
    """Over the layers first, then over the heads of each."""

    layers: EvenLayers = EvenLayers()
    heads: EvenHeads = EvenHeads()

    even_in_layer: ClassVar[bool] = True

    def __post_init__(self):
        check_a("layers", self.layers, EvenLayers)
        check_a("heads", self.heads, EvenHeads)

    @property
    def overruns(self) -> bool:
        return self.layers.overruns

    def allowed(self, budget: Budget, artefacts: Artefacts) -> Int32[Array, ""]:
        if not self.overruns:
            return budget.blocks
        tokens = jnp.sum(self.layers.tokens(budget, artefacts))
        whole = jnp.round(budget.num_heads * tokens / budget.block_size)
        # Protecting more tokens than there are must not leave int32.
        return jnp.maximum(budget.blocks, jnp.minimum(whole, 1 << 30).astype(jnp.int32))

    def shares(
        self,
        scores: Float[Array, "H T"],
        layer: Int32[Array, ""],
        budget: Budget,
        artefacts: Artefacts,
    ) -> Float[Array, " H"]:
        return self.heads.shares(
            scores, self._tokens_of(layer, budget, artefacts), budget.protected
        )

    def shares_of_shard(
        self,
        scores: Float[Array, "H T"],
        layer: Int32[Array, ""],
        budget: Budget,
        artefacts: Artefacts,
        shard: HeadShard,
    ) -> Float[Array, " H"]:
        tokens = self._tokens_of(layer, budget, artefacts)
        return self.heads.shares_of_shard(scores, tokens, budget.protected, shard)

    def _tokens_of(
        self, layer: Int32[Array, ""], budget: Budget, artefacts: Artefacts
    ) -> Float[Array, ""]:
        return self.layers.tokens(budget, artefacts)[layer]

    def split_of_shard(
        self, costs: BlockCosts, budget: Budget, artefacts: Artefacts, shard: HeadShard
    ) -> Int32[Array, "L H"]:
        if not isinstance(self.heads, CheapestBlocks) or costs.same_in_layer:
            return super().split_of_shard(costs, budget, artefacts, shard)
        costs = self._guarded(costs, self.layers.tokens(budget, artefacts), budget)
        whole = costs.of_all(shard)
        go = jnp.sum(whole.owned, -1) - self._of_layers(whole, budget, artefacts)
        given = jax.vmap(cheapest_blocks)(costs.cost, go, shard)
        return costs.owned - given

    def _guarded(self, costs: BlockCosts, tokens: Float[Array, " L"], budget: Budget) -> BlockCosts:
        if not isinstance(self.heads, CheapestBlocks):
            return costs
        cost = guarded(costs, tokens, self.heads.safe, budget.block_size)
        return dataclasses.replace(costs, cost=cost)

    def _of_layers(
        self, costs: BlockCosts, budget: Budget, artefacts: Artefacts
    ) -> Int32[Array, " L"]:
        """Blocks that each layer keeps."""
        _, num_heads, units = costs.cost.shape
        low, high = (jnp.sum(x, -1) for x in (costs.least, costs.owned))
        tokens = self.layers.tokens(budget, artefacts)
        return apportion(tokens, low, high, self.allowed(budget, artefacts), num_heads * units)

    def split(self, costs: BlockCosts, budget: Budget, artefacts: Artefacts) -> Int32[Array, "L H"]:
        tokens, owned = self.layers.tokens(budget, artefacts), costs.owned
        _, num_heads, units = costs.cost.shape
        keep = self.allowed(budget, artefacts)
        costs = self._guarded(costs, tokens, budget)
        low = costs.least
        if costs.same_in_layer:
            rows = apportion(tokens, jnp.max(low, -1), jnp.max(owned, -1), keep // num_heads, units)
            return jnp.minimum(rows[:, None], owned)
        goal = self._of_layers(costs, budget, artefacts)
        if isinstance(self.heads, CheapestBlocks):
            go = jnp.sum(owned, -1) - goal
            return owned - jax.vmap(cheapest_blocks)(costs.cost[:, None], go)[:, 0]
        return jax.vmap(apportion, in_axes=(0, 0, 0, 0, None))(
            costs.shares, low, owned, goal, units
        )


def _bits(x: Float[Array, "*dims"]) -> Int32[Array, "*dims"]:
    """Floats as whole numbers, so that they travel with others; added to zeros they stay whole."""
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _floats(bits: Int32[Array, "*dims"]) -> Float[Array, "*dims"]:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def apportion(
    share: Float[Array, " n"],
    low: Int32[Array, " n"],
    high: Int32[Array, " n"],
    total: Int32[Array, ""],
    units: int,
) -> Int32[Array, " n"]:
    """Whole numbers near `share`'s proportions that add up to `total`, between `low` and `high`.

    Webster's method; equal claims go to the lowest index first. The sum is Σ low or Σ high where
    `total` lies outside of these.

    Args:
        share: what each should get, in any unit (≥ 0).
        low: what each gets at least (≤ high).
        high: what each gets at most (≤ units).
        total: sum of the result.
        units: upper bound of `high` (static).
    """
    # In whole numbers: devices divide floats inexactly, which would break ties at random.
    _, exponent = jnp.frexp(jnp.max(share))
    amount = jnp.ldexp(share, 30 - exponent).astype(jnp.int32)
    unit = jnp.arange(1, units + 1, dtype=jnp.int32)
    claim = -(amount[:, None] // (2 * unit - 1))
    claim = jnp.where(unit <= low[:, None], jnp.iinfo(jnp.int32).min, claim)
    claim = jnp.where(unit <= high[:, None], claim, jnp.iinfo(jnp.int32).max).reshape(-1)
    total = jnp.clip(total, jnp.sum(low), jnp.sum(high))
    given = smallest(claim, total, jnp.sort(claim)[jnp.maximum(total - 1, 0)]) & (total > 0)
    return jnp.sum(given.reshape(-1, units), axis=-1, dtype=jnp.int32)
