"""What is stored of a row of keys or values, worked out row by row from the definition."""

import functools

import ml_dtypes
import numpy as np

FORMATS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
SHARES = {5: (1.0, 0.92), 4: (1.0, 0.9, 0.8), 2: (1.0, 0.85, 0.7, 0.55)}
TWELVE = np.array([n * (64 + n * n) / 64 for n in np.arange(-5.5, 6)])


def scale_for(value: float) -> float:
    """The least bfloat16 number that is not below a value."""
    near = ml_dtypes.bfloat16(value)
    if float(near) < float(np.float32(value)):
        near = np.nextafter(near, ml_dtypes.bfloat16(np.inf))
    return float(near)


@functools.cache
def rotation(d: int) -> np.ndarray:
    """Entry (i, j) is −1 to the number of bits that i and j share, in parts of the largest power
    of two that divides d."""
    part = d & -d
    matrix = np.zeros((d, d))
    for i in range(d):
        for j in range(d):
            if i // part == j // part:
                shared = bin((i % part) & (j % part)).count("1")
                matrix[i, j] = (-1) ** shared / np.sqrt(part)
    return matrix


def decoded(name: str, row: np.ndarray) -> np.ndarray:
    """What a codec makes of one row, in float64; NaN where an entry is not finite."""
    row = np.asarray(row, np.float64)
    if name.startswith("mustafar"):
        kept = len(row) - int(name.removeprefix("mustafar")) * len(row) // 100
        stays = sorted(range(len(row)), key=lambda i: -abs(row[i]))[:kept]
        rounded = row.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
        return np.where(np.isin(np.arange(len(row)), stays), rounded, 0)
    if not np.isfinite(row).all():
        return np.full(row.shape, np.nan)
    if name.startswith("affine"):
        steps = 2 ** int(name.removeprefix("affine")) - 1
        zero = float(ml_dtypes.bfloat16(np.float32(row.min())))
        scale = scale_for(max(row.max() - zero, 0) / steps) or 1.0
        return np.clip(np.round((row - zero) / scale), 0, steps) * scale + zero
    top = float(np.max(np.abs(row)))
    if name in FORMATS:
        kind = FORMATS[name]
        scale = scale_for(top / float(ml_dtypes.finfo(kind).max)) or 1.0
        return (row / scale).astype(np.float32).astype(kind).astype(np.float64) * scale
    if name == "int8":
        scale = scale_for(top / 127) or 1.0
        return np.round(row / scale) * scale
    if name == "int3.6":
        levels, shares = TWELVE, (1.0, 0.92, 0.84, 0.76)
    else:
        bits = int(name.removeprefix("int"))
        levels, shares = np.arange(2**bits) - (2**bits - 1) / 2, SHARES[bits]
    turned = rotation(len(row)) @ row
    top = float(np.max(np.abs(turned)))
    if top == 0:
        return np.zeros(row.shape)
    found = []
    for share in shares:
        step = top * share / levels[-1]
        level = levels[np.argmin(np.abs(turned[:, None] / step - levels), axis=1)]
        found.append((np.sum((level * step - turned) ** 2), level))
    level = min(found, key=lambda pair: pair[0])[1]
    # The row's product with what it decodes to is its square.
    scale = float(ml_dtypes.bfloat16(np.sum(turned**2) / np.sum(turned * level)))
    return rotation(len(row)) @ level * scale
