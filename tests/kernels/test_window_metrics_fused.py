"""Metrics of all queries on a device: each kernel against the oracle, its choice, its lowering."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from kvjax.kernels import explain, window_metrics
from kvjax.kernels.window_metrics import fused, mosaic_gpu, tpu
from tests import oracle
from tests.kernels.devices import A100, H200, TPU_V5E
from tests.kernels.paged import races_seen

H, R, D = 2, 2, 64
START = 100
"""Position of the first query."""
NAMES = ["tpu", "mosaic_gpu"]
KERNELS = {"mosaic_gpu": mosaic_gpu, "tpu": tpu}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """The smallest that a TPU's registers take."""
    monkeypatch.setattr(tpu, "KEYS", 128)
    monkeypatch.setattr(tpu, "QUERIES", 128)


def prompt(held: int, own: int, seed: int = 0):
    """Queries, keys and positions of a chunk behind what heads hold, with what does not count:
    the last query, a key that is not there. They are poisoned."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((own, H * R, D)) * 2
    k = rng.standard_normal((held + own, H, D))
    before = [rng.permutation(START)[:held] for _ in range(H)]
    at = START + np.arange(own)
    key_at = np.concatenate([np.stack(before, 1), np.repeat(at[:, None], H, 1)]).astype(np.int32)
    key_at[: held // 4, 1] = key_at[-1] = at[-1] = -1
    q, k = (np.array(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)) for x in (q, k))
    q[-1] = np.nan
    k[key_at < 0] = np.nan
    return q, k, at.astype(np.int32), key_at


def log_sum_of(q, k, at, key_at, scale: float) -> np.ndarray:
    """Log-sum-exp [Hr, w] of each query's logits over the keys it sees, in float64."""
    found = np.zeros((q.shape[1], q.shape[0]))
    for head, i in np.ndindex(found.shape):
        seen = (key_at[:, head // R] >= 0) & (key_at[:, head // R] <= at[i])
        if at[i] >= 0:
            s = k[seen, head // R].astype(np.float64) @ q[i, head] * scale
            found[head, i] = np.logaddexp.reduce(s)
    return found


def run(name: str, q, k, at, key_at, num_own: int, weight=None, **changes):
    if name == "mosaic_gpu":
        interpret = plgpu.InterpretGPUParams(detect_races=True)
    else:
        interpret = pltpu.InterpretParams()
    scale = 1 / math.sqrt(D)
    options = {"power": 2, "excluded_distance": 0} | changes
    got = fused.window_metrics(
        KERNELS[name],
        jnp.asarray(q, jnp.bfloat16),
        jnp.asarray(k, jnp.bfloat16),
        log_sum=jnp.asarray(log_sum_of(q, k, at, key_at, scale), jnp.float32),
        num_own=num_own,
        query_position=jnp.asarray(at),
        key_position=jnp.asarray(key_at),
        query_weight=None if weight is None else jnp.asarray(weight),
        scale=scale,
        interpret=interpret,
        **options,
    )
    assert not races_seen(name)
    return np.asarray(got)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("held", "own", "options"),
    [(40, 130, {"power": 2}), (0, 70, {"power": 1, "excluded_distance": 10})],
)
def test_all_queries_of_a_chunk(name: str, held: int, own: int, options: dict) -> None:
    q, k, at, key_at = prompt(held, own)
    got = run(name, q, k, at, key_at, own, **options)
    want = oracle.window_metric(
        q, k, at, key_at,
        power=options["power"], excluded=options.get("excluded_distance", 0),
    )  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_queries_of_no_order_and_weights(name: str) -> None:
    """Queries whose own keys are not the last ones see any key at or before their position."""
    q, k, _, key_at = prompt(0, 150)
    at = np.random.default_rng(1).integers(START - 1, START + 149, 20).astype(np.int32)
    at[at < START] = -1
    queries = q[np.maximum(at - START, 0)]
    weight = np.where(np.arange(20) < 10, 0.5, 0).astype(np.float32)
    got = run(name, queries, k, at, key_at, 0, weight, power=1)
    want = oracle.window_metric(queries[:10], k, at[:10], key_at, power=1) / 2
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-6)


def shapes(d: int = 128, dtype: str = "bfloat16", queries: int = 600):
    return (
        jax.ShapeDtypeStruct((queries, 8, d), jnp.dtype(dtype)),
        jax.ShapeDtypeStruct((600, 2, d), jnp.dtype(dtype)),
        jax.ShapeDtypeStruct((8, queries), jnp.float32),
    )


def call(q, k, log_sum):
    at = jnp.arange(q.shape[0], dtype=jnp.int32)
    return window_metrics(q, k, query_position=at, log_sum=log_sum, power=1)


@pytest.mark.parametrize(
    ("device", "platform", "d", "dtype"),
    [
        *((H200, "cuda", d, "bfloat16") for d in mosaic_gpu.HEAD_DIMS),
        (H200, "cuda", 128, "float16"),
        *((TPU_V5E, "tpu", d, "bfloat16") for d in (64, 128)),
        (TPU_V5E, "tpu", 128, "float32"),
    ],
)
def test_lowers(device, platform: str, d: int, dtype: str) -> None:
    with jax.sharding.use_abstract_mesh(device):
        text = (
            jax.jit(call).trace(*shapes(d, dtype)).lower(lowering_platforms=(platform,)).as_text()
        )
    kernel = "custom_call @mosaic_gpu" if platform == "cuda" else "custom_call @tpu_custom_call"
    assert text.count(kernel) == 1
    assert "stablehlo.while" not in text


def test_explains_the_choice() -> None:
    def said(device, *arrays, **options) -> str:
        with jax.sharding.use_abstract_mesh(device):
            return explain(window_metrics, *arrays, **options)

    q, k, log_sum = shapes()
    assert said(H200, q, k, log_sum=log_sum) == "mosaic_gpu"
    assert said(TPU_V5E, q, k, log_sum=log_sum).startswith("tpu: mosaic_gpu does not serve device")
    assert "compute capability 9.0" in said(A100, q, k, log_sum=log_sum)
    assert said(H200, q, k).startswith("xla: mosaic_gpu does not serve a softmax that is not known")
    assert "a softmax that is not known" in said(H200, q, k, log_sum=log_sum, above=1.0)
    wide = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    assert "q and k of float32 and bfloat16" in said(H200, wide, k, log_sum=log_sum)
    assert "float32 keys" in said(H200, *shapes(dtype="float32")[:2], log_sum=log_sum)
    assert "head dimension 72" in said(H200, *shapes(d=72)[:2], log_sum=log_sum)
    assert "tpu does not serve float16 keys" in said(
        TPU_V5E, *shapes(dtype="float16")[:2], log_sum=log_sum
    )


def test_only_kernels_that_serve_can_be_asked_for() -> None:
    q, k, log_sum = shapes(queries=20)
    at = jax.ShapeDtypeStruct((20,), jnp.int32)
    unchecked = inspect.unwrap(window_metrics)
    asked = functools.partial(unchecked, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="implementation: got 'mosaic_gpu', wanted one that serv"):
        jax.eval_shape(lambda: asked(q, k, query_position=at, log_sum=log_sum))
