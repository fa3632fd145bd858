"""Sampling: each setting against the definition, and independence of the batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.engine.sampling import SamplingParams, _draw, init_sampling, sample, sampling_row
from kvjax.errors import UserError

LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(1, 50)) * 2, jnp.float32)


def draws(params: SamplingParams, count: int = 4000) -> np.ndarray:
    state = jax.tree.map(jnp.asarray, sampling_row(params))
    step = jax.jit(jax.vmap(lambda at: sample(LOGITS, state, at[None])[0]))
    return np.asarray(step(jnp.arange(count, dtype=jnp.int32)))


def test_greedy_takes_the_first_of_the_likeliest():
    scores = jnp.asarray([[0.0, 3.0, 3.0, 1.0]])
    assert int(sample(scores, init_sampling(1), jnp.zeros(1, jnp.int32))[0]) == 1


def test_temperature_follows_the_softmax():
    seen = np.bincount(draws(SamplingParams(temperature=1.0), 20000), minlength=50) / 20000
    np.testing.assert_allclose(seen, jax.nn.softmax(LOGITS[0]), atol=0.012)


def test_top_k_top_p_and_min_p_keep_the_right_tokens():
    probability = np.asarray(jax.nn.softmax(LOGITS[0]))
    order = np.argsort(-probability)
    assert set(draws(SamplingParams(temperature=1, top_k=5))) == set(order[:5])
    assert set(draws(SamplingParams(temperature=1, top_k=1))) == {order[0]}
    count = int(np.searchsorted(np.cumsum(probability[order]), 0.6)) + 1
    assert set(draws(SamplingParams(temperature=1, top_p=0.6))) == set(order[:count])
    assert set(draws(SamplingParams(temperature=1, top_p=1e-6))) == {order[0]}
    wanted = set(np.flatnonzero(probability >= 0.3 * probability.max()))
    assert set(draws(SamplingParams(temperature=1, min_p=0.3))) == wanted


def test_a_draw_never_takes_what_has_no_probability():
    vocab = 700  # more than two chunks, and no whole number of them
    p = np.zeros((4, vocab), np.float32)
    p[0, [3, 255, 256, 600]] = 0.25
    p[1, 511] = 1
    p[2, [0, 699]] = 0.5
    p[3] = 1 / vocab
    draw = jax.jit(_draw)
    below_one = np.float32(1 - 2**-24)
    assert draw(p, np.zeros(4, np.float32)).tolist() == [3, 511, 0, 0]
    assert draw(p, np.full(4, below_one)).tolist() == [600, 511, 699, 699]
    assert draw(p, np.ones(4, np.float32)).tolist() == [600, 511, 699, 699]
    for u, first, last in ((0.3, 255, 0), (0.6, 256, 699), (0.76, 600, 699)):
        got = draw(p, np.full(4, u, np.float32)).tolist()
        assert got[:3] == [first, 511, last]
        assert got[3] == pytest.approx(u * vocab, abs=1)


def test_a_draw_depends_on_seed_and_position_alone():
    params = SamplingParams(temperature=1.0, seed=7)
    alone = draws(params, 16)
    others = SamplingParams(temperature=2.0, top_k=3), SamplingParams()
    rows = [sampling_row(p) for p in (others[0], params, others[1])]
    batch = jax.tree.map(lambda *x: jnp.concatenate(x), *rows)
    for at in range(16):
        position = jnp.asarray([3, at, 9], jnp.int32)
        assert int(sample(jnp.repeat(LOGITS, 3, 0), batch, position)[1]) == alone[at]
    assert (draws(dataclasses.replace(params, seed=8), 16) != alone).any()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", 2.0),
        ("max_tokens", 0),
        ("seed", -1),
        ("stop", ("",)),
    ],
)
def test_settings_out_of_range_are_named(name, value):
    with pytest.raises(UserError, match=name):
        SamplingParams(**{name: value})
