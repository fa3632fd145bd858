"""`compresskv`: layers share a budget by their error, heads of a layer count or do not."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.methods.compresskv import LAYER_ERROR, SEMANTIC_HEAD, ErrorLayers, SemanticHeads
from kvjax.cache.policy import LayerView
from kvjax.cache.policy.allocate import Budget
from kvjax.errors import UserError
from tests.oracle.attention import causal_attention


@pytest.mark.parametrize(
    ("error", "cap", "want"),
    [
        # 32 of each, and of 5 · 68 the share of the error; three times the mean at most.
        ([1, 2, 3, 4, 0], 100, [66, 100, 134, 168, 32]),
        ([0, 0, 10, 0, 0], 100, [32, 32, 300, 32, 32]),
        ([1, 2, 3, 4, 0], 20, [20] * 5),
        ([0] * 5, 100, [32] * 5),
    ],
)
def test_layers_keep_by_their_error(error, cap, want):
    budget = Budget(jnp.int32(5 * 2 * cap // 4), jnp.int32(8), jnp.int32(900), 5, 2, 4)
    found = ErrorLayers().tokens(budget, {LAYER_ERROR: jnp.asarray(error, jnp.float32)})
    np.testing.assert_allclose(found, want, rtol=1e-6)


def test_the_highest_heads_of_a_layer_count():
    rng = np.random.default_rng(0)
    t, heads, group, d = 9, 2, 3, 4
    q = rng.standard_normal((t, heads * group, d)).astype(np.float32)
    k = rng.standard_normal((t, heads, d)).astype(np.float32)
    of = {SEMANTIC_HEAD: jnp.asarray([0.1, 0.9, 0.3, 0.2, 0.8, 0.7])}
    view = LayerView(0, jnp.asarray(q), jnp.asarray(k), jnp.int32(t), jnp.int32(0))
    found = SemanticHeads(window=2, pool=1, heads=3).score(view, of).metric
    given = causal_attention(q, k)[:, -2:].sum(axis=1)
    want = 2 / 3 * np.array([given[1], given[4] + given[5]])
    np.testing.assert_allclose(found, want, rtol=1e-5)
    every = SemanticHeads(window=2, pool=1, heads=9).score(view, of).metric
    np.testing.assert_allclose(np.mean(every, axis=0), given.mean(axis=0), rtol=1e-5)


@pytest.mark.parametrize("wrong", [{"heads": 0}, {"pool": 2}, {"window": 0}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(UserError, match=f"^{next(iter(wrong))}[^\n]*$"):
        SemanticHeads(**wrong)
