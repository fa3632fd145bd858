"""`windowkv`: groups of layers go by their first one, and share budgets by groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.methods.windowkv import GroupPyramid, Windows
from kvjax.cache.policy import LayerView, Scores
from kvjax.cache.policy.allocate import Budget
from kvjax.errors import UserError
from tests.oracle.scores import Prompt, window_scores

L, H, T, P = 5, 2, 12, 40


def test_layers_go_by_the_first_of_their_group():
    rng = np.random.default_rng(0)
    metric = jnp.asarray(rng.random((L, H, T)), jnp.float32)
    found = Windows(layers=2).join_layers(Scores(metric), None, jnp.int32(T), P).metric
    assert np.array_equal(found, metric[np.array([0, 0, 2, 2, 4])])


def test_held_kvs_go_by_the_position_that_the_first_layer_holds():
    rng = np.random.default_rng(1)
    at = np.stack([rng.permutation(P)[:T] for _ in range(L * H)]).reshape(L, H, T)
    at[:, :, 9:] = -1
    metric = rng.random((L, H, T)).astype(np.float32)
    scores = Scores(jnp.asarray(metric))
    position = jnp.asarray(at, jnp.int32)
    found = Windows(layers=2).join_layers(scores, position, jnp.int32(P), P).metric
    known = 0
    for layer, head, i in np.ndindex(L, H, 9):
        first = layer // 2 * 2
        where = np.flatnonzero(at[first, head] == at[layer, head, i])
        want = metric[first, head, where[0]] if len(where) else 0
        assert found[layer, head, i] == want
        known += len(where) and layer != first
    assert known


def test_every_group_has_its_own_first_layer():
    rng = np.random.default_rng(2)
    q = rng.standard_normal((L, T, 2 * H, 8)).astype(np.float32)
    k = rng.standard_normal((L, T, H, 8)).astype(np.float32)
    scorer = Windows(window=3, width=4, best=2, layers=2)

    @jax.jit
    def measured(q, k):
        def one(x):
            q, k = x
            return scorer.score(LayerView(0, q, k, jnp.int32(T), jnp.int32(0)), {})

        return scorer.join_layers(jax.lax.map(one, (q, k)), None, jnp.int32(T), T).metric

    found = measured(q, k)
    want = window_scores(3, 4, 2, 2)(Prompt(q, k, k, 8, 4))
    for (layer, head), row in want.items():
        there = ~np.isnan(row)
        np.testing.assert_allclose(found[layer, head][there], row[there], rtol=1e-5)


@pytest.mark.parametrize(
    ("beta", "layers", "want"),
    # 100 tokens beside the window of 12: ⌊layers · 100 / β⌋ in the last group.
    [
        (14, 2, [186, 186, 100, 100, 14]),
        (14, 3, [179, 179, 179, 21, 21]),
        (1, 2, [0, 0, 100, 100, 200]),
    ],
)  # fmt: skip
def test_budgets_of_groups(beta, layers, want):
    budget = Budget(jnp.int32(5 * 2 * 28), jnp.int32(12), jnp.int32(900), 5, 2, 4)
    found = GroupPyramid(beta, layers).tokens(budget, {})
    assert (np.asarray(found) - 12).tolist() == want


def test_a_single_group_keeps_the_cap_everywhere():
    budget = Budget(jnp.int32(5 * 2 * 28), jnp.int32(12), jnp.int32(900), 5, 2, 4)
    assert np.asarray(GroupPyramid().tokens(budget, {})).tolist() == [112.0] * 5


@pytest.mark.parametrize("wrong", [{"width": 0}, {"best": 0}, {"layers": 0}, {"window": 0}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(UserError, match=f"^{next(iter(wrong))}[^\n]*$"):
        Windows(**wrong)
