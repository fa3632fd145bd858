"""Products of a few rows on CPUs with a matrix whose inputs lie along its rows, as those of tied
embeddings do: what is read on end is multiplied on end, and a vector's lanes are added up at last.

A row's products are added up in one order, whatever other rows there are and however many threads.
"""

import functools
from typing import no_type_check

import numba
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num
from numba.misc.special import literally

from kvjax.kernels import numba_calls as calls
from kvjax.kernels import numba_source
from kvjax.kernels import numba_threads as threads
from kvjax.kernels.matmul.by_hand import by_hand
from kvjax.kernels.matmul.numba_cpu import by_some
from kvjax.kernels.numba_calls import float32s
from kvjax.kernels.numba_matrices import hold
from kvjax.kernels.numba_vectors import WIDTH, row_dots

MOST_ROWS = {"float32": 32, "bfloat16": 8, "int8": 8}
"""Rows up to which XLA takes longer, by the dtype of weights."""
CHUNK = 64
"""Rows of the matrix in a chunk."""


@functools.partial(by_hand, axis=1)
def matmul(
    x: Float[Array, "T I"], weight: Num[Array, "O I"], dtype: DTypeLike
) -> Float[Array, "T O"]:
    """See `kvjax.kernels.matmul`; I is a multiple of `WIDTH`, O at least that."""
    return by_some(_target, x, weight, 0, dtype)


@calls.once
def _target(kind: int, together: int) -> str:
    """The name by which programs call what multiplies, for what weights are and how many rows are
    multiplied at once; all else is read from the call."""
    name = f"kvjax_matmul_by_rows_{kind}_{together}"
    stamp = numba_source.stamp()

    @no_type_check
    def task(team):
        if stamp >= 0:
            _work(team, kind, together)
        threads.leave(team)

    @no_type_check
    def call(frame):
        if calls.runs(frame) and stamp >= 0:
            chunks = -(-calls.sizes(frame, 1)[0] // CHUNK)
            threads.run(frame, threads.address_of(name), 0, chunks)
        return 0

    threads.serve(name, task, call)
    return name


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
    columns, size = calls.sizes(frame, 1)[0], calls.row_bytes(depth, kind)
    group, own = WIDTH // together, min(CHUNK, columns)
    found, sums = np.empty((together, group), np.float32), np.empty((rows, own), np.float32)
    while chunk < team[threads.TOTAL]:
        # The last ones may be some of those before: they become the same again.
        first = min(chunk * CHUNK, columns - own)
        for at in range(0, own, group):
            begin = min(at, own - group)
            for row in range(0, rows, together):
                row_dots(
                    calls.argument(frame, 0) + row * depth * 4,
                    calls.argument(frame, 1) + (first + begin) * size,
                    found.ctypes.data,
                    depth // WIDTH,
                    (depth * 4, size),
                    kind,
                    together,
                )
                for i in range(together):
                    for j in range(group):
                        sums[row + i, begin + j] = found[i, j]
        for row in range(rows):
            out = float32s(calls.result(frame, 0) + (row * columns + first) * 4)
            for j in range(own):
                out[j] = sums[row, j]
        threads.finished(address)
        chunk = threads.take(address)
    hold(found, sums)
