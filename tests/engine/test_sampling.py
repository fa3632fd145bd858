"""Sampling: each setting against the definition in NumPy, and independence of the batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.engine.sampling import (
    SamplingParams,
    _draw,
    _filter,
    effort_of,
    init_sampling,
    sample,
    sampling_row,
)
from kvjax.errors import UserError

LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(1, 50)) * 2, jnp.float32)


def wanted(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """The probability of each token, one setting after the other as they are defined."""
    scaled = np.asarray(logits, np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda token: -p[token])
    kept, reached = set(), 0.0
    for rank, token in enumerate(order):
        enough = reached >= top_p or (top_k and rank >= top_k) or p[token] < min_p * p[order[0]]
        if rank == 0 or not enough:
            kept.add(token)
        reached += p[token]
    p = np.array([p[token] if token in kept else 0.0 for token in range(len(p))])
    return p / p.sum()


@jax.jit
def _draws(state, positions):
    return jax.vmap(lambda at: sample(LOGITS, state, at[None])[0])(positions)


def draws(params: SamplingParams, count: int = 4000) -> np.ndarray:
    state = jax.tree.map(jnp.asarray, sampling_row(params))
    return np.asarray(_draws(state, jnp.arange(count, dtype=jnp.int32)))


def test_greedy_takes_the_first_of_the_likeliest():
    scores = jnp.asarray([[0.0, 3.0, 3.0, 1.0]])
    assert int(sample(scores, init_sampling(1), jnp.zeros(1, jnp.int32))[0]) == 1


@pytest.mark.parametrize(
    ("rows", "most"),
    [
        ([{}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}], 0),  # greedy all the same
        pytest.param([{}, {"temperature": 0.5}], 1, marks=pytest.mark.slow),
        pytest.param(
            [{"temperature": 2}, {}, {"temperature": 1, "top_k": 5}], 2, marks=pytest.mark.slow
        ),
        pytest.param(
            [{"temperature": 1, "top_p": 0.9}, {"temperature": 1}], 2, marks=pytest.mark.slow
        ),
        pytest.param([{"temperature": 1, "min_p": 0.1}], 2, marks=pytest.mark.slow),
    ],
)
def test_what_the_host_knows_of_rows_changes_no_token(rows, most):
    params = [SamplingParams(seed=n, **row) for n, row in enumerate(rows)]
    assert effort_of(params) == most
    state = jax.tree.map(lambda *x: jnp.concatenate(x), *map(sampling_row, params))
    scores = jax.random.normal(jax.random.key(0), (len(rows), 40)) * 3
    for position in range(20):
        at = jnp.full(len(rows), position, jnp.int32)
        told = sample(scores, state, at, most)
        np.testing.assert_array_equal(told, sample(scores, state, at))


FILTERS = [
    {},
    {"top_k": 6},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"top_k": 12, "top_p": 0.8},
    {"top_p": 0.9, "min_p": 0.05},
    {"top_k": 9, "top_p": 0.95, "min_p": 0.02},
]


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
@pytest.mark.parametrize("filters", FILTERS)
def test_tokens_are_drawn_as_often_as_they_should_be(temperature, filters):
    """Filters look at the probabilities that the temperature leaves."""
    count = 4000
    p = wanted(LOGITS[0], temperature, **filters)
    drawn = draws(SamplingParams(temperature=temperature, seed=3, **filters), count)
    seen = np.bincount(drawn, minlength=len(p)) / count
    assert set(np.flatnonzero(seen)) <= set(np.flatnonzero(p))
    # Five standard deviations, and a draw or two where next to none are due.
    assert (np.abs(seen - p) <= 5 * np.sqrt(p * (1 - p) / count) + 2 / count).all()


def test_each_filter_changes_with_the_temperature():
    """The test above would see a filter that ignores it."""
    for filters in FILTERS[2:]:
        sizes = [(wanted(LOGITS[0], t, **filters) > 0).sum() for t in (0.4, 1.0, 2.5)]
        assert len(set(sizes)) > 1


def test_top_k_top_p_and_min_p_keep_the_right_tokens():
    probability = np.asarray(jax.nn.softmax(LOGITS[0]))
    order = np.argsort(-probability)
    assert set(draws(SamplingParams(temperature=1, top_k=5))) == set(order[:5])
    assert set(draws(SamplingParams(temperature=1, top_k=1))) == {order[0]}
    count = int(np.searchsorted(np.cumsum(probability[order]), 0.6)) + 1
    assert set(draws(SamplingParams(temperature=1, top_p=0.6))) == set(order[:count])
    assert set(draws(SamplingParams(temperature=1, top_p=1e-6))) == {order[0]}
    # Zero as a float32.
    assert set(draws(SamplingParams(temperature=1, top_p=1e-60))) == {order[0]}
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
    filtered = draws(others[0], 16)
    assert len(set(filtered)) > 1
    # The greedy row is all ties, which go to the lowest id however others are drawn.
    step, scores = jax.jit(sample), jnp.concatenate([LOGITS, LOGITS, 0 * LOGITS])
    for at in range(16):
        position = jnp.asarray([15 - at, at, 9], jnp.int32)
        assert step(scores, batch, position).tolist() == [filtered[15 - at], alone[at], 0]
    assert (draws(dataclasses.replace(params, seed=8), 16) != alone).any()


def test_rows_without_filters_keep_all_of_a_large_vocabulary_beside_others():
    scores = 6 * jax.random.normal(jax.random.key(0), (4, 128_256))
    state = jax.tree.map(lambda x: jnp.repeat(x, 4), sampling_row(SamplingParams(temperature=1.0)))
    np.testing.assert_array_equal(jax.jit(_filter)(scores, state), scores)


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
