"""Softmax of rows on CPUs, in loops that LLVM makes vectors of."""

from typing import no_type_check

import numba
import numpy as np

from kvjax.kernels.numba_calls import times_power_of_two
from kvjax.kernels.numba_vectors import ROWS

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
