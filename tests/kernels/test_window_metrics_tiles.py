"""Metrics of all queries from a log-sum-exp that is known, and the one that attention returns."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels import (
    Prefix,
    prefill_attention,
    prefill_attention_with_log_sum,
    window_metrics,
)
from kvjax.kernels.window_metrics import tiles

H, R, D = 2, 3, 16


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 32)


def prompt(seed: int, tokens: int, dtype: str = "float32"):
    rng = np.random.default_rng(seed)
    shapes = (tokens, H * R, D), (tokens, H, D), (tokens, H, D)
    return [jnp.asarray(2 * rng.standard_normal(shape), dtype) for shape in shapes]


def held(seed: int, lengths: tuple[int, ...], most: int):
    """Keys of each head at scattered positions; what a head does not hold is poisoned."""
    rng = np.random.default_rng(seed)
    k, v = rng.standard_normal((2, H, most, D))
    position = np.full((H, most), -1, np.int32)
    for head, length in enumerate(lengths):
        position[head, :length] = rng.permutation(200)[:length]
        k[head, length:] = v[head, length:] = np.nan
    prefix = Prefix(*(jnp.asarray(x, jnp.float32) for x in (k, v)), jnp.asarray(lengths, jnp.int32))  # type: ignore[call-arg]
    return prefix, jnp.asarray(position)


@pytest.mark.parametrize("tokens", [1, 32, 75])
@pytest.mark.parametrize("options", [{"power": 1}, {"power": 2}, {"excluded_distance": 10}])
def test_one_pass_gives_what_two_give(tokens, options):
    q, k, v = prompt(tokens, tokens)
    at = jnp.arange(tokens, dtype=jnp.int32)
    out, log_sum = prefill_attention_with_log_sum(q, k, v)
    np.testing.assert_array_equal(out, prefill_attention(q, k, v))
    want = window_metrics(q, k, query_position=at, **options)
    got = window_metrics(q, k, query_position=at, log_sum=log_sum, **options)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 20, 75])
def test_a_sample_of_the_queries(tokens):
    """In any order, some twice, some missing, and also more of them than keys."""
    q, k, v = prompt(tokens, tokens)
    _, log_sum = prefill_attention_with_log_sum(q, k, v)
    index = np.random.default_rng(tokens).integers(-1, tokens, 50).astype(np.int32)
    sample = {"query_position": jnp.asarray(index), "excluded_distance": 3}
    want = window_metrics(q[index], k, **sample)
    got = window_metrics(q[index], k, log_sum=log_sum[:, index], own_keys_last=False, **sample)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("power", [1, 2])
def test_padding_and_weights(power):
    """A weight counts once, whatever the power."""
    tokens, length = 75, 60
    q, k, v = prompt(0, tokens)
    at = jnp.arange(tokens, dtype=jnp.int32)
    at = jnp.where(at < length, at, -1)
    weight = jnp.float32(0.9) ** jnp.arange(tokens, dtype=jnp.float32)[::-1]
    _, log_sum = prefill_attention_with_log_sum(q, k, v)
    options = {"query_position": at, "query_weight": weight, "power": power}
    want = window_metrics(q, k, **options)
    got = window_metrics(q, k, log_sum=log_sum, **options)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    assert not np.asarray(got)[:, length:].any()
    none = window_metrics(q, k, log_sum=log_sum, **options | {"query_weight": 0 * weight})
    assert not np.asarray(none).any()


@pytest.mark.parametrize("lengths", [(0, 33), (40, 40), (0, 0)])
@pytest.mark.parametrize("excluded", [0, 10])
def test_keys_that_are_held_before(lengths, excluded):
    tokens, start = 50, 200
    q, k, v = prompt(1, tokens)
    prefix, position = held(2, lengths, 40)
    _, log_sum = prefill_attention_with_log_sum(q, k, v, prefix=prefix)
    before = jnp.where((position >= 0)[..., None], prefix.k, 0)
    keys = jnp.concatenate([jnp.swapaxes(before, 0, 1), k])
    at = start + jnp.arange(tokens, dtype=jnp.int32)
    own = jnp.broadcast_to(at[:, None], (tokens, H))
    options = {
        "query_position": at,
        "key_position": jnp.concatenate([position.T, own]),
        "excluded_distance": excluded,
    }
    want = window_metrics(q, keys, **options)
    got = window_metrics(q, keys, log_sum=log_sum, **options)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_half_precision():
    q, k, v = prompt(3, 70, "bfloat16")
    at = jnp.arange(70, dtype=jnp.int32)
    _, log_sum = prefill_attention_with_log_sum(q, k, v)
    assert log_sum.dtype == jnp.float32
    got = window_metrics(q, k, query_position=at, log_sum=log_sum)
    want = window_metrics(q, k, query_position=at)
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=1e-3)


def test_bad_log_sums_are_named():
    q, k, _ = prompt(4, 20)
    at = jnp.arange(20, dtype=jnp.int32)
    unchecked = inspect.unwrap(window_metrics)
    with pytest.raises(ValueError, match="log_sum shape"):
        unchecked(q, k, query_position=at, log_sum=jnp.zeros((H * R, 19)))
    with pytest.raises(ValueError, match="at most 19 queries with log_sum"):
        unchecked(q, k[:19], query_position=at, log_sum=jnp.zeros((H * R, 20)))
