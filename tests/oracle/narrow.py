"""Weights of few bits in plain NumPy: every number is the nearest of a list of all there are."""

import numpy as np

E4M3 = [
    (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    for exponent in range(16)
    for mantissa in range(8)
][:-1]
"""From 0 to 448; an even place in the list is an even number."""
NUMBERS = {"int8": np.arange(128.0), "float8_e4m3fn": np.array(E4M3)}


def narrow_rows(rows: np.ndarray, dtype: str, scale_dtype: np.dtype) -> tuple:
    """Rows of weights [R, in] -> numbers [R, in] and scales [R]; quotients are float32."""
    numbers = NUMBERS[dtype]
    scale = (np.abs(rows).max(1).astype(np.float32) / np.float32(numbers[-1])).astype(scale_dtype)
    scale = scale.astype(np.float32)
    scale[scale == 0] = 1
    wanted = (rows.astype(np.float32) / scale[:, None]).astype(np.float64)
    low = np.clip(np.searchsorted(numbers, np.abs(wanted), "right") - 1, 0, len(numbers) - 2)
    below, above = np.abs(wanted) - numbers[low], numbers[low + 1] - np.abs(wanted)
    up = (above < below) | ((above == below) & (low % 2 == 1))
    return np.sign(wanted) * numbers[low + up], scale
