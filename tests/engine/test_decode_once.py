"""A single decode step beside a loop of one turn: the same cache, states and report."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as kv
from kvjax.cache import get_method, init_cache
from kvjax.engine.decode import decode, decode_once, init_slots
from tests.engine.conftest import TINY

S, SIZE, LENGTH = 3, 4, 10
"""Slots, KVs of a block, and those of the first slot: its last block is partly filled."""
RULE = get_method("kv-compress-continual").decode
EACH = TINY.num_layers * TINY.num_kv_heads


def shared_by_two(num_blocks: int) -> kv.PagedCache:
    """The second slot holds what the first one does, in the same blocks."""
    cache = init_cache(
        num_slots=S, num_layers=TINY.num_layers, num_kv_heads=TINY.num_kv_heads,
        head_dim=TINY.head_dim, num_blocks=num_blocks, max_blocks_per_head=6, block_size=SIZE,
        sharing=True,
    )  # fmt: skip
    k, v = jax.random.normal(
        jax.random.key(0), (2, TINY.num_layers, LENGTH, TINY.num_kv_heads, TINY.head_dim)
    )
    metric = jnp.ones((TINY.num_layers, TINY.num_kv_heads, LENGTH))
    cache, ok = kv.write_prompt(cache, jnp.int32(0), k, v, metric, jnp.int32(LENGTH))
    cache, shared = kv.share(cache, jnp.int32(0), jnp.int32(1))
    assert ok
    assert shared
    return cache


@pytest.mark.parametrize(
    ("spare", "fits"),
    [(20 * EACH, True), (0, False), pytest.param(2 * EACH, False, marks=pytest.mark.slow)],
    ids=["room", "none", "room for the token, none for copies of all that is held"],
)
def test_it_does_what_a_loop_of_one_turn_does(tiny_params, spare, fits):
    state = init_slots(S)
    state = dataclasses.replace(
        state,
        active=jnp.asarray([True, True, False]),
        observed=jnp.asarray([True, True, False]),
        remaining=jnp.asarray([5, 1, 0]),
    )
    slots, eos = jnp.asarray([1, 0, S, S]), jnp.asarray([-1])
    cache = shared_by_two(3 * EACH + spare)
    loop = decode(TINY, RULE, 4, 2, None, tiny_params, cache, state, slots, jnp.int32(1), eos)
    once = decode_once(TINY, RULE, 4, 2, None, 0, tiny_params, cache, state, slots, eos)
    reports = loop[2], once[2]
    assert bool(once[2].ok) is fits
    assert np.asarray(once[2].active).tolist() == [not fits, True, False, False]
    # A loop has room for tokens of more turns, and says nothing of one that nobody takes part in.
    if not fits:
        assert (np.asarray(once[2].tokens) == -1).all()
        reports = [dataclasses.replace(r, log_probs=None) for r in reports]
    told = [jax.tree.map(lambda x: np.asarray(x)[:1], (r.tokens, r.log_probs)) for r in reports]
    rest = [dataclasses.replace(r, tokens=None, log_probs=None) for r in reports]
    for one, other in (loop[:2], once[:2]), [x[0] for x in told], rest:
        jax.tree.map(np.testing.assert_array_equal, one, other)
    # XLA joins the last operations of either in its own way.
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), *(x[1] for x in told))
