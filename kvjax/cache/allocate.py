"""How many blocks each head keeps, where that is not left to one global choice.

Budgets are split in two steps, over layers and then over the heads of each, by Webster's divisor
method: blocks are given one after the other to whoever has the largest share / (blocks so far + ½).
So whole blocks come out, their total is exactly what may be kept, and bounds (what a head protects,
what it holds) are met by construction.

Sources: PyramidKV, section 3.2, and its authors' code for the floored step; Ada-KV's code.
"""

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.cache.methods.base import Allocation, Method
from kvjax.cache.paged import blocks_for
from kvjax.cache.prices import select_blocks, smallest


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


def layer_tokens(
    allocation: Allocation,
    num_layers: int,
    window: Int32[Array, ""],
    cap: Float[Array, ""],
    seq_len: Int32[Array, ""],
) -> Float[Array, " L"]:
    """Tokens that each head of each layer should keep, the window included.

    Args:
        allocation: the allocation (static).
        num_layers: L.
        window: tokens at the end that every head keeps.
        cap: tokens that a head keeps on average.
        seq_len: tokens that the sequence has seen.
    """
    if allocation.layers == "weights":
        weights = jnp.asarray(allocation.weights, jnp.float32)
        if weights.shape != (num_layers,):
            raise ValueError(f"weights: got {weights.shape[0]} layers, wanted {num_layers}")
        return cap * num_layers * weights / jnp.sum(weights)
    even = jnp.full(num_layers, cap, jnp.float32)
    if allocation.layers != "pyramid":
        return even
    base = jnp.maximum(cap.astype(jnp.int32) - window, 0)
    low = base // allocation.beta
    high = 2 * base - low
    room = jnp.maximum(seq_len - window, 0)
    low = jnp.where(high >= room, 2 * base - room, low)
    high = jnp.minimum(high, room)
    layer = jnp.arange(num_layers, dtype=jnp.int32)
    steps = max(1, num_layers - 1)
    if allocation.exact:
        slope = (high - low).astype(jnp.float32) / steps
        tokens = high.astype(jnp.float32) - layer.astype(jnp.float32) * slope
    else:
        tokens = (high - layer * ((high - low) // steps)).astype(jnp.float32)
    pyramid = (seq_len >= 2 * base) & (num_layers > 1)
    return jnp.where(pyramid, tokens + window, even)


def ada_shares(
    keys: Float[Array, "H T"], base: Float[Array, ""], protected: Int32[Array, ""], floor: float
) -> Float[Array, " H"]:
    """Ada-KV: tokens of each head of a layer, by how many of the layer's largest keys it has.

    Of the layer's evictable KVs the H · base largest are counted per head; a head gets
    round((1 − α) · count + ⌊α · base⌋) and what it protects.

    Args:
        keys: eviction keys, +inf where a KV may not be evicted.
        base: tokens that each head keeps on average beside what it protects.
        protected: tokens that each head keeps anyway.
        floor: α, the share that is split evenly.
    """
    num_heads = keys.shape[0]
    base = jnp.floor(jnp.maximum(base, 0))
    # Largest first; of equal keys those of the highest head and index, which are evicted last.
    claims = jnp.where(jnp.isfinite(keys), -keys, jnp.inf).reshape(-1)[::-1]
    wanted = jnp.minimum(
        (num_heads * base).astype(jnp.int32), jnp.sum(jnp.isfinite(claims), dtype=jnp.int32)
    )
    last = jnp.sort(claims)[jnp.maximum(wanted - 1, 0)]
    top = smallest(claims, wanted, jnp.where(wanted > 0, last, -jnp.inf))[::-1]
    count = jnp.sum(top.reshape(keys.shape), axis=-1).astype(jnp.float32)
    return jnp.round(count * (1 - floor) + jnp.floor(floor * base)) + protected


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """What a budget means for a sequence before any metric is looked at."""

    protected: Int32[Array, ""]
    """Newest token positions that stay."""
    tokens: Float[Array, " L"]
    """Tokens that the heads of each layer should keep on average."""

    @classmethod
    def of(
        cls,
        method: Method | None,
        num_layers: int,
        num_heads: int,
        block_size: int,
        keep: Int32[Array, ""],
        seq_len: Int32[Array, ""],
        protected: Int32[Array, ""] | int,
    ) -> "Plan":
        """The plan for `keep` blocks of a sequence that has seen `seq_len` tokens."""
        protected = jnp.maximum(jnp.asarray(protected, jnp.int32), 0)
        if method is None:
            return cls(protected, jnp.zeros(num_layers, jnp.float32))
        cap = keep.astype(jnp.float32) * block_size / (num_layers * num_heads)
        if method.protected_share:
            share = jnp.floor(cap * method.protected_share).astype(jnp.int32)
            protected = jnp.maximum(protected, share)
        return cls(protected, layer_tokens(method.allocation, num_layers, protected, cap, seq_len))


def head_shares(
    method: Method | None,
    keys: Float[Array, "H T"],
    tokens: Float[Array, ""],
    protected: Int32[Array, ""],
) -> Float[Array, " H"]:
    """Tokens that each head of a layer should keep, relative to the others."""
    if method is None or method.allocation.heads != "ada":
        return jnp.ones(keys.shape[0], jnp.float32)
    return ada_shares(keys, tokens - protected, protected, method.allocation.floor)


def choose_blocks(
    method: Method | None,
    prices: Float[Array, "L H M"],
    shares: Float[Array, "L H"],
    tokens: Float[Array, " L"],
    context_len: Int32[Array, "L H"],
    evict: Int32[Array, ""],
    block_size: int,
) -> tuple[Int32[Array, "L H"], Int32[Array, "L H"], Float[Array, "L H"], Int32[Array, ""]]:
    """The blocks that one sequence gives up, as `select_blocks` returns them.

    Args:
        method: the method (static); None for the globally cheapest blocks.
        prices: price of the 1st, 2nd, … block to go of each head; +inf where it must stay.
        shares: from `head_shares`.
        tokens: from `Plan`.
        context_len: KVs of each head.
        evict: blocks to give up.
        block_size: b.
    """
    if method is None or method.allocation == Allocation():
        return select_blocks(prices, context_len, evict, block_size)
    owned = blocks_for(context_len, block_size)
    keep = jnp.sum(owned) - evict
    kept, over = _kept_blocks(
        method.allocation, method.shared, prices, shares, tokens, owned, keep, block_size
    )
    blocks = owned - kept
    count = jnp.where(blocks > 0, context_len - kept * block_size, 0)
    threshold = jnp.take_along_axis(prices, jnp.maximum(blocks - 1, 0)[..., None], -1)[..., 0]
    return blocks, count, jnp.where(blocks > 0, threshold, -jnp.inf), over


def _kept_blocks(
    allocation: Allocation,
    shared: bool,
    prices: Float[Array, "L H M"],
    shares: Float[Array, "L H"],
    tokens: Float[Array, " L"],
    owned: Int32[Array, "L H"],
    keep: Int32[Array, ""],
    block_size: int,
) -> tuple[Int32[Array, "L H"], Int32[Array, ""]]:
    """Blocks that each head keeps, and how many they are over what may be kept."""
    _, num_heads, units = prices.shape
    if allocation.overruns:
        whole = jnp.round(num_heads * jnp.sum(tokens) / block_size)
        # Protecting more tokens than there are must not leave int32.
        keep = jnp.maximum(keep, jnp.minimum(whole, 1 << 30).astype(jnp.int32))
    if allocation.heads == "cheapest" and allocation.floor:
        # A share of the even split is out of reach for the global choice.
        even = jnp.floor(allocation.floor * tokens / block_size).astype(jnp.int32)
        e = jnp.arange(1, units + 1, dtype=jnp.int32)
        guarded = e > (owned - even[:, None])[..., None]
        prices = jnp.where(guarded, jnp.inf, prices)
    low = owned - jnp.sum(jnp.isfinite(prices), axis=-1, dtype=jnp.int32)
    if allocation.layers == "global":
        kept = owned - select_blocks(prices, owned, jnp.sum(owned) - keep, 1)[0]
    elif shared:
        rows = apportion(tokens, jnp.max(low, -1), jnp.max(owned, -1), keep // num_heads, units)
        kept = jnp.minimum(rows[:, None], owned)
    else:
        goal = apportion(tokens, jnp.sum(low, -1), jnp.sum(owned, -1), keep, num_heads * units)
        if allocation.heads == "cheapest":
            kept = owned - jax.vmap(
                lambda price, own, go: select_blocks(price[None], own[None], go, 1)[0][0]
            )(prices, owned, jnp.sum(owned, -1) - goal)
        else:
            kept = jax.vmap(apportion, in_axes=(0, 0, 0, 0, None))(shares, low, owned, goal, units)
    return kept, jnp.maximum(jnp.sum(kept) - keep, 0)
