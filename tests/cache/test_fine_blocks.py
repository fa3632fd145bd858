"""Which blocks hold finer codes of which, and in which order they are taken."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvjax.cache.store import FreeBlocks
from kvjax.cache.store.fine import FineBlocks
from tests.oracle.fine import OracleFine


class Pair:
    """Stacks and tags of arrays beside the oracle's."""

    def __init__(self, n: int):
        self.n, self.oracle = n, OracleFine(n)
        self.free, self.fine = FreeBlocks.every(n), FineBlocks.none(n)
        self.owned: list[int] = []

    def padded(self, blocks: list[int]) -> jax.Array:
        """Some ids, with places for none before, between and behind them."""
        ids = np.full(2 * self.n + 1, self.n, np.int32)
        ids[1 : 2 * len(blocks) : 2] = blocks
        return jnp.asarray(ids)

    def claim(self, count: int) -> list[int]:
        count = min(count, len(self.oracle.stack))
        ids = self.free.peek(jnp.arange(count, dtype=jnp.int32))
        self.free = self.free.without(jnp.int32(count))
        self.fine = self.fine.parted(ids, self.free)
        found = self.oracle.claim(count)
        assert ids.tolist() == found
        self.owned += found
        return found

    def append(self, count: int) -> None:
        found = self.claim(count)
        self.fine = self.fine.grown(self.padded(found), self.free)
        self.oracle.grow(found)

    def drop(self, which: list[int]) -> None:
        blocks = [self.owned[i] for i in sorted({i % len(self.owned) for i in which})]
        self.owned = [block for block in self.owned if block not in blocks]
        ids = self.padded(blocks)
        self.free = self.free.with_blocks(ids)
        self.fine = self.fine.parted(ids, self.free)
        self.oracle.drop(blocks)

    def arrange(self, count: int, worth: list[float]) -> None:
        new = self.claim(count)
        of = {block: worth[block] for block in [*new, *self.oracle.of]}
        given = np.full(self.n, -np.inf, np.float32)
        given[[*of]] = list(of.values())
        self.fine, self.free = self.fine.arranged(jnp.asarray(given), self.free)
        self.oracle.arrange(of)

    def check(self) -> None:
        count = int(self.free.count[0])
        assert self.free.stack[:count].tolist() == self.oracle.stack
        tag = np.full(self.n, self.n)
        for one, other in self.oracle.of.items():
            tag[one], tag[other] = other, one
        assert self.fine.tag.tolist() == tag.tolist()
        assert int(self.fine.count[0]) == self.oracle.top


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_tags_and_the_stack_are_the_oracles(data):
    n = data.draw(st.integers(1, 9))
    pair, count = Pair(n), st.integers(0, 4)
    for _ in range(data.draw(st.integers(1, 8))):
        kind = data.draw(st.sampled_from(["append", "drop", "arrange"]))
        if kind == "append":
            pair.append(data.draw(count))
        elif kind == "drop" and pair.owned:
            pair.drop(data.draw(st.lists(st.integers(0, n), max_size=4)))
        else:
            # A few numbers, so that some are equal.
            of = st.sampled_from([0.0, 0.5, 1.0, 2.0])
            pair.arrange(data.draw(count), data.draw(st.lists(of, min_size=n, max_size=n)))
        pair.check()


def test_a_metric_that_is_no_number_is_worth_nothing():
    free, fine = FreeBlocks.every(4).without(jnp.int32(2)), FineBlocks.none(4)
    worth = jnp.asarray([jnp.nan, 1.0, -jnp.inf, -jnp.inf])
    fine, free = fine.arranged(worth, free)
    assert fine.tag.tolist() == [4, 3, 4, 1]
    assert free.stack[:2].tolist() == [3, 2]
