"""Static description of Hopper's kernels of decode attention, and the shared memory they take."""

import dataclasses
import math

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.paged_attention import mosaic_gpu_codes as codes

WARPS = 4
TILE = 64
"""KVs per tile: the rows of one tensor core instruction, and the largest block size."""

ALIGNED = 128
"""Bytes to which copies of shared memory are aligned."""
BUFFER_ALIGNED = 1024
"""Bytes to which JAX aligns each of a kernel's buffers there."""
SUM_ROWS = 8
"""Rows behind those of an output for its largest logits and sums; copies stay aligned."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Static description of one kernel instance."""

    dtype: jnp.dtype
    """Of rows."""
    head_dim: int
    block_size: int
    group: int
    """r, query heads per KV head."""
    padded_group: int
    """R, `group` rounded up to 8 or 16."""
    stages: int
    """Tiles of K and of V in flight per program."""
    programs: int
    scale: float
    """Factor of the logits, log₂ e included."""
    keep_logits: bool
    exact: bool = False
    """Whether heads begin with what their exact KVs gave, and leave these out of the pool's."""
    forms: tuple[codes.Form, codes.Form] | None = None
    """How codes of keys and of values are read, where pools hold codes instead of rows."""
    fine: bool = False
    """Whether blocks may have finer codes in others, of which rows are to be added to theirs."""
    newest_at: int | None = None
    """Where newest keys and values stand among rows that are given, if the kernel appends them."""

    @property
    def pages(self) -> int:
        """Pages per tile."""
        return TILE // self.block_size

    @property
    def halves(self) -> bool:
        """Whether queries and weights are two operands of half the bits for the tensor core.

        Its own float32 mode rounds operands to 11 bits; the sum of two bfloat16 keeps 16.
        """
        return self.dtype == jnp.float32

    @property
    def split(self) -> bool:
        """Whether rows of the pool are two such operands, too; codes are exact in one."""
        return self.halves and self.forms is None

    @property
    def operand_dtype(self) -> jnp.dtype:
        """Type of the tensor core's operands."""
        if self.forms is not None:
            return jnp.dtype(self.forms[0].operand)
        return jnp.dtype(jnp.bfloat16) if self.halves else self.dtype

    @property
    def parts(self) -> int:
        """Operands per query and weight."""
        return 2 if self.halves else 1

    @property
    def out_dtype(self) -> jnp.dtype:
        """Type of the output: where pools hold codes, it may still have to be turned."""
        return self.dtype if self.forms is None else jnp.dtype(jnp.float32)

    @property
    def stored(self) -> tuple[jnp.dtype, jnp.dtype]:
        """Types of what the pools of keys and of values hold."""
        if self.forms is None:
            return self.dtype, self.dtype
        return jnp.dtype(self.forms[0].stored), jnp.dtype(self.forms[1].stored)

    @property
    def unit(self) -> float:
        """Factor of the weights that are summed; the output is divided by it."""
        return 1.0 if self.forms is None else self.forms[1].unit

    @property
    def channels(self) -> tuple[tuple[int, int], ...]:
        """(first, count) of the channel ranges that outᵀ is computed in, each a multiple of 64.

        Head dimensions 80 and 96 take two ranges of 64 that overlap.
        """
        if self.head_dim % 64:
            return ((0, 64), (self.head_dim - 64, 64))
        return ((0, self.head_dim),)

    @property
    def begun_rows(self) -> int:
        """Rows of what a head begins with: channels of its output, range by range, then its largest
        logits, its sums, and nothing."""
        return sum(count for _, count in self.channels) + SUM_ROWS

    def columns(self, dtype: jnp.dtype, width: int | None = None) -> int:
        """Columns per tile of shared memory: the widest swizzle that divides a row, which is of all
        channels or of some of them."""
        itemsize, width = jnp.dtype(dtype).itemsize, width or self.head_dim
        return next(n for n in (128, 64, 32) if width * itemsize % n == 0) // itemsize

    @property
    def widths(self) -> tuple[int, int]:
        """Elements of a row of what the pools of keys and of values hold."""
        forms = self.forms or (codes.ROWS, codes.ROWS)
        return self.head_dim // forms[0].packed, self.head_dim // forms[1].packed

    @property
    def at_once(self) -> tuple[int, int]:
        """Of these, how many become operands at once."""
        if self.forms is None:
            return self.widths
        keys, values = (form.columns(n) for form, n in zip(self.forms, self.widths))
        return keys, values

    @property
    def rounds(self) -> int:
        """Tiles in shared memory for one of KVs: of codes, and of finer codes behind all these."""
        return 2 if self.fine else 1

    @property
    def copies(self) -> int:
        """Copies of a page that the products with keys wait for: of keys, and of all scales."""
        return 1 if self.forms is None else 3

    def _rows_scratch(self, n: int):
        """Shared memory for tiles of what is stored of keys (0) or values (1)."""
        shape, at_once = (self.stages * self.rounds, TILE, self.widths[n]), self.at_once[n]
        # Rows of 16 bytes are shorter than any swizzle.
        if at_once * self.stored[n].itemsize < 32:
            return plgpu.SMEM(shape, self.stored[n])
        return self._tiled(shape, self.stored[n], at_once)

    def _tiled(self, shape: tuple[int, ...], dtype: jnp.dtype, width: int | None = None):
        """Shared memory in tiles for rows of `width`."""
        columns = self.columns(dtype, width)
        transforms = (
            plgpu.TilingTransform((8, columns)),  # pyright: ignore[reportAbstractUsage]
            plgpu.SwizzleTransform(  # pyright: ignore[reportAbstractUsage]
                columns * jnp.dtype(dtype).itemsize
            ),
        )
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    def out_scratch(self):
        """Shared memory for the finished output of one head."""
        shape = (len(self.channels), self.padded_group, self.channels[0][1])
        return plgpu.SMEM(shape, self.out_dtype)

    def attend_scratch(self) -> dict:
        """Shared memory and barriers of `attend`."""
        r, d, stages, parts = self.padded_group, self.head_dim, self.stages, self.parts
        operand, k = self.operand_dtype, self.stored[0]
        arrivals = self.pages * self.rounds
        newest = None
        if self.newest_at is not None:
            width = -(-d * k.itemsize // ALIGNED) * ALIGNED // k.itemsize
            newest = plgpu.SMEM((2, 2, width), k)
        of_a_head = parts + (0 if newest is None else 2) + self.exact
        begun = plgpu.SMEM((2, self.begun_rows, r), jnp.float32)
        scales = dict.fromkeys(("scales_s", "flat_s"))
        if self.forms is not None:
            scales = codes.scratch(stages, self.rounds, self.block_size)
        # A product's operands have one swizzle, and are written by so many columns of codes.
        narrow = min(self.at_once)
        converted = (2, TILE, d) if self.split else (1, TILE, d)
        return {
            "q_s": self._tiled((2, parts, r, d), operand, narrow),
            "k_s": self._rows_scratch(0),
            "v_s": self._rows_scratch(1),
            "operand_s": self._tiled(converted, operand, narrow) if operand != k else None,
            "p_s": self._tiled((parts, r, TILE), operand, narrow),
            "out_s": self.out_scratch(),
            "logits_s": plgpu.SMEM((2, r, TILE), jnp.float32) if self.keep_logits else None,
            "newest_s": newest,
            "begun_s": begun if self.exact else None,
            "q_full": plgpu.Barrier(num_arrivals=of_a_head, num_barriers=2),
            "q_free": plgpu.Barrier(num_barriers=2),
            "k_full": plgpu.Barrier(num_arrivals=arrivals * self.copies, num_barriers=stages),
            "v_full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
            "free": plgpu.Barrier(num_barriers=stages),
            **scales,
        }

    def shared_bytes(self) -> int:
        """Bytes of shared memory of `attend`, without barriers and what JAX adds for reductions."""
        refs = [
            x for x in self.attend_scratch().values() if isinstance(x, type(self.out_scratch()))
        ]
        sizes = (math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in refs)
        return sum(-(-size // BUFFER_ALIGNED) * BUFFER_ALIGNED for size in sizes)
