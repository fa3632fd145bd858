"""Invariants 1-5, 8, 11, 12 and 14: what is evicted, and how much of it."""

import math
from itertools import combinations

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as kv
from tests.cache.pair import (
    SMALL,
    Geometry,
    Pair,
    assert_identical,
    filled,
    heads_of,
    host,
    jitted,
)
from tests.oracle import brute_force_cost, eviction_count, prices

ROOMY = Geometry(blocks=72)  # no operation is ever refused
TINY = Geometry(slots=1, layers=2, heads=2, d=1, blocks=20, max_blocks=3, block=2, prompt=6)
ONE_HEAD = Geometry(slots=1, layers=1, heads=1, d=1, blocks=4, max_blocks=4, block=4, prompt=16)


def contents(pair: Pair) -> dict:
    return {at: [x.bits() for x in kvs] for at, kvs in heads_of(pair.cache).items()}


def schedule(pair: Pair, slots, evict, **options) -> kv.EvictionSchedule:
    return jitted("schedule_evictions")(
        pair.cache, jnp.asarray(slots, jnp.int32), jnp.asarray(evict, jnp.int32), **options
    )


def test_invariant_05_each_sequence_has_its_own_protection():
    pair = filled([16, 13, 11], ROOMY, seed=5)
    slots, evict, protected = [0, 1, 2], [12, 12, 12], [0, 6, 3]
    together = schedule(pair, slots, evict, protected=jnp.asarray(protected, jnp.int32))
    assert together.protected.tolist() == protected
    for slot in slots:
        alone = schedule(pair, [slot], [12], protected=protected[slot])
        np.testing.assert_array_equal(together.count[slot], alone.count[0])


@pytest.mark.parametrize("protected", [0, 6])
@pytest.mark.parametrize("evict", [[0, 0, 0], [1, 5, 2], [12, 0, 3], [99, 99, 99]])
def test_invariant_01_budget(evict, protected):
    """Exactly E blocks go, or all that can, with the shortfall said."""
    pair = filled([16, 13, 9], ROOMY, seed=1)
    evictable = [
        sum(
            price < math.inf
            for costs in pair.oracle.costs(s, protected, 0).values()
            for price in prices(costs, 4)
        )
        for s in range(3)
    ]
    before = int(kv.free_blocks(pair.cache))
    keep = [max(0, pair.oracle.owned_blocks(s) - e) for s, e in enumerate(evict)]
    asked = [pair.oracle.owned_blocks(s) - k for s, k in enumerate(keep)]
    choices = pair.compress([0, 1, 2], keep, protected)  # asserts the report's numbers
    freed = [sum(c.blocks.values()) for c in choices]
    assert freed == [min(e, most) for e, most in zip(asked, evictable, strict=True)]
    assert [c.shortfall for c in choices] == [e - f for e, f in zip(asked, freed, strict=True)]
    assert int(kv.free_blocks(pair.cache)) == before + sum(freed)


@pytest.mark.parametrize("seed", range(3))
def test_invariant_02_batch_independence(seed):
    """A batch in any order equals each sequence alone, bit for bit."""
    keep, protected = {0: 7, 1: 6, 2: 5}, 3
    alone = filled([16, 13, 11], ROOMY, seed)
    for slot in (2, 0, 1):
        alone.compress([slot], [keep[slot]], protected)
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        batch = filled([16, 13, 11], ROOMY, seed)
        batch.compress(order, [keep[s] for s in order], protected)
        assert contents(batch) == contents(alone)


@pytest.mark.parametrize("length", [13, 14, 15, 16])
def test_invariant_03_optimal_prefix(length):
    """The set for e blocks has the least possible sum, and contains the set for e - 1."""
    pair = filled([length], ONE_HEAD, seed=length)
    metric = [x.metric for x in heads_of(pair.cache)[0, 0, 0]]
    previous: set[int] = set()
    for e in range(1, 4):
        chosen = schedule(pair, [0], [e])
        mask = np.asarray(jitted("eviction_mask")(pair.cache, chosen))
        evicted = set(np.flatnonzero(mask[0, 0, 0]).tolist())
        size = eviction_count(length, e, 4)
        assert len(evicted) == size
        least = min(sum(subset) for subset in combinations(metric, size))
        assert math.isclose(sum(metric[i] for i in evicted), least, abs_tol=1e-9)
        assert previous < evicted
        previous = evicted


@pytest.mark.parametrize("seed", range(12))
def test_invariant_04_global_greedy(seed):
    """Dearest evicted ≤ cheapest kept; the total equals the minimum over all possible choices."""
    rng = np.random.default_rng(seed)
    pair = Pair(TINY, seed)
    assert pair.write_prompt(0, 6, rng.integers(1, 7, (2, 2)), ties=seed % 2 == 0)
    protected = int(rng.integers(0, 3))
    costs = pair.oracle.costs(0, protected, 0)
    for evict in range(7):
        chosen = schedule(pair, [0], [evict], protected=protected)
        blocks = {at: int(n) for at, n in np.ndenumerate(np.asarray(chosen.blocks)[0])}
        short = int(chosen.shortfall[0])
        by_head = {at: prices(costs[at], TINY.block) for at in blocks}
        gone = [price for at, row in by_head.items() for price in row[: blocks[at]]]
        kept = [price for at, row in by_head.items() for price in row[blocks[at] :]]
        assert len(gone) == evict - short
        assert max(gone, default=0.0) <= min(kept, default=math.inf)
        total, winners = brute_force_cost(costs, evict - short, TINY.block)
        assert math.isclose(sum(gone), total)
        assert blocks in winners
        if short:
            assert all(price == math.inf for price in kept)


@pytest.mark.parametrize(
    ("protected", "sinks"), [(1, 0), (5, 2), (0, 4), (16, 0), (40, 0), (0, 40)]
)
def test_invariant_05_protection(protected, sinks):
    """Asked for everything, a sequence keeps its protected tokens, its sinks and a block a head."""
    pair = filled([16, 13, 6], ROOMY, seed=2)
    before = contents(pair)
    pair.compress([0, 1, 2], [0, 0, 0], protected, sinks)
    for (slot, layer, h), kvs in contents(pair).items():
        length = pair.oracle.seq_len[slot]
        must_stay = {p for p in range(length) if p < sinks or p >= length - protected}
        assert must_stay <= {x[0] for x in kvs}
        assert len(kvs) >= min(length, max(len(must_stay), 1))
        assert kv.blocks_for(jnp.int32(len(kvs)), 4) >= 1
        assert set(kvs) <= set(before[slot, layer, h])


def test_invariant_08_length():
    """A head that evicts e > 0 blocks loses a + (e-1)·b KVs and ends full; others do not change."""
    pair = filled([16, 13, 10], ROOMY, seed=3)
    before = host(pair.cache)["context_len"]
    chosen = schedule(pair, [0, 1, 2], [4, 3, 2])
    pair.schedule_and_move([0, 1, 2], [4, 3, 2])
    after = host(pair.cache)["context_len"]
    seen = set()
    for at, e in np.ndenumerate(np.asarray(chosen.blocks)):
        ragged = before[at] % 4 or 4
        assert after[at] == (before[at] - (ragged + (e - 1) * 4) if e else before[at])
        assert not e or after[at] % 4 == 0
        seen.add(bool(e))
    assert seen == {True, False}


@pytest.mark.parametrize("spare", [0, 1, 7])
def test_invariant_11_no_op(spare):
    """A cap at or above what a sequence owns changes no bit of the cache."""
    pair = filled([16, 13, 1], ROOMY, seed=4)
    owned = [pair.oracle.owned_blocks(s) for s in range(3)]
    cache, report = jitted("compress")(
        pair.cache,
        jnp.arange(3, dtype=jnp.int32),
        jnp.asarray([n + spare for n in owned], jnp.int32),
        protected=3,
    )
    assert_identical(pair.cache, cache, "compression under a cap that is met")
    assert np.asarray(report.freed).tolist() == [0, 0, 0]
    assert np.asarray(report.shortfall).tolist() == [0, 0, 0]


def test_invariant_11_no_op_without_sequences():
    """Empty slots and slots out of range pass through."""
    pair = filled([16], ROOMY, seed=5)
    slots = jnp.asarray([2, ROOMY.slots, ROOMY.slots + 9], jnp.int32)
    cache, report = jitted("compress")(pair.cache, slots, jnp.zeros(3, jnp.int32))
    assert_identical(pair.cache, cache, "compression of nobody")
    assert not np.asarray(report.freed).any()


@pytest.mark.parametrize("keep", [3, 7, 12])
def test_invariant_12_determinism_of_ties(keep):
    """All metrics equal: the same KVs go on every run and in every batch order."""
    results = []
    for order in ([0, 1, 2], [2, 1, 0], [0, 1, 2]):
        pair = Pair(ROOMY, seed=6)
        for slot in range(3):
            metric = np.full((2, 2, 16), 0.5, np.float32)
            assert pair.write_prompt(slot, 14, metric=metric)
        pair.compress(order, [keep] * 3)  # compares each logical index with the oracle
        results.append(contents(pair))
    assert results[0] == results[1] == results[2]
    evicted = set(range(14)) - {x[0] for x in results[0][0, 0, 0]}
    assert evicted == set(range(len(evicted))), "of equal KVs the first in logical order go"


@pytest.mark.parametrize(("protected", "sinks"), [(0, 0), (6, 1)])
def test_invariant_14_idempotence(protected, sinks):
    """Compressing again with no new token evicts nothing, even where the budget was missed."""
    pair = filled([16, 13, 9], ROOMY, seed=7)
    keep = [6, 5, 0]
    pair.compress([0, 1, 2], keep, protected, sinks)
    first = pair.cache
    again, report = jitted("compress")(
        first,
        jnp.arange(3, dtype=jnp.int32),
        jnp.asarray(keep, jnp.int32),
        protected=protected,
        sinks=sinks,
    )
    assert_identical(first, again, "second compression")
    assert not np.asarray(report.freed).any()


def test_invariant_14_after_new_tokens_only_they_are_paid_for():
    pair = filled([16, 13], SMALL, seed=8)
    pair.compress([0, 1], [6, 5])
    assert pair.append([True, True, False])
    choices = pair.compress([0, 1], [6, 5])
    owned = [pair.oracle.owned_blocks(s) for s in (0, 1)]
    assert owned == [6, 5]
    assert all(sum(c.blocks.values()) > 0 for c in choices)
