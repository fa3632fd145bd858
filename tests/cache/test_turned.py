"""Numbers of KVs [N, b] are read and written whichever way a device lays them out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax import cache as kv
from kvjax.cache.store import gathered, move_rows, paged, pool, scattered
from kvjax.cache.store.paged import UNWRITTEN
from tests.cache.pair import filled
from tests.kernels.devices import H200, TPU_V5E

N, B = 7, 4


def test_who_turns_them():
    """TPUs, arrays of a number per KV; decided when a step is traced."""
    numbers, rows = jnp.zeros((N, B)), jnp.zeros((N, B, 2))
    for device, want in ((TPU_V5E, True), (H200, False)):
        with jax.sharding.use_abstract_mesh(device):
            assert pool.lies_turned(numbers) is want
            assert not pool.lies_turned(rows)
    assert not pool.lies_turned(numbers)


@pytest.fixture(params=[False, True], ids=["as written", "turned"])
def lies(request, monkeypatch):
    monkeypatch.setattr(pool, "lies_turned", lambda array: request.param and array.ndim == 2)


def of(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("width", [(), (3,)])
def test_whole_blocks(lies, width):
    array, ids = of(0, N, B, *width), np.array([[2, N], [5, 0]], np.int32)
    got = gathered(jnp.asarray(array), jnp.asarray(ids), -1)
    want = np.where((ids < N).reshape(2, 2, *[1] * (1 + len(width))), array[ids % N], -1)
    np.testing.assert_array_equal(got, want)
    rows = of(1, 2, 2, B, *width)
    got = scattered(jnp.asarray(array), (jnp.asarray(ids),), jnp.asarray(rows))
    want = array.copy()
    want[[2, 5, 0]] = rows[[0, 1, 1], [0, 0, 1]]
    np.testing.assert_array_equal(got, want)
    want[[2, 5, 0]] = 0
    np.testing.assert_array_equal(scattered(jnp.asarray(array), (jnp.asarray(ids),), 0), want)


def test_at_offsets(lies):
    array, block, offset = of(0, N, B), np.array([3, N, 6], np.int32), np.array([1, 0, 3], np.int32)
    at = jnp.asarray(block), jnp.asarray(offset)
    want = array.copy()
    want[3, 1], want[6, 3] = 5, 7
    values = jnp.asarray([5, 6, 7], jnp.int32)
    np.testing.assert_array_equal(scattered(jnp.asarray(array), at, values), want)
    want[3, 1] = want[6, 3] = 0
    np.testing.assert_array_equal(scattered(jnp.asarray(array), at, 0), want)


def test_rows_that_are_emptied(lies, monkeypatch):
    """What nobody owns any more says nothing."""
    monkeypatch.setattr(paged, "lies_turned", pool.lies_turned)
    pair = filled([5, 6])
    was, marked = pair.cache, jnp.arange(pair.cache.num_slots) != 1
    cache, table = kv.release(was, marked), np.asarray(was.block_table)[np.asarray(marked)]
    freed = np.zeros(was.num_blocks, bool)
    freed[table[table < was.num_blocks]] = True
    for name, nothing in (("metric", 0), ("position", UNWRITTEN)):
        got, before = (np.asarray(getattr(x, name)) for x in (cache, was))
        np.testing.assert_array_equal(got, np.where(freed[:, None], nothing, before))
        assert (before != nothing)[freed].any()
        assert (before != nothing)[~freed].any()


@given(st.permutations(range(N * B)), st.integers(0, 6), st.integers(0, 6))
def test_moves(order, first, second):
    """Of two rows, the first ones of each."""
    array = of(0, N, B)
    source, target = np.array(order[:24], np.int32).reshape(2, 2, 6)
    want = array.copy().reshape(-1)
    for row, count in enumerate((first, second)):
        want[target[row, :count]] = array.reshape(-1)[source[row, :count]]
    counts = jnp.asarray([first, second], jnp.int32)
    for turned in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pool, "lies_turned", lambda array, turned=turned: turned)
            got = move_rows(jnp.asarray(array), jnp.asarray(source), jnp.asarray(target), counts)
        np.testing.assert_array_equal(np.asarray(got).reshape(-1), want)
