"""Codecs of whole prompts: what codes, low ranks and levels lose of numbers, on drawn ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.eval.prompt_codecs.codes import in_codes
from kvjax.eval.prompt_codecs.gear import Gear
from kvjax.eval.prompt_codecs.kvquant import k_means, middles_of
from tests.oracle import prompt_codecs as oracle

TOKENS = 48
NUMBERS = st.lists(st.floats(-100, 100, width=32), min_size=12, max_size=12)


@settings(max_examples=40, deadline=None)
@given(NUMBERS, st.integers(1, 12), st.sampled_from([2, 3, 4]))
def test_codes_lie_within_half_a_step(numbers, count, bits):
    x = np.asarray(numbers, np.float32)
    counts = np.arange(12) < count
    got = np.asarray(in_codes(jnp.asarray(x), bits, 0, jnp.asarray(counts)))
    part = x[:count]
    # A least number that bfloat16 rounds is off by 2⁻⁹ of it; a scale is up by 2⁻⁷ at most.
    rounding = 2**-8 * np.abs(part).max() + 1e-6
    step = (part.max() - part.min() + rounding) / (2**bits - 1)
    assert np.abs(got[:count] - part).max() <= step / 2 * (1 + 2**-7) + rounding


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, TOKENS))
def test_a_low_rank_of_what_is_lost_is_never_a_loss(seed, length):
    """Head by head, but for its rounding; and all of what is lost is nothing lost."""
    rng = np.random.default_rng(seed)
    lost = rng.standard_normal((TOKENS, 2, 8)) * rng.exponential(1, (1, 1, 8))
    lost[length:] = 0
    got = np.asarray(low_rank(Gear())(jnp.asarray(lost, jnp.float32)))
    left = np.linalg.norm(lost - got, axis=(0, 2))
    size = np.linalg.norm(lost, axis=(0, 2))
    assert (left <= size * (1 + 2**-8)).all()
    got = np.asarray(low_rank(Gear(rank=8))(jnp.asarray(lost, jnp.float32)))
    assert (np.linalg.norm(lost - got, axis=(0, 2)) <= 2**-6 * size + 1e-6).all()


@functools.cache
def low_rank(codec: Gear):
    return jax.jit(codec.low_rank)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_k_means_lose_no_more_than_what_they_begin_with(seed):
    x = np.random.default_rng(seed).standard_t(3, 60).astype(np.float32)
    counts = np.arange(60) < 50
    losses = []
    for steps in (0, 5, 50):
        levels = np.asarray(levels_after(steps)(jnp.asarray(x), jnp.asarray(counts)))
        assert (np.diff(levels) >= 0).all()
        losses.append(np.sum((oracle.nearest(x[:50], levels) - x[:50]) ** 2))
    assert losses[2] <= losses[1] * (1 + 1e-5)
    assert losses[1] <= losses[0] * (1 + 1e-5)


def test_levels_that_are_nearest_to_none_stay():
    x = jnp.asarray([5.0] * 50 + [6, 7, 8, 9, 9, 9, 9, 9, 9, 9])
    levels = np.asarray(levels_after(50)(x, jnp.ones(60, bool)))
    assert levels[:6].tolist() == [5] * 6
    assert levels[6:].min() >= 5


@pytest.mark.parametrize("size", [0, 5, 69 << 20, (1 << 31) - 1])
def test_levels_begin_in_the_middle_of_equal_parts(size):
    for levels in (4, 8, 16):
        want = [(2 * i + 1) * size // (2 * levels) for i in range(levels)]
        assert middles_of(levels, jnp.int32(size)).tolist() == want


@functools.cache
def levels_after(steps: int):
    return jax.jit(functools.partial(k_means, levels=8, steps=steps))
