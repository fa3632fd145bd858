"""Presses of kvpress, what each is compared with, and at how many KVs."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from kvjax.errors import UserError
from kvjax.eval.results import Result

PREFIX = "kvpress:"
EQUAL_KVS = 0.01
"""Budgets that differ by no more than this are one."""


@dataclasses.dataclass(frozen=True)
class Press:
    """A press of kvpress and what it is compared with."""

    like: str | None
    """Our method of the same name; None if there is none."""
    positions: bool = False
    """Whether both are defined alike, so that the positions they keep must be the same."""
    note: str = ""


PRESSES: dict[str, Press] = {
    "snapkv": Press("snapkv-w64-avg5", True),
    "pyramidkv": Press("pyramidkv-exact", note="window 64 and average pooling against 8 and max"),
    "adakv-snapkv": Press("ada-snapkv-kvpress", note="single KVs, masked, against blocks, freed"),
    "expected-attention": Press("expected-attention", True),
    "keydiff": Press("keydiff", True),
    "compactor": Press("compactor", note="λ = the share removed, another sketch, padding counted"),
    "streaming-llm": Press("streaming-llm", True),
    "tova": Press("tova", True),
    "observed-attention": Press("h2o", note="mean over the queries that see a KV, no window"),
    "kvzip": Press("kvzip", note="repeats the prompt: several prefills; single KVs, masked"),
}


def choose_presses(names: Sequence[str]) -> list[str]:
    """The names, checked; "all" stands for every one.

    Raises:
        UserError: there is no such press.
    """
    if list(names) == ["all"]:
        return list(PRESSES)
    for name in names:
        if name not in PRESSES:
            raise UserError(f"no press {name!r}: there are {', '.join(PRESSES)}")
    return list(names)


def peer_method(press: str, budget_of: str) -> str:
    """How results of a press at the KVs of one of our methods are called."""
    return f"{PREFIX}{press}@{budget_of}"


def budgets(press: str, reference: str, kept: Mapping[str, int]) -> list[str]:
    """Methods of ours at whose KVs a press runs: the reference, and the like-named one.

    Both even where they hold as much, because each pair is a line of the table.

    Args:
        press: a name of `PRESSES`.
        reference: the method that every press is compared with.
        kept: KVs that each of our methods really holds of this prompt.
    """
    like = PRESSES[press].like
    names = [reference] if like is None else [reference, like]
    return [name for name in dict.fromkeys(names) if name in kept]


def group_equal(wanted: Mapping[str, int]) -> list[list[str]]:
    """Names whose KVs are equal but for `EQUAL_KVS`, together: they need one run.

    Args:
        wanted: KVs of each name.
    """
    groups: list[list[str]] = []
    for name, kvs in wanted.items():
        for group in groups:
            if abs(kvs - wanted[group[0]]) <= EQUAL_KVS * wanted[group[0]]:
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def find_equal(rows: Iterable[Result], press: str, kvs: int) -> Result | None:
    """A result of the press at as many KVs, but for `EQUAL_KVS`; None if there is none.

    Args:
        rows: results of one prompt and protocol.
        press: a name of `PRESSES`.
        kvs: KVs that the press may keep.
    """
    own = (row for row in rows if row["method"].startswith(peer_method(press, "")))
    return next((row for row in own if abs(row["kvs_wanted"] - kvs) <= EQUAL_KVS * kvs), None)


def relabelled(row: Result, press: str, budget_of: str, rate: float) -> Result:
    """The same result as that of another method's budget."""
    return {**row, "method": peer_method(press, budget_of), "rate": rate, "agreement": None}


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Share of equal positions, over all heads.

    Both keep the best KVs of one order, so where one of them holds fewer, because budgets are
    rounded to blocks here, all of its positions must be among the other's.

    Args:
        ours: positions kept by each head.
        theirs: the same heads in the same order.

    Raises:
        ValueError: not the same number of heads.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"theirs: got {len(theirs)} heads, wanted {len(ours)}")
    equal = sum(len(set(a) & set(b)) for a, b in zip(ours, theirs))
    fewer = sum(min(len(a), len(b)) for a, b in zip(ours, theirs))
    return equal / fewer if fewer else 1.0
