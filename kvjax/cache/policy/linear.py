"""Small positive definite systems, solved by products.

A triangular solve with many right sides is no product: the BLAS behind it starts threads of its own
on CPUs, once per head, which wait for each other and for the cores that XLA's threads have, and an
accelerator goes through it row by row. A factor's inverse takes a few products instead.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def cholesky_inverted(gram: Float[Array, "*n m m"]) -> Float[Array, "*n m m"]:
    """L⁻¹ of gram = L Lᵀ, which is positive definite: so gram⁻¹ = L⁻ᵀ L⁻¹.

    By blocks that double: [[A, 0], [B, C]]⁻¹ = [[A⁻¹, 0], [−C⁻¹ B A⁻¹, C⁻¹]] (Higham, Accuracy and
    Stability of Numerical Algorithms, 2nd edition, section 14.3).
    """
    low = jnp.linalg.cholesky(gram)
    lead, size = low.shape[:-2], low.shape[-1]
    whole = 1 << (size - 1).bit_length()
    diagonal = jnp.diagonal(low, axis1=-2, axis2=-1)
    # Beyond it the identity, which is its own inverse.
    edge = (0, whole - size)
    around = [(0, 0)] * len(lead)
    low = jnp.pad(low, [*around, edge, edge])
    inverse = jnp.pad(1 / diagonal, [*around, edge], constant_values=1)[..., None, None]
    # What is left of a difference has to be right: no products in fewer bits.
    with jax.default_matmul_precision("highest"):
        while (s := inverse.shape[-1]) < whole:
            pairs = low.reshape(*lead, whole // (2 * s), 2 * s, whole // (2 * s), 2 * s)
            pairs = jnp.moveaxis(jnp.diagonal(pairs, axis1=-4, axis2=-2), -1, -3)
            first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
            below = -second @ (pairs[..., s:, :s] @ first)
            above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
            below = jnp.concatenate([below, second], axis=-1)
            inverse = jnp.concatenate([above, below], axis=-2)
    return inverse[..., 0, :size, :size]
