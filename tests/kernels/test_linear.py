"""Small positive definite systems against NumPy in float64."""

import re

import jax
import numpy as np
import pytest

from kvjax.kernels.linear import LEAF, cholesky_inverted


@pytest.mark.parametrize("size", [1, 2, 5, 32, 33, 65, 144])
def test_the_factors_inverse_is_numpys(size):
    """Of several matrices at once, of sizes that are powers of two and that are none."""
    draws = np.random.default_rng(size).standard_normal((2, 3, size, size + 2))
    gram = draws @ np.swapaxes(draws, -1, -2) + np.eye(size)
    wanted = np.linalg.inv(np.linalg.cholesky(gram))
    found = np.asarray(jax.jit(cholesky_inverted)(gram.astype(np.float32)))
    assert found.shape == gram.shape
    np.testing.assert_array_equal(found, np.tril(found))
    np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())


def test_no_library_factors_more_rows_than_one_thread_does():
    """One of 336 rows, seven query heads' references, took a BLAS's threads seconds a prompt."""
    traced = str(jax.make_jaxpr(cholesky_inverted)(np.eye(336, dtype=np.float32)))
    sizes = {int(rows) for rows in re.findall(r"f32\[(\d+),\d+\] = cholesky ", traced)}
    assert sizes
    assert max(sizes) <= LEAF == 64
