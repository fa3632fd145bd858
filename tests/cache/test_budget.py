"""Caps and budgets against the oracle and the numbers of the paper's benchmark."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.cache.budget import budget_blocks, cache_cap, rate_blocks
from kvjax.errors import UserError
from tests import oracle


@pytest.mark.parametrize(
    ("length", "rate", "expected"),
    [
        (6000, 32, 176),  # 187 tokens -> 11 whole blocks
        (6000, 64, 128),  # the floor, not min(128, …)
        (500, 1, 512),  # nothing goes
        (512, 1, 512),
        (513, 1.001, 496),  # strictly below 512
        (514, 1.001, 512),
        (500, 4, 128),
        (2000, 1.5, 1328),
        (12000, 7.9, 1504),
    ],
)
def test_cap_of_the_benchmark(length, rate, expected):
    assert cache_cap(length, rate) == expected


@settings(deadline=None, derandomize=True, max_examples=300)
@given(
    length=st.integers(1, 20_000),
    rate=st.one_of(st.integers(1, 128), st.sampled_from([1.0, 1.25, 1.5, 2.5, 7.5, 100.0])),
    block_size=st.sampled_from([1, 4, 16, 32]),
    floor=st.sampled_from([0, 16, 128]),
)
def test_cap_equals_the_oracle(length, rate, block_size, floor):
    cap = cache_cap(length, rate, block_size=block_size, floor=floor)
    assert cap == oracle.cache_cap(length, rate, block_size, floor)
    assert isinstance(cap, int)
    assert cap >= block_size


@settings(deadline=None, derandomize=True, max_examples=300)
@given(
    length=st.integers(1, 3000),
    rate=st.one_of(st.integers(1, 128), st.sampled_from([1.0, 1.25, 1.5, 2.5, 7.5, 1e300])),
    heads=st.integers(1, 12),
    block_size=st.sampled_from([1, 4, 16, 32]),
    floor=st.sampled_from([0, 8, 100]),
)
def test_blocks_of_a_rate_equal_the_oracle(length, rate, heads, block_size, floor):
    blocks = rate_blocks(length, rate, heads, block_size, floor)
    assert blocks == oracle.rate_blocks(length, rate, heads, block_size, floor)
    assert isinstance(blocks, int)


@settings(deadline=None, derandomize=True)
@given(
    cap=st.integers(1, 5000),
    layers=st.integers(1, 80),
    heads=st.integers(1, 8),
    block_size=st.sampled_from([1, 2, 16, 32]),
)
def test_budget_counts_partial_blocks_whole(cap, layers, heads, block_size):
    blocks = budget_blocks(cap, layers, heads, block_size)
    assert blocks == oracle.budget_blocks(cap, layers, heads, block_size)


def test_budgets_stay_in_int32():
    assert budget_blocks(2**31 - 1, 80, 8, 1) == 2**31 - 1
    assert budget_blocks(0, 80, 8, 16) == 0
    assert rate_blocks(2**31 - 1, 1.5, 640, 1) == 2**31 - 1


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: cache_cap(100, math.nan), "rate nan"),
        (lambda: cache_cap(100, math.inf), "rate inf"),
        (lambda: cache_cap(100, 0.99), r"rate 0.99: give a number of at least 1"),
        (lambda: cache_cap(-1, 2), "length -1"),
        (lambda: cache_cap(100, 2, block_size=0), "block_size 0"),
        (lambda: cache_cap(100, 2, floor=2**31), "floor 2147483648"),
        (lambda: rate_blocks(100, 0.99, 6), "rate 0.99"),
        (lambda: rate_blocks(100, math.inf, 6), "rate inf"),
        (lambda: rate_blocks(100, 2, 0), "heads 0"),
        (lambda: budget_blocks(2**31, 1, 1, 16), "cap 2147483648"),
        (lambda: budget_blocks(16, 1, 1, 0), "block_size 0"),
        (lambda: budget_blocks(16, 0, 1, 16), "num_layers 0"),
        (lambda: budget_blocks(16, 1, 0, 16), "num_kv_heads 0"),
    ],
)
def test_sizes_out_of_range_are_named(call, says):
    with pytest.raises(UserError, match=says):
        call()


def test_budget_rounds_the_cap_up():
    assert budget_blocks(128, 32, 8, 16) == 8 * 32 * 8
    assert budget_blocks(129, 32, 8, 16) == 9 * 32 * 8
