"""Running counts of marks, from sums that compile to a few kernels."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

BLOCK = 64
"""Entries that are summed by one product with a triangle of ones."""
MOST = 1 << 24
"""Whole numbers up to here are exact in float32."""


def running_count(mask: Bool[Array, "*rows T"]) -> Int32[Array, "*rows T"]:
    """How many entries of each row are marked up to each one, itself included.

    On CPUs `jnp.cumsum` is a tree of small kernels, and each of them has to be compiled; products
    are few, and take a little longer to run.
    """
    if mask.shape[-1] > MOST:
        return jnp.cumsum(mask, axis=-1, dtype=jnp.int32)
    return _running_sums(mask.astype(jnp.float32)).astype(jnp.int32)


def _running_sums(x: Float[Array, "*rows T"]) -> Float[Array, "*rows T"]:
    """Sums of whole numbers up to each one; those of a block first, then those before it."""
    size = x.shape[-1]
    width = size if size <= 2 * BLOCK else BLOCK
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -size % width)])
    x = x.reshape(*x.shape[:-1], -1, width)
    # Sums beyond 256 are not exact in the formats that products may else be rounded to.
    sums = jnp.matmul(
        x, np.triu(np.ones((width, width), np.float32)), precision=lax.Precision.HIGHEST
    )
    if width < size:
        total = sums[..., -1]
        sums = sums + (_running_sums(total) - total)[..., None]
    return sums.reshape(*x.shape[:-2], -1)[..., :size]
