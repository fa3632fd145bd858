"""How wide the block tables are that a step works on, and how many sequences take part in it.

A step copies the rows of those that take part. They are as wide as the longest sequence that an
engine serves, of which most hold far less; so steps are compiled for a few widths. Sequences that
hold much are few, as all share one pool: of wide rows fewer take part in a step, so that what
copies take is bounded by the pool and not by the length that a model allows.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from kvjax.engine.compilation import sizes_upto

NARROW = 8192
"""KVs of a head, for which every sequence has a row."""
ENTRIES = 16
"""Of wider rows as many take part as have so many entries per block of the pool. Widths go by four:
where no head holds more than four times what an average one does, no more sequences need them."""


@dataclasses.dataclass(frozen=True)
class Tables:
    """Sizes that a step is compiled for."""

    widths: tuple[int, ...]
    """Blocks of a row, ascending."""
    narrow: int
    """Blocks of a row up to which all take part."""
    slots: int
    """Sequences that may take part."""
    blocks: int
    """Blocks of the pool, or of each shard of it."""
    heads: int
    """KV heads of it, over all layers."""
    block_size: int
    first: int = 1
    """The least number of sequences that it is compiled for, `factor` times as many the next."""
    factor: int = 2

    @classmethod
    def of(cls, max_blocks: int, block_size: int, slots: int, blocks: int, heads: int) -> "Tables":
        """Those of decode steps, for rows of up to `max_blocks`."""
        narrow = -(-NARROW // block_size)
        widths = sizes_upto(max_blocks, narrow, 4)
        return cls(widths, narrow, slots, blocks, heads, block_size)

    def of_widths(self, first: int, factor: int) -> "Tables":
        """The same for other widths."""
        return dataclasses.replace(self, widths=sizes_upto(self.widths[-1], first, factor))

    def of_sizes(self, first: int, factor: int) -> "Tables":
        """The same for other numbers of sequences."""
        return dataclasses.replace(self, first=first, factor=factor)

    @property
    def largest(self) -> tuple[int, int]:
        """Sequences and width of the step that copies most."""
        return max(((self.rows(w), w) for w in self.widths), key=math.prod)

    def rows(self, width: int) -> int:
        """Sequences that take part in a step on rows of that width, at most."""
        if width <= self.narrow:
            return self.slots
        return min(self.slots, max(1, ENTRIES * self.blocks // (self.heads * width)))

    def sizes(self, width: int) -> tuple[int, ...]:
        """Numbers of sequences that it is compiled for."""
        return sizes_upto(self.rows(width), self.first, self.factor)

    def width_of(self, kvs: int) -> int:
        """The narrowest row that holds a head of so many KVs; the widest where none does."""
        blocks = -(-kvs // self.block_size)
        return next((width for width in self.widths if width >= blocks), self.widths[-1])

    def holding(self, count: int, longest: int) -> Iterator[tuple[int, int]]:
        """Sequences and widths that do for so many sequences whose heads hold so many KVs at most,
        the narrowest first. None where so many cannot take part: see `parts`."""
        least = self.width_of(longest)
        for width in self.widths:
            if width >= least:
                yield from ((size, width) for size in self.sizes(width) if size >= count)

    def parts(self, longest: Sequence[int]) -> list[list[int]]:
        """Who takes part in a step together.

        Args:
            longest: KVs of each sequence's longest head.

        Returns:
            Places in `longest`: all of them where they can, and otherwise those of one width.
        """
        if not longest or len(longest) <= self.rows(self.width_of(max(longest))):
            return [list(range(len(longest)))]
        places: dict[int, list[int]] = {}
        for place, kvs in enumerate(longest):
            places.setdefault(self.width_of(kvs), []).append(place)
        return [
            places[width][i : i + self.rows(width)]
            for width in sorted(places)
            for i in range(0, len(places[width]), self.rows(width))
        ]
