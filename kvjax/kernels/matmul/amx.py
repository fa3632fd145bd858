"""Products of many rows on CPUs with AMX: both matrices are put into tiles, then multiplied.

Both are dealt in chunks to whichever thread is free. What a sum is added up from, and in which
order, depends on nothing but its row, its column and their length: results are the same in every
bit on any number of threads and among any other rows.
"""

from typing import no_type_check

import jax
import jax.numpy as jnp
import numba
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num
from numba.misc.special import literally

from kvjax.kernels import numba_calls as calls
from kvjax.kernels import numba_source, numba_tiles
from kvjax.kernels import numba_threads as threads
from kvjax.kernels.matmul.by_hand import by_hand
from kvjax.kernels.numba_calls import KINDS
from kvjax.kernels.numba_matrices import hold
from kvjax.kernels.numba_tiles import DEPTH, SIDE, pack_columns, pack_rows, product, step_bytes

NEAR = 1 << 20
"""Bytes of rows that a core's cache has room for, beside what they are multiplied by."""
CHUNKS = 4
"""Least chunks of rows of a call, where it has as many panels."""


@by_hand
def matmul(
    x: Float[Array, "T I"], weight: Num[Array, "I O"], dtype: DTypeLike
) -> Float[Array, "T O"]:
    """See `kvjax.kernels.matmul`; I and O are multiples of `SIDE`."""
    (rows, depth), columns = x.shape, weight.shape[1]
    kinds = KINDS[x.dtype.name], KINDS[weight.dtype.name]
    row_panels, column_panels, steps = -(-rows // SIDE), columns // SIDE, depth // DEPTH
    packed = jax.ShapeDtypeStruct((column_panels, steps, step_bytes(kinds[1])), jnp.uint8)
    results = [jax.ShapeDtypeStruct((row_panels * SIDE, columns), jnp.float32), packed]
    call = jax.ffi.ffi_call(_target(*kinds), results, vmap_method="sequential")
    return call(x, weight)[0][:rows].astype(dtype)


@calls.once
def _target(of_rows: int, of_columns: int) -> str:
    """The name by which programs call it, for two kinds of numbers; all else is read from the
    call."""
    name = f"kvjax_matmul_{of_rows}_{of_columns}"
    stamp = numba_source.stamp()

    @no_type_check
    def task(team):
        if stamp >= 0:
            _work(team, of_rows, of_columns)
        threads.leave(team)

    @no_type_check
    def call(frame):
        if calls.runs(frame) and stamp >= 0:
            _, _, row_panels, column_panels = _shape(frame)
            address = threads.address_of(name)
            threads.run(frame, address, _PACK, column_panels)
            chunks = -(-row_panels // _together(frame, of_rows))
            threads.run(frame, address, _MULTIPLY, chunks)
        return 0

    threads.serve(name, task, call)
    return name


_PACK, _MULTIPLY = 0, 1
"""What the chunks of a call are, first and last."""


@no_type_check
@numba.njit(inline="always")
def _shape(frame):
    """Rows, steps, panels of rows and panels of columns."""
    rows, depth = calls.sizes(frame, 0)[0], calls.sizes(frame, 0)[1]
    columns = calls.sizes(frame, 1)[1]
    return rows, depth // DEPTH, -(-rows // SIDE), columns // SIDE


@no_type_check
@numba.njit(inline="always")
def _together(frame, of_rows):
    """Panels of rows of a chunk."""
    _, steps, panels, _ = _shape(frame)
    return max(1, min(NEAR // (steps * step_bytes(of_rows)), -(-panels // CHUNKS)))


@no_type_check
@numba.njit
def _work(address, of_rows, of_columns):
    """Chunks of a team's call, panels of columns or some of rows, while there are any."""
    chunk = threads.take(address)
    team = calls.words(address)
    if chunk >= team[threads.TOTAL]:
        return
    if team[threads.PHASE] == _MULTIPLY:
        _multiply(address, chunk, of_rows, of_columns)
        return
    while chunk < team[threads.TOTAL]:
        _pack(address, chunk, of_columns)
        threads.finished(address)
        chunk = threads.take(address)


@no_type_check
@numba.njit
def _pack(address, panel, kind):
    """A panel of columns."""
    _ = literally(kind)
    frame = calls.words(calls.words(address)[threads.FRAME])
    _, steps, _, panels = _shape(frame)
    size = calls.row_bytes(1, kind)
    pack_columns(
        calls.argument(frame, 1) + panel * SIDE * size,
        panels * SIDE * size,
        steps,
        calls.result(frame, 1) + panel * steps * step_bytes(kind),
        kind,
    )


@no_type_check
@numba.njit
def _multiply(address, chunk, of_rows, of_columns):
    """Some panels of rows, packed where they stay near, times all of columns."""
    _ = literally(of_rows), literally(of_columns)
    team = calls.words(address)
    frame = calls.words(team[threads.FRAME])
    rows, steps, row_panels, column_panels = _shape(frame)
    together, size = _together(frame, of_rows), calls.row_bytes(1, of_rows)
    of_panel, stride = steps * step_bytes(of_rows), column_panels * SIDE * 4
    packed = np.empty(together * of_panel, np.uint8)
    numba_tiles.begin()
    while chunk < team[threads.TOTAL]:
        first = chunk * together
        last = min(first + together, row_panels)
        for row in range(first, last):
            pack_rows(
                calls.argument(frame, 0) + row * SIDE * steps * DEPTH * size,
                steps * DEPTH * size,
                min(SIDE, rows - row * SIDE),
                steps,
                packed.ctypes.data + (row - first) * of_panel,
                of_rows,
            )
        for column in range(column_panels):
            for row in range(first, last):
                product(
                    packed.ctypes.data + (row - first) * of_panel,
                    calls.result(frame, 1) + column * steps * step_bytes(of_columns),
                    calls.result(frame, 0) + row * SIDE * stride + column * SIDE * 4,
                    steps,
                    (stride, SIDE // 2 * stride, SIDE // 2 * 4),
                    of_rows,
                    of_columns,
                    True,
                )
        threads.finished(address)
        chunk = threads.take(address)
    numba_tiles.release()
    hold(packed)
