"""Running counts, and the free blocks that are found by them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.store import running_count
from kvjax.cache.store.paged import nth_free


@pytest.mark.parametrize("size", [1, 128, 129, 8300])
def test_a_running_count_is_exact(size):
    """One product, and two and three levels of blocks."""
    mask = np.random.default_rng(size).random((2, size)) < 0.9
    found = jax.jit(running_count)(mask)
    assert found.dtype == jnp.int32
    assert (np.asarray(found) == np.cumsum(mask, axis=-1)).all()


def test_counts_beyond_what_float32_holds_are_whole_numbers(monkeypatch):
    monkeypatch.setattr("kvjax.cache.store.counting.MOST", 7)
    jaxpr = str(jax.make_jaxpr(running_count)(np.ones(8, bool)))
    assert "f32" not in jaxpr
    assert "dot_general" in str(jax.make_jaxpr(running_count)(np.ones(7, bool)))


@pytest.mark.parametrize("size", [1, 63, 64, 65])
def test_the_nth_free_block_is_found(size):
    rng, find = np.random.default_rng(size), jax.jit(nth_free)
    ranks = np.arange(-1, size + 2).reshape(-1, 1)
    for share in (0.0, 0.5, 1.0):
        free = rng.random(size) < share
        ids = np.append(np.flatnonzero(free), [size] * (size + 2))
        found = np.asarray(find(free, ranks))[:, 0]
        assert (found[1:] == ids[: size + 2]).all(), share
        # Heads that take no block ask for ranks below 0; any id will do.
        assert 0 <= found[0] <= size
