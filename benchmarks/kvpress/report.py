"""What is said of the results: pairs of methods, tables, a page."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.kvpress.presses import PREFIX, PRESSES, peer_method
from kvjax.eval.results import Result
from kvjax.eval.table import (
    FULL,
    LEAST_FULL,
    RESAMPLES,
    Interval,
    bootstrap,
    protocols_of,
    with_interval,
)


@dataclasses.dataclass(frozen=True)
class Pair:
    """A press and the method of ours at whose KVs it ran, over the same prompts."""

    task: str
    protocol: str
    rate: float
    press: str
    method: str
    prompts: int
    kvs: tuple[float, float]
    """KVs in use, mean: theirs, ours."""
    score: tuple[Interval | None, Interval | None]
    free: tuple[Interval | None, Interval | None]
    """Answers without a given beginning that hold the true one."""
    nll_ratio: tuple[Interval | None, Interval | None]
    """Mean NLL over the full cache's, of the same prompts."""
    kl: tuple[Interval | None, Interval | None]
    positions: float | None
    """Share of equal positions, over the rows that were looked at."""

    @property
    def like(self) -> bool:
        """Whether the two bear the same name."""
        return PRESSES[self.press].like == self.method


def pairs_of(results: Iterable[Result]) -> list[Pair]:
    """One pair per (task, protocol, rate, press, method), over the prompts that both ran."""
    found: dict[tuple, dict[str, Result]] = collections.defaultdict(dict)
    for result in results:
        key = (result["task"], result["protocol"], float(result["rate"]), result["method"])
        found[key][result["id"]] = result
    pairs = []
    for (task, protocol, rate, name), theirs in found.items():
        if not name.startswith(PREFIX):
            continue
        press, _, method = name.removeprefix(PREFIX).partition("@")
        ours = found.get((task, protocol, rate, method), {})
        full = found.get((task, protocol, 1.0, "full"), {})
        ids = sorted(theirs.keys() & ours.keys() & full.keys())
        if ids:
            sides = [[side[id] for id in ids] for side in (theirs, ours)]
            reference = [full[id] for id in ids]
            pairs.append(_pair(task, protocol, rate, press, method, sides, reference))
    order = {press: n for n, press in enumerate(PRESSES)}
    tasks = {task: n for n, task in enumerate(dict.fromkeys(p.task for p in pairs))}
    places = {name: n for n, name in enumerate(protocols_of(p.protocol for p in pairs))}
    pairs.sort(key=lambda p: (tasks[p.task], places[p.protocol], p.rate, order[p.press], p.like))
    return pairs


def _pair(
    task: str,
    protocol: str,
    rate: float,
    press: str,
    method: str,
    sides: list[list[Result]],
    full: list[Result],
) -> Pair:
    def both(make: Callable[[list[Result]], Interval | None]):
        theirs, ours = sides
        return make(theirs), make(ours)

    def mean_of(name: str):
        return lambda rows: bootstrap([r[name] for r in rows if r.get(name) is not None])

    def ratio(rows: list[Result]) -> Interval | None:
        told = [(r["nll"], f["nll"]) for r, f in zip(rows, full) if r["nll"] is not None]
        return bootstrap([a for a, _ in told], [b for _, b in told]) if told else None

    shares = [r["agreement"] for r in sides[0] if r.get("agreement") is not None]
    kvs = tuple(float(np.mean([r["kvs"] for r in rows])) for rows in sides)
    return Pair(
        task=task,
        protocol=protocol,
        rate=rate,
        press=press,
        method=method,
        prompts=len(full),
        kvs=(kvs[0], kvs[1]),
        score=both(mean_of("score")),
        free=both(mean_of("free")),
        nll_ratio=both(ratio),
        kl=both(mean_of("kl")),
        positions=float(np.mean(shares)) if shares else None,
    )


def overlaps(pair: Pair) -> bool | None:
    """Whether the intervals of both scores meet (NLL ratios where there is no score)."""
    theirs, ours = pair.score if pair.score[0] is not None else pair.nll_ratio
    if theirs is None or ours is None:
        return None
    return theirs.low <= ours.high and ours.low <= theirs.high


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines]


def full_lines(results: Sequence[Result]) -> list[str]:
    """What the full cache does with every task, as both sides compute it."""
    groups: dict[tuple[str, str], list[Result]] = collections.defaultdict(list)
    theirs = {(r["id"], r["protocol"]): r["full"] for r in results if "full" in r}
    for result in results:
        if result["method"] == "full":
            groups[result["task"], result["protocol"]].append(result)
    rows = []
    for (task, protocol), found in groups.items():
        peer = [theirs[key] for r in found if (key := (r["id"], r["protocol"])) in theirs]
        cells = [task, protocol, len(found)]
        for side in (found, peer):
            cells.append(f"{100 * np.mean([r['em'] for r in side]):.1f}" if side else "–")
            told = [r["nll"] for r in side if r["nll"] is not None]
            cells.append(f"{np.mean(told):.4f}" if told else "–")
        rows.append(cells)
    head = ("task", "protocol", "prompts", "em ours", "NLL ours", "em theirs", "NLL theirs")
    return _table(head, rows)


def mean_of_tasks(tasks: Sequence[Sequence[float]]) -> Interval | None:
    """Mean over tasks of a score, each task counting once, with its 95 % interval.

    Percentile bootstrap: the prompts of every task are drawn with replacement, on their own.

    Args:
        tasks: for each task the scores of its prompts.
    """
    if not tasks or not all(len(scores) for scores in tasks):
        return None
    drawn = []
    for number, scores in enumerate(tasks):
        own = np.asarray(scores, float)
        picked = np.random.default_rng(number).integers(0, len(own), (RESAMPLES, len(own)))
        drawn.append(own[picked].mean(axis=1))
    low, high = np.percentile(np.mean(drawn, axis=0), (2.5, 97.5))
    mean = float(np.mean([np.mean(scores) for scores in tasks]))
    return Interval(mean, float(low), float(high))


class _Grid:
    """Results by task, method and rate, of one protocol."""

    def __init__(self, results: Iterable[Result], protocol: str):
        self._rows: dict[tuple[str, str, float], dict[str, Result]] = collections.defaultdict(dict)
        for row in results:
            if row["protocol"] == protocol:
                key = row["task"], row["method"], float(row["rate"])
                self._rows[key][row["id"]] = row
        tasks = dict.fromkeys(task for task, method, _ in self._rows if method == FULL)
        self.texts = [task for task in tasks if self._full(task)[0]["metric"] == "nll"]
        # Elsewhere the full cache itself does not know the answer.
        self.tasks = [
            task
            for task in tasks
            if task not in self.texts
            and all(row["score"] is not None for row in self._full(task))
            and np.mean([row["score"] for row in self._full(task)]) >= LEAST_FULL["em"]
        ]

    def _full(self, task: str) -> list[Result]:
        return list(self._rows[task, FULL, 1.0].values())

    def rates(self) -> list[float]:
        return sorted({rate for _, method, rate in self._rows if method != FULL})

    def both(self, task: str, method: str, rate: float, name: str) -> tuple[list, list]:
        """Values of a method and of the full cache, on the prompts that both ran."""
        own, full = self._rows[task, method, rate], self._rows[task, FULL, 1.0]
        ids = [id for id in own if id in full and own[id].get(name) is not None]
        return [own[id][name] for id in ids], [full[id][name] for id in ids]

    def by_rate(self, task: str, method: str, name: str) -> str:
        """Means of a task's score at every rate, in one cell; one of the full cache."""
        if method == FULL:
            full = self.both(task, FULL, 1.0, name)[0]
            return f"{100 * np.mean(full):.0f}" if full else "–"
        found = [self.both(task, method, rate, name)[0] for rate in self.rates()]
        if not any(found):
            return "–"
        return " / ".join(f"{100 * np.mean(own):.0f}" if own else "–" for own in found)

    def mean(self, method: str, rate: float, name: str) -> Interval | None:
        """Mean of all tasks; None if a task lacks rows."""
        rate = 1.0 if method == FULL else rate
        return mean_of_tasks([self.both(task, method, rate, name)[0] for task in self.tasks])

    def held(self, method: str, rate: float) -> str:
        """KVs that a method holds, mean of all tasks' prompts, and the rate that it reaches."""
        rows = [row for task in self.tasks for row in self._rows[task, method, rate].values()]
        if not rows:
            return "–"
        kvs = np.mean([row["kvs"] for row in rows])
        reached = np.mean([row["kvs_full"] / row["kvs"] for row in rows])
        return f"{kvs:,.0f} ({reached:.1f}×)"


SHOWN = {"score": "Exact matches", "free": "Answers without a given beginning that hold the answer"}
"""Scores of a summary, and what they are called."""


def summary_tables(results: Sequence[Result], reference: str) -> list[str]:
    """One line per method and one column per rate: all of ours, and kvpress at our KVs.

    Absolute scores, the full cache's first.

    Args:
        results: rows of a results file.
        reference: the method of ours at whose KVs the presses ran.
    """
    ours = dict.fromkeys(row["method"] for row in results if not row["method"].startswith(PREFIX))
    theirs = {peer_method(press, reference): f"kvpress {press}" for press in PRESSES}
    held = {row["method"] for row in results}
    names = {FULL: "full cache"} | {name: f"`{name}`" for name in ours if name != FULL}
    names |= {name: shown for name, shown in theirs.items() if name in held}
    lines = []
    for protocol in protocols_of(row["protocol"] for row in results):
        grid = _Grid(results, protocol)
        rates = grid.rates()
        head = ["method", *(f"{rate:g}×" for rate in rates)]

        def table(cell: Callable[[str, float], str], head=head, rates=rates) -> list[str]:
            rows = [[shown, *(cell(name, r) for r in rates)] for name, shown in names.items()]
            return [*_table(head, [row for row in rows if set(row[1:]) != {"–"}]), ""]

        for score, called in SHOWN.items() if grid.tasks else ():

            def mean(name: str, rate: float, grid=grid, score=score) -> str:
                return with_interval(grid.mean(name, rate, score), 0, 100)

            columns = {}
            for task in grid.tasks:
                prompts = len(grid.both(task, FULL, 1.0, score)[0])
                columns[f"{task} ({prompts} prompts)"] = task
            rows = [
                [shown, *(grid.by_rate(task, name, score) for task in columns.values())]
                for name, shown in names.items()
            ]
            rows = [row for row in rows if set(row[1:]) != {"–"}]
            if not rows:
                continue
            if len(grid.tasks) > 1:
                lines += [f"{called}, %, mean of {', '.join(grid.tasks)}, `{protocol}`:", ""]
                lines += table(mean)
            lines += [f"{called}, %, at {' / '.join(head[1:])}, `{protocol}`:", ""]
            lines += [*_table(["method", *columns], rows), ""]
        if grid.tasks:
            lines += [f"KVs held and rate reached, `{protocol}`:", ""]
            lines += table(lambda name, rate, grid=grid: grid.held(name, rate))
        for task in grid.texts:
            prompts = len(grid.both(task, FULL, 1.0, "nll")[0])
            lines += [f"KL to the full cache, {task}, `{protocol}`, {prompts} prompts:", ""]

            def kl(name: str, rate: float, grid=grid, task=task) -> str:
                return with_interval(bootstrap(grid.both(task, name, rate, "kl")[0]), 3)

            lines += table(kl)
    return lines


def report(results: Sequence[Result], notes: Sequence[str], reference: str) -> str:
    """The comparison as a Markdown page; `reference` as in `summary_tables`."""
    pairs = pairs_of(results)
    words = {True: "yes", False: "no", None: "–"}
    head = (
        *("task", "protocol", "rate", "kvpress", "kvjax", "n"),
        *("KVs theirs", "KVs ours", "score theirs", "score ours", "free theirs", "free ours"),
        *("NLL ratio theirs", "NLL ratio ours", "KL theirs", "KL ours", "intervals meet"),
    )

    def cells(pair: Pair) -> list[Any]:
        line = [pair.task, pair.protocol, f"{pair.rate:g}", pair.press, pair.method, pair.prompts]
        line += [f"{kvs:,.0f}" for kvs in pair.kvs]
        line += [with_interval(score, 1, 100) for score in (*pair.score, *pair.free)]
        line += [with_interval(ratio, 2) for ratio in pair.nll_ratio]
        line += [with_interval(kl, 3) for kl in pair.kl]
        return [*line, words[overlaps(pair)]]

    same = [pair for pair in pairs if pair.like]
    looked = [pair for pair in same if pair.positions is not None]
    page = ["# kvjax beside kvpress", "", *(f"- {note}" for note in notes), ""]
    page += ["## Summary", "", *summary_tables(results, reference)]
    page += ["## Full cache", "", *full_lines(results), ""]
    others = [pair for pair in pairs if not pair.like]
    page += ["## At the KVs of the reference", "", *_table(head, map(cells, others)), ""]
    page += ["## Methods of the same name", "", *_table(head, map(cells, same)), ""]
    if looked:
        place = ("task", "protocol", "rate", "kvpress", "kvjax", "equal positions, %")
        page += ["## Positions kept", ""]
        page += _table(
            place,
            (
                (p.task, p.protocol, f"{p.rate:g}", p.press, p.method, f"{100 * p.positions:.2f}")
                for p in looked
                if p.positions is not None
            ),
        )
        page.append("")
    return "\n".join(page)
