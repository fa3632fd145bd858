"""Running counts, and the stack of free blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.store import FreeBlocks, running_count


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


def lowest(stack: FreeBlocks, many: int) -> list[int]:
    """The ids that the next takers get."""
    return np.asarray(jax.jit(FreeBlocks.peek)(stack, jnp.arange(many).reshape(-1, 1)))[
        :, 0
    ].tolist()


def test_free_blocks_are_taken_from_the_top():
    stack = FreeBlocks.every(6)
    assert lowest(stack, 8) == [0, 1, 2, 3, 4, 5, 6, 6]
    stack = stack.without(jnp.int32(4))
    assert lowest(stack, 3) == [4, 5, 6]
    assert np.asarray(stack.mask).tolist() == [False] * 4 + [True] * 2
    # Heads that take no block ask for ranks below 0; any id will do.
    assert 0 <= int(stack.peek(jnp.int32(-7))) <= 6


def test_blocks_that_come_back_go_first_and_in_their_order():
    stack = FreeBlocks.every(6).without(jnp.int32(5))
    given = jnp.asarray([[6, 3], [1, 6], [4, 6]])
    stack = jax.jit(FreeBlocks.with_blocks)(stack, given)
    assert lowest(stack, 6) == [3, 1, 4, 5, 6, 6]
    assert int(stack.count[0]) == 4


@pytest.mark.parametrize("size", [5, 200])
def test_random_takers(size):
    """Against a list."""
    rng, stack, model = np.random.default_rng(size), FreeBlocks.every(size), [*range(size)][::-1]
    held: list[int] = []
    give = jax.jit(FreeBlocks.with_blocks)
    for _ in range(60):
        assert np.asarray(stack.stack)[: int(stack.count[0])].tolist() == model
        if held and rng.random() < 0.5:
            ids = np.full(size, size)
            back = rng.permutation(held)[: rng.integers(1, len(held) + 1)].tolist()
            ids[np.sort(rng.permutation(size)[: len(back)])] = back
            stack, model = give(stack, jnp.asarray(ids)), model + back[::-1]
            held = [block for block in held if block not in back]
        elif model:
            many = int(rng.integers(0, len(model) + 1))
            held += lowest(stack, size)[:many]
            stack, model = stack.without(jnp.int32(many)), model[: len(model) - many]
        assert sorted(held + model) == list(range(size))
