"""Invariant 13, prefill: every method's metric equals the oracle's dense definition."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.methods import METHODS
from kvjax.cache.policy import LayerView, Observation
from kvjax.cache.policy.pooling import pool_metric, pool_metric_at, reduce_group
from tests import oracle
from tests.oracle.scores import avg_pool

TOKENS, HEADS, GROUP, D = 45, 2, 2, 8

# Written down from the paper and the authors' runs, not from the methods' own files.
PAPER = {
    "kv-compress": {"window": 8, "power": 2},
    "kv-compress-w8-l1": {"window": 8, "power": 1},
    "kv-compress-w32-l2": {"window": 32, "power": 2},
    "kv-compress-w32-l1": {"window": 32, "power": 1},
    "kv-compress-full-l2": {"window": TOKENS, "power": 2, "pool": None, "excluded": 10},
    "kv-compress-continual": {"window": 32, "power": 2},
}
PROTECTED = {"kv-compress": 8, "kv-compress-w8-l1": 8}  # 32 for the others


def measured(name: str, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The metric [H, T] that the method's scorer gives."""
    scorer = METHODS[name].scorer
    assert scorer is not None
    view = LayerView(0, jnp.asarray(q), jnp.asarray(k), jnp.int32(len(q)), jnp.int32(0))
    return np.asarray(scorer.score(view, {}).metric)


@pytest.mark.parametrize("tokens", [TOKENS, 5])
@pytest.mark.parametrize("name", PAPER)
def test_invariant_13_prefill_metric(name, tokens):
    rng = np.random.default_rng(len(name))
    q = 2 * rng.standard_normal((tokens, HEADS * GROUP, D)).astype(np.float32)
    k = rng.standard_normal((tokens, HEADS, D)).astype(np.float32)
    want = oracle.prefill_metric(q, k, **PAPER[name])
    np.testing.assert_allclose(measured(name, q, k), want, rtol=3e-5, atol=1e-8)


@pytest.mark.parametrize("name", PAPER)
def test_methods_protect_what_the_authors_protect(name):
    assert METHODS[name].protected == PROTECTED.get(name, 32)
    assert METHODS[name].sinks == 0


def test_pooling_comes_before_the_sum_over_the_group():
    """Max and sum do not commute: two heads with peaks at different keys tell the order."""
    received = jnp.asarray([[0.0, 4, 0, 0], [0.0, 0, 3, 0]])
    by_method = reduce_group(pool_metric(received, 3), "sum")
    assert np.asarray(by_method).tolist() == [4, 7, 7, 3]


@pytest.mark.parametrize("width", [1, 3, 7])
def test_pool_metric(width):
    rows = np.random.default_rng(width).random((4, 20)).astype(np.float32)
    want = np.stack([oracle.max_pool(row, width) for row in rows])
    assert np.array_equal(pool_metric(jnp.asarray(rows), width), want)
    mean = np.stack([avg_pool(row, width) for row in rows])
    np.testing.assert_allclose(pool_metric(jnp.asarray(rows), width, "avg"), mean, rtol=1e-5)


@pytest.mark.parametrize("kind", ["max", "avg"])
@pytest.mark.parametrize("width", [1, 3, 7])
def test_pool_metric_at_scattered_positions(width, kind):
    """After moves keys lie in any order, with gaps: neighbours are near in tokens, not in slots."""
    rng = np.random.default_rng(width)
    position = np.stack([rng.permutation(30)[:16] for _ in range(HEADS)]).astype(np.int32)
    position[rng.random(position.shape) < 0.2] = -1
    metric = rng.random((HEADS, GROUP, 16)).astype(np.float32)
    got = np.asarray(pool_metric_at(jnp.asarray(metric), jnp.asarray(position), width, kind))
    for (h, g, j), value in np.ndenumerate(got):
        if position[h, j] < 0:
            continue
        near = (position[h] >= 0) & (abs(position[h] - position[h, j]) <= width // 2)
        if kind == "max":
            assert value == metric[h, g, near].max()
        else:  # what is absent counts as zero
            assert value == pytest.approx(metric[h, g, near].sum() / width)


@pytest.mark.parametrize("kind", ["max", "avg"])
def test_pool_metric_at_equals_pool_metric_where_nothing_is_missing(kind):
    rows = np.random.default_rng(0).random((HEADS, GROUP, 16)).astype(np.float32)
    position = jnp.broadcast_to(jnp.arange(16, dtype=jnp.int32), (HEADS, 16))
    got = pool_metric_at(jnp.asarray(rows), position, 7, kind)
    np.testing.assert_allclose(got, pool_metric(jnp.asarray(rows), 7, kind), rtol=1e-6)


@pytest.mark.parametrize("name", ["h2o", "a2sf", "kv-compress-full-l2"])
def test_what_attention_told_is_taken_for_what_it_is(name):
    """A scorer that sums all queries computes nothing anew where the attention told these sums,
    and takes no others for them."""
    rng = np.random.default_rng(3)
    q = jnp.asarray(rng.standard_normal((TOKENS, HEADS * GROUP, D)), jnp.float32)
    k = jnp.asarray(rng.standard_normal((TOKENS, HEADS, D)), jnp.float32)
    scorer = METHODS[name].scorer
    assert scorer is not None
    view = LayerView(0, q, k, jnp.int32(TOKENS), jnp.int32(0))
    alone = np.asarray(scorer.score(view, {}).metric)
    sums = jnp.asarray(rng.random((HEADS * GROUP, TOKENS)), jnp.float32)
    told = dataclasses.replace(view, received=sums, observation=scorer.observation)
    want = np.asarray(sums).reshape(HEADS, GROUP, TOKENS).sum(axis=1)
    np.testing.assert_allclose(scorer.score(told, {}).metric, want, rtol=1e-6)
    for other in (Observation(1, 3), Observation(2, 0), Observation(decay=0.5)):
        others = dataclasses.replace(view, received=sums, observation=other)
        np.testing.assert_array_equal(scorer.score(others, {}).metric, alone)


def test_a_window_is_not_all_queries():
    for name in ("kv-compress", "kv-compress-w32-l1", "snapkv", "tova"):
        scorer = METHODS[name].scorer
        assert scorer is not None
        assert scorer.observation is None


def test_weights_of_queries():
    """By age from the last token on; padding counts for nothing."""
    got = Observation(decay=0.5).query_weight(jnp.int32(3), 5)
    np.testing.assert_array_equal(got, [0.25, 0.5, 1, 0, 0])
    np.testing.assert_array_equal(Observation().query_weight(jnp.int32(2), 3), [1, 1, 0])
