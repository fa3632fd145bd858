"""What of this package is compiled into functions that Numba keeps on disk."""

import functools
import inspect
import sys
import zlib

from kvjax.kernels import (
    numba_calls,
    numba_matrices,
    numba_squares,
    numba_threads,
    numba_tiles,
    numba_vectors,
)


@functools.cache
def stamp(*others: str) -> int:
    """A number that a function closes over, so that what lies on disk is of these sources, and of
    those of other modules that it calls, by their names.

    Numba tells functions on disk by what they close over, and by their own file alone.
    """
    own = numba_calls, numba_threads, numba_vectors, numba_matrices, numba_tiles, numba_squares
    modules = *own, *(sys.modules[name] for name in others)
    return zlib.crc32("".join(map(inspect.getsource, modules)).encode())
