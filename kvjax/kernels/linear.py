"""Small positive definite systems, solved by products.

A triangular solve with many right sides is no product: the BLAS behind it starts threads of its own
on CPUs, once per head, which wait for each other and for the cores that XLA's threads have, and an
accelerator goes through it row by row. A factor's inverse takes a few products instead. The same
is true of a large factor: one of 336 rows took that BLAS, on two busy cores, some twenty times as
long as products.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

LEAF = 64
"""Rows that are factored at once: so few that a BLAS does it in one thread."""


def cholesky_inverted(gram: Float[Array, "*n m m"]) -> Float[Array, "*n m m"]:
    """L⁻¹ of gram = L Lᵀ, which is positive definite: so gram⁻¹ = L⁻ᵀ L⁻¹.

    By blocks: with gram = [[A, Bᵀ], [B, C]] and L_A the factor of A, the lower left one is B L_A⁻ᵀ,
    and the lower right one that of what it leaves of C (Higham, Accuracy and Stability of Numerical
    Algorithms, 2nd edition, section 10.3).
    """
    # What is left of a difference has to be right: no products in fewer bits.
    with jax.default_matmul_precision("highest"):
        return _factor_inverted(gram)


def _factor_inverted(gram: Float[Array, "*n m m"]) -> Float[Array, "*n m m"]:
    size = gram.shape[-1]
    if size <= LEAF:
        return _inverted(jnp.linalg.cholesky(gram))
    half = 1 << (size - 1).bit_length() - 1
    first = _factor_inverted(gram[..., :half, :half])
    below = gram[..., half:, :half] @ jnp.swapaxes(first, -1, -2)
    left = gram[..., half:, half:] - below @ jnp.swapaxes(below, -1, -2)
    return _joined(first, below, _factor_inverted(left))


def _inverted(low: Float[Array, "*n m m"]) -> Float[Array, "*n m m"]:
    """The inverse of a triangular factor.

    By blocks that double: [[A, 0], [B, C]]⁻¹ = [[A⁻¹, 0], [−C⁻¹ B A⁻¹, C⁻¹]] (Higham, section
    14.3).
    """
    size = low.shape[-1]
    half = 1 << (size - 1).bit_length() - 1 if size > 1 else 0
    if 2 * half != size and size > 1:
        first, second = _inverted(low[..., :half, :half]), _inverted(low[..., half:, half:])
        return _joined(first, low[..., half:, :half], second)
    # Of a power of two all blocks of a size at once.
    inverse = 1 / jnp.diagonal(low, axis1=-2, axis2=-1)[..., None, None]
    while (s := inverse.shape[-1]) < size:
        pairs = low.reshape(*low.shape[:-2], size // (2 * s), 2 * s, size // (2 * s), 2 * s)
        pairs = jnp.moveaxis(jnp.diagonal(pairs, axis1=-4, axis2=-2), -1, -3)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        inverse = _joined(first, pairs[..., s:, :s], second)
    return inverse[..., 0, :, :]


def _joined(
    first: Float[Array, "*n a a"], below: Float[Array, "*n b a"], second: Float[Array, "*n b b"]
) -> Float[Array, "*n m m"]:
    """The inverse of a triangular matrix of two blocks, from those of its diagonal ones."""
    below = -second @ (below @ first)
    above = jnp.zeros((*first.shape[:-1], second.shape[-1]), first.dtype)
    return jnp.concatenate(
        [jnp.concatenate([first, above], axis=-1), jnp.concatenate([below, second], axis=-1)],
        axis=-2,
    )
