"""Stacks of free blocks as tests want them."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.store import FreeBlocks


def free_of(mask: np.ndarray | jax.Array, order: Iterable[int] = ()) -> FreeBlocks:
    """A stack of the blocks that a mask marks: those of `order` at the bottom, the lowest of the
    others on top. Above it lie ids that are not free, and some that are no ids."""
    mask = np.asarray(mask)
    first = [block for block in order if mask[block]]
    rest = sorted(set(np.flatnonzero(mask).tolist()) - set(first), reverse=True)
    stack = np.resize(np.array([-1, 0, len(mask) + 7, 1], np.int32), len(mask))
    stack[: len(first) + len(rest)] = first + rest
    return FreeBlocks(jnp.asarray(stack), jnp.asarray([len(first) + len(rest)], jnp.int32))
