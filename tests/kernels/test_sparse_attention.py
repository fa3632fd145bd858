"""Attention to verticals and a local band, against float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.kernels import prefill_attention, sparse_attention, sparse_prefill_attention
from tests.oracle import attend
from tests.oracle.sparse import seen_from

H, R, D = 2, 3, 8


def problem(num_tokens: int, num_verticals: int, dtype: str = "float32", seed: int = 0):
    """Queries, keys, values and verticals; the second head has half as many, the rest is none."""
    rng = np.random.default_rng(seed)
    shapes = (num_tokens, H * R, D), (num_tokens, H, D), (num_tokens, H, D)
    q, k, v = ((2 * rng.standard_normal(shape)).astype(jnp.dtype(dtype)) for shape in shapes)
    verticals = np.full((H, num_verticals), num_tokens, np.int32)
    for head, count in enumerate((num_verticals, num_verticals // 2)):
        count = min(count, num_tokens)
        verticals[head, :count] = np.sort(rng.permutation(num_tokens)[:count])
    return q, k, v, verticals


def answer(q, k, v, verticals, local: int, block: int) -> np.ndarray:
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    for head in range(H):
        rows, own = slice(head * R, (head + 1) * R), set(verticals[head].tolist())
        for t in range(len(q)):
            seen = seen_from(t, own, local, block)
            out[t, rows], _ = attend(q[t, rows], k[seen, head], v[seen, head])
    return out


def attended(q, k, v, *, verticals, **given):
    given = {"verticals": jnp.asarray(verticals), **given}
    return sparse_prefill_attention(*map(jnp.asarray, (q, k, v)), **given)


@functools.cache
def compiled(local: int, block: int):
    return jax.jit(functools.partial(sparse_prefill_attention, local=local, block=block))


@pytest.mark.parametrize("at_once", [512, 4], ids=["at once", "in parts"])
@pytest.mark.parametrize("num_verticals", [0, 1, 11, 200])
@pytest.mark.parametrize(("num_tokens", "local"), [(103, 16), (100, 4), (17, 16), (16, 16), (3, 8)])
def test_exact(num_tokens: int, local: int, num_verticals: int, at_once: int, monkeypatch):
    monkeypatch.setattr(sparse_attention, "AT_ONCE", at_once)
    q, k, v, verticals = problem(num_tokens, num_verticals)
    out = attended(q, k, v, verticals=verticals, local=local, block=4)
    np.testing.assert_allclose(out, answer(q, k, v, verticals, local, 4), atol=1e-5)


@settings(max_examples=20)
@given(
    num_tokens=st.integers(1, 60),
    num_verticals=st.integers(0, 70),
    blocks=st.sampled_from([1, 4]),
    seed=st.integers(0, 99),
)
def test_any_prompt(num_tokens: int, num_verticals: int, blocks: int, seed: int):
    q, k, v, verticals = problem(num_tokens, num_verticals, seed=seed)
    # Padded as the engine pads: few shapes are compiled.
    fill = ((0, 60 - num_tokens), (0, 0), (0, 0))
    padded = [np.pad(x, fill, constant_values=7) for x in (q, k, v)]
    chosen = np.full((H, 70), 60, np.int32)
    chosen[:, :num_verticals] = np.where(verticals < num_tokens, verticals, 60)
    out = compiled(4 * blocks, 4)(*padded, verticals=chosen)
    want = answer(q, k, v, verticals, 4 * blocks, 4)
    np.testing.assert_allclose(out[:num_tokens], want, atol=1e-5)


def test_all_keys_as_verticals_are_dense_attention():
    q, k, v, _ = problem(150, 0)
    verticals = np.tile(np.arange(150, dtype=np.int32), (H, 1))
    out = attended(q, k, v, verticals=verticals, local=64)
    np.testing.assert_allclose(out, prefill_attention(*map(jnp.asarray, (q, k, v))), atol=1e-5)


def test_a_prompt_within_the_band_is_dense_attention_itself():
    q, k, v, verticals = problem(64, 5)
    out = attended(q, k, v, verticals=verticals, local=64)
    assert np.array_equal(out, prefill_attention(*map(jnp.asarray, (q, k, v))))


def test_rounds_once():
    q, k, v, verticals = problem(90, 9, "bfloat16")
    out = attended(q, k, v, verticals=verticals, local=16, block=8)
    assert out.dtype == jnp.bfloat16
    want = answer(q, k, v, verticals, 16, 8)
    np.testing.assert_allclose(out.astype(jnp.float32), want, atol=2.0**-6)


def test_the_scale_is_that_of_the_logits():
    q, k, v, verticals = problem(90, 9)
    out = attended(q, k, v, verticals=verticals, local=16, block=8, scale=1.0)
    want = answer(q * D**0.5, k, v, verticals, 16, 8)
    np.testing.assert_allclose(out, want, atol=1e-5)


def test_it_computes_less_than_dense_attention():
    """Logits in memory at once are of the band or of some verticals, never of all keys."""
    num_tokens, local = 2048, 128
    shapes = [jax.ShapeDtypeStruct((num_tokens, n, D), jnp.float32) for n in (H * R, H, H)]
    verticals = jax.ShapeDtypeStruct((H, 128), jnp.int32)
    sparse = jax.jit(functools.partial(sparse_prefill_attention, local=local))
    text = sparse.lower(*shapes, verticals=verticals).as_text()
    # Of a query's logits no row is as long as the prompt.
    rows = {int(n) for n in re.findall(rf"tensor<(?:\d+x)*{R * 64}x(\d+)xf32>", text)}
    assert max(rows) == local + 64 < num_tokens


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"local": 96}, "local: got 96, wanted a multiple of the block of 64, at least one"),
        ({"local": 0}, "local: got 0, wanted a multiple"),
        ({"verticals": np.zeros(5, int)}, "verticals shape: got [5], wanted [2, n]"),
        (
            {"verticals": np.zeros((H, 5), np.float32)},
            "verticals dtype: got float32, wanted an integer type",
        ),
        ({"q": np.zeros((9, 6, D), np.float32)}, "q shape: got [9, 6, 8], wanted [90, 6, 8]"),
        ({"v": np.zeros((9, H, D), np.float32)}, "v shape: got [9, 2, 8], wanted that of k"),
        ({"v": np.zeros((90, H, D), int)}, "v dtype: got int32, wanted a floating-point type"),
    ],
)
@pytest.mark.usefixtures("unchecked_signatures")
def test_what_does_not_fit_is_refused(changed, says):
    q, k, v, verticals = problem(90, 9)
    given = {"q": q, "k": k, "v": v, "verticals": verticals, "local": 64} | changed
    with pytest.raises(ValueError, match=re.escape(says)):
        attended(**given)
