"""KVCrush (Jha et al. 2025): a quarter of any method's budget for KVs that stand for dropped ones.

Section 3, and OpenVINO's `kvcrush.cpp`. The most important KVs are kept by the base method's own
order. Of the rest, the candidates, a few are kept that are spread over all candidates: sorted by
the Hamming distance of their bit vectors from an anchor, cut into equal bins, one of each bin. (One
anchor gives no more distances than bits, so the paper's "bucket per distance" cannot fill a larger
budget.)

A candidate's bits say for which query heads of the layer it would have been important: the head's
own choice would keep the token. On its way in, that are the query heads; in the pool, where one
metric per KV is kept, the KV heads. OpenVINO adds its representatives to the budget; here they are
part of it.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, UInt32

from kvjax.cache.policy.allocate import Allocator
from kvjax.cache.policy.block_cost import lowest
from kvjax.cache.policy.checks import check_one_of, check_wholes, wanted
from kvjax.cache.policy.method import Method
from kvjax.cache.policy.representatives import Representatives, times_over, wrapped
from kvjax.cache.policy.select import Candidates, Scope, page_sums, uneven
from kvjax.checks import INT32_MAX

Mode = Literal["paper", "openvino"]
Anchor = Literal["random", "mean", "alternating", "zeros", "ones"]
Pick = Literal["random", "middle"]


@dataclasses.dataclass(frozen=True)
class SpreadOverBits(Representatives):
    """Representatives spread over the bit vectors of the candidates."""

    mode: Mode = "paper"
    """paper: a bit for each query head of the layer, one KV out of each of equal bins; openvino:
    one bit, whether the KV is in the upper half of its layer, every so many-th from the anchor."""
    anchor: Anchor = "random"
    compared: int = 1  # type: ignore[misc]
    """Token positions that are compared and kept together, as aligned pages."""
    pick: Pick = "random"
    """Which one of a bin is kept."""
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_one_of("mode", self.mode, Mode)
        check_one_of("anchor", self.anchor, Anchor)
        check_one_of("pick", self.pick, Pick)
        check_wholes(self, 0, INT32_MAX, "seed")

    def check_with(self, allocator: Allocator) -> None:
        if self.mode == "openvino" and self.scope != "layer":
            raise wanted("scope", self.scope, "layer for openvino's mode")
        if self.mode == "openvino" and not allocator.even_in_layer:
            raise wanted("mode", self.mode, uneven(allocator))
        super().check_with(allocator)

    @property
    def needs_query_heads(self) -> bool:  # type: ignore[override]
        return self.mode == "paper"

    def stand_ins(
        self,
        of: Candidates,
        candidate: Bool[Array, "H T"],
        dropped: Int32[Array, " H"],
        budget: Int32[Array, " H"],
    ) -> Bool[Array, "H T"]:
        bits = self._bits(of, dropped)
        # OpenVINO's mean is that of all pages that compete, also of those that stay.
        averaged = jnp.isfinite(of.single) if self.mode == "openvino" else candidate
        distance = jax.vmap(lambda *x: _distances(self, *x))(bits, candidate, averaged, of.position)
        return jax.vmap(lambda *x: _one_per_bin(self, *x))(
            distance, candidate, of.position, budget // self.compared
        )

    def _bits(self, of: Candidates, dropped: Int32[Array, " H"]) -> Bool[Array, "H G T"]:
        num_heads, num_keys = of.scores.shape
        if self.mode == "openvino":
            evictable = jnp.isfinite(of.single)
            half = jnp.sum(evictable, axis=-1, dtype=jnp.int32) // 2
            bits = (evictable & ~lowest(of.single, half))[:1]
        elif of.query_heads is not None:
            guarded = jnp.where(jnp.isfinite(of.scores)[:, None], of.query_heads, jnp.inf)
            count = jnp.broadcast_to(dropped[:, None], guarded.shape[:2])
            bits = ~jax.vmap(lowest)(guarded, count)
            bits = bits.reshape(-1, num_keys)
        else:
            important = ~lowest(of.single, dropped)
            return _bits_by_position(important, of.position, of.context_len)
        return jnp.broadcast_to(bits, (num_heads, *bits.shape))


def kv_crush(base: Method, name: str, **settings) -> Method:
    """`base` with a share of its budget for representatives by KVCrush.

    Args:
        base: a method that evicts and has no representatives yet.
        name: of the new method.
        **settings: of `SpreadOverBits`: share, mode, anchor, compared, pick, seed.

    Raises:
        UserError: the base cannot be wrapped.
    """
    scope: Scope = "layer" if settings.get("mode") == "openvino" else base.selector.scope
    selector = SpreadOverBits(unit=base.selector.unit, scope=scope, **settings)
    evidence = "P" if selector.mode == "paper" else "C"
    return wrapped(base, selector, name, f"{selector.anchor} anchor", evidence)


def _bits_by_position(
    important: Bool[Array, "H T"], position: Int32[Array, "H T"], context_len: Int32[Array, " H"]
) -> Bool[Array, "H G T"]:
    """For each head's KVs, whether each head of the layer holds that token and finds it important.

    Heads may hold different tokens in a different order.
    """
    last = jnp.iinfo(jnp.int32).max
    held = jnp.arange(position.shape[-1]) < context_len[:, None]
    order = jnp.argsort(jnp.where(held, position, last), axis=-1)
    sorted_position = jnp.take_along_axis(jnp.where(held, position, last), order, axis=-1)
    sorted_bit = jnp.take_along_axis(important & held, order, axis=-1)

    def look_up(wanted, positions, bits):
        at = jnp.minimum(jnp.searchsorted(positions, wanted), positions.shape[0] - 1)
        return bits[at] & (positions[at] == wanted)

    of_all_heads = jax.vmap(look_up, in_axes=(None, 0, 0))
    return jax.vmap(of_all_heads, in_axes=(0, None, None))(position, sorted_position, sorted_bit)


def _distances(
    chosen: SpreadOverBits,
    bits: Bool[Array, "G T"],
    candidate: Bool[Array, " T"],
    averaged: Bool[Array, " T"],
    position: Int32[Array, " T"],
) -> Float[Array, " T"]:
    """Hamming distance of each candidate's bits, or of its page's, from the anchor, which may be
    the mean of some."""
    num_bits, unit = bits.shape[0], chosen.compared
    offset = jnp.maximum(position, 0) % unit
    if chosen.anchor == "mean":
        total = jax.ops.segment_sum((bits & averaged).T.astype(jnp.int32), offset, unit)
        size = jax.ops.segment_sum(averaged.astype(jnp.int32), offset, unit)
        anchor = 2 * total > size[:, None]
    else:
        anchor = {
            "random": np.random.default_rng(chosen.seed).integers(0, 2, (unit, num_bits)),
            "alternating": np.arange(unit * num_bits).reshape(unit, num_bits) % 2,
            "zeros": np.zeros((unit, num_bits)),
            "ones": np.ones((unit, num_bits)),
        }[chosen.anchor]
        anchor = jnp.asarray(anchor.astype(bool))
    distance = jnp.sum(anchor[offset] != bits.T, axis=-1).astype(jnp.float32)
    return distance if unit == 1 else page_sums(distance, position, candidate, unit)


def _one_per_bin(
    chosen: SpreadOverBits,
    distance: Float[Array, " T"],
    candidate: Bool[Array, " T"],
    position: Int32[Array, " T"],
    bins: Int32[Array, ""],
) -> Bool[Array, " T"]:
    """Marks one candidate, or the candidates of one page, out of each of some equal bins."""
    num_keys = position.shape[0]
    last = jnp.iinfo(jnp.int32).max
    leader = candidate
    if chosen.compared > 1:  # the first candidate of a page stands for the page
        page = jnp.where(candidate, position // chosen.compared, last)
        order = jnp.argsort(jnp.where(candidate, position, last))
        first = jnp.concatenate([jnp.ones(1, bool), page[order][1:] != page[order][:-1]])
        leader = candidate & jnp.zeros(num_keys, bool).at[order].set(first)
    order = jnp.lexsort((position, jnp.where(leader, distance, jnp.inf)))
    rank = jnp.arange(num_keys, dtype=jnp.uint32)
    amount = jnp.sum(leader, dtype=jnp.uint32)
    wanted = jnp.minimum(bins.astype(jnp.uint32), amount)
    if chosen.mode == "openvino":
        step = jnp.maximum(amount // jnp.maximum(wanted, 1), 1)
        taken = (rank % step == 0) & (rank // step < wanted)
    else:
        taken = rank == _member(chosen, rank, amount, wanted)
    taken = taken & (rank < amount) & (wanted > 0)
    picked = jnp.zeros(num_keys, bool).at[order].set(taken)
    if chosen.compared > 1:
        picked = page_sums(picked.astype(jnp.float32), position, candidate, chosen.compared) > 0
    return picked & candidate


def _member(
    chosen: SpreadOverBits,
    rank: UInt32[Array, " T"],
    amount: UInt32[Array, ""],
    wanted: UInt32[Array, ""],
) -> UInt32[Array, " T"]:
    """The rank that is taken out of the bin of each rank."""
    amount, wanted = jnp.maximum(amount, 1), jnp.maximum(wanted, 1)
    before, left = times_over(rank + 1, wanted, amount)
    bin_of = jnp.where(left > 0, before, before - 1)
    start, end = (times_over(at, amount, wanted)[0] for at in (bin_of, bin_of + 1))
    if chosen.pick == "middle":
        return (start + end - 1) // 2
    drawn = np.random.default_rng(chosen.seed).integers(0, 2**16, rank.shape[0])
    drawn = jnp.asarray(drawn.astype(np.uint32))[jnp.minimum(bin_of, rank.shape[0] - 1)]
    return start + drawn % jnp.maximum(end - start, 1)
