"""An engine step that finds too few blocks leaves the cache as it was, bit for bit."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as kv
from kvjax.cache.methods import get_method
from kvjax.engine.decode import decode_step
from kvjax.engine.prefill import prefill_in_pool
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import init_params
from tests.cache.pair import Geometry, assert_identical, filled, heads_of

POOL = Geometry(slots=2, layers=2, heads=2, d=8, blocks=22, max_blocks=12, block=4, prompt=16)
MODEL = ModelConfig(
    name="tiny",
    vocab_size=32,
    hidden_size=32,
    intermediate_size=32,
    num_layers=POOL.layers,
    num_heads=2 * POOL.heads,
    num_kv_heads=POOL.heads,
    head_dim=POOL.d,
)
METHODS = ("kv-compress-continual", "kv-compress-full-l2")


@pytest.fixture(scope="module")
def params():
    return init_params(MODEL, jnp.float32)


@pytest.mark.parametrize("method", METHODS)
def test_a_refused_chunk(method, params):
    """16 tokens are held, 8 more need 8 blocks and 6 are free."""
    cache = filled([16], POOL).cache
    chunk = jax.jit(partial(prefill_in_pool, MODEL, get_method(method).observer))
    tokens = jnp.arange(8, dtype=jnp.int32)
    after, _, ok, _ = chunk(params, {}, cache, jnp.int32(0), tokens, jnp.int32(8))
    assert not ok
    assert_identical(cache, after, "refused chunk")
    after, scores, ok, _ = chunk(params, {}, cache, jnp.int32(0), tokens, jnp.int32(4))
    assert ok
    assert np.isfinite(np.asarray(scores)).all()
    assert [x.position for x in heads_of(after)[0, 1, 1]] == list(range(20))


@pytest.mark.parametrize("method", METHODS)
def test_a_refused_decode_step(method, params):
    """Both slots need four blocks for their next KV and only six are free."""
    pair = filled([8, 8], POOL)
    step = jax.jit(partial(decode_step, MODEL, get_method(method).decode))
    tokens = jnp.asarray([3, 4], jnp.int32)
    after, _, ok = step(params, pair.cache, tokens, jnp.asarray([True, True]))
    assert not ok
    assert_identical(pair.cache, after, "refused step")
    assert int(kv.free_blocks(after)) == 6
    after, scores, ok = step(params, pair.cache, tokens, jnp.asarray([False, True]))
    assert ok
    assert np.isfinite(np.asarray(scores)[1]).all()
    before, now = heads_of(pair.cache), heads_of(after)
    for at in before:
        assert len(now[at]) == len(before[at]) + (at[0] == 1)
        if at[0] == 0:
            assert [x.bits() for x in now[at]] == [x.bits() for x in before[at]]
