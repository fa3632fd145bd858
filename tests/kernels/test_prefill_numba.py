"""Prefill attention that Numba compiles: what it serves, and that nothing depends on threads."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels import explain, prefill_attention, prefill_attention_with_received
from kvjax.kernels.numba_vectors import TALL, VECTORS, WIDTH
from kvjax.kernels.prefill_attention import numba_cpu, reference
from kvjax.kernels.prefill_attention.reference import Observed
from tests.kernels.devices import H200
from tests.kernels.threads import assert_one_thread_suffices
from tests.oracle import attend, causal_attention

H, R, D = 2, 3, 16
LONG = 1100
"""Tokens whose queries are more than `SPANS` tiles: spans have several."""


@functools.cache
def prompt(tokens: int, d: int = D):
    rng = np.random.default_rng(tokens)
    shapes = (tokens, H * R, d), (tokens, H, d), (tokens, H, d)
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)


def told(tokens: int) -> list[np.ndarray]:
    """Output, log-sum-exps and sums of squares of a prompt."""
    weight = jnp.linspace(0.5, 1, tokens)
    call = jax.jit(functools.partial(prefill_attention_with_received, power=2, excluded_distance=9))
    return [np.asarray(x) for x in call(*prompt(tokens), query_weight=weight)]


def test_sums_of_several_tiles_and_spans() -> None:
    q, k, v = prompt(LONG)
    out, _, received = told(LONG)
    matrix = causal_attention(np.asarray(q), np.asarray(k))
    i = np.arange(LONG)
    counts = (i[:, None] - i >= 9) * np.linspace(0.5, 1, LONG)[:, None]
    np.testing.assert_allclose(received, np.sum(matrix**2 * counts, axis=1), rtol=3e-5, atol=1e-7)
    values = np.repeat(np.asarray(v), R, axis=1)
    np.testing.assert_allclose(out, np.einsum("hqt,thd->qhd", matrix, values), rtol=0, atol=1e-5)


def test_tiles_of_one_query_head() -> None:
    """A tile has more tokens than a vector has numbers: keys after a token are in several."""
    q, k, v = prompt(100)
    got, wanted = (prefill_attention(q[:, ::R], k, v, implementation=i) for i in ("numba", "xla"))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


def test_many_keys_make_tiles_smaller() -> None:
    """Of 8,200 keys a tile of 48 queries is more than a cache has room for, of 33,000 one of 24."""
    tokens, held = 9, 33_000
    q = prompt(tokens)[0]
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((H, held, D)).astype(np.float32) for _ in "kv")
    length = np.array([8_200, held], np.int32)
    part = numba_cpu.over_prefix(q, jnp.asarray(k), jnp.asarray(v), jnp.asarray(length), 0.25)
    out = np.asarray(reference.normalised(part, "float32"))
    for head in range(H):
        keys, values = (x[head, : length[head]] for x in (k, v))
        for t in range(tokens):
            rows = slice(head * R, (head + 1) * R)
            wanted, _ = attend(np.asarray(q)[t, rows], keys, values)
            np.testing.assert_allclose(out[t, rows], wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("length", [-3, 0, 45, 1 << 30])
def test_lengths_that_lead_nowhere_read_nothing_else(length: int) -> None:
    tokens, held = 5, 40
    q = prompt(tokens)[0]
    k, v = (prompt(held)[i].swapaxes(0, 1) for i in (1, 2))
    given = jnp.full(H, length, jnp.int32)
    out, top, total = numba_cpu.over_prefix(q, k, v, given, 0.25)
    if length <= 0:
        assert not np.asarray(out).any()
        assert np.isneginf(top).all()
        assert not np.asarray(total).any()
        return
    usual = numba_cpu.over_prefix(q, k, v, jnp.full(H, held, jnp.int32), 0.25)
    np.testing.assert_array_equal(out, usual[0])


def test_one_thread_computes_what_several_do(tmp_path) -> None:
    assert_one_thread_suffices(
        tmp_path, "from tests.kernels.test_prefill_numba import LONG, told", "told(LONG)"
    )


def test_a_query_that_is_not_finite_is_nobody_elses() -> None:
    q, k, v = prompt(70)
    usual = np.array(prefill_attention(q, k, v, implementation="numba"))
    for bad in (jnp.nan, jnp.inf):
        broken = q.at[30, 4, 3].set(bad)
        out = np.array(prefill_attention(broken, k, v, implementation="numba"))
        assert np.isnan(out[30, 4]).all()
        out[30, 4] = usual[30, 4]
        np.testing.assert_array_equal(out, usual)


def test_several_prompts_one_after_the_other() -> None:
    q, k, v = prompt(70)
    both = [jnp.stack([x, x[::-1]]) for x in (q, k, v)]
    attend = functools.partial(prefill_attention_with_received, query_weight=jnp.ones(70))
    found = jax.jit(jax.vmap(attend))(*both)
    for i in range(2):
        alone = attend(*(x[i] for x in both))
        for several, one in zip(found, alone, strict=True):
            np.testing.assert_array_equal(several[i], one)


def test_products_of_all_columns() -> None:
    """Head dimensions of whole products, of a part of one, of both, and of no whole vector."""
    columns = WIDTH * VECTORS
    for d in (columns, WIDTH, columns + WIDTH, 6):
        q, k, v = prompt(TALL + 5, d)
        got, wanted = (prefill_attention(q, k, v, implementation=i) for i in ("numba", "xla"))
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


def test_a_statistic_of_half_the_queries() -> None:
    """Weights of 0 take a query out of the sums, and nothing else of it."""
    q, k, v = prompt(70)
    weight = jnp.where(jnp.arange(70) < 35, 1.0, 0.0)
    part, received = numba_cpu.causal_with_received(q, k, v, 0.25, Observed(weight, 1, 0))
    alone = numba_cpu.causal(q, k, v, 0.25)
    for one, other in zip(part, alone, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(jnp.sum(received, axis=1), np.full(H * R, 35), rtol=1e-5)


def test_only_cpus_have_it() -> None:
    with (
        jax.sharding.use_abstract_mesh(H200),
        pytest.raises(ValueError, match="'numba', wanted one that serves device"),
    ):
        explain(prefill_attention, *prompt(9), implementation="numba")


def test_without_numba_xla_serves(monkeypatch) -> None:
    assert explain(prefill_attention, *prompt(9)).startswith("numba")
    usual = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "numba" else usual(name)
    )
    found = explain(prefill_attention, *prompt(9))
    assert found.startswith("xla: ")
    assert "Python without Numba (pip install '.[cpu]')" in found
