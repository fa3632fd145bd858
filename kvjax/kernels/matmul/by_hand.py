"""Products that are no operations of JAX, with the derivatives of those that are."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

Product = Callable[[Float[Array, "T I"], Num[Array, "I O"], DTypeLike], Float[Array, "T O"]]


def by_hand(product: Product, axis: int = 0) -> Any:
    """A product of activations and weights, whose inputs lie on an axis, in a dtype, with
    derivatives: those of `plain`, of what is differentiated alone."""
    found = jax.custom_jvp(product, nondiff_argnums=(2,))

    def derivative(dtype: DTypeLike, operands: tuple, changes: tuple) -> tuple[Array, Array]:
        (x, weight), (of_x, of_weight) = operands, changes
        out = found(x, weight, dtype)
        change = jnp.zeros_like(out)
        if not isinstance(of_x, SymbolicZero):
            change += plain(of_x, weight, axis, dtype)
        if not isinstance(of_weight, SymbolicZero):
            change += plain(x, of_weight, axis, dtype)
        return out, change

    found.defjvp(derivative, symbolic_zeros=True)
    return functools.wraps(product)(found)


def plain(
    x: Float[Array, "T I"], weight: Num[Array, "A B"], axis: int, dtype: DTypeLike
) -> Float[Array, "T O"]:
    """The same product as an operation of JAX."""
    dims = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(x, weight.astype(x.dtype), dims, preferred_element_type=dtype)
