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
from tests.kernels.amx import needs_amx
from tests.kernels.devices import H200
from tests.kernels.threads import assert_one_thread_suffices
from tests.oracle import attend, causal_attention

H, R, D = 2, 3, 32
SCALE = D**-0.5
BY = [pytest.param("amx", marks=needs_amx), "numba"]
OFF = {"amx": 8e-5, "numba": 1e-5}
"""Of outputs, by which each may be off: logits of two digits are, by some 2⁻¹⁸ of their terms."""
TILES = [pytest.param(True, marks=needs_amx), False]
LONG = 1100
"""Tokens whose queries are more than `SPANS` tiles: spans have several."""


@functools.cache
def prompt(tokens: int, d: int = D):
    rng = np.random.default_rng(tokens)
    shapes = (tokens, H * R, d), (tokens, H, d), (tokens, H, d)
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)


def told(tokens: int, name: str | None = None) -> list[np.ndarray]:
    """Output, log-sum-exps and sums of squares of a prompt."""
    weight = jnp.linspace(0.5, 1, tokens)
    options = {"power": 2, "excluded_distance": 9, "implementation": name}
    call = jax.jit(functools.partial(prefill_attention_with_received, **options))
    return [np.asarray(x) for x in call(*prompt(tokens), query_weight=weight)]


@pytest.mark.parametrize("name", BY)
def test_sums_of_several_tiles_and_spans(name: str) -> None:
    q, k, v = prompt(LONG)
    out, _, received = told(LONG, name)
    matrix = causal_attention(np.asarray(q), np.asarray(k))
    i = np.arange(LONG)
    counts = (i[:, None] - i >= 9) * np.linspace(0.5, 1, LONG)[:, None]
    wanted = np.sum(matrix**2 * counts, axis=1)
    np.testing.assert_allclose(received, wanted, rtol=6 * OFF[name], atol=1e-6)
    values = np.repeat(np.asarray(v), R, axis=1)
    wanted = np.einsum("hqt,thd->qhd", matrix, values)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=OFF[name])


@pytest.mark.parametrize("name", BY)
def test_tiles_of_one_query_head(name: str) -> None:
    """A tile has more tokens than a vector has numbers: keys after a token are in several."""
    q, k, v = prompt(100)
    got, wanted = (prefill_attention(q[:, ::R], k, v, implementation=i) for i in (name, "xla"))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=OFF[name])


@pytest.mark.parametrize("tiles", TILES)
def test_many_keys_make_tiles_smaller(tiles: bool) -> None:
    """Of 8,200 keys a tile of 48 queries is more than a cache has room for, of 33,000 one of 24."""
    tokens, held = 9, 33_000
    q = prompt(tokens)[0]
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((H, held, D)).astype(np.float32) for _ in "kv")
    length = np.array([8_200, held], np.int32)
    part = numba_cpu.over_prefix(
        q, jnp.asarray(k), jnp.asarray(v), jnp.asarray(length), SCALE, tiles
    )
    out = np.asarray(reference.normalised(part, "float32"))
    for head in range(H):
        keys, values = (x[head, : length[head]] for x in (k, v))
        for t in range(tokens):
            rows = slice(head * R, (head + 1) * R)
            wanted, _ = attend(np.asarray(q)[t, rows], keys, values)
            np.testing.assert_allclose(out[t, rows], wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("length", [-3, 0, 45, 1 << 30])
def test_lengths_that_lead_nowhere_read_nothing_else(length: int, tiles: bool) -> None:
    tokens, held = 5, 40
    q = prompt(tokens)[0]
    k, v = (prompt(held)[i].swapaxes(0, 1) for i in (1, 2))
    given = jnp.full(H, length, jnp.int32)
    out, top, total = numba_cpu.over_prefix(q, k, v, given, SCALE, tiles)
    if length <= 0:
        assert not np.asarray(out).any()
        assert np.isneginf(top).all()
        assert not np.asarray(total).any()
        return
    usual = numba_cpu.over_prefix(q, k, v, jnp.full(H, held, jnp.int32), SCALE, tiles)
    np.testing.assert_array_equal(out, usual[0])


def test_one_thread_computes_what_several_do(tmp_path) -> None:
    call = "[*told(LONG), *told(LONG, 'numba')]"
    assert_one_thread_suffices(
        tmp_path, "from tests.kernels.test_prefill_numba import LONG, told", call
    )


@pytest.mark.parametrize("name", BY)
def test_a_query_that_is_not_finite_is_nobody_elses(name: str) -> None:
    q, k, v = prompt(70)
    usual = np.array(prefill_attention(q, k, v, implementation=name))
    for bad in (jnp.nan, jnp.inf):
        broken = q.at[30, 4, 3].set(bad)
        out = np.array(prefill_attention(broken, k, v, implementation=name))
        assert np.isnan(out[30, 4]).all()
        out[30, 4] = usual[30, 4]
        np.testing.assert_array_equal(out, usual)


@pytest.mark.parametrize("name", BY)
def test_several_prompts_one_after_the_other(name: str) -> None:
    q, k, v = prompt(70)
    both = [jnp.stack([x, x[::-1]]) for x in (q, k, v)]
    options = {"query_weight": jnp.ones(70), "implementation": name}
    attend = functools.partial(prefill_attention_with_received, **options)
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


@pytest.mark.parametrize("tiles", TILES)
def test_a_statistic_of_half_the_queries(tiles: bool) -> None:
    """Weights of 0 take a query out of the sums, and nothing else of it."""
    q, k, v = prompt(70)
    weight = jnp.where(jnp.arange(70) < 35, 1.0, 0.0)
    part, received = numba_cpu.causal_with_received(q, k, v, SCALE, Observed(weight, 1, 0), tiles)
    alone = numba_cpu.causal(q, k, v, SCALE, tiles)
    for one, other in zip(part, alone, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(jnp.sum(received, axis=1), np.full(H * R, 35), rtol=1e-5)


@needs_amx
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("d", [32, 96])
def test_tiles_of_either_kind(d: int, dtype: str) -> None:
    """Keys and values of bfloat16 are what they are; queries and weights have two digits."""
    q, k, v = (x.astype(dtype) for x in prompt(150, d))
    wide = (x.astype("float32") for x in (q, k, v))
    wanted = prefill_attention(*wide, implementation="xla")
    part = numba_cpu.causal(q, k, v, d**-0.5, True)
    got = reference.normalised(part, "float32")
    np.testing.assert_allclose(got, wanted, rtol=0, atol=5e-5)


@needs_amx
def test_who_attends_in_tiles() -> None:
    given = prompt(70)
    assert explain(prefill_attention, *given).startswith("amx: ")
    assert "amx does not serve d=16, which" in explain(prefill_attention, *prompt(70, 16))
    assert "amx does not serve 63 tokens" in explain(prefill_attention, *prompt(63))
    with jax.default_matmul_precision("highest"):
        assert "float32 at precision highest" in explain(prefill_attention, *given)


def test_only_cpus_have_it() -> None:
    with (
        jax.sharding.use_abstract_mesh(H200),
        pytest.raises(ValueError, match="'numba', wanted one that serves device"),
    ):
        explain(prefill_attention, *prompt(9), implementation="numba")


def test_without_numba_xla_serves(monkeypatch) -> None:
    assert explain(prefill_attention, *prompt(9)).startswith("numba: ")
    usual = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "numba" else usual(name)
    )
    found = explain(prefill_attention, *prompt(9))
    assert found.startswith("xla: ")
    assert "Python without Numba (pip install '.[cpu]')" in found
