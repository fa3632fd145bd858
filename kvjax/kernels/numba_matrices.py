"""Softmax of rows, products and systems of equations on CPUs, where they stay in a core's cache."""

from typing import no_type_check

import numba
import numpy as np

from kvjax.kernels.numba_calls import times_power_of_two
from kvjax.kernels.numba_vectors import ROWS, TALL, VECTORS, WIDTH, product

BLOCK = 8 * TALL
"""Rows that are factored at once."""
FAST = {"reassoc", "contract", "arcp", "nsz", "afn"}
"""Sums in any order; but what is not finite stays so, and is nobody else's."""
LOG2_E = np.float32(1.4426950408889634)
POWER_OF_TWO = tuple(
    np.float32(x)
    for x in (1, 0.69314718, 0.24022651, 0.05550411, 0.00961813, 0.00133336, 0.00015404)
)
"""Of 2^x between −½ and ½: the Taylor series, to 1e-8 of it."""


@no_type_check
@numba.njit(inline="always", fastmath=FAST)
def exponentials(s, n, lane):
    """Make of the first n logits of a row their exponentials, over the largest one's.

    The row is as long as n rounded up to a multiple of `ROWS`; what it has beyond n becomes 0.
    `lane` is room for `ROWS` numbers.

    Returns:
        The largest logit, and the sum of the exponentials.
    """
    padded = -(-n // ROWS) * ROWS
    for t in range(n, padded):
        s[t] = -np.inf
    # As many maxima as a vector has lanes: of one alone there would be no vectors.
    for j in range(ROWS):
        lane[j] = -np.inf
    for t in range(0, padded, ROWS):
        for j in range(ROWS):
            lane[j] = s[t + j] if s[t + j] > lane[j] else lane[j]
    most = lane[0]
    for j in range(1, ROWS):
        most = lane[j] if lane[j] > most else most
    for t in range(padded):
        s[t] = exp(s[t] - most)
    for t in range(n, padded):
        s[t] = 0
    total = np.float32(0)
    for t in range(padded):
        total += s[t]
    return most, total


@no_type_check
@numba.njit(inline="always", fastmath=FAST)
def exp(x):
    """e^x of a float32 that is not above 0, to 1e-7 of it; what is below 2^−125 becomes that."""
    y = x * LOG2_E
    y = np.float32(-125) if y < np.float32(-125) else y
    whole = np.floor(y + np.float32(0.5))
    y -= whole
    p = POWER_OF_TWO[6]
    p = p * y + POWER_OF_TWO[5]
    p = p * y + POWER_OF_TWO[4]
    p = p * y + POWER_OF_TWO[3]
    p = p * y + POWER_OF_TWO[2]
    p = p * y + POWER_OF_TWO[1]
    p = p * y + POWER_OF_TWO[0]
    return times_power_of_two(p, np.int32(whole))


@no_type_check
@numba.njit(inline="always")
def multiply(a, b, out, rows, depth, columns, strides, width):
    """The product of a [rows, depth] and b [depth, columns].

    Args: addresses, of the first rows; a and the result have room for rows up to a multiple of
    `TALL`; the depth, at least 1; bytes from row to row of the three; numbers of a vector, of which
    the columns are a multiple, a literal.
    """
    whole = columns - columns % (width * VECTORS)
    for i in range(0, rows, TALL):
        own, into = a + i * strides[0], out + i * strides[2]
        for c in range(0, whole, width * VECTORS):
            product(own, b + c * 4, into + c * 4, depth, strides, width, VECTORS)
        for c in range(whole, columns, width):
            product(own, b + c * 4, into + c * 4, depth, strides, width, 1)


@no_type_check
@numba.njit
def hold(*arrays):
    """Keep arrays whose addresses are in use: Numba frees one where it is named last."""


@no_type_check
@numba.njit
def room(n):
    """Rows of a matrix for `solve`, of n rows and columns, and columns."""
    return -(-n // BLOCK) * BLOCK, -(-n // WIDTH) * WIDTH


@no_type_check
@numba.njit(fastmath=FAST, error_model="numpy")
def solve(gram, n, ridge, right, width):
    """Make of right [n, m] the x of (gram + ridge · 1) x = right.

    Its rows and columns, of which gram has `room`, are n; it is positive semidefinite, what it has
    in columns beyond is 0. It becomes the factor U of Uᵀ U, and Uᵀ in its lower half, by blocks of
    rows, of which products are taken off what is behind them (Higham, Accuracy and Stability of
    Numerical Algorithms, 2nd edition, section 10.3). `width` is that of vectors, of which m is a
    multiple, a literal.
    """
    across, m = gram.shape[1], right.shape[1]
    start, known = gram.ctypes.data, right.ctypes.data
    taken = np.empty((BLOCK, max(across, m)), np.float32)
    off = taken.ctypes.data
    to_gram = (across * 4, across * 4, taken.shape[1] * 4)
    to_right = (across * 4, m * 4, taken.shape[1] * 4)
    for i in range(n):
        gram[i, i] += ridge
    for first in range(0, n, BLOCK):
        last = min(first + BLOCK, n)
        for k in range(first, last):
            scale = np.float32(1) / np.sqrt(gram[k, k])
            for j in range(k, n):
                gram[k, j] *= scale
            for i in range(k + 1, last):
                _subtract(gram[i, i:n], gram[k, i], gram[k, i:n])
        transpose(gram[first:last], gram[:, first:last], last, n)
        for i in range(last, n, BLOCK):
            above, rows = start + (first * across + last) * 4, min(BLOCK, n - i)
            below = start + (i * across + first) * 4
            multiply(below, above, off, rows, last - first, across - last, to_gram, WIDTH)
            for r in range(rows):
                _subtract(gram[i + r, last:], np.float32(1), taken[r])
    for first in range(0, n, BLOCK):
        last = min(first + BLOCK, n)
        if first > 0:
            own = start + first * across * 4
            multiply(own, known, off, last - first, first, m, to_right, width)
            for r in range(first, last):
                _subtract(right[r], np.float32(1), taken[r - first])
        for k in range(first, last):
            _divide(right[k], gram[k, k])
            for i in range(k + 1, last):
                _subtract(right[i], gram[k, i], right[k])
    for first in range((n - 1) // BLOCK * BLOCK, -1, -BLOCK):
        last = min(first + BLOCK, n)
        if last < n:
            own, behind = start + (first * across + last) * 4, known + last * m * 4
            multiply(own, behind, off, last - first, n - last, m, to_right, width)
            for r in range(first, last):
                _subtract(right[r], np.float32(1), taken[r - first])
        for k in range(last - 1, first - 1, -1):
            for i in range(k + 1, last):
                _subtract(right[k], gram[k, i], right[i])
            _divide(right[k], gram[k, k])
    hold(gram, right, taken)


@no_type_check
@numba.njit
def transpose(x, out, first, last):
    """Write columns of x from the first to before the last as rows of the same numbers, a few at a
    time, as all of neither are near."""
    for start in range(first, last, ROWS):
        for begin in range(0, x.shape[0], ROWS):
            for i in range(begin, min(begin + ROWS, x.shape[0])):
                for j in range(start, min(start + ROWS, last)):
                    out[j, i] = x[i, j]


@no_type_check
@numba.njit(inline="always", fastmath=FAST, error_model="numpy")
def _subtract(row, times, other):
    for j in range(row.shape[0]):
        row[j] -= times * other[j]


@no_type_check
@numba.njit(inline="always", fastmath=FAST, error_model="numpy")
def _divide(row, by):
    for j in range(row.shape[0]):
        row[j] /= by
