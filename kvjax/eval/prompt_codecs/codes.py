"""What the methods of this folder are made of: codes between two ends, shares, ranks, bytes.

Of arrays of a layer's keys or values [T, H, d] only the first `length` tokens count. Numbers that a
method keeps beside its codes are bfloat16, as those of the codecs of the pool are.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache.store.scaled import divisor, rounded_up
from kvjax.kernels.rounding import rounded

NUMBER = 2
"""Bytes of a number beside codes: bfloat16."""


def in_bfloat16(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """What bfloat16 keeps of numbers, in float32."""
    return rounded(x, jnp.bfloat16)


def in_codes(
    x: Float[Array, "*n"],
    bits: int,
    axis: int | tuple[int, ...],
    counts: Bool[Array, "*#n"] | bool = True,
    clip: float = 1.0,
) -> Float[Array, "*n"]:
    """What numbers are once they are codes 0 … 2^bits − 1 times a scale, and the least one added.

    Source: KIVI (Liu et al. 2024), equation 1.

    Args:
        x: float32 numbers.
        bits: of a code (static).
        axis: axes of the numbers that share a scale and a least number (static).
        counts: which of them do; others are coded with what these give.
        clip: share of the least and of the largest number that the ends stand for.
    """
    most = (1 << bits) - 1
    low = jnp.min(jnp.where(counts, x, jnp.inf), axis, keepdims=True)
    high = jnp.max(jnp.where(counts, x, -jnp.inf), axis, keepdims=True)
    some = low <= high
    zero = in_bfloat16(jnp.where(some, low, 0) * clip)
    scale = rounded_up(jnp.maximum(jnp.where(some, high, 0) * clip - zero, 0) / most)
    return jnp.clip(jnp.round((x - zero) / divisor(scale)), 0, most) * scale + zero


def in_groups(x: Float[Array, "*n c"], bits: int, most: int, clip: float = 1.0) -> Array:
    """Rows coded in equal groups of neighbours, of at most so many (static); see `in_codes`."""
    size = group_size(x.shape[-1], most)
    groups = x.reshape(*x.shape[:-1], -1, size)
    return in_codes(groups, bits, -1, clip=clip).reshape(x.shape)


def group_size(row: int, most: int) -> int:
    """The largest part of a row that divides it and is not above `most`."""
    return max(size for size in range(1, min(row, most) + 1) if row % size == 0)


def first_tokens(num_tokens: int, length: Int32[Array, ""]) -> Bool[Array, " T"]:
    """Which of so many tokens are a prompt's, and no padding."""
    return jnp.arange(num_tokens) < length


def permille[N: (int, Array)](share: int, size: N) -> N:
    """So many thousandths of a size, rounded down."""
    return size * share // 1000


def ranks(x: Float[Array, "*n"], axis: int) -> Int32[Array, "*n"]:
    """The place of each number in ascending order along an axis; of equal ones the first first."""
    return jnp.argsort(jnp.argsort(x, axis=axis, stable=True), axis=axis)


def largest(
    x: Float[Array, "*n"], count: Int32[Array, ""] | int, axis: int = -1
) -> Bool[Array, "*n"]:
    """Which numbers are the `count` largest along an axis; −inf where one does not compete."""
    return (ranks(-x, axis) < count) & (x > -jnp.inf)


def code_bytes(codes: int, bits: int) -> int:
    """Bytes of so many codes, one behind the other."""
    return math.ceil(codes * bits / 8)


def index_bytes(places: int) -> int:
    """Bytes of the number of one of so many places."""
    return 1 if places <= 1 << 8 else 2 if places <= 1 << 16 else 4
