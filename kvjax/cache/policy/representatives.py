"""Selectors that spend part of the budget on KVs that stand for those that go."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32, UInt32

from kvjax.cache.policy.block_cost import lowest
from kvjax.cache.policy.checks import MOST_UNIT, check_numbers, check_wholes
from kvjax.cache.policy.method import Evidence, Method
from kvjax.cache.policy.select import Candidates, Selector
from kvjax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Representatives(Selector):
    """The most important KVs stay by the base's own order; of the rest, the candidates, a share of
    the budget is chosen by `stand_ins`."""

    share: float = 0.25
    """Share of what a head keeps that goes to representatives."""

    compared: ClassVar[int] = 1
    """Token positions that are compared and kept together, as aligned pages."""

    def __post_init__(self):
        super().__post_init__()
        check_numbers(self, 0, 1, "share", above=True)
        if self.share == 1:
            raise UserError(f"share {self.share}: wanted less than 1")
        check_wholes(self, 1, MOST_UNIT, "compared")

    def stand_ins(
        self,
        of: Candidates,
        candidate: Bool[Array, "H T"],
        dropped: Int32[Array, " H"],
        budget: Int32[Array, " H"],
    ) -> Bool[Array, "H T"]:
        """Marks `budget` candidates of each head.

        Args:
            of: the KVs of a layer.
            candidate: those that the base would drop, representatives included.
            dropped: how many these are.
            budget: representatives of each head, a multiple of `compared`.
        """
        raise NotImplementedError

    def choose(self, of: Candidates) -> Bool[Array, "H T"]:
        count = of.count
        stay = jnp.sum(jnp.isfinite(of.scores), axis=-1, dtype=jnp.int32) - count
        budget = jnp.floor(self.share * (of.context_len - count)).astype(jnp.int32)
        budget = jnp.where(count > 0, jnp.minimum(budget, stay), 0)
        budget = budget // self.compared * self.compared
        candidate = lowest(of.scores, count + budget)
        picked = self.stand_ins(of, candidate, count + budget, budget)
        return lowest(jnp.where(picked, jnp.inf, of.scores), count)


def times_over(
    index: UInt32[Array, "*n"], whole: UInt32[Array, ""], parts: UInt32[Array, ""]
) -> tuple[UInt32[Array, "*n"], UInt32[Array, "*n"]]:
    """index · whole / parts in whole numbers, and what is left over.

    The product may pass 32 bits (114,688 candidates, 49,152 representatives), so it is divided bit
    by bit, as by hand. Index and quotient have 32 bits, the parts at most 30.
    """
    times, rest = whole // parts, whole % parts

    def bit(n, state):
        found, left = state
        left = 2 * left + jnp.where(index >> (31 - n) & 1 == 1, rest, 0)
        return 2 * found + left // parts, left % parts

    none = jnp.zeros_like(index)
    found, left = lax.fori_loop(jnp.uint32(0), jnp.uint32(32), bit, (none, none))
    return index * times + found, left


def wrapped(
    base: Method,
    selector: Representatives,
    name: str,
    what: str,
    evidence: Evidence,
) -> Method:
    """`base` with a selector that keeps representatives.

    Raises:
        UserError: the base never evicts, or chooses by a rule of its own.
    """
    if not base.compresses or type(base.selector).choose is not Selector.choose:
        raise UserError(f"base {base.name}: wanted one that evicts by itself")
    return dataclasses.replace(
        base,
        name=name,
        summary=f"{base.summary}; {100 * selector.share:.0f} % for representatives ({what})",
        selector=selector,
        evidence=evidence,
    )
