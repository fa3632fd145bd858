"""Products with a matrix whose inputs lie along its rows, by Numba: against float64 and XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels import explain, matmul
from kvjax.models.families.llama import _by_head
from kvjax.models.narrow import scaled_product
from tests.kernels.test_matmul import KINDS, assert_product, operands
from tests.kernels.threads import assert_one_thread_suffices

OUTPUTS = 541
"""Several chunks, the last of which is none of whole groups."""
by_numba = functools.partial(matmul, axis=1, implementation="numba")


def given(rows: int, of_x: str = "float32", of_weight: str = "float32", outputs: int = OUTPUTS):
    """Activations, and a matrix [O, I]."""
    x, weight = operands(rows, of_x, of_weight, columns=outputs)
    return x, weight.T


@pytest.mark.parametrize(("of_x", "of_weight"), KINDS)
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_the_product_in_float64(of_x: str, of_weight: str, rows: int) -> None:
    x, weight = given(rows, of_x, of_weight)
    assert_product("numba", x, weight, axis=1)


@pytest.mark.parametrize("outputs", [16, 17, 64, 65])
def test_few_outputs(outputs: int) -> None:
    assert_product("numba", *given(5, outputs=outputs), axis=1)


def test_a_row_is_the_same_among_others() -> None:
    x, weight = given(21)
    together = np.asarray(by_numba(x, weight))
    for some in (slice(0, 1), slice(7, 9), slice(16, 21)):
        np.testing.assert_array_equal(together[some], by_numba(x[some], weight))


def test_what_is_not_finite_stays_its_own() -> None:
    x, weight = (np.array(a) for a in given(9))
    usual = np.array(by_numba(jnp.asarray(x), jnp.asarray(weight)))
    x[8, 50], weight[300, 5] = np.nan, np.inf
    got = np.array(by_numba(jnp.asarray(x), jnp.asarray(weight)))
    assert not np.isfinite(got[8]).any()
    assert not np.isfinite(got[:, 300]).any()
    got[8], got[:, 300] = usual[8], usual[:, 300]
    np.testing.assert_array_equal(got, usual)


def told() -> list[np.ndarray]:
    return [np.asarray(by_numba(*given(9, *kinds)), np.float32) for kinds in KINDS]


@pytest.mark.slow
def test_one_thread_computes_what_several_do(tmp_path) -> None:
    assert_one_thread_suffices(
        tmp_path, "from tests.kernels.test_matmul_by_rows import told", "told()"
    )


def test_the_way_back_is_that_of_a_plain_product() -> None:
    x, weight = given(5)

    def loss(product, x, weight):
        return jnp.sum(jnp.sin(product(x, weight)))

    got = jax.grad(functools.partial(loss, by_numba), argnums=(0, 1))(x, weight)
    want = jax.grad(functools.partial(loss, lambda x, w: x @ w.T), argnums=(0, 1))(x, weight)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-2)


@pytest.mark.parametrize(
    ("rows", "kinds", "name"),
    [
        (1, KINDS[0], "xla"),
        (2, KINDS[0], "numba"),
        (32, KINDS[0], "numba"),
        (70, KINDS[0], "xla: amx does not serve"),
        (1, KINDS[1], "numba"),
        (9, KINDS[1], "xla"),
        (8, KINDS[2], "numba"),
        (9, KINDS[2], "xla"),
    ],
)
def test_few_rows_are_for_whoever_is_faster(rows: int, kinds, name: str) -> None:
    x, weight = given(rows, *kinds)
    found = explain(matmul, x, weight, axis=1)
    assert found.startswith(name)
    assert ("numba does not serve" in found) == (name != "numba")


def test_matrices_that_fill_no_vectors_are_left_to_xla() -> None:
    for shape in ((544, 95), (15, 96)):
        found = explain(matmul, jnp.ones((4, shape[1])), jnp.ones(shape), axis=1)
        assert f"numba does not serve a matrix of {list(shape)}" in found


def test_what_does_not_fit_is_named() -> None:
    x = jnp.ones((2, 4))
    with pytest.raises(ValueError, match=r"weight shape: got \[4, 5\], wanted \[O, 4\]"):
        matmul(x, jnp.ones((4, 5)), axis=1)
    with pytest.raises(ValueError, match="axis: got 2, wanted 0 or 1"):
        matmul(x, jnp.ones((4, 4)), axis=2)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axis", [0, 1])
def test_the_vocabulary_is_multiplied_by_few_rows(axis: int, dtype: str, rows: int) -> None:
    """Whichever way a model stores it."""
    x, weight = given(rows, dtype, dtype)
    got = _by_head(x, weight if axis else weight.T, axis)
    assert got.dtype == jnp.float32
    want = x.astype(jnp.float32) @ weight.astype(jnp.float32).T
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-3)


@pytest.mark.parametrize("axis", [0, 1])
def test_codes_are_multiplied_as_they_are(axis: int) -> None:
    """No digits of activations: the product is that of the matrix, to float32's precision."""
    x, weight = given(3, "float32", "int8")
    scale = jnp.linspace(0.5, 2, OUTPUTS - 13)
    weight = weight[: OUTPUTS - 13]
    got = scaled_product(x, weight if axis else weight.T, scale, axis)
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T * np.asarray(scale)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-2)
