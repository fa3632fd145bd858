"""The attention that keys receive from observed queries, against the oracle's definitions."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels import window_metrics
from tests import oracle
from tests.kernels.devices import H200, TPU_V5E

TOKENS, HEADS, GROUP, D = 21, 2, 3, 8


def prompt(seed: int, tokens: int = TOKENS) -> tuple[np.ndarray, np.ndarray]:
    """Queries and keys with logits of a spread that makes attention uneven."""
    rng = np.random.default_rng(seed)
    q = 2 * rng.standard_normal((tokens, HEADS * GROUP, D)).astype(np.float32)
    k = rng.standard_normal((tokens, HEADS, D)).astype(np.float32)
    return q, k


def observed(q, k, query_position, key_position=None, **options) -> np.ndarray:
    """`window_metrics` on NumPy arrays."""
    if key_position is not None:
        key_position = jnp.asarray(key_position, jnp.int32)
    at = jnp.asarray(query_position, jnp.int32)
    result = window_metrics(
        jnp.asarray(q), jnp.asarray(k), query_position=at, key_position=key_position, **options
    )
    assert result.dtype == jnp.float32
    return np.asarray(result)


def per_head(q, k, query_position, key_position, **options) -> np.ndarray:
    if key_position.ndim == 1:
        key_position = np.repeat(key_position[:, None], k.shape[1], axis=1)
    return oracle.window_metric(q, k, query_position, key_position, **options)


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("window", [1, 8, TOKENS])
@pytest.mark.parametrize("excluded", [0, 1, 10])
def test_last_queries_of_a_prompt(window, power, excluded):
    q, k = prompt(window)
    at = np.arange(TOKENS - window, TOKENS, dtype=np.int32)
    got = observed(q[at], k, at, power=power, excluded_distance=excluded)
    want = per_head(q[at], k, at, np.arange(TOKENS), power=power, excluded=excluded)
    np.testing.assert_allclose(got, want, rtol=3e-5, atol=1e-7)


def test_definition_is_the_causal_matrix():
    """The oracle's own two definitions agree: per pair, and from the whole matrix A."""
    q, k = prompt(3)
    matrix = oracle.causal_attention(q, k)
    at = np.arange(TOKENS - 8, TOKENS)
    want = (matrix[:, at] ** 2).sum(axis=1)
    np.testing.assert_allclose(per_head(q[at], k, at, np.arange(TOKENS), power=2), want)


@pytest.mark.parametrize("query_block", [1, 4, 64])
def test_unused_queries_and_keys_count_for_nothing(query_block):
    """Padding of queries (-1), of keys beyond the last query and NaN in either is invisible."""
    q, k = prompt(4)
    query_position = np.array([9, -1, 14, 11, -1], np.int32)
    queries = q[np.maximum(query_position, 0)]
    queries[query_position < 0] = np.nan
    keys = k.copy()
    keys[15:] = np.nan
    got = observed(queries, keys, query_position, query_block=query_block)
    want = per_head(queries, k, query_position, np.arange(TOKENS), power=2)
    np.testing.assert_allclose(got, want, rtol=3e-5, atol=1e-7)
    assert not got[:, 15:].any()


def test_keys_at_positions_of_their_own():
    """After compression every head holds other positions, in any order, some slots unwritten."""
    q, k = prompt(5)
    rng = np.random.default_rng(5)
    key_position = np.stack([rng.permutation(40)[:TOKENS] for _ in range(HEADS)], 1)
    key_position[rng.random(key_position.shape) < 0.2] = -1
    query_position = np.array([12, 30, 39], np.int32)
    got = observed(q[:3], k, query_position, key_position, excluded_distance=4)
    want = per_head(q[:3], k, query_position, key_position, power=2, excluded=4)
    np.testing.assert_allclose(got, want, rtol=3e-5, atol=1e-7)


def test_scale_and_large_logits():
    q, k = prompt(6)
    at = np.arange(TOKENS - 4, TOKENS, dtype=np.int32)
    for scale in (0.01, 30.0):
        got = observed(q[at], k, at, power=1, scale=scale)
        want = per_head(q[at], k, at, np.arange(TOKENS), power=1, scale=scale)
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-6)
        np.testing.assert_allclose(got.sum(axis=1), 4, rtol=1e-5)


def test_half_precision_inputs_accumulate_in_float32():
    q, k = (jnp.asarray(x, jnp.bfloat16) for x in prompt(7))
    at = np.arange(TOKENS - 8, TOKENS)
    got = observed(q[at], k, at)
    q64, k64 = np.asarray(q, np.float64), np.asarray(k, np.float64)
    want = per_head(q64[at], k64, at, np.arange(TOKENS), power=2)
    np.testing.assert_allclose(got, want, rtol=3e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"power": 3}, "power: got 3, wanted 1 or 2"),
        ({"query_block": 0}, "query_block: got 0, wanted at least 1"),
        ({"q": (4, 6)}, r"q shape: got \[4, 6\], wanted \[w, H·r, d\]"),
        ({"q": (0, 6, 8)}, r"q shape: got \[0, 6, 8\], wanted \[w, H·r, d\]"),
        ({"q": (4, 6, 16)}, r"q shape: got \[4, 6, 16\], wanted \[w, H·r, 8\]"),
        ({"q": (4, 5, 8)}, "q shape: got 5 query heads, wanted a multiple of 2 KV heads"),
        ({"query_position": (3,)}, r"query_position shape: got \[3\], wanted \[4\]"),
        ({"query_weight": (3,)}, r"query_weight shape: got \[3\], wanted \[4\]"),
        ({"key_position": (9, 3)}, r"key_position shape: got \[9, 3\], wanted \[9\] or \[9, 2\]"),
    ],
)
def test_bad_arguments_are_named(changes: dict, message: str) -> None:
    shapes = {"q": (4, 6, 8), "k": (9, 2, 8), "query_position": (4,)}
    options = {name: changes.pop(name) for name in ("power", "query_block") if name in changes}
    arguments = {
        name: jax.ShapeDtypeStruct(shape, jnp.int32 if "position" in name else jnp.float32)
        for name, shape in (shapes | changes).items()
    }
    unchecked = inspect.unwrap(window_metrics)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(unchecked, **options), **arguments)


def test_memory_is_linear_in_the_prompt():
    """Observing every query of a prompt twice as long takes about twice the memory, not four."""

    def temporaries(tokens: int) -> int:
        def f(q, k):
            at = jnp.arange(tokens, dtype=jnp.int32)
            return window_metrics(q, k, query_position=at, query_block=128)

        shapes = (
            jax.ShapeDtypeStruct((tokens, 4, 16), jnp.float32),
            jax.ShapeDtypeStruct((tokens, 2, 16), jnp.float32),
        )
        analysis = jax.jit(f).lower(*shapes).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    short, long = temporaries(2048), temporaries(4096)
    assert long <= 2.2 * short
    assert long < 4 * 4096 * 4096  # below one head's matrix


@pytest.mark.parametrize(("device", "platform"), [(H200, "cuda"), (TPU_V5E, "tpu")])
@pytest.mark.parametrize("window", [8, 2048])
def test_lowers_for_devices_that_are_not_here(device, platform: str, window: int) -> None:
    def f(q, k):
        at = jnp.arange(2048 - window, 2048, dtype=jnp.int32)
        return window_metrics(q, k, query_position=at)

    q = jax.ShapeDtypeStruct((window, 8, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2048, 2, 128), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(device):
        traced = jax.jit(f).trace(q, k)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "bf16>, tensor<" in text
    assert "x2048xf32>" in text
