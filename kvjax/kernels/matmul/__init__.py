"""Products of activations and weights, as processors without accelerators are fast at them."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

from kvjax.kernels.checks import check_dtype, wanted
from kvjax.kernels.choice import Choice, choose
from kvjax.kernels.device import Device, check_in_parts, check_numba
from kvjax.kernels.matmul.by_hand import plain

LEAST_ROWS = 64
"""Rows from which on it pays to put weights into the order in which AMX reads them."""


def matmul(
    x: Float[Array, "T I"],
    weight: Num[Array, "A B"],
    *,
    axis: int = 0,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "T O"]:
    """x times a matrix, added up in float32.

    On CPUs with AMX, float32 numbers of many rows are taken as two of bfloat16 each, as JAX does on
    TPUs at precision "high": off by less than 2⁻¹⁶ of each product. With
    `jax.default_matmul_precision("highest")` they are multiplied as they are, on every device.

    Args:
        x: activations.
        weight: a matrix [I, O] of their dtype, or of int8.
        axis: of the matrix, on which the inputs lie: 1 for one [O, I], as embeddings are.
        dtype: of the result; that of x by default.
        implementation: "amx" (CPUs that have it, for many rows), "numba" (CPUs, for few) or
            "xla"; None picks by device and shape (`kvjax.kernels.explain` says which and why).

    Raises:
        ValueError: an argument does not fit, or the implementation asked for is unknown or does not
            serve the call; names the argument, what it got and what is wanted.
    """
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    name = choice(x, weight, axis=axis, implementation=implementation).name
    if name == "amx":
        from kvjax.kernels.matmul import amx

        return amx.matmul(x, weight, dtype)
    if name == "numba":
        from kvjax.kernels.matmul import numba_cpu, numba_rows

        return (numba_cpu, numba_rows)[axis].matmul(x, weight, dtype)
    return plain(x, weight, axis, dtype)


def choice(x, weight, *, axis: int = 0, implementation: str | None = None, **_) -> Choice:
    """The implementation of a call of `matmul`."""
    if x.ndim != 2 or x.shape[1] == 0:
        raise wanted("x shape", list(x.shape), "[T, I], I at least 1")
    if axis not in (0, 1):
        raise wanted("axis", axis, "0 or 1")
    if weight.ndim != 2 or weight.shape[axis] != x.shape[1] or 0 in weight.shape:
        shape = (f"[{x.shape[1]}, O]", f"[O, {x.shape[1]}]")[axis]
        raise wanted("weight shape", list(weight.shape), shape)
    check_dtype("x", x, jnp.floating, "a floating-point type")
    if weight.dtype not in (x.dtype, jnp.int8):
        raise wanted("weight dtype", weight.dtype, f"that of x, {x.dtype}, or int8")

    def check_rows(pays: bool) -> None:
        if implementation is None and not pays:
            raise NotImplementedError(f"{x.shape[0]} rows of {weight.dtype} faster than others")

    def check_kinds(first: int, last: int, least: int = 1) -> None:
        if x.shape[0] == 0:
            raise NotImplementedError("no rows")
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            raise NotImplementedError(f"{x.dtype}")
        if weight.shape[0] % first or weight.shape[1] % last or len(weight) < least:
            raise NotImplementedError(f"a matrix of {list(weight.shape)}")

    def amx(where: Device) -> None:
        check_numba(where)
        from kvjax.kernels import numba_tiles

        numba_tiles.check()
        if axis:
            raise NotImplementedError("matrices whose inputs lie on axis 1")
        check_kinds(numba_tiles.DEPTH, numba_tiles.SIDE)
        check_rows(x.shape[0] >= LEAST_ROWS)
        check_in_parts(x)

    def numba(where: Device) -> None:
        check_numba(where)
        from kvjax.kernels.matmul import numba_cpu, numba_rows

        if axis:
            check_kinds(1, numba_rows.WIDTH, least=numba_rows.WIDTH)
            most = numba_rows.MOST_ROWS[weight.dtype.name]
        else:
            check_kinds(numba_cpu.AT_ONCE, numba_cpu.ROWS)
            most = numba_cpu.MOST_ROWS[weight.dtype.name]
        # Of float32 XLA reads as fast, for one row.
        check_rows(x.shape[0] <= most and (x.shape[0] > 1 or weight.dtype != jnp.float32))

    return choose(implementation, {"amx": amx, "numba": numba, "xla": lambda _: None}, x)


matmul.choice = choice  # type: ignore[attr-defined]
