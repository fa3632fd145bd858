"""Prefill attention: every implementation against float64, and its choice."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels import Prefix, explain, prefill_attention, prefill_attention_with_log_sum
from kvjax.kernels.numba_tiles import DEPTH
from kvjax.kernels.prefill_attention import cudnn, numba_cpu, reference, splash
from tests.kernels.amx import needs_amx
from tests.kernels.devices import A100, H200, TPU_V5E
from tests.oracle import attend

T, H, R, P = 150, 2, 3, 40


@functools.cache
def problem(d: int, dtype: str, with_prefix: bool):
    """Arguments and the float64 answer; what the prefix does not hold is poisoned."""
    rng = np.random.default_rng(d)
    q, k, v = (
        jnp.asarray(rng.standard_normal(s), dtype) for s in ((T, H * R, d), (T, H, d), (T, H, d))
    )
    length = np.array([0, 33], np.int32)
    held = rng.standard_normal((2, H, P, d))
    held[:, np.arange(P) >= length[:, None]] = np.nan
    held = jnp.asarray(held, dtype)
    prefix = Prefix(held[0], held[1], jnp.asarray(length)) if with_prefix else None
    exact = [np.asarray(x.astype(jnp.float32)) for x in (q, k, v, held)]
    answer = np.zeros((T, H * R, d))
    for h in range(H):
        before = exact[3][:, h, : length[h]] if with_prefix else np.zeros((2, 0, d))
        rows = slice(h * R, (h + 1) * R)
        for t in range(T):
            keys = np.concatenate([before[0], exact[1][: t + 1, h]])
            values = np.concatenate([before[1], exact[2][: t + 1, h]])
            answer[t, rows], _ = attend(exact[0][t, rows], keys, values)
    return (q, k, v), prefix, answer


def allowed(dtype: str) -> float:
    """Rounding of scaled queries, weights and output, of values up to 4: see paged.tolerance."""
    return {"float32": 1e-5, "bfloat16": 4 * 2.0**-7}[dtype]


@pytest.mark.parametrize("with_prefix", [False, True], ids=["alone", "behind a prefix"])
@pytest.mark.parametrize(
    ("name", "d", "dtype"),
    [
        pytest.param(name, *shape, marks=needs_amx if name == "amx" else ())
        for name in ("xla", "amx", "numba", "splash", "cudnn")
        for shape in ((64, "float32"), (80, "bfloat16"), (128, "bfloat16"))
        if name != "amx" or shape[0] % DEPTH == 0
    ],
)
def test_exact(name: str, d: int, dtype: str, with_prefix: bool, monkeypatch) -> None:
    arguments, prefix, answer = problem(d, dtype, with_prefix)
    scale = 1 / math.sqrt(d)
    if name == "cudnn":
        monkeypatch.setattr(cudnn, "_with_lse", dense_with_lse)
    causal = {
        "xla": reference.causal,
        "amx": functools.partial(numba_cpu.causal, tiles=True),
        "numba": numba_cpu.causal,
        "splash": functools.partial(splash.causal, interpret=True),
        "cudnn": cudnn.causal,
    }[name]
    part = causal(*arguments, scale)
    if prefix is not None:
        own = {
            "amx": functools.partial(numba_cpu.over_prefix, tiles=True),
            "cudnn": cudnn.over_prefix,
            "numba": numba_cpu.over_prefix,
        }
        over_prefix = own.get(name, reference.over_prefix)
        before = over_prefix(arguments[0], prefix.k, prefix.v, prefix.length, scale)
        part = reference.merged(part, before)
    out = reference.normalised(part, dtype)
    # Logits of digits are off by some 2⁻¹⁸ of their terms.
    off = allowed(dtype) * (4 if name == "amx" else 1)
    np.testing.assert_allclose(np.asarray(out, np.float64), answer, rtol=0, atol=off)


def dense_with_lse(q, k, v, kv_length, scale: float):
    """What `cudnn._with_lse` promises, by definition."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x.astype(jnp.float32), group, axis=2) for x in (k, v))
    s = jnp.einsum("btnd,bpnd->bntp", q.astype(jnp.float32), k) * scale
    if kv_length is None:
        seen = jnp.tril(jnp.ones(s.shape[2:], bool))
    else:
        seen = (jnp.arange(s.shape[3]) < kv_length[:, None])[:, None, None]
    s = jnp.where(seen, s, -jnp.inf)
    out = jnp.einsum("bntp,bpnd->btnd", jax.nn.softmax(s), v)
    return out.astype(q.dtype), jax.nn.logsumexp(s, axis=-1)


def shapes(d: int, dtype: str = "bfloat16", tokens: int = 1000):
    heads = ((tokens, 32, d), (tokens, 8, d), (tokens, 8, d))
    return [jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for s in heads]


def explained(device, *arguments, **kwargs) -> str:
    with jax.sharding.use_abstract_mesh(device):
        return explain(prefill_attention, *arguments, **kwargs)


def test_explains_the_choice() -> None:
    assert explained(H200, *shapes(128)) == "cudnn"
    assert explained(A100, *shapes(64, "float16")) == "cudnn"
    assert explained(TPU_V5E, *shapes(64)).startswith("splash: cudnn does not serve device TPU v5")
    assert "cudnn does not serve float32" in explained(H200, *shapes(64, "float32"))
    assert "served are multiples of 8 up to 128" in explained(H200, *shapes(160))
    assert "splash does not serve float16" in explained(TPU_V5E, *shapes(64, "float16"))
    assert explained(H200, *shapes(64), implementation="xla") == "xla"
    with pytest.raises(ValueError, match="implementation: got 'flash', wanted one of 'cudnn'"):
        explained(H200, *shapes(64), implementation="flash")


@pytest.mark.parametrize(
    ("place", "wrong", "message"),
    [
        (0, (1000, 32), r"q shape: got \[1000, 32\], wanted \[T, H·r, d\]"),
        (0, (999, 32, 64), r"q shape: got \[999, 32, 64\], wanted \[1000, 32, 64\]"),
        (0, (1000, 33, 64), "q shape: got 33 query heads, wanted a multiple of 8 KV heads"),
        (0, (1000, 32, 80), r"q shape: got \[1000, 32, 80\], wanted \[T, H·r, 64\]"),
        (2, (1000, 8, 80), r"v shape: got \[1000, 8, 80\], wanted that of k, \[1000, 8, 64\]"),
        (3, (4, 70, 64), r"prefix.k shape: got \[4, 70, 64\], wanted \[8, P, 64\]"),
        (3, (8, 0, 64), r"prefix.k shape: got \[8, 0, 64\], wanted P of at least 1"),
        (4, (8, 71, 64), r"prefix.v shape: got \[8, 71, 64\], wanted that of k, \[8, 70, 64\]"),
        (5, (7,), r"prefix.length shape: got \[7\], wanted \[8\]"),
    ],
)
def test_bad_arguments_are_named(place: int, wrong: tuple[int, ...], message: str) -> None:
    arguments = [*shapes(64), *(jax.ShapeDtypeStruct((8, 70, 64), jnp.bfloat16) for _ in "kv")]
    arguments.append(jax.ShapeDtypeStruct((8,), jnp.int32))
    arguments[place] = jax.ShapeDtypeStruct(wrong, arguments[place].dtype)
    prefix = Prefix(*arguments[3:])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        explain(prefill_attention, *arguments[:3], prefix=prefix)


def lowered(device, platform: str, d: int, with_prefix: bool, *, log_sum: bool = False) -> str:
    """The program for a device that is not here."""
    held = jax.ShapeDtypeStruct((8, 512, d), jnp.bfloat16)
    length = jax.ShapeDtypeStruct((8,), jnp.int32)

    def call(q, k, v, held, length):
        prefix = Prefix(held, held, length) if with_prefix else None
        attention = prefill_attention_with_log_sum if log_sum else prefill_attention
        return attention(q, k, v, prefix=prefix)

    with jax.sharding.use_abstract_mesh(device):
        traced = jax.jit(call).trace(*shapes(d), held, length)
        return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("with_prefix", [False, True], ids=["alone", "behind a prefix"])
@pytest.mark.parametrize("d", [64, 80, 96, 128])
@pytest.mark.parametrize("log_sum", [False, True])
def test_lowers_for_h200(d: int, with_prefix: bool, log_sum: bool, monkeypatch) -> None:
    """JAX asks the installed cuDNN for its version: there is none here."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91200)
    text = lowered(H200, "cuda", d, with_prefix, log_sum=log_sum)
    assert text.count("__cudnn$fmhaSoftmax") == 1 + with_prefix
    # Without the mask of its own every token would see those after it.
    masks = re.findall(r"mask_type\W+22\W+22(\w+?)\W", text)
    assert masks == ["CAUSAL", "PADDING"][: 1 + with_prefix]


@pytest.mark.parametrize("with_prefix", [False, True], ids=["alone", "behind a prefix"])
@pytest.mark.parametrize("d", [64, 80, 96, 128])
def test_lowers_for_tpu(d: int, with_prefix: bool) -> None:
    assert "tpu_custom_call" in lowered(TPU_V5E, "tpu", d, with_prefix)
