"""Numbers as a narrower type keeps them."""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def rounded(x: Float[Array, "*n"], dtype: DTypeLike) -> Float[Array, "*n"]:
    """What a floating-point type keeps of float32 numbers, in float32.

    Where XLA may keep more digits than it is told, as by default it may on GPUs, it takes a number
    that is rounded and widened again for the number itself, and what rounding loses for zero.
    """
    kept = jnp.finfo(dtype)
    return lax.reduce_precision(x.astype(jnp.float32), kept.nexp, kept.nmant)
