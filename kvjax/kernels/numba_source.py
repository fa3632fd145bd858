"""What of this package is compiled into functions that Numba keeps on disk."""

import functools
import inspect
import zlib

from kvjax.kernels import numba_calls, numba_matrices, numba_threads, numba_vectors


@functools.cache
def stamp() -> int:
    """A number that a function closes over, so that what lies on disk is of these sources.

    Numba tells functions on disk by what they close over, and by their own file alone.
    """
    modules = numba_calls, numba_threads, numba_vectors, numba_matrices
    return zlib.crc32("".join(map(inspect.getsource, modules)).encode())
