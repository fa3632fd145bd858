"""Attention matching: every implementation against the oracle; nothing depends on threads."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels import explain, match_attention
from tests.kernels.devices import H200
from tests.kernels.threads import assert_one_thread_suffices
from tests.oracle.matched import matched

RULE = {"most_mass": 4.0, "stiffness": 0.01, "drawn_back": 1.0}
NAMES = ["numba", "xla"]


@functools.cache
def heads(queries: int, tokens: int, d: int, rate: int, dtype: str = "float32") -> tuple:
    """Arguments for three heads, of which the second holds less; what it does not is poisoned."""
    rng = np.random.default_rng(queries + tokens + d)
    q = (rng.standard_normal((3, queries, d)) * d**-0.5).astype(np.float32)
    k, v = (rng.standard_normal((3, tokens, d)).astype(np.float32) for _ in "kv")
    there = np.ones((3, tokens), bool)
    there[1, rng.random(tokens) < 0.3] = False
    k[~there], v[~there] = np.nan, np.nan
    kept = there & (rng.random((3, tokens)) < 1 / rate)
    rows = (jnp.asarray(x, dtype) for x in (2 * k, v))
    return jnp.asarray(q), *rows, jnp.asarray(there & ~kept), jnp.asarray(kept)


def fitted(name: str, *arguments):
    return jax.jit(functools.partial(match_attention, implementation=name, **RULE))(*arguments)


@pytest.mark.parametrize(
    ("queries", "tokens", "d", "rate"),
    [
        (144, 300, 64, 4),
        pytest.param(100, 130, 80, 2, marks=pytest.mark.slow),
        (7, 40, 64, 8),
        (30, 70, 6, 3),
        (5, 20, 64, 2),
    ],
    ids=["whole blocks", "parts of blocks", "few", "no whole vector", "more channels than queries"],
)
@pytest.mark.parametrize("name", NAMES)
def test_heads_are_fitted_as_the_oracle_fits_them(name, queries, tokens, d, rate) -> None:
    q, k, v, dropped, kept = heads(queries, tokens, d, rate)
    got = fitted(name, q, k, v, dropped, kept)
    for h in range(3):
        there = np.asarray(dropped[h] | kept[h])
        of_k, of_v = (np.asarray(x[h])[there] for x in (k, v))
        stays = np.asarray(kept[h])[there]
        want = matched(np.asarray(q[h]) * np.sqrt(d), of_k, of_v, stays)
        for new, old, wanted in zip(got, (k, v), want, strict=True):
            new, old, stay = (np.asarray(x[h]) for x in (new, old, kept))
            np.testing.assert_allclose(new[stay], wanted, rtol=1e-3, atol=1e-3)
            np.testing.assert_array_equal(new[~stay], old[~stay])


@pytest.mark.parametrize("name", NAMES)
def test_what_nothing_goes_of_stays_to_the_bit(name) -> None:
    q, k, v, dropped, kept = heads(7, 40, 64, 8)
    nothing = jnp.zeros_like(kept)
    for masks in ((nothing, dropped | kept), (dropped | kept, nothing), (nothing, nothing)):
        for new, old in zip(fitted(name, q, k, v, *masks), (k, v), strict=True):
            np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("name", NAMES)
def test_a_query_that_looks_at_nothing_that_stays_counts_no_more_than_others(name) -> None:
    rng = np.random.default_rng(3)
    q = rng.standard_normal((1, 40, 64)).astype(np.float32) / 8
    k, v = (rng.standard_normal((1, 60, 64)).astype(np.float32) for _ in "kv")
    kept = np.arange(60)[None] % 4 == 0
    # One key that goes and that one query looks at alone.
    k[0, 1] = 30 * q[0, 0]
    given = (jnp.asarray(x) for x in (q, k, v, ~kept, kept))
    got = fitted(name, *given)
    want = matched(8 * q[0], k[0], v[0], kept[0])
    for new, wanted in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(new)[kept], wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("gap", [80, 95, 200])
@pytest.mark.parametrize("name", NAMES)
def test_where_nothing_that_stays_is_looked_at_values_stay_as_they_are(name, gap) -> None:
    """All that queries weigh of it is rounded away, or all but."""
    rng = np.random.default_rng(gap)
    way = rng.standard_normal(16)
    way /= np.linalg.norm(way)
    q = (way + 0.02 * rng.standard_normal((1, 48, 16))).astype(np.float32)
    k, v = (rng.standard_normal((1, 40, 16)).astype(np.float32) for _ in "kv")
    k *= 0.1
    k[0, :4] += gap * way
    kept = np.arange(40)[None] >= 20
    new_k, new_v = fitted(name, *(jnp.asarray(x) for x in (q, k, v, ~kept, kept)))
    np.testing.assert_array_equal(new_v, v)
    assert (np.abs(new_k - k) < 10).all()


@pytest.mark.parametrize("name", NAMES)
def test_keys_and_values_of_other_dtypes(name) -> None:
    arguments = heads(30, 70, 64, 3, "bfloat16")
    q, k, v, dropped, kept = arguments
    wide = fitted(name, q, k.astype(jnp.float32), v.astype(jnp.float32), dropped, kept)
    for new, old in zip(fitted(name, *arguments), wide, strict=True):
        assert new.dtype == jnp.bfloat16
        rounded = old.astype(jnp.bfloat16).astype(jnp.float32)
        np.testing.assert_array_equal(new.astype(jnp.float32), rounded)


def test_several_layers_at_once() -> None:
    one, other = heads(30, 70, 64, 3), tuple(x[::-1] for x in heads(30, 70, 64, 3))
    both = [jnp.stack(pair) for pair in zip(one, other, strict=True)]
    found = jax.jit(jax.vmap(functools.partial(match_attention, **RULE)))(*both)
    for i, alone in enumerate((one, other)):
        for several, single in zip(found, fitted("numba", *alone), strict=True):
            np.testing.assert_array_equal(several[i], single)


def test_one_thread_computes_what_several_do(tmp_path) -> None:
    imports = "from tests.kernels.test_match_attention import fitted, heads"
    assert_one_thread_suffices(tmp_path, imports, "fitted('numba', *heads(144, 300, 64, 4))")


def test_explains_the_choice(monkeypatch) -> None:
    arguments = heads(7, 40, 64, 8)
    assert explain(match_attention, *arguments) == "numba"
    with jax.sharding.use_abstract_mesh(H200):
        assert explain(match_attention, *arguments).startswith("xla: numba does not serve device")
    usual = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "numba" else usual(name)
    )
    assert "Python without Numba (pip install '.[cpu]')" in explain(match_attention, *arguments)


@pytest.mark.parametrize(
    ("place", "wrong", "message"),
    [
        (0, (3, 7, 8), r"q shape: got \[3, 7, 8\], wanted \[3, Q, 64\]"),
        (0, (3, 0, 64), r"q shape: got \[3, 0, 64\], wanted \[3, Q, 64\]"),
        (1, (3, 40), r"k shape: got \[3, 40\], wanted \[H, T, d\]"),
        (2, (3, 41, 64), r"v shape: got \[3, 41, 64\], wanted that of k, \[3, 40, 64\]"),
        (3, (40,), r"dropped shape: got \[40\], wanted \[3, 40\]"),
        (4, (3, 39), r"kept shape: got \[3, 39\], wanted \[3, 40\]"),
    ],
)
def test_bad_arguments_are_named(place: int, wrong: tuple[int, ...], message: str) -> None:
    arguments: list = list(heads(7, 40, 64, 8))
    arguments[place] = jax.ShapeDtypeStruct(wrong, arguments[place].dtype)
    with pytest.raises(ValueError, match=message):
        explain(match_attention, *arguments)
