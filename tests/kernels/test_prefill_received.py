"""What keys receive of all queries, told by prefill attention, against the matrix of the oracle."""

import functools
import inspect
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels import prefill_attention_with_log_sum, prefill_attention_with_received
from kvjax.kernels.choice import Choice
from kvjax.kernels.prefill_attention import reference, splash
from tests.kernels.amx import needs_amx
from tests.kernels.devices import H200, TPU_V5E
from tests.oracle import attend, causal_attention

H, R, D = 2, 3, 32
TOKENS = [1, 61, 64]
"""A part of a tile; three loops of tiles, the last tile in part or whole."""


def off(name: str) -> float:
    """By how much an implementation may be off, where others are by 1: logits of digits are."""
    return 20 if name == "amx" else 1


@pytest.fixture(
    params=[
        pytest.param("amx", marks=needs_amx),
        "numba",
        "one head at a time",
        "all heads at once",
    ]
)
def name(monkeypatch, request):
    """Of an implementation; XLA's with tiles of 8 queries, loops of two or three tiles."""
    if request.param in ("amx", "numba"):
        return request.param
    monkeypatch.setattr(reference, "ROWS", 8 * R)
    monkeypatch.setattr(reference, "LOOPS", 3)
    monkeypatch.setattr(reference, "LOOP", 16)
    if request.param == "all heads at once":
        monkeypatch.setattr(reference, "one_at_a_time", lambda _: False)
    return "xla"


@functools.cache
def prompt(tokens: int):
    rng = np.random.default_rng(tokens)
    shapes = (tokens, H * R, D), (tokens, H, D), (tokens, H, D)
    q, k, v = (2 * rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return q, k, v, causal_attention(q, k)


def told(q, k, v, weight, **options):
    """Output, log-sum-exps and sums, of NumPy arrays."""
    call = jax.jit(functools.partial(prefill_attention_with_received, **options))
    arguments = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    return call(*arguments, query_weight=jnp.asarray(weight, jnp.float32))


def wanted(matrix, weight, power: int, excluded: int) -> np.ndarray:
    """Σ over queries i ≥ j + excluded of weight[i] · A[i, j]^power, by the whole matrix."""
    i = np.arange(matrix.shape[1])
    counts = i[:, None] - i >= excluded
    return np.sum(np.where(counts, matrix**power, 0) * weight[:, None], axis=1)


@pytest.mark.parametrize(
    ("tokens", "power", "excluded"), [(1, 2, 0), (61, 1, 0), (61, 2, 20), (64, 2, 1), (64, 1, 70)]
)
def test_sums_of_the_matrix(tokens, power, excluded, name):
    q, k, v, matrix = prompt(tokens)
    weight = np.where(np.arange(tokens) < tokens - 2, 0.9 ** np.arange(tokens)[::-1], 0)
    options = {"power": power, "excluded_distance": excluded}
    got = told(q, k, v, weight, implementation=name, **options)[2]
    want = wanted(matrix, weight, power, excluded)
    np.testing.assert_allclose(got, want, rtol=3e-5 * off(name), atol=1e-7 * off(name))


@pytest.mark.parametrize("tokens", TOKENS)
def test_attention_and_log_sums_by_segments(tokens, name):
    q, k, v, _ = prompt(tokens)
    out, log_sum, _ = told(q, k, v, np.ones(tokens), implementation=name)
    without = functools.partial(prefill_attention_with_log_sum, implementation=name)
    alone = jax.jit(without)(*map(jnp.asarray, (q, k, v)))
    for t in range(tokens):
        for head in range(H):
            rows = slice(head * R, (head + 1) * R)
            want, _ = attend(q[t, rows], k[: t + 1, head], v[: t + 1, head])
            np.testing.assert_allclose(out[t, rows], want, rtol=0, atol=1e-5 * off(name))
            s = np.float64(k[: t + 1, head]) @ q[t, rows].T / np.sqrt(D)
            want = np.logaddexp.reduce(s)
            np.testing.assert_allclose(log_sum[rows, t], want, rtol=0, atol=1e-5 * off(name))
    np.testing.assert_allclose(alone[0], out, rtol=0, atol=1e-6)
    np.testing.assert_allclose(alone[1], log_sum, rtol=0, atol=1e-6)


def test_scale_and_large_logits(name):
    q, k, v, _ = prompt(61)
    for scale in (0.01, 30.0):
        matrix = causal_attention(q, k, scale)
        got = told(q, k, v, np.ones(61), scale=scale, implementation=name)[2]
        np.testing.assert_allclose(
            got, wanted(matrix, np.ones(61), 1, 0), rtol=2e-3 * off(name), atol=1e-6 * off(name)
        )


def call(q, k, v, weight):
    return prefill_attention_with_received(q, k, v, query_weight=weight, excluded_distance=10)


def shapes(tokens: int, dtype: str):
    heads = ((tokens, 8, 128), (tokens, 2, 128), (tokens, 2, 128))
    return [jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for s in heads]


@pytest.mark.parametrize(
    ("device", "platform", "dtype", "kernel"),
    [
        (H200, "cuda", "bfloat16", "__cudnn$fmha"),
        (H200, "cuda", "float32", None),
        (TPU_V5E, "tpu", "bfloat16", "splash"),
    ],
)
def test_lowers_for_devices_that_are_not_here(device, platform, dtype, kernel, monkeypatch) -> None:
    """Where attention is a device's own kernel, so is the pass after it."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91200)
    weight = jax.ShapeDtypeStruct((512,), jnp.float32)
    with jax.sharding.use_abstract_mesh(device):
        traced = jax.jit(call).trace(*shapes(512, dtype), weight)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("attention_received" in text) == (kernel is not None)
    assert kernel is None or kernel in text


def test_another_pass_where_attention_is_a_devices_own(monkeypatch) -> None:
    """What it is given there, by an attention of ours under a device's name."""
    q, k, v, matrix = prompt(61)
    weight = 0.9 ** np.arange(61)[::-1]
    module = sys.modules["kvjax.kernels.prefill_attention"]
    monkeypatch.setattr(module, "choice", lambda *_, **__: Choice("splash", None, ()))
    monkeypatch.setattr(splash, "causal", reference.causal)
    got = told(q, k, v, weight, power=2, excluded_distance=20)
    np.testing.assert_allclose(got[2], wanted(matrix, weight, 2, 20), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"power": 3}, "power: got 3, wanted 1 or 2"),
        ({"excluded_distance": -1}, "excluded_distance: got -1, wanted at least 0"),
        ({"query_weight": jnp.ones(8)}, r"query_weight shape: got \[8\], wanted \[9\]"),
    ],
)
def test_bad_arguments_are_named(options, message: str) -> None:
    q, k, v, _ = prompt(9)
    unchecked = inspect.unwrap(prefill_attention_with_received)
    with pytest.raises(ValueError, match=message):
        unchecked(*map(jnp.asarray, (q, k, v)), **{"query_weight": jnp.ones(9)} | options)
