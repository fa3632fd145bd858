"""Finer codes in free blocks, as a list and a dictionary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class OracleFine:
    """A stack of free blocks, bottom first, and whose finer codes some of them hold."""

    def __init__(self, num_blocks: int):
        self.stack = list(range(num_blocks))[::-1]
        self.of: dict[int, int] = {}
        self.top = 0

    def _forget(self, blocks: Iterable[int]) -> None:
        gone = set(blocks)
        self.of = {one: other for one, other in self.of.items() if not {one, other} & gone}
        self.top = min(self.top, len(self.stack))

    def claim(self, count: int) -> list[int]:
        """Blocks from the top: what they held of others is lost."""
        taken = [self.stack.pop() for _ in range(count)]
        self._forget(taken)
        return taken

    def drop(self, blocks: list[int]) -> None:
        """Blocks come back, the first of them on top, without their finer codes."""
        self.stack += blocks[::-1]
        self._forget(blocks)

    def grow(self, blocks: list[int]) -> None:
        """Blocks have finer codes above those that are there, while there is room."""
        for block in blocks:
            if self.top < len(self.stack):
                self.of[block] = self.stack[self.top]
                self.top += 1

    def arrange(self, worth: Mapping[int, float]) -> None:
        """The blocks that are worth most have finer codes; those are taken last."""
        best = sorted(worth, key=lambda block: (-worth[block], block))[: len(self.stack)]
        stay = {block: self.of[block] for block in best if block in self.of}
        vacant = [block for block in self.stack if block not in stay.values()]
        ids = [stay[block] if block in stay else vacant.pop(0) for block in best]
        self.of, self.stack, self.top = dict(zip(best, ids, strict=True)), ids + vacant, len(best)
