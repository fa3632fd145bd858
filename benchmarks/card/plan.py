"""What is measured within a time budget: the parts that tell most, and what each group may take.

Each part is one of call A, B or C, and its result is in that call's file.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

from benchmarks.card.parts import Group, Part


class Chosen(NamedTuple):
    """Of a call's group, some parts."""

    call: str
    group: str
    seconds: float | None = None
    """The most that it takes, so that what follows has its time; None for what is left."""
    parts: tuple[str, ...] | None = None
    """How their names begin, in the order in which they are measured; None for all."""


FIRST = (
    Chosen("A", "peaks", 30),
    # What one call of the kernel says comes before what many do: it may hang.
    Chosen("A", "kernels", 120),
    Chosen("B", "attention", 80, (
        "attention: 8B 256 × 1024 uniform b=16", "attention: 8B 32 × 8192 uniform b=16",
        "attention: 8B 2 × 64 uniform b=16",
    )),
    Chosen("C", "throughput", 230, ("throughput: rate 64", "throughput: no compression")),
    Chosen("B", "steps", None, (
        "step: llama3.1-8b, 64 × 1024, full", "step: llama3.1-8b, 2 × 1024, full",
    )),
)  # fmt: skip
"""Names with a 2 are those of rehearsals."""
REST = (
    Chosen("A", "kernels", 60),
    # Compiling it takes most of that.
    Chosen("B", "steps", 80),
    Chosen("C", "throughput", None, (
        "throughput: rate 64", "throughput: no compression", "throughput: rate 8",
        "throughput: rate 16", "throughput: rate 1",
    )),
)  # fmt: skip
"""What comes first of the rest."""
LAST = ("memory checker", "others")
"""Groups for which time may be left."""


def first(groups_of: Callable[[str], tuple[Group, ...]]) -> tuple[Group, ...]:
    """The groups of the first command, from those of each call."""
    return tuple(_chosen(one, groups_of(one.call)) for one in FIRST)


def rest(groups_of: Callable[[str], tuple[Group, ...]]) -> tuple[Group, ...]:
    """Those of the commands after it: all, what was measured included."""
    early = [_chosen(one, groups_of(one.call)) for one in REST]
    named = {(one.call, one.group) for one in REST}
    others = [g for call in "ABC" for g in groups_of(call) if (call, g.name) not in named]
    return (*early, *sorted(others, key=lambda group: group.name in LAST))


def _chosen(one: Chosen, groups: tuple[Group, ...]) -> Group:
    (group,) = (group for group in groups if group.name == one.group)
    parts = group.parts if one.parts is None else tuple(_named(group.parts, one.parts))
    return dataclasses.replace(group, parts=parts, seconds=one.seconds)


def _named(parts: tuple[Part, ...], names: tuple[str, ...]) -> Iterator[Part]:
    """Each part once, though one name may begin as another one does."""
    found = [part for name in names for part in parts if part.name.startswith(name)]
    yield from {part.name: part for part in found}.values()
