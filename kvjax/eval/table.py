"""Results as Markdown tables, with 95 % intervals by the bootstrap over prompts."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kvjax.eval.results import Result
from kvjax.eval.rows import PROTOCOLS

RESAMPLES = 2000
SEED = 0
"""Of the resampling."""
FULL = "full"
MOST_LENGTHS = 8
"""Lengths of a task that are told apart; data sets have as many as rows."""
LEAST_FULL = {"em": 0.5}
"""Least mean score of the full cache below which a task says nothing; 0.05 for other metrics."""


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float

    def shown(self, digits: int) -> str:
        # 0 is added so that what rounds to nothing has no sign.
        mean, low, high = (round(x, digits) + 0.0 for x in (self.mean, self.low, self.high))
        return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def bootstrap(values: Sequence[float], of: Sequence[float] | None = None) -> Interval | None:
    """Mean of some values, or the ratio of their mean to that of others of the same prompts.

    Percentile bootstrap: prompts are drawn with replacement, both numbers of a prompt together.

    Args:
        values: one per prompt.
        of: the same prompts' values in the denominator.

    Returns:
        None without values or with a denominator of 0.
    """
    top = np.asarray(values, float)
    if not len(top):
        return None
    drawn = np.random.default_rng(SEED).integers(0, len(top), (RESAMPLES, len(top)))
    means = top[drawn].mean(axis=1)
    mean = top.mean()
    if of is not None:
        bottom = np.asarray(of, float)
        if bottom.mean() == 0:
            return None
        below = bottom[drawn].mean(axis=1)
        # A sample in which the full cache scores nothing has no ratio.
        means, mean = means[below > 0] / below[below > 0], mean / bottom.mean()
    low, high = np.percentile(means, (2.5, 97.5))
    return Interval(float(mean), float(low), float(high))


@dataclasses.dataclass(frozen=True)
class Line:
    """One (task, protocol, method, rate) over its prompts."""

    task: str
    protocol: str
    method: str
    rate: float
    metric: str
    prompts: int
    score: Interval | None
    free: Interval | None
    """How many answers without a given beginning hold the true one."""
    share: Interval | None
    """Score as a share of the full cache's on the same prompts."""
    nll: Interval | None
    kl: Interval | None
    agree: Interval | None
    recall: float | None
    kvs: float
    """KVs held, mean."""
    kvs_share: float
    """KVs held as a share of the full cache's."""
    megabytes: float
    bytes_share: float | None
    """Bytes held as a share of the full cache's, as it is computed."""
    select_share: float
    """Seconds of choosing and writing the survivors as a share of the prefill's."""
    seconds: float
    """Seconds of a prompt after its prefill."""
    full_fails: bool
    """Whether the full cache scores too little for the task to say anything."""

    @property
    def smaller(self) -> float | None:
        """Bytes of the full cache, as it is computed, over bytes held."""
        return None if self.bytes_share is None else 1 / self.bytes_share


def protocols_of(names: Iterable[str]) -> list[str]:
    """These protocols, each once, in the order of reports."""
    known = list(PROTOCOLS)
    return sorted(
        dict.fromkeys(names), key=lambda name: known.index(name) if name in known else len(known)
    )


def summarise(results: Iterable[Result]) -> list[Line]:
    """One line per (task, protocol, method, rate); the full cache comes first."""
    results = list(results)
    name = _names(results)
    groups: dict[tuple, list[Result]] = collections.defaultdict(list)
    for result in results:
        key = (name(result), result["protocol"], result["method"], result["rate"])
        groups[key].append(result)
    lines = []
    for (task, protocol, method, rate), rows in groups.items():
        full = {r["id"]: r for r in groups.get((task, protocol, FULL, 1.0), [])}
        lines.append(_line(task, protocol, method, rate, rows, full))
    methods = {method: n for n, method in enumerate(dict.fromkeys(l.method for l in lines))}
    tasks = {task: n for n, task in enumerate(dict.fromkeys(l.task for l in lines))}
    order = {name: n for n, name in enumerate(protocols_of(l.protocol for l in lines))}
    lines.sort(
        key=lambda l: (
            tasks[l.task],
            order[l.protocol],
            l.method != FULL,
            methods[l.method],
            l.rate,
        )
    )
    return lines


def _names(results: Sequence[Result]) -> Callable[[Result], str]:
    """How a result's task is called: with its length where a task has a few of them."""
    lengths: dict[str, set[int]] = collections.defaultdict(set)
    for result in results:
        lengths[result["task"]].add(result.get("length", 0))

    def name(result: Result) -> str:
        task = result["task"]
        several = 1 < len(lengths[task]) <= MOST_LENGTHS
        return f"{task} {result['length']}" if several else task

    return name


def _line(
    task: str, protocol: str, method: str, rate: float, rows: list[Result], full: dict[str, Result]
) -> Line:
    rows = sorted(rows, key=lambda row: row["id"])

    def present(name: str, source: Sequence[Result] = rows) -> list[float]:
        return [row[name] for row in source if row.get(name) is not None]

    scores = present("score")
    share, fails = None, False
    if scores and all(row["id"] in full for row in rows):
        reference = present("score", [full[row["id"]] for row in rows])
        share = bootstrap(scores, reference)
        fails = float(np.mean(reference)) < LEAST_FULL.get(rows[0]["metric"], 0.05)
    seconds = [row["seconds"] for row in rows]
    recalls = present("recall")
    return Line(
        task=task,
        protocol=protocol,
        method=method,
        rate=rate,
        metric=rows[0]["metric"],
        prompts=len(rows),
        score=bootstrap(scores),
        free=bootstrap(present("free")),
        share=share,
        nll=bootstrap(present("nll")),
        kl=bootstrap(present("kl")),
        agree=bootstrap(present("agree")),
        recall=float(np.mean(recalls)) if recalls else None,
        kvs=float(np.mean([row["kvs"] for row in rows])),
        kvs_share=float(np.mean([row["kvs"] / row["kvs_full"] for row in rows])),
        megabytes=float(np.mean([row["bytes"] for row in rows])) / 1e6,
        bytes_share=float(np.mean([row["bytes"] / row["bytes_full"] for row in rows]))
        if all(row.get("bytes_full") is not None for row in rows)
        else None,
        select_share=float(np.mean([s["select"] / s["prefill"] for s in seconds])),
        seconds=float(np.mean([s["select"] + s["score"] + s["decode"] for s in seconds])),
        full_fails=fails,
    )


def _row(cells: Iterable[Any]) -> str:
    plain = (" ".join(str(cell).split()).replace("|", "\\|") for cell in cells)
    return "| " + " | ".join(plain) + " |"


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """The lines of a Markdown table."""
    return [_row(head), _row("---" for _ in head), *map(_row, rows)]


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def with_interval(interval: Interval | None, digits: int, factor: float = 1) -> str:
    """A mean and its interval, times a factor, as tables have them."""
    if interval is None:
        return "–"
    scaled = Interval(interval.mean * factor, interval.low * factor, interval.high * factor)
    return scaled.shown(digits)


def full_table(lines: Sequence[Line]) -> str:
    """What the full cache does on every task, and which tasks it cannot do."""
    head = ("task", "protocol", "metric", "prompts", "score", "free answer", "NLL", "KVs", "MB", "")
    rows = [
        (
            line.task,
            line.protocol,
            line.metric,
            line.prompts,
            with_interval(line.score, 1, 100),
            with_interval(line.free, 1, 100),
            with_interval(line.nll, 3),
            f"{line.kvs:,.0f}",
            f"{line.megabytes:.1f}",
            "the full cache fails" if line.full_fails else "",
        )
        for line in lines
        if line.method == FULL
    ]
    return "\n".join(markdown(head, rows))


def rate_table(lines: Sequence[Line], protocol: str, tasks: Sequence[str], value: str) -> str:
    """Methods by rates, one number each: the mean over tasks. The full cache's stands first.

    What was run on fewer prompts than others says so: "12.5 (4 of 10 prompts)".

    Args:
        lines: from `summarise`.
        protocol: of the lines to use.
        tasks: the tasks to average over.
        value: "score", "free", "share" (% of the full cache's score), "agree" or "recall", all in
            %; "nll", "kl", "rate" (KVs of the full cache over KVs held) or "smaller" (the same of
            their bytes).
    """
    chosen = [l for l in lines if l.protocol == protocol and l.task in tasks]
    rates = sorted({line.rate for line in chosen if line.method != FULL})
    cells: dict[tuple[str, float], list[float]] = collections.defaultdict(list)
    prompts: collections.Counter[tuple[str, float]] = collections.Counter()
    percent = value in ("score", "free", "share", "agree", "recall")
    for line in chosen:
        number = 1 / line.kvs_share if value == "rate" else getattr(line, value)
        number = number.mean if isinstance(number, Interval) else number
        if number is not None:
            cells[line.method, line.rate].append(number * (100 if percent else 1))
            prompts[line.method, line.rate] += line.prompts
    # A mean over fewer tasks than the others' would not compare.
    whole = {key: float(np.mean(c)) for key, c in cells.items() if len(c) == len(tasks)}
    most = max((prompts[key] for key in whole), default=0)
    form = ".1f" if percent or value in ("rate", "smaller") else ".3f"

    def shown(key: tuple[str, float]) -> str:
        number = _number(whole.get(key), form)
        fewer = key in whole and prompts[key] < most
        return f"{number} ({prompts[key]} of {most} prompts)" if fewer else number

    rows = []
    for method in dict.fromkeys(line.method for line in chosen):
        # Once for all rates: nothing is compressed.
        keys = [(method, 1.0 if method == FULL else rate) for rate in rates]
        rows.append((method, *map(shown, keys)))
    return "\n".join(markdown(("method", *(f"{rate:g}×" for rate in rates)), rows))


def long_table(lines: Sequence[Line]) -> str:
    """Every line with its intervals."""
    head = (
        *("task", "protocol", "method", "rate", "prompts", "score", "free answer", "% of full"),
        *("NLL", "KL", "agree %", "recall %", "KVs", "reached rate", "MB", "fewer bytes"),
        *("select % of prefill", "s"),
    )
    rows = (
        (
            line.task + (" ✗" if line.full_fails else ""),
            line.protocol,
            line.method,
            f"{line.rate:g}",
            line.prompts,
            with_interval(line.score, 1, 100),
            with_interval(line.free, 1, 100),
            with_interval(line.share, 1, 100),
            with_interval(line.nll, 3),
            with_interval(line.kl, 3),
            with_interval(line.agree, 1, 100),
            _number(None if line.recall is None else line.recall * 100, ".1f"),
            f"{line.kvs:,.0f}",
            f"{1 / line.kvs_share:.1f}",
            f"{line.megabytes:.2f}",
            _number(line.smaller, ".1f"),
            f"{line.select_share * 100:.1f}",
            f"{line.seconds:.2f}",
        )
        for line in lines
    )
    return "\n".join(markdown(head, rows))


def report(results: Sequence[Result], title: str, notes: Sequence[str] = ()) -> str:
    """Everything as one Markdown page."""
    lines = summarise(results)
    page = [f"# {title}", "", *(f"- {note}" for note in notes), ""]
    page += ["## The full cache", "", full_table(lines), ""]
    for protocol in protocols_of(line.protocol for line in lines):
        full = [l for l in lines if l.protocol == protocol and l.method == FULL]
        scored = [l.task for l in full if l.score is not None and not l.full_fails]
        texts = [l.task for l in full if l.metric == "nll"]
        own = [l.task for l in full if l.metric == "own"]
        freely = [l.task for l in full if l.task in scored and l.free is not None]
        sections = [("Score × 100", scored, "score"), ("Free answers × 100", freely, "free")]
        for task in scored if len(scored) > 1 else ():
            sections += [(f"Score × 100: {task}", [task], "score")]
            if task in freely:
                sections += [(f"Free answers × 100: {task}", [task], "free")]
        sections += [("KL(full ‖ compressed) on continuation", texts, "kl")]
        sections += [("NLL on continuation", texts, "nll")]
        sections += [("KL(full ‖ compressed) on what the full cache says by itself", own, "kl")]
        reached = "Reached rate: KVs of the full cache / KVs held"
        sections += [(reached, [l.task for l in full], "rate")]
        sections += [("Fewer bytes: full cache / held", [l.task for l in full], "smaller")]
        for name, tasks, value in sections:
            if tasks:
                mean = f", mean of {len(tasks)} tasks" if len(tasks) > 1 else ""
                page += [f"## {name} (`{protocol}`{mean})", ""]
                page += [rate_table(lines, protocol, tasks, value), ""]
    page += [EVERY, "", FOOT, "", long_table(lines), ""]
    return "\n".join(page)


EVERY = "## Every line"
FOOT = (
    "Means over prompts, 95 % bootstrap intervals over prompts in brackets. Scores × 100. "
    "free answer: how many greedy answers that are given no beginning hold the true one. "
    "reached rate: KVs of the full cache / KVs held. fewer bytes: the same of the bytes, with all "
    "that is kept beside a KV, the full cache as it is computed. "
    "✗: the full cache itself scores under 50 (em) or 5 (other metrics), so the line says nothing. "
    "NLL, KL to the full cache and top-1 agreement are over the target tokens after the first. "
    "recall: share of the attention that the following tokens pay to the prompt, with the full "
    "cache, that falls on the KVs kept. select: choosing the survivors and writing them. s: "
    "seconds of a prompt after its prefill."
)
