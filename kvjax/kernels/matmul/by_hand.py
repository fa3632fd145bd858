"""Products that are no operations of JAX, with the derivatives of those that are."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

Product = Callable[[Float[Array, "T I"], Num[Array, "I O"], DTypeLike], Float[Array, "T O"]]


def by_hand(product: Product) -> Any:
    """A product of activations and weights, in a dtype, that JAX can go back through: there it is
    what JAX makes of `x @ weight`."""
    found = jax.custom_vjp(product, nondiff_argnums=(2,))

    def forward(x: Array, weight: Array, dtype: DTypeLike) -> Any:
        return product(x, weight, dtype), (x, weight)

    def back(dtype: DTypeLike, operands: tuple[Array, Array], slope: Array) -> Any:
        def plain(x: Array, weight: Array) -> Array:
            return (x @ weight.astype(x.dtype)).astype(dtype)

        return jax.vjp(plain, *operands)[1](slope)

    found.defvjp(forward, back)
    return functools.wraps(product)(found)
