"""Pictures of `kvjax throughput`'s results, like KV-Compress's figures 1b, 7 and 8."""

from pathlib import Path
from typing import Any

from kvjax.eval.plots import new_figure, save_figure

VANILLA = "without compression"


def plot_all(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Throughput and largest batch by rate, and throughput by prompt length."""
    rows = [row for row in rows if row["input_len"] is not None and "seconds_by_phase" in row]
    if not rows:
        return []
    lengths = sorted({row["input_len"] for row in rows})
    rates = sorted({row["rate"] for row in rows if row["rate"] is not None})
    files = [
        _by_rate(rows, lengths, rates, "total_tokens_per_second", "tokens per second", folder),
        _by_rate(rows, lengths, rates, "max_batch", "largest batch", folder),
    ]
    if len(lengths) > 1:
        files.append(_by_length(rows, lengths, rates, folder))
    return files


def _value(rows: list[dict[str, Any]], length: int, rate: float | None, name: str) -> float | None:
    found = [row[name] for row in rows if row["input_len"] == length and row["rate"] == rate]
    return found[-1] if found else None


def _by_rate(rows, lengths, rates, name: str, label: str, folder: Path) -> Path:
    figure, axes = _figure()
    for number, length in enumerate(lengths):
        points = [(rate, _value(rows, length, rate, name)) for rate in rates]
        points = [(x, y) for x, y in points if y is not None]
        color = f"C{number % 10}"
        if points:
            axes.plot(*zip(*points), "o-", color=color, label=f"{length:,} tokens in")
        vanilla = _value(rows, length, None, name)
        if vanilla is not None:
            axes.axhline(vanilla, color=color, linestyle=":")
    axes.plot([], [], ":", color="grey", label=VANILLA)
    if rates:
        axes.set_xscale("log", base=2)
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.set(xlabel="compression rate", ylabel=label, title=_title(rows))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return _saved(figure, folder / f"{name}_by_rate.png")


def _by_length(rows, lengths, rates, folder: Path) -> Path:
    figure, axes = _figure()
    for number, rate in enumerate([None, *rates]):
        points = [(n, _value(rows, n, rate, "total_tokens_per_second")) for n in lengths]
        points = [(x, y) for x, y in points if y is not None]
        name = VANILLA if rate is None else f"rate {rate:g}"
        style = "k:" if rate is None else "o-"
        color = {} if rate is None else {"color": f"C{number % 10}"}
        if points:
            axes.plot(*zip(*points), style, label=name, **color)
    axes.set(xlabel="prompt tokens", ylabel="tokens per second", title=_title(rows))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return _saved(figure, folder / "total_tokens_per_second_by_length.png")


def _figure() -> tuple[Any, Any]:
    figure = new_figure(6, 4)
    return figure, figure.subplots()


def _saved(figure: Any, file: Path) -> Path:
    save_figure(figure, file)
    return file


def _title(rows: list[dict[str, Any]]) -> str:
    row = rows[0]
    return (
        f"{row['model']}, {row['device']}, {row['num_prompts']} prompts, "
        f"{row['output_len']} tokens out\npool of {row['pool_tokens']:,} tokens"
    )
