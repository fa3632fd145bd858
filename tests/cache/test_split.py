"""How budgets are split over layers and heads, and what age makes of a metric: the parts alone."""

import jax
import numpy as np
import pytest

from kvjax.cache.evict import eviction_scores
from kvjax.cache.methods import get_method
from kvjax.cache.methods.pyramidkv import Pyramid
from kvjax.cache.policy.allocate import Budget, apportion
from tests.oracle.scores import Prompt
from tests.oracle.selection import pyramid_layers, webster


def test_apportion_is_websters_method():
    split = jax.jit(apportion, static_argnums=4)
    rng = np.random.default_rng(0)
    for _ in range(40):
        share = rng.integers(1, 50, 5).astype(np.float32)
        low = rng.integers(0, 4, 5).astype(np.int32)
        high = (low + rng.integers(0, 12, 5)).astype(np.int32)
        total = np.int32(rng.integers(low.sum(), high.sum() + 1))
        want = webster(share.tolist(), low.tolist(), high.tolist(), int(total))
        assert np.asarray(split(share, low, high, total, 16)).tolist() == want


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("cap", "length"), [(40, 300), (64, 90), (24, 30), (8, 200)])
def test_pyramids_are_those_of_the_oracle(exact, cap, length):
    layers, window = 6, 8
    none = np.zeros((layers, length, 2, 1), np.float32)
    prompt = Prompt(none, none, none, cap, 4)
    want, _ = pyramid_layers(exact=exact)(prompt, window)
    blocks = np.int32(cap * layers * 2 // 4)

    @jax.jit
    def tokens(blocks, window, length):
        budget = Budget.of(blocks, length, window, 0.0, (layers, 2, 4))
        return Pyramid(exact=exact).tokens(budget, {})

    got = tokens(blocks, np.int32(window), np.int32(length))
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_metrics_per_age_are_divided_by_the_queries_that_could_see_the_kv():
    """OpenVINO's score; summed over pages of 32 and averaged over heads afterwards."""
    method = get_method("paged-h2o-openvino")
    rng = np.random.default_rng(1)
    metric = rng.random((2, 96)).astype(np.float32)
    position = np.broadcast_to(np.arange(96, dtype=np.int32), (2, 96))
    held, seen = np.full(2, 96, np.int32), np.full(2, 100, np.int32)
    keys, raw = jax.jit(eviction_scores)(method, metric, {}, position, held, seen, 4)
    each = (metric / (100 - np.arange(96))).mean(axis=0)
    pages = np.repeat([np.inf, each[32:64].sum(), each[64:96].sum()], 32)
    for head in range(2):
        np.testing.assert_allclose(keys[head], pages, rtol=1e-5)
        np.testing.assert_allclose(raw[head][32:], each[32:], rtol=1e-5)
