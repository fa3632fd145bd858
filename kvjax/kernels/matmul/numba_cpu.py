"""Products of a few rows on CPUs: every weight is read once, in the order in which it lies.

A chunk is some columns of the matrix. Four of its rows at a time are added, times what the rows of
activations have there, to sums that stay in a core's first cache, and those that come are fetched
before. A row's sums are added up in the order of the matrix's rows, whatever other rows there are
and however many threads.
"""

from collections.abc import Callable
from typing import no_type_check

import jax
import jax.numpy as jnp
import numba
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num
from numba.misc.special import literally

from kvjax.kernels import numba_calls as calls
from kvjax.kernels import numba_source
from kvjax.kernels import numba_threads as threads
from kvjax.kernels.matmul.by_hand import by_hand
from kvjax.kernels.numba_calls import FLOAT32, KINDS, float32s
from kvjax.kernels.numba_matrices import hold
from kvjax.kernels.numba_vectors import AT_ONCE, ROWS, add_products

MOST_ROWS = {"float32": 32, "bfloat16": 16, "int8": 16}
"""Rows up to which XLA takes longer, by the dtype of weights."""
TOGETHER = 8
"""Rows of activations whose sums are made at once, at most."""
CHUNK = 1024
"""Bytes of a row of the matrix that are read on end; of narrow ones half of that."""
BETWEEN = 8 * ROWS
"""Numbers between rows of sums: rows a page apart would wait for each other."""


@by_hand
def matmul(
    x: Float[Array, "T I"], weight: Num[Array, "I O"], dtype: DTypeLike
) -> Float[Array, "T O"]:
    """See `kvjax.kernels.matmul`; I is a multiple of `AT_ONCE`, O one of `ROWS`."""
    return by_some(_target, x, weight, 1, dtype)


def by_some(
    target: Callable[[int, int], str],
    x: Float[Array, "T I"],
    weight: Num[Array, "A B"],
    axis: int,
    dtype: DTypeLike,
) -> Float[Array, "T O"]:
    """The product by what multiplies some rows at once: a power of two, as many as there are or
    `TOGETHER`.

    Args:
        target: the name of a function for the kind of weights and these rows.
        x: activations.
        weight: the matrix.
        axis: of the matrix, on which the outputs lie.
        dtype: of the result.
    """
    rows = x.shape[0]
    together = min(TOGETHER, 1 << (rows - 1).bit_length())
    x = jnp.pad(x.astype(jnp.float32), ((0, -rows % together), (0, 0)))
    call = jax.ffi.ffi_call(
        target(KINDS[weight.dtype.name], together),
        jax.ShapeDtypeStruct((x.shape[0], weight.shape[axis]), jnp.float32),
        vmap_method="sequential",
    )
    return call(x, weight)[:rows].astype(dtype)


@calls.once
def _target(kind: int, together: int) -> str:
    """The name by which programs call what multiplies, for what weights are and how many rows are
    multiplied at once; all else is read from the call."""
    name = f"kvjax_matmul_of_few_{kind}_{together}"
    stamp = numba_source.stamp()

    @no_type_check
    def task(team):
        if stamp >= 0:
            _work(team, kind, together)
        threads.leave(team)

    @no_type_check
    def call(frame):
        if calls.runs(frame) and stamp >= 0:
            columns = calls.sizes(frame, 1)[1]
            threads.run(frame, threads.address_of(name), 0, -(-columns // _width(columns, kind)))
        return 0

    threads.serve(name, task, call)
    return name


@no_type_check
@numba.njit(inline="always")
def _width(columns, kind):
    """Columns of a chunk: an equal share of all, in whole vectors."""
    most = CHUNK // 4 if kind == FLOAT32 else CHUNK // 2
    vectors, chunks = columns // ROWS, -(-columns // most)
    return -(-vectors // chunks) * ROWS


@no_type_check
@numba.njit
def _work(address, kind, together):
    """Chunks of a team's call, while there are any."""
    _ = literally(kind), literally(together)
    chunk = threads.take(address)
    team = calls.words(address)
    if chunk >= team[threads.TOTAL]:
        return
    frame = calls.words(team[threads.FRAME])
    rows, depth = calls.sizes(frame, 0)[0], calls.sizes(frame, 0)[1]
    columns = calls.sizes(frame, 1)[1]
    width, across = _width(columns, kind), calls.row_bytes(columns, kind)
    sums = np.empty((rows, width + BETWEEN), np.float32)
    while chunk < team[threads.TOTAL]:
        first = chunk * width
        own = min(width, columns - first)
        sums[:] = 0
        for i in range(0, depth, AT_ONCE):
            for row in range(0, rows, together):
                add_products(
                    calls.argument(frame, 1) + i * across + calls.row_bytes(first, kind),
                    calls.argument(frame, 0) + (row * depth + i) * 4,
                    sums.ctypes.data + row * (width + BETWEEN) * 4,
                    own // ROWS,
                    (across, depth * 4, (width + BETWEEN) * 4),
                    kind,
                    together,
                )
        for row in range(rows):
            out = float32s(calls.result(frame, 0) + (row * columns + first) * 4)
            for j in range(own):
                out[j] = sums[row, j]
        threads.finished(address)
        chunk = threads.take(address)
    hold(sums)
