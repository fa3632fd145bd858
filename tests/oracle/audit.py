"""What is wrong with a paged cache, found block by block: no use is made of kvjax's own check."""

from __future__ import annotations

from typing import Any

import numpy as np


def audit(cache: Any, *, unwritten: bool = False) -> list[str]:
    """Everything that is wrong with a cache; an empty list for a sound one.

    Every block has one owner or is free; heads own as many blocks as their KVs fill, at the front
    of their table rows, and N stands in the rest; a head's KVs have distinct positions below the
    sequence's length; nothing is written elsewhere. Where the cache shares, blocks may have owners
    in several slots, and `shared` says how many beside the first.

    Args:
        cache: a `PagedCache`, or anything with its fields.
        unwritten: whether heads may count KVs that nothing was written to.
    """
    fields = ("block_table", "context_len", "seq_len", "position", "metric")
    table, lengths, seq_len, position, metric = (
        np.asarray(getattr(cache, name)) for name in fields
    )
    free = np.asarray(cache.free.stack)[: int(cache.free.count[0])].tolist()
    total, block_size = position.shape
    width = table.shape[-1]
    wrong: list[str] = []
    owner: dict[int, tuple[int, ...]] = {}
    shared = getattr(cache, "shared", None)
    more: dict[int, set[int]] = {}
    for at in np.ndindex(*lengths.shape):
        head, length, row = f"head {at}", int(lengths[at]), table[at].tolist()
        if length < 0:
            wrong.append(f"{head}: holds {length} KVs")
            continue
        used, rest = divmod(length, block_size)
        used += rest > 0
        if used > width:
            wrong.append(f"{head}: holds {length} KVs, its table ends at {width * block_size}")
            continue
        for column, block in enumerate(row[used:], start=used):
            if block != total:
                wrong.append(f"{head}: empty entry {column} names {block}")
        seen: set[int] = set()
        for column, block in enumerate(row[:used]):
            if not 0 <= block < total:
                wrong.append(f"{head}: entry {column} is block {block} of {total}")
                continue
            if block in owner and shared is not None and at[0] not in more[block]:
                more[block].add(at[0])
            elif block in owner:
                wrong.append(f"block {block}: owned by head {owner[block]} and {head}")
            if block not in owner:
                owner[block], more[block] = at, {at[0]}
            count = min(block_size, length - column * block_size)
            places = position[block].tolist()
            if any(place != -1 for place in places[count:]):
                wrong.append(f"{head}: block {block} is written past the head's length")
            for place in places[:count]:
                if place == -1 and unwritten:
                    continue
                if not 0 <= place < seq_len[at[0]]:
                    wrong.append(f"{head}: position {place} of a sequence of {seq_len[at[0]]}")
                elif place in seen:
                    wrong.append(f"{head}: holds position {place} twice")
                seen.add(place)
    counts = np.zeros(total, int) if shared is None else np.asarray(shared)
    for block, count in enumerate(counts.tolist()):
        if count == max(0, len(more.get(block, ())) - 1):
            continue
        wrong.append(f"block {block}: {count} owners beside the first are counted")
    if len(set(free)) < len(free):
        wrong.append(f"free blocks {free}: some of them twice")
    for block in free:
        if block in owner:
            wrong.append(f"block {block}: free, and owned by head {owner[block]}")
        elif (position[block] != -1).any() or (metric[block] != 0).any():
            wrong.append(f"block {block}: free, and not empty")
    lost = sorted(set(range(total)) - set(owner) - set(free))
    if lost:
        wrong.append(f"blocks {lost}: neither owned nor free")
    return wrong
