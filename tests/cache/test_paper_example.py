"""The worked example of the paper's figure 5: b = 2, two KV heads with five and two KVs."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as kv
from tests.cache.pair import Geometry, Pair, heads_of, host

FIGURE = Geometry(slots=1, layers=1, heads=2, d=2, blocks=5, max_blocks=3, block=2, prompt=6)

# Head one loses its three smallest (0.1, 0.2, 0.3) for two blocks; head two's lone block would
# have come next, at 0.6, were it not the head's last.
METRIC = {0: [0.5, 0.1, 0.8, 0.3, 0.2], 1: [0.4, 0.6]}
TOKENS = {0: [0, 1, 3, 4, 5], 1: [2, 5]}  # what an earlier compression left


@pytest.fixture
def figure() -> Pair:
    pair = Pair(FIGURE)
    metric = np.zeros((1, 2, 6), np.float32)
    index = np.zeros((1, 2, 6), np.int32)
    for head, tokens in TOKENS.items():
        metric[0, head, tokens] = METRIC[head]
        index[0, head, : len(tokens)] = tokens
    k, v = (np.random.default_rng(s).standard_normal((1, 6, 2, 2)).astype("f4") for s in (1, 2))
    pair.cache, ok = kv.write_prompt(
        pair.cache,
        0,
        jnp.asarray(k),
        jnp.asarray(v),
        jnp.asarray(metric),
        6,
        kept_index=jnp.asarray(index),
        kept_len=jnp.asarray([[5, 2]], jnp.int32),
    )
    assert ok
    assert pair.oracle.write_prompt(0, k, v, metric, 6, lambda _layer, head: TOKENS[head])
    pair.check()
    return pair


def positions(pair: Pair) -> list[list[int]]:
    return [[x.position for x in heads_of(pair.cache)[0, 0, h]] for h in (0, 1)]


def test_first_block_costs_the_ragged_kv_alone(figure):
    (choice,) = figure.schedule_and_move([0], [1])
    assert choice.blocks == {(0, 0): 1, (0, 1): 0}
    assert positions(figure) == [[0, 5, 3, 4], [2, 5]]
    assert int(kv.free_blocks(figure.cache)) == 2


def test_two_blocks_both_from_head_one(figure):
    """Three KVs go; the survivor 0.8 at logical index 2 moves into the hole at index 1."""
    (choice,) = figure.schedule_and_move([0], [2])
    assert choice.blocks == {(0, 0): 2, (0, 1): 0}
    assert choice.shortfall == 0
    assert positions(figure) == [[0, 3], [2, 5]]
    assert host(figure.cache)["context_len"].tolist() == [[[2, 2]]]
    assert int(kv.free_blocks(figure.cache)) == 3


def test_third_block_is_refused(figure):
    """Equation 16: no head gives up its last block. The text's next candidate is outside it."""
    (choice,) = figure.schedule_and_move([0], [3])
    assert choice.blocks == {(0, 0): 2, (0, 1): 0}
    assert choice.shortfall == 1
    assert positions(figure) == [[0, 3], [2, 5]]


@pytest.mark.parametrize(("keep", "shortfall"), [(2, 0), (1, 1), (0, 2)])
def test_compress_says_what_it_could_not_free(figure, keep, shortfall):
    (choice,) = figure.compress([0], [keep])
    assert choice.shortfall == shortfall
