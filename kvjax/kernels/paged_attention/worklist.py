"""The work list of a decode step: every head's KVs cut into tiles, shared out evenly.

The tiles of all heads lie on one line, head after head, and each of P persistent programs takes an
equal stretch of it. A head that crosses a border is finished by merging, and there are at most two
such parts per program however ragged the lengths are. The list depends on the lengths alone:
layers and steps with equal lengths can share it.
"""

import dataclasses
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

SPAN_WIDTH = 8
"""Columns of `WorkList.spans`: with them the spans of one layer out of many begin where XLA lets a
kernel read them without a copy, at a multiple of 256 bytes."""


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WorkList:
    """Who works on what. Leading axes (layers) are allowed, for `lax.scan` to slice.

    `heads` per head, those with KVs in order and then the empty ones: its row s·H + h, its first
    tile on the line, its KVs, 0.
    `spans` per program: its first head (index into `heads`), how many heads it touches, and its
    stretch [begin, end) of the line, all of one size but those at the end; then which empty heads
    are its own, [begin, end) of `heads`; the rest is zero.
    """

    heads: Int32[Array, "... rows 4"]
    spans: Int32[Array, "... P 8"]
    tile: int = dataclasses.field(metadata={"static": True})

    @property
    def num_programs(self) -> int:
        """Programs that share the line."""
        return self.spans.shape[-2]


class Span(NamedTuple):
    """One program's stretch, as scalars read in a kernel."""

    first: Any
    count: Any
    begin: Any
    end: Any
    empty_begin: Any
    empty_end: Any

    @staticmethod
    def read(spans, program) -> "Span":
        """The stretch of `program`, from `WorkList.spans`."""
        return Span(*(spans[program, i] for i in range(len(Span._fields))))


class Head(NamedTuple):
    """One head inside one stretch, as scalars read in a kernel: its tiles [begin, end)."""

    row: Any
    start: Any
    length: Any
    tiles: Any
    begin: Any
    end: Any

    @staticmethod
    def read(heads, index, span: Span, tile: int) -> "Head":
        """Head `index` of `WorkList.heads`, clipped to `span`."""
        row, start, length = (heads[index, i] for i in range(3))
        tiles = (length + tile - 1) // tile
        return Head(
            row=row,
            start=start,
            length=length,
            tiles=tiles,
            begin=jnp.maximum(span.begin - start, 0),
            end=jnp.minimum(span.end - start, tiles),
        )


def build(context_len: Int32[Array, "S H"], tile: int, num_programs: int) -> WorkList:
    """The work list of one layer.

    Args:
        context_len: KVs of each head.
        tile: KVs per tile.
        num_programs: programs that share the work.
    """
    lengths = context_len.reshape(-1).astype(jnp.int32)
    num_rows = lengths.shape[0]
    number = jnp.arange(num_rows, dtype=jnp.int32)
    filled = jnp.cumsum(lengths > 0, dtype=jnp.int32)
    num_filled = filled[-1]
    place = jnp.where(lengths > 0, filled - 1, num_filled + number - filled)
    rows = jnp.zeros_like(number).at[place].set(number, unique_indices=True)
    lengths = lengths[rows]
    tiles = (lengths + tile - 1) // tile
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    total = ends[-1]
    begin, end = _shares(total, num_programs)
    first = jnp.searchsorted(ends, begin, side="right", method="compare_all").astype(jnp.int32)
    last = jnp.searchsorted(ends, end - 1, side="right", method="compare_all").astype(jnp.int32)
    count = jnp.where(end > begin, last - first + 1, 0)
    empty = [num_filled + x for x in _shares(num_rows - num_filled, num_programs)]
    spans = jnp.stack([first, count, begin, end, *empty], axis=1)
    return WorkList(
        heads=jnp.stack([rows, ends - tiles, lengths, jnp.zeros_like(rows)], axis=1),
        spans=jnp.pad(spans, ((0, 0), (0, SPAN_WIDTH - spans.shape[1]))),
        tile=tile,
    )


def _shares(total: Int32[Array, ""], num_programs: int) -> tuple[Array, Array]:
    """Begin and end of what each program has of `total`, as even as whole shares are."""
    share = jnp.maximum((total + num_programs - 1) // num_programs, 1)
    begin = jnp.minimum(jnp.arange(num_programs, dtype=jnp.int32) * share, total)
    return begin, jnp.minimum(begin + share, total)
