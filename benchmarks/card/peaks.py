"""What the memory and the matrix units of the machine can do."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.card.parts import Group, Part
from kvjax.cli.throughput.limits import copy_bandwidth, measure_limits, median_seconds


def hashed(shape: tuple[int, ...], dtype, salt: int = 0) -> jax.Array:
    """Values spread over ±√3 that look random, for pools too large for random numbers.

    Arrays may exceed 2^31 elements, and what lies 2^31 elements apart differs.
    """
    mixed = jnp.full(shape, (0x9E3779B9 * (salt + 1)) & 0xFFFFFFFF, jnp.uint32)
    for axis in range(len(shape)):
        mixed = (mixed ^ lax.broadcasted_iota(jnp.uint32, shape, axis)) * jnp.uint32(0x85EBCA6B)
        mixed ^= mixed >> 15
    return ((mixed >> 8).astype(jnp.float32) * (12**0.5 / 2**24) - 3**0.5).astype(dtype)


def read_bandwidth(size: int) -> float:
    """Bytes per second that a pass reads which writes next to nothing."""
    x = jax.jit(lambda: hashed((size // 4 // 4096, 4096), jnp.float32))()
    found = []
    for axis in (None, 0, 1):
        total = jax.jit(lambda x, axis=axis: jnp.sum(x, axis=axis))
        found.append(median_seconds(lambda total=total: total(x)))
    return x.nbytes / min(found)


def measure_peaks(small: bool) -> dict[str, float]:
    """`measure_limits`, and the bytes/s of reads alone."""
    if small:
        found = {"copy_bytes_per_s": copy_bandwidth(1 << 20, 2e10), "flop_per_s": 1e11}
    else:
        found = measure_limits()
    return {**found, "read_bytes_per_s": read_bandwidth(1 << (20 if small else 33))}


def peaks_group() -> Group:
    """The peaks as a part of a call; XLA must be free to choose how it multiplies."""
    return Group("peaks", (Part("peaks", lambda machine, _: machine.peaks(), seconds=8, limit=60),))
