"""Codecs of 8, 5, 4, 3.6 and 2 bits: every row as small numbers and a scale of its own.

A row follows from what is stored of it alone, so blocks can be freed, moved and shared as they are.
Scales are bfloat16. Of 8 bits they are rounded up, and codes are those of the rounded scale, so
that rounding costs nothing but range; entries next to the largest number of the rows' dtype become
a little smaller, so that they stay finite. A row that is not finite is stored with the scale NaN:
it decodes to NaN and hides nothing.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

from kvjax.cache.store.codec import Codec
from kvjax.errors import UserError
from kvjax.kernels.encoded import Codes, Factors

Stored = dict[str, Array]
"""`codes` [*n, w] and `scale` [*n], bfloat16."""


@dataclasses.dataclass(frozen=True)
class Scaled(Codec):
    """Rows are codes times a scale per row."""

    @property
    def form(self) -> str:
        """What kernels call the codes."""
        return self.name

    def codes(self, stored: dict[str, Any]) -> Codes:
        return Codes(stored["codes"], stored["scale"])

    def factors(self, stored: Stored) -> Factors:
        return Factors(stored["codes"], stored["scale"])

    def turned(self, rows: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        """Rows in the basis in which they are coded, or back."""
        return rows

    def decode(self, stored: Stored) -> Float[Array, "*n d"]:
        return self.turned(self.factors(stored).rows).astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class Floats(Scaled):
    """Eight-bit floating point: "e4m3" (3 bits of mantissa) or "e5m2" (2, and more range).

    Source: Micikevicius et al., FP8 Formats for Deep Learning (2022), section 3. The largest entry
    of a row becomes the largest number of the format.
    """

    kind: str = "e4m3"

    @property
    def name(self) -> str:
        return self.kind

    def encode(self, rows: Float[Array, "*n d"]) -> Stored:
        stored = jnp.dtype({"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}[self.kind])
        rows = rows.astype(jnp.float32)
        top = jnp.max(jnp.abs(rows), axis=-1)
        most = float(jnp.finfo(stored).max)
        scale = scale_for(top, most, self.dtype)
        codes = jnp.where(jnp.isfinite(top)[..., None], rows / divisor(scale)[..., None], 0)
        codes = jnp.clip(codes, -most, most)
        return {"codes": codes.astype(stored), "scale": as_scale(scale, top)}


@dataclasses.dataclass(frozen=True)
class Integers(Scaled):
    """Whole numbers of 8, 5, 4 or 2 bits.

    Those of 8 bits are −127 … 127 times the scale. Rows of fewer bits are rotated first (a
    Hadamard matrix, as of QuaRot, section 4), which spreads what single channels have over all of
    them; what all channels have in common it gathers in one, so rows with a mean far from zero lose
    much, and those of the models measured have none. Levels lie at ±½, ±1½, …; the outermost stands
    for the share of the row's largest entry, of a few, that leaves the least squared error. The
    scale is then the one with which the product of a row and what it decodes to is the row's square
    (EDEN, section 3): logits are not drawn to 0, as they are by the scale of least error.
    """

    bits: int = 8

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    def check(self, head_dim: int) -> None:
        packed = max(8 // width for width in PLANES[self.bits])
        if head_dim % packed:
            raise UserError(
                f"cache_dtype {self.name} packs {packed} numbers into a byte, and the head "
                f"dimension is {head_dim}: give int8"
            )

    def turned(self, rows: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        return rows if self.bits == 8 else rotated(rows)

    def encode(self, rows: Float[Array, "*n d"]) -> Stored:
        rows = self.turned(rows.astype(jnp.float32))
        top = jnp.max(jnp.abs(rows), axis=-1)
        finite = jnp.where(jnp.isfinite(top)[..., None], rows, 0)
        if self.bits == 8:
            scale = scale_for(top, 127, self.dtype)
            codes = jnp.clip(jnp.round(finite / divisor(scale)[..., None]), -127, 127)
            return {"codes": codes.astype(jnp.int8), "scale": as_scale(scale, top)}
        half = 1 << (self.bits - 1)

        def levels(rows):
            return jnp.clip(jnp.floor(rows), -half, half - 1) + 0.5

        level, scale = in_levels(finite, top, levels, half - 0.5, SHARES[self.bits])
        codes = (level + half - 0.5).astype(jnp.uint8)
        return {"codes": packed(codes, PLANES[self.bits]), "scale": as_scale(scale, top)}

    def factors(self, stored: Stored) -> Factors:
        codes = stored["codes"]
        if self.bits < 8:
            codes = unpacked(codes, PLANES[self.bits]).astype(jnp.float32)
            codes = codes - ((1 << self.bits) - 1) / 2
        return Factors(codes, stored["scale"])


@dataclasses.dataclass(frozen=True)
class Companded(Scaled):
    """Twelve levels, closer together near 0: two bits, and a fifth of a byte.

    Rows are rotated and scaled as `Integers` of few bits are. Rotated entries are close to normal,
    and levels n + n³ / 64, n of ±½ … ±5½, lose a sixth less of these than even ones, as Max's do
    (Quantizing for minimum distortion, 1960), of which a table would have to be looked up.
    """

    @property
    def name(self) -> str:
        return "int3.6"

    def check(self, head_dim: int) -> None:
        if head_dim % 4:
            raise UserError(
                f"cache_dtype {self.name} packs 4 numbers into a byte, and the head dimension is "
                f"{head_dim}: give int8"
            )

    def turned(self, rows: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        return rotated(rows)

    def encode(self, rows: Float[Array, "*n d"]) -> Stored:
        rows = rotated(rows.astype(jnp.float32))
        top = jnp.max(jnp.abs(rows), axis=-1)
        finite = jnp.where(jnp.isfinite(top)[..., None], rows, 0)
        curve = [companded(n + 0.5) for n in range(6)]
        middles = [(low + high) / 2 for low, high in itertools.pairwise(curve)]

        def numbers(rows):
            found = functools.reduce(jnp.add, (jnp.abs(rows) >= x for x in middles), 0.5)
            return jnp.where(rows < 0, -found, found)

        level, scale = in_levels(
            finite, top, lambda x: companded(numbers(x)), curve[-1], (1.0, 0.92, 0.84, 0.76)
        )
        codes = (numbers(level) + 5.5).astype(jnp.uint8)
        parts = packed(codes & low_bits(2), (2,)), thirds(codes >> np.uint8(2))
        return {"codes": jnp.concatenate(parts, axis=-1), "scale": as_scale(scale, top)}

    def factors(self, stored: Stored) -> Factors:
        codes = stored["codes"]
        # A quarter of d bytes, and then a fifth of it.
        quarter = codes.shape[-1] * 5 // 9
        low = unpacked(codes[..., :quarter], (2,))
        codes = low | from_thirds(codes[..., quarter:], 4 * quarter) << np.uint8(2)
        return Factors(companded(codes.astype(jnp.float32) - 5.5), stored["scale"])


def companded(number: Any) -> Any:
    """The level with a number of ±½ … ±5½."""
    return number + number * number * number / 64


def thirds(digits: UInt8[Array, "*n d"]) -> UInt8[Array, "*n w"]:
    """Five numbers below 3 to a byte: those of the first fifth of a row count once."""
    width = -(-digits.shape[-1] // 5)
    pad = [(0, 0)] * (digits.ndim - 1) + [(0, 5 * width - digits.shape[-1])]
    parts = jnp.split(jnp.pad(digits, pad), 5, axis=-1)
    return functools.reduce(jnp.add, (part * np.uint8(3**i) for i, part in enumerate(parts)))


def from_thirds(stored: UInt8[Array, "*n w"], count: int) -> UInt8[Array, "*n d"]:
    """The first `count` of the numbers in such bytes."""
    parts = [stored // np.uint8(3**i) % np.uint8(3) for i in range(5)]
    return jnp.concatenate(parts, axis=-1)[..., :count]


def in_levels(
    rows: Float[Array, "*n d"],
    top: Float[Array, "*n"],
    levels: Callable[[Array], Array],
    outermost: float,
    shares: tuple[float, ...],
) -> tuple[Float[Array, "*n d"], Float[Array, "*n"]]:
    """The levels of rows, and their scales: of the least squared error, and such that the product
    of a row with what it decodes to is its square.

    Args:
        rows: finite rows.
        top: their largest entries.
        levels: the levels nearest to some numbers.
        outermost: the largest of them.
        shares: of the largest entry, what this level may stand for.
    """
    # Largest entries of 1, so that no square is out of range.
    rows, best = rows / divisor(top)[..., None], None
    for share in shares:
        step = share / outermost
        level = levels(rows / step)
        error = jnp.sum((level * step - rows) ** 2, axis=-1, keepdims=True)
        if best is not None:
            less = error < best[0]
            error, level = (jnp.where(less, x, old) for x, old in zip((error, level), best))
        best = error, level
    assert best is not None
    level = best[1]
    along = jnp.sum(rows * level, axis=-1)
    scale = jnp.where(top > 0, top * jnp.sum(rows**2, axis=-1) / divisor(along), 0)
    return level, scale


def rotated(rows: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
    """Rows times a Hadamard matrix (of the largest power of two that divides d, in parts)."""
    size = math.gcd(rows.shape[-1], 1 << 30)
    parts = rows.astype(jnp.float32).reshape(*rows.shape[:-1], -1, size)
    # Products in fewer bits, as of some devices, would cost more than the codes do.
    parts = jnp.matmul(parts, hadamard(size), precision=lax.Precision.HIGHEST)
    return parts.reshape(rows.shape)


SHARES = {5: (1.0, 0.92), 4: (1.0, 0.9, 0.8), 2: (1.0, 0.85, 0.7, 0.55)}
"""Of a row's largest entry: what the outermost level may stand for, by bits."""


PLANES = {8: (8,), 5: (4, 1), 4: (4,), 2: (2,)}
"""How the bits of a code are stored, the lowest first: in planes of so many bits of each, one
behind the other, as bytes hold whole numbers of codes of these sizes."""


def packed(codes: UInt8[Array, "*n d"], planes: tuple[int, ...]) -> UInt8[Array, "*n w"]:
    """Several codes to a byte: of each plane those of the first part of a row in its lowest
    bits."""
    found, below = [], 0
    for bits in planes:
        parts = jnp.split((codes >> np.uint8(below)) & low_bits(bits), 8 // bits, axis=-1)
        shifted = (part << np.uint8(i * bits) for i, part in enumerate(parts))
        found.append(functools.reduce(jnp.bitwise_or, shifted))
        below += bits
    return jnp.concatenate(found, axis=-1)


def unpacked(stored: UInt8[Array, "*n w"], planes: tuple[int, ...]) -> UInt8[Array, "*n d"]:
    """The codes in such bytes."""
    whole, first, below, codes = sum(planes), 0, 0, None
    for bits in planes:
        width = stored.shape[-1] * bits // whole
        plane = stored[..., first : first + width]
        parts = [(plane >> np.uint8(shift)) & low_bits(bits) for shift in range(0, 8, bits)]
        plane = jnp.concatenate(parts, axis=-1) << np.uint8(below)
        codes = plane if codes is None else codes | plane
        first, below = first + width, below + bits
    assert codes is not None
    return codes


def low_bits(bits: int) -> np.uint8:
    """Ones in so many of a byte's lowest bits."""
    return np.uint8((1 << bits) - 1)


@functools.lru_cache
def hadamard(size: int) -> np.ndarray:
    """Sylvester's matrix of a power of two, orthogonal and symmetric: its own inverse."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / math.sqrt(size)).astype(np.float32)


def rounded_up(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """The least bfloat16 numbers, in float32, that are not below some numbers of at least 0."""
    bits = lax.bitcast_convert_type(jnp.where(jnp.isfinite(x), x, 0), jnp.uint32)
    return lax.bitcast_convert_type((bits + 0xFFFF) & np.uint32(0xFFFF0000), jnp.float32)


def scale_for(top: Float[Array, "*n"], most: float, dtype: str) -> Float[Array, "*n"]:
    """The least bfloat16 scales with which codes up to `most` reach some numbers, as far as what
    they reach is finite in a dtype."""
    largest = np.float32(float(jnp.finfo(dtype).max) / most).view(np.uint32) & np.uint32(0xFFFF0000)
    return jnp.minimum(rounded_up(top / most), largest.view(np.float32))


def divisor(scale: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """What rows are divided by; rows of zeros stay what they are."""
    return jnp.where(scale > 0, scale, 1)


def as_scale(scale: Float[Array, "*n"], top: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """A scale as it is stored; NaN for rows that are not finite."""
    return jnp.where(jnp.isfinite(top), scale, jnp.nan).astype(jnp.bfloat16)
