"""Checks of arguments that the kernels share."""

import jax.numpy as jnp


def wanted(name: str, got: object, wanted: object) -> ValueError:
    """The error for an argument that does not fit: its name, what it got and what is wanted."""
    return ValueError(f"{name}: got {got}, wanted {wanted}")


def check_dtype(name: str, array, kind, text: str) -> None:
    """Raise `ValueError` unless the array's dtype is of a kind, such as `jnp.floating`."""
    if not jnp.issubdtype(array.dtype, kind):
        raise wanted(f"{name} dtype", array.dtype, text)


def check_prompt(q, k, tokens_of_q: str) -> tuple[int, int, int]:
    """Check queries [w, H·r, d] against keys [T, H, d].

    Returns:
        T, H and d.

    Raises:
        ValueError: they do not fit; names the argument, what it got and what is wanted.
    """
    for name, array, shape in (("q", q, f"[{tokens_of_q}, H·r, d]"), ("k", k, "[T, H, d]")):
        if array.ndim != 3 or 0 in array.shape:
            raise wanted(f"{name} shape", list(array.shape), shape)
        check_dtype(name, array, jnp.floating, "a floating-point type")
    tokens, heads, d = k.shape
    if q.shape[2] != d:
        raise wanted("q shape", list(q.shape), f"[{tokens_of_q}, H·r, {d}]")
    if q.shape[1] % heads:
        raise wanted("q shape", f"{q.shape[1]} query heads", f"a multiple of {heads} KV heads")
    return tokens, heads, d
