"""Tables that papers print of LongBench and RULER, what runs for them, and the page of both.

`papers.toml` beside this file has the published figures, and what their authors' scripts fix.
"""

import dataclasses
import difflib
import functools
import tomllib
import zlib
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

import numpy as np

from kvjax.errors import UserError
from kvjax.eval.results import Result
from kvjax.eval.sizes import Variant
from kvjax.eval.table import FULL, RESAMPLES, Interval, markdown


@dataclasses.dataclass(frozen=True)
class PaperRow:
    """One line of a table."""

    row: str
    """What the paper calls it."""
    variant: Variant
    """What runs for it here."""
    scores: tuple[float, ...] | None
    """One for each column; None for a method that the paper does not have."""


@dataclasses.dataclass(frozen=True)
class PaperTable:
    """A table of a paper. Fields that are explained in `papers.toml` have its names."""

    name: str
    title: str
    model: str
    task: str
    """What the tasks of the columns begin with: "longbench" or "ruler13"."""
    columns: tuple[str, ...]
    """Subsets of LongBench, or lengths of RULER."""
    prompts: tuple[int, ...]
    """How many prompts the paper has of each."""
    rows: tuple[PaperRow, ...]
    note: str
    prompt: int | None = None
    context: int | None = None
    turn: tuple[str, str] | None = None
    share: bool = False
    floor: int = 0

    @property
    def task_options(self) -> dict[str, Any]:
        """Fields of `TaskOptions`."""
        return {
            "whole": True,
            "prompt_tokens": self.prompt,
            "prompt_and_answer": self.context,
            "turn": self.turn,
        }

    @property
    def variants(self) -> list[Variant]:
        """What runs, the full cache first, each once."""
        every = [Variant(FULL, 1.0), *(row.variant for row in self.rows)]
        return list(dict.fromkeys(every))

    @property
    def kept(self) -> list[tuple[float, int | None]]:
        """Rates and caps of its rows, each once, but that of the full cache."""
        every = dict.fromkeys((row.variant.rate, row.variant.cap) for row in self.rows)
        return [one for one in every if one != (1.0, None)]

    def beside(self, methods: Sequence[str], rates: Sequence[float] = ()) -> "PaperTable":
        """The table with further methods at every cap and rate that it has, and at `rates`."""
        kept = dict.fromkeys([*self.kept, *((float(rate), None) for rate in rates)])
        known = {row.variant for row in self.rows}
        more = [
            PaperRow(method, variant, None)
            for rate, cap in kept
            for method in methods
            if (variant := Variant(method, rate, cap=cap)) not in known and method != FULL
        ]
        return dataclasses.replace(self, rows=(*self.rows, *more))


def _row(values: dict[str, Any]) -> PaperRow:
    rate, cap = float(values.get("rate", 1)), values.get("cap")
    return PaperRow(
        values["row"], Variant(values["method"], rate, cap=cap), tuple(values["scores"])
    )


@functools.cache
def paper_tables() -> dict[str, PaperTable]:
    """All tables, by name."""
    text = resources.files("kvjax.eval").joinpath("papers.toml").read_text(encoding="utf-8")
    found = tomllib.loads(text)
    usual = {name: found.pop(name) for name in ("task", "columns", "prompts")}

    def of_all(table: dict[str, Any], name: str) -> Any:
        return table.pop(name, usual[name])

    return {
        name: PaperTable(
            name=name,
            task=of_all(table, "task"),
            columns=tuple(of_all(table, "columns")),
            prompts=tuple(of_all(table, "prompts")),
            rows=tuple(map(_row, table.pop("rows"))),
            turn=tuple(table.pop("turn")) if "turn" in table else None,
            **table,
        )
        for name, table in found.items()
    }


def get_table(name: str) -> PaperTable:
    """The table of that name.

    Raises:
        UserError: there is none; names those there are.
    """
    tables = paper_tables()
    if name not in tables:
        near = difflib.get_close_matches(name, tables, n=2) or tables
        raise UserError(f"no paper's table {name!r}; did you mean {' or '.join(near)}?")
    return tables[name]


@dataclasses.dataclass(frozen=True)
class Cell:
    """What was measured for a row of the table in one column."""

    prompts: int
    draws: np.ndarray
    """The mean of every resample of the prompts, and last of them all: [RESAMPLES + 1]. Where a
    column has several tasks, it is the mean of theirs."""
    kept: float
    """KVs held, as a share of the full cache's."""

    @property
    def interval(self) -> Interval:
        return _interval(self.draws)


def _interval(draws: np.ndarray) -> Interval:
    low, high = np.percentile(draws[:-1], (2.5, 97.5))
    return Interval(float(draws[-1]), float(low), float(high))


def _cells(table: PaperTable, results: Sequence[Result]) -> dict[tuple[str, Variant], Cell]:
    """What was measured, by column and variant, of the prompts that the full cache has, too."""
    groups: dict[tuple[str, str, float], dict[str, dict[str, Result]]] = {}
    for result in results:
        kind, _, column = result["task"].partition("/")
        column, _, task = column.partition("/")
        if kind == table.task:
            key = column, result["method"], float(result["rate"])
            groups.setdefault(key, {}).setdefault(task, {})[result["id"]] = result
    found = {}
    for column in table.columns:
        full = groups.get((column, FULL, 1.0), {})
        for variant in table.variants:
            parts = []
            for task, rows in groups.get((column, variant.label, variant.rate), {}).items():
                ids = sorted(set(rows) & set(full.get(task, {})))
                seed = zlib.crc32(f"{column}/{task}".encode())
                draws = _draws(rows, full.get(task, {}), ids, table.share, seed)
                if draws is not None:
                    kept = [rows[name]["kvs"] / rows[name]["kvs_full"] for name in ids]
                    parts.append(Cell(len(ids), draws, float(np.mean(kept))))
            if parts:
                found[column, variant] = Cell(
                    sum(part.prompts for part in parts),
                    np.mean([part.draws for part in parts], axis=0),
                    float(np.mean([part.kept for part in parts])),
                )
    return found


def _draws(
    rows: dict[str, Result], full: dict[str, Result], ids: Sequence[str], share: bool, seed: int
) -> np.ndarray | None:
    """Means of resampled prompts and last that of all, × 100; None where there is none to tell."""
    if not ids:
        return None
    # Of each task by itself: prompts of two are no pairs.
    drawn = np.random.default_rng(seed).integers(0, len(ids), (RESAMPLES, len(ids)))
    drawn = np.concatenate([drawn, np.arange(len(ids))[None]])
    scores = 100 * np.array([rows[name]["score"] for name in ids])[drawn].mean(1)
    if not share:
        return scores
    below = np.array([full[name]["score"] for name in ids])[drawn].mean(1)
    if below[-1] == 0:
        return None
    shares = scores / np.where(below > 0, below, 1)
    # A sample in which the full cache scores nothing has no ratio.
    return np.where(below > 0, shares, shares[-1])


def _kept(variant: Variant) -> str:
    if variant.cap is not None:
        return f"C = {variant.cap}"
    return "the full cache" if variant.rate == 1 else f"{variant.rate:g}×"


def _shown(values: Sequence[float | None]) -> Iterator[str]:
    return ("–" if value is None else f"{value:.2f}" for value in values)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _wide(table: PaperTable, rows: Sequence[PaperRow], cells: dict) -> list[str]:
    """Rows of one cap or rate: what was published, what was measured, in the columns that anything
    was measured in (all of them before)."""
    columns = [c for c in table.columns if any((c, v) in cells for v in table.variants)]
    columns, lines = columns or list(table.columns), []
    for row in rows:
        ours = [cells.get((column, row.variant)) for column in columns]
        found = [None if cell is None else cell.interval.mean for cell in ours]
        there = [n for n, cell in enumerate(ours) if cell is not None]
        if row.scores is not None:
            scores = [row.scores[table.columns.index(column)] for column in columns]
            # A mean over other columns than ours would not compare.
            mean = _mean([scores[n] for n in there or range(len(columns))])
            lines.append((row.row, "published", *_shown([*scores, mean])))
        if there:
            mean = _mean([value for value in found if value is not None])
            lines.append((f"`{row.variant.method}`", "ours", *_shown([*found, mean])))
    return markdown(("row", "", *columns, "mean"), lines)


def _every(table: PaperTable, cells: dict) -> list[str]:
    """Every cell that was measured, with its interval; the mean over a row's columns behind it."""
    lines = []
    for row in table.rows:
        ours = {c: cells[c, row.variant] for c in table.columns if (c, row.variant) in cells}
        for column, cell in ours.items():
            published = None if row.scores is None else row.scores[table.columns.index(column)]
            off = None if published is None else cell.interval.mean - published
            lines.append(
                (
                    _kept(row.variant),
                    row.row,
                    f"`{row.variant.method}`",
                    column,
                    f"{cell.prompts} of {table.prompts[table.columns.index(column)]}",
                    f"{100 * cell.kept:.1f}",
                    *_shown([published]),
                    cell.interval.shown(2),
                    "–" if off is None else f"{off:+.2f}",
                )
            )
        if len(ours) > 1:
            mean = _interval(np.mean([cell.draws for cell in ours.values()], axis=0))
            lines.append((_kept(row.variant), row.row, f"`{row.variant.method}`", "mean", "", "",
                          "", mean.shown(2), ""))  # fmt: skip
    head = ("kept", "row", "ours", "column", "prompts", "KVs %", "published", "ours [95 %]", "off")
    return markdown(head, lines)


def page(table: PaperTable, results: Sequence[Result], notes: Sequence[str] = ()) -> str:
    """The paper's table beside what was measured, as Markdown.

    Args:
        table: the table, perhaps with further methods.
        results: rows of a results file; those of other tasks are passed over.
        notes: what else is said in front.
    """
    cells = _cells(table, results)
    lacking = [c for c in table.columns if not any((c, v) in cells for v in table.variants)]
    unit = "% of the full cache's score" if table.share else "score × 100"
    told = [
        f"published with {table.model}",
        *notes,
        *([table.note] if table.note else []),
        f"{unit}; means are over the columns that were measured here, of both alike",
        *([f"not measured: {', '.join(lacking)}"] if lacking else []),
    ]
    lines = [f"# {table.title}, and ours", "", *(f"- {note}" for note in told), ""]
    groups: dict[str, list[PaperRow]] = {}
    for row in table.rows:
        groups.setdefault(_kept(row.variant), []).append(row)
    for kept, rows in groups.items():
        lines += [f"## {kept[0].upper()}{kept[1:]}", "", *_wide(table, rows, cells), ""]
    lines += [EVERY, "", FOOT, "", *_every(table, cells), ""]
    return "\n".join(lines)


EVERY = "## Every cell"
FOOT = (
    "Brackets are 95 % bootstrap intervals over prompts. KVs %: of the full cache's. off: ours "
    "less published. prompts: run here, and in the paper."
)
