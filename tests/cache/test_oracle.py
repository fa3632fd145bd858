"""The oracle against itself: its shortcuts against the paper's own constructions."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import (
    KV,
    brute_force_cost,
    cheapest_blocks,
    cost,
    eviction_count,
    eviction_order,
    max_pool,
    move_cache,
    paper_prices,
    prices,
)

COSTS = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, math.inf]), min_size=1, max_size=7)


@settings(deadline=None, derandomize=True)
@given(COSTS, st.integers(1, 4))
def test_prices_are_equation_17(costs, block_size):
    assert prices(costs, block_size) == paper_prices(costs, block_size)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(COSTS, min_size=1, max_size=3), st.integers(1, 3), st.integers(0, 8))
def test_greedy_choice_is_the_cheapest(rows, block_size, evict):
    heads = {(0, h): row for h, row in enumerate(rows)}
    choice = cheapest_blocks(heads, evict, block_size)
    total, winners = brute_force_cost(heads, evict - choice.shortfall, block_size)
    assert sum(bid[0] for bid in choice.bids) == total
    assert choice.blocks in winners
    if choice.shortfall:
        assert brute_force_cost(heads, evict - choice.shortfall + 1, block_size)[1] == []


@settings(deadline=None, derandomize=True)
@given(COSTS, st.integers(1, 3), st.data())
def test_move_cache_keeps_the_survivors(costs, block_size, data):
    blocks = data.draw(st.integers(0, math.ceil(len(costs) / block_size) - 1))
    gone = set(eviction_order(costs)[: eviction_count(len(costs), blocks, block_size)])
    left = move_cache(list(range(len(costs))), gone)
    assert sorted(left) == [i for i in range(len(costs)) if i not in gone]
    assert all(left[i] == i for i in range(len(left)) if i not in gone)


@pytest.mark.parametrize(("kvs", "expected"), [(1, 1), (3, 3), (4, 4), (5, 1), (8, 4)])
def test_first_block_evicts_what_the_last_one_holds(kvs, expected):
    assert eviction_count(kvs, 1, 4) == expected


def test_cost_protects_exactly_the_last_tokens():
    vector = np.zeros(2, np.float32)
    costs = [cost(KV(p, vector, vector, 0.5), 10, protected=3, sinks=2) for p in range(10)]
    assert [math.isinf(c) for c in costs] == [True] * 2 + [False] * 5 + [True] * 3


def test_max_pool():
    row = np.array([0.0, 5, 0, 0, 0, 0, 1, 0])
    assert max_pool(row, 7).tolist() == [5, 5, 5, 5, 5, 1, 1, 1]
    assert max_pool(row, 1).tolist() == row.tolist()
