"""Pictures of an evaluation's results.

Each function makes one figure from the rows of a results file, or None where the rows do not hold
what it shows.
"""

import collections
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.eval.plots import new_figure
from kvjax.eval.results import Result
from kvjax.eval.table import FULL, Interval, Line, summarise

Figure = Any
"""`matplotlib.figure.Figure`; imported where a figure is made, as it takes a second."""
MARKERS = "osD^vPX*<>hdp8"


def _styles(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour and a marker for each method, all of them different."""
    import matplotlib

    colours = matplotlib.color_sequences["tab10"]
    return {
        method: {
            "color": colours[i % len(colours)],
            "marker": MARKERS[(i // len(colours) + i) % len(MARKERS)],
            "linestyle": ("-", "--", ":", "-.")[i // len(colours) % 4],
        }
        for i, method in enumerate(methods)
    }


def _labels(methods: Sequence[str]) -> dict[str, str]:
    """What methods are called in pictures: "kvpress:tova@ours" without what tells no two apart."""
    short = [method.partition("@")[0].replace(":", " ") for method in methods]
    shown = short if len(set(short)) == len(short) else methods
    return {m: s if "@" in m else m for m, s in zip(methods, shown)}


def _methods(rows: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows if row["method"] != FULL))


SCORES = {
    "score": "score against the true answer",
    "free": "answers without a given beginning that hold the true one",
}
"""What `plot_scores` can show."""


def _by_rate(
    lines: Sequence[Line], tasks: Sequence[str], value: str
) -> dict[str, list[tuple[float, float]]]:
    """For each method (KVs of the full cache / KVs held, mean of the value over all tasks)."""
    cells: dict[tuple[str, float], list[tuple[float, float]]] = collections.defaultdict(list)
    for line in lines:
        number = getattr(line, value)
        number = number.mean if isinstance(number, Interval) else number
        if line.task in tasks and line.method != FULL and number is not None:
            cells[line.method, line.rate].append((line.kvs_share, number))
    points: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for (method, _), found in sorted(cells.items(), key=lambda cell: cell[0][1]):
        if len(found) == len(tasks):
            share, number = np.mean(found, axis=0)
            points[method].append((1 / share, number))
    return points


def _draw_by_rate(
    axes: Any,
    points: dict[str, list[tuple[float, float]]],
    factor: float,
    methods: Sequence[str],
) -> None:
    labels = _labels(methods)
    for method, style in _styles(methods).items():
        if method in points:
            x, y = np.array(points[method]).T
            axes.plot(x, y * factor, label=labels[method], markersize=4, linewidth=1.2, **style)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda rate, _: f"{rate:g}×")
    axes.set_xlabel("KVs of the full cache / KVs held")
    axes.grid(alpha=0.3)


def _legend(figure: Any, panels: Sequence[Any], count: int) -> None:
    """One legend for all panels, some of which may lack a method."""
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            found.setdefault(label, handle)
    columns = min(4, max(1, math.ceil(count / 2)))
    figure.legend(
        list(found.values()), list(found), loc="outside lower center", ncols=columns, fontsize=7
    )


def plot_scores(rows: Sequence[Result], protocol: str, value: str = "score") -> Figure | None:
    """A score, 0 to 100 %, by rate: the mean of all tasks, and each task.

    Args:
        rows: of a results file.
        protocol: of the rows to draw.
        value: one of `SCORES`.
    """
    lines = [line for line in summarise(rows) if line.protocol == protocol]
    full = {line.task: line for line in lines if line.method == FULL and not line.full_fails}
    found = {task: getattr(line, value) for task, line in full.items()}
    reference = {task: interval.mean for task, interval in found.items() if interval is not None}
    tasks = list(reference)
    if not tasks or not _methods(rows):
        return None
    panels = [("mean of all tasks", tasks)] * (len(tasks) > 1) + [(task, [task]) for task in tasks]
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows_of_panels = math.ceil(len(panels) / columns)
    count = len(_methods(rows))
    figure = new_figure(4 * columns + 1, 3 * rows_of_panels + 0.6 + 0.05 * count)
    grid = figure.subplots(rows_of_panels, columns, squeeze=False, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (title, wanted) in zip(grid.flat, panels):
        level = 100 * float(np.mean([reference[task] for task in wanted]))
        axes.axhline(
            level, color="#222222", linewidth=1.2, linestyle=(0, (6, 2)), label="full cache"
        )
        _draw_by_rate(axes, _by_rate(lines, wanted, value), 100, _methods(rows))
        axes.set_title(title, fontsize=9)
        axes.set_ylim(-3, 103)
    for axes in grid[:, 0]:
        axes.set_ylabel("%")
    what = SCORES[value]
    if value == "score" and {full[task].metric for task in tasks} == {"em"}:
        what = "exact matches of the true answer"
    figure.suptitle(f"{what.capitalize()} (protocol {protocol})", fontsize=10)
    _legend(figure, list(grid.flat), count)
    return figure


def plot_text(rows: Sequence[Result], protocol: str) -> Figure | None:
    """NLL of continued text, and KL to the full cache, by rate."""
    texts = [row for row in rows if row["metric"] == "nll"]
    lines = [line for line in summarise(texts) if line.protocol == protocol]
    tasks = list(dict.fromkeys(line.task for line in lines))
    methods = _methods(texts)
    if not lines or not methods:
        return None
    figure = new_figure(9, 4 + 0.05 * len(methods))
    left, right = figure.subplots(1, 2)
    _draw_by_rate(left, _by_rate(lines, tasks, "nll"), 1, methods)
    full = [line.nll.mean for line in lines if line.method == FULL and line.nll is not None]
    if full:
        left.axhline(np.mean(full), color="#888888", linewidth=0.8, label="full")
    left.set_ylabel("NLL per token")
    _draw_by_rate(right, _by_rate(lines, tasks, "kl"), 1, methods)
    right.set_ylabel("KL(full ‖ compressed) per token")
    right.set_yscale("log")
    figure.suptitle(f"Continued text by compression ({protocol})", fontsize=10)
    _legend(figure, [left], len(methods))
    return figure


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of points (fewer bytes, score) those that no other has both numbers of, or more, in order."""
    found: list[tuple[float, float]] = []
    for x, y in sorted(points, reverse=True):
        if not found or y > found[-1][1]:
            found.append((x, y))
    return found[::-1]


def plot_bytes(rows: Sequence[Result], protocol: str) -> Figure | None:
    """Mean score, and KL on continued text, over bytes, where keys and values have several types.

    A line goes through what nothing beats at its bytes.
    """
    methods = [method for method in _methods(rows) if " in " in method]
    lines = [line for line in summarise(rows) if line.protocol == protocol]
    if not methods or not lines:
        return None
    full = [line for line in lines if line.method == FULL]
    scored = [l.task for l in full if l.score is not None and not l.full_fails]
    texts = [l.task for l in full if l.metric == "nll"]
    panels = [("score", scored, 100, 1), ("kl", texts, 1, -1)]
    panels = [panel for panel in panels if panel[1]]
    if not panels:
        return None
    figure = new_figure(2 + 4.5 * max(2, len(panels)), 4 + 0.06 * len(methods))
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (value, tasks, factor, better) in zip(grid, panels):
        points = _over_bytes(lines, tasks, value)
        for method, style in _styles(methods).items():
            if found := sorted(points.get(method, [])):
                x, y = np.array(found).T
                axes.plot(x, y * factor, label=method, markersize=4, linewidth=1, **style)
        every = [(x, better * y) for method in methods for x, y in points.get(method, [])]
        if best := frontier(every):
            x, y = np.array(best).T
            axes.plot(x, better * y * factor, color="#222222", alpha=0.25, linewidth=6, zorder=0)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda fewer, _: f"{fewer:g}×")
        axes.set_xlabel("bytes of the full cache / bytes held")
        axes.grid(alpha=0.3)
    exact = {line.metric for line in full if line.task in scored} == {"em"}
    grid[0].set_ylabel("exact matches, %" if exact else "score, %" if scored else "KL per token")
    if panels[-1][0] == "kl":
        grid[-1].set_ylabel("KL(full ‖ compressed) per token")
        grid[-1].set_yscale("log")
    figure.suptitle(f"Score and KL over bytes ({protocol})", fontsize=10)
    _legend(figure, list(grid), len(methods))
    return figure


def _over_bytes(
    lines: Sequence[Line], tasks: Sequence[str], value: str
) -> dict[str, list[tuple[float, float]]]:
    """For each method (bytes of the full cache / bytes held, value), means over all the tasks."""
    cells: dict[tuple[str, float], list[tuple[float, float]]] = collections.defaultdict(list)
    for line in lines:
        number = getattr(line, value)
        if line.task in tasks and number is not None and line.bytes_share is not None:
            cells[line.method, line.rate].append((line.bytes_share, number.mean))
    points: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for (method, _), found in cells.items():
        if len(found) == len(tasks):
            share, y = np.mean(found, axis=0)
            points[method].append((float(1 / share), float(y)))
    return points


def plot_needles(rows: Sequence[Result], protocol: str, task: str) -> Figure | None:
    """Exact matches of a task by depth, one map per method.

    Across: lengths where there are several, each at the largest rate; otherwise rates.
    """
    found = [
        row
        for row in rows
        if row["task"] == task and row["protocol"] == protocol and row["depth"] is not None
    ]
    lengths = sorted({row["length"] for row in found})
    rates = sorted({row["rate"] for row in found if row["method"] != FULL})
    methods = _methods(found)
    if not methods:
        return None
    depths = sorted({row["depth"] for row in found})
    across, name = (lengths, "length") if len(lengths) > 1 else (rates, "rate")
    if name == "length":
        found = [row for row in found if row["rate"] == rates[-1]]
    columns = min(6, len(methods))
    panels = math.ceil(len(methods) / columns)
    figure = new_figure(1.2 + 1.7 * columns, 0.8 + 1.7 * panels)
    grid = figure.subplots(panels, columns, squeeze=False, sharex=True, sharey=True)
    image = None
    for axes in grid.flat[len(methods) :]:
        axes.set_axis_off()
    for axes, method in zip(grid.flat, methods):
        values = np.full((len(depths), len(across)), np.nan)
        for y, depth in enumerate(depths):
            for x, at in enumerate(across):
                hits = [
                    row["em"]
                    for row in found
                    if (row["method"], row["depth"], row[name]) == (method, depth, at)
                ]
                values[y, x] = np.mean(hits) if hits else np.nan
        image = axes.imshow(values, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        axes.set_title(_labels(methods)[method], fontsize=6)
        axes.set_xticks(range(len(across)), [f"{at:g}" for at in across], fontsize=6)
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=6)
    at_rate = f", rate {rates[-1]:g}" if name == "length" else ""
    figure.supxlabel("prompt length" if name == "length" else "rate", fontsize=8)
    figure.supylabel("depth", fontsize=8)
    figure.colorbar(image, ax=grid, label="exact matches", shrink=0.6)
    figure.suptitle(f"{task} ({protocol}{at_rate})", fontsize=10)
    return figure


def _detailed(rows: Sequence[Result], protocol: str, rate: float) -> dict[str, list[Result]]:
    """Rows with details at a rate, by method."""
    found: dict[str, list[Result]] = collections.defaultdict(list)
    for row in rows:
        if "kept" in row and row["protocol"] == protocol and row["rate"] == rate:
            found[row["method"]].append(row)
    return {method: group for method, group in found.items() if method != FULL}


def plot_kept(rows: Sequence[Result], protocol: str, rate: float) -> Figure | None:
    """Share of the prompt's KVs that each layer × KV head keeps, one map per method."""
    groups = _detailed(rows, protocol, rate)
    if not groups:
        return None
    columns = min(8, len(groups))
    panels = math.ceil(len(groups) / columns)
    figure = new_figure(1.2 + 1.3 * columns, 0.8 + 2.2 * panels)
    grid = figure.subplots(panels, columns, squeeze=False, sharex=True, sharey=True)
    image = None
    for axes in grid.flat[len(groups) :]:
        axes.set_axis_off()
    shares = {
        method: 100 * np.mean([np.array(r["kept"]) / r["compressed_tokens"] for r in group], axis=0)
        for method, group in groups.items()
    }
    # The few heads that keep nearly all would leave one colour to all others.
    top = float(np.quantile(np.concatenate([s.ravel() for s in shares.values()]), 0.99))
    for axes, (method, share) in zip(grid.flat, shares.items()):
        image = axes.imshow(share, aspect="auto", cmap="viridis", vmin=0, vmax=top)
        axes.set_title(method, fontsize=6)
        axes.tick_params(labelsize=6)
        axes.set_xticks(range(share.shape[1]))
    figure.supxlabel("KV head", fontsize=8)
    figure.supylabel("layer", fontsize=8)
    label = "% of the prompt's KVs"
    figure.colorbar(image, ax=grid, label=label, shrink=0.6, extend="max")
    figure.suptitle(f"KVs kept at rate {rate:g} ({protocol})", fontsize=10)
    return figure


def plot_recall(rows: Sequence[Result], protocol: str, rate: float) -> Figure | None:
    """Attention recall by layer: the share of attention that falls on the KVs kept."""
    groups = {
        method: [row for row in group if row["recall_by_layer"] is not None]
        for method, group in _detailed(rows, protocol, rate).items()
    }
    groups = {method: group for method, group in groups.items() if group}
    if not groups:
        return None
    figure = new_figure(8, 4.2 + 0.05 * len(groups))
    axes = figure.subplots()
    for method, style in _styles(list(groups)).items():
        recall = np.mean([row["recall_by_layer"] for row in groups[method]], axis=0)
        axes.plot(recall * 100, label=method, markersize=3, linewidth=1, **style)
    axes.set_xlabel("layer")
    axes.set_ylabel("attention recall, %")
    axes.grid(alpha=0.3)
    axes.set_title(f"Attention recall at rate {rate:g} ({protocol})", fontsize=10)
    _legend(figure, [axes], len(groups))
    return figure
