"""Codes in the Hopper kernel of decode attention. `mosaic_gpu_attend.py` calls this.

Pages of codes are copied as they are stored, and so are their scales. A tile of codes becomes
operands of the tensor core on the chip: numbers, without their scales, each of them exact. The
scale of a key multiplies its logit, that of a value its weight.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

WGMMA = plgpu.Layout.WGMMA
PER_KV = WGMMA.reduce(1)
EIGHTS = WGMMA.reduce(0)
"""Registers of a vector whose length is a multiple of 8."""
ALIGNED = 64
"""Scales (bfloat16) in 128 bytes, to which copies into shared memory are aligned."""


@dataclasses.dataclass(frozen=True)
class Form:
    """How the kernel reads numbers of one kind."""

    stored: str
    operand: str
    """Type of the tensor core's operands, which holds every number."""
    finite: bool = True
    """Whether all bytes are finite numbers."""
    packed: int = 1
    """Numbers in what is stored: one, or several of no sign, of which half the largest is taken,
    those of the first part of a row in the lowest bits."""
    unit: float = 1.0
    """Weights are times a scale and this, so that they fill the operand's range: of a float16
    operand with the numbers of a row up to `unit`, about the row's largest entry times p."""

    def columns(self, width: int) -> int:
        """How many columns of a tile of codes, whose rows are so wide, are converted at once: as
        many as leave registers for two programs on a multiprocessor."""
        return math.gcd(width, max(32, 64 // self.packed))

    def parts(self, stored) -> list:
        """The numbers in what is stored, as operands: those of each part of a row."""
        if self.packed == 1:
            return [stored.astype(self.operand)]
        bits, found = 8 // self.packed, []
        for shift in range(0, 8, bits):
            number = stored & (((1 << bits) - 1) << shift)
            less = ((1 << bits) - 1) / 2
            if shift + bits == 8:
                # Signed bytes take fewer instructions to convert: the highest bits, less 128.
                number, less = number ^ 128, less - (128 >> shift)
            number = number.astype(jnp.int8).astype(self.operand)
            found.append(number * 2.0**-shift - less)
        return found


FORMS: Mapping[str, Form] = {
    "int8": Form("int8", "bfloat16"),
    "int4": Form("uint8", "bfloat16", packed=2),
    "int2": Form("uint8", "bfloat16", packed=4),
    "e4m3": Form("float8_e4m3fn", "float16", finite=False, unit=448.0),
    "e5m2": Form("float8_e5m2", "float16", finite=False, unit=57344.0),
}


ROWS = Form("", "")
"""What stands for rows as they are."""


def scratch(stages: int, rounds: int, block_size: int) -> dict:
    """Shared memory for the scales of tiles of keys and values: a row of 128 bytes for each page
    (so copies are aligned), and those of one tile side by side; of finer codes behind these."""
    pages = 2 * ALIGNED // block_size
    return {
        "scales_s": plgpu.SMEM((stages * rounds, pages, ALIGNED), jnp.bfloat16),
        "flat_s": plgpu.SMEM((rounds, 2 * ALIGNED), jnp.float32),
    }


def copy_scales(page, slot, j, k_scale, v_scale, scales_s, barrier) -> None:
    """Start the copies of the scales of one page, the j-th of its tile."""
    for pool, row in ((k_scale, j), (v_scale, scales_s.shape[1] // 2 + j)):
        place = scales_s.at[slot, pl.ds(row, 1), pl.ds(0, pool.shape[1])]
        plgpu.copy_gmem_to_smem(pool.at[pl.ds(page, 1)], place, barrier)


def gather_scales(scales, flat_s) -> None:
    """Put the scales of a tile of keys and of one of values side by side; warps meet."""
    pages = scales.shape[0]
    b = 2 * ALIGNED // pages
    for page in range(pages):
        found = plgpu.load(scales.at[page, pl.ds(0, b)], layout=EIGHTS, optimized=False)
        flat_s[pl.ds(page * b, b)] = found.astype(jnp.float32)
    plgpu.commit_smem()


def tile_scales(flat_s, values: bool):
    """Those of keys or of values, a number for each row of a product."""
    half = flat_s.at[pl.ds(ALIGNED if values else 0, ALIGNED)]
    return plgpu.load(half, layout=PER_KV, optimized=False)


def times(x, scale):
    """Rows of a product times a number each."""
    return x * lax.broadcast_in_dim(scale, x.shape, [0])


def convert(codes, operands, form: Form, end=None):
    """Write a tile of codes as the tensor core's operands, some columns at a time.

    Rows from `end` on (unless it is None) are zeros where a number may be NaN or infinite: weight 0
    does not silence what shared memory held before.
    """
    width = codes.shape[1]
    count = form.columns(width)
    for first in range(0, width, count):
        found = plgpu.load(codes.at[:, pl.ds(first, count)], layout=plgpu.Layout.WGMMA_UPCAST_2X)
        for n, numbers in enumerate(form.parts(found)):
            numbers = plgpu.layout_cast(numbers, WGMMA)
            if end is not None and not form.finite:
                row = plgpu.broadcasted_iota(jnp.int32, numbers.shape, 0, layout=WGMMA)
                numbers = jnp.where(row < end, numbers, jnp.zeros_like(numbers))
            operands[:, pl.ds(n * width + first, count)] = numbers
