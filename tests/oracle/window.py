"""A residual window as dictionaries: of each head the newest KVs as they were handed in.

KIVI (2024), algorithm 1: the newest tokens stay in full precision. Here a head's newest KVs are the
newest of those that it keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

Head = tuple[int, int, int]  # (slot, layer, KV head)
Rows = dict[int, tuple[np.ndarray, np.ndarray]]  # by token position: key and value


class OracleWindow:
    """At most `size` KVs of each head."""

    def __init__(self, size: int):
        self.size = size
        self.heads: dict[Head, Rows] = {}

    def of(self, head: Head) -> Rows:
        return self.heads.get(head, {})

    def write(self, head: Head, rows: Rows) -> None:
        """A head gets further KVs: the newest of all stay."""
        found = self.of(head) | rows
        self.heads[head] = {at: found[at] for at in sorted(found)[-self.size :]}

    def keep(self, held: Mapping[Head, Iterable[int]]) -> None:
        """What heads no longer hold goes."""
        self.heads = {
            head: {at: row for at, row in rows.items() if at in set(held.get(head, ()))}
            for head, rows in self.heads.items()
        }

    def share(self, source: int, target: int) -> None:
        """A slot has what another one has."""
        for (slot, *place), rows in list(self.heads.items()):
            if slot == source:
                self.heads[target, place[0], place[1]] = dict(rows)
