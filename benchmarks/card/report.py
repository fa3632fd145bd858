"""A page of what the card said: what was asked, what was reached, every figure.

    python -m benchmarks.card.report > docs/gpu.md

Reads benchmarks/results/h200-*.json and those of other cards, or the files of `--results FOLDER`: a
page for each card. A question that nothing was measured for is left open in the table.
"""

from kvjax.startup import guard

guard(__name__)

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.cli import ArgumentParser, run_script
from kvjax.errors import UserError

RESULTS = Path(__file__).parents[1] / "results"
FILES = ("kernels", "decode", "throughput")
LARGE_POOL = ", large pool"
"""In the name of a step over a pool that takes all of the memory."""
EARLIER = " †"
"""Marks rows of a table that were measured with an earlier source than the last of their file."""
LARGE = 10**9
"""Bytes of keys and values from which on attention must reach the bandwidth."""
KERNELS = 14
"""Kernels of a trace that are listed."""
TIMED = ("prefill", "compress", "decode", "host", "compile")
"""What a run's time is spent on."""
PAPER, GOAL = 5.18, 8.0
"""Tokens per second at 64× over none, at 6,000 tokens on an L4: the paper's, and what is wanted."""
UNMEASURED = """# On a GPU

Nothing was measured on a GPU yet. On a machine with a Hopper GPU:

    python -m benchmarks.card first --out benchmarks/results # what tells most, in ten minutes
    python -m benchmarks.card rest --out benchmarks/results  # all else, as far as time allows
    python -m benchmarks.card A --out benchmarks/results     # are the kernels right
    python -m benchmarks.card B --out benchmarks/results     # attention, decode steps
    python -m benchmarks.card C --out benchmarks/results     # tokens per second
    python -m benchmarks.card.report > docs/gpu.md
"""

Row = dict[str, Any]
Parts = dict[str, Row]


class Question(NamedTuple):
    """Something that was asked of the card."""

    asked: str
    wanted: str
    got: str
    met: bool | None
    """None where nothing was wanted, or nothing was measured."""


def cards(folder: Path) -> list[str]:
    """How the files of each card begin."""
    found = {f.stem.rpartition("-")[0] for name in FILES for f in folder.glob(f"*-{name}.json")}
    return sorted(found - {"rehearsal"})


def read(folder: Path, prefix: str) -> tuple[dict[str, Any], Parts]:
    """The machine and all parts of the calls' files that are there."""
    machine: dict[str, Any] = {}
    parts: Parts = {}
    for name in FILES:
        file = folder / f"{prefix}-{name}.json"
        if file.exists():
            content = json.loads(file.read_text(encoding="utf-8"))
            machine = content["machine"] or machine
            # What was measured last stands last.
            latest = next(reversed(content["parts"].values()), {}).get("source")
            for part, row in content["parts"].items():
                # Each call measures the peaks again.
                named = f"{name} {part}" if part == "peaks" else part
                parts[named] = row | {"earlier": row["source"] != latest, "file": name}
    return machine, parts


def of(parts: Parts, kind: str) -> Parts:
    """Parts of a kind by what follows it, those that gave nothing left out."""
    return {
        name.removeprefix(f"{kind}: "): row
        for name, row in parts.items()
        if name.startswith(f"{kind}: ") and not {"error", "skipped"} & row.keys()
    }


def questions(parts: Parts) -> Iterator[Question]:
    """What the files answer, in the order in which it was asked."""
    yield from _right(parts)
    yield from _attention(of(parts, "attention"))
    yield from _rivals(of(parts, "rival"), of(parts, "attention"))
    yield from _steps(of(parts, "step"))
    yield from _throughput(of(parts, "throughput"))
    for name, row in of(parts, "trace").items():
        if "seconds" in row and row["trace"]["kernels"]:
            # Kernels take as long without the profiler, and the host less.
            idle = 1 - row["trace"]["busy_us"] / 1e6 / row["seconds"]
            what = f"no kernel runs, {marked(name, row)}, {row['prompts']} prompts"
            yield asked(what, "≤ 3 %", idle, at_most(0.03), "{:.1%}")


def asked(
    what: str,
    wanted: str,
    got: float | None,
    met: Callable[[float], bool] | None = None,
    form: str = "{:.0%}",
) -> Question:
    """A question with a number as its answer."""
    if got is None:
        return Question(what, wanted, "not measured", None)
    return Question(what, wanted, form.format(got), None if met is None else met(got))


def _right(parts: Parts) -> Iterator[Question]:
    checked = {
        name: row
        for name, row in parts.items()
        if name.startswith(("right: ", "ring: ", "pool ")) and "skipped" not in row
    }
    good = sum(row.get("good", False) for row in checked.values())
    if not checked:
        yield Question("kernels against the reference", "all", "not measured", None)
        return
    yield Question(
        "kernels against the reference",
        "all",
        f"{good} of {len(checked)}",
        good == len(checked),
    )
    rings = of(parts, "ring")
    repeats = sum(row["repeats"] for row in rings.values())
    differing = sum(row["differing"] for row in rings.values())
    if rings:
        yield Question(
            f"repeats of {repeats} runs that differ in a bit", "0", str(differing), differing == 0
        )
    memory = parts.get("memory checker", {})
    if "good" in memory:
        said = "nothing found" if memory["good"] else f"exit code {memory['exit_code']}"
        yield Question("compute-sanitizer memcheck", "nothing found", said, memory["good"])


def _attention(rows: Parts) -> Iterator[Question]:
    def us(name: str) -> float | None:
        return rows[name]["us"] if name in rows else None

    large = {n: r for n, r in rows.items() if r["bytes"] >= LARGE and "statistic" not in n}
    for name, row in large.items():
        share = row["share_of_copy"]
        yield asked(f"attention, {name}: of the copy bandwidth", "≥ 85 %", share, at_least(0.85))
    for name, row in large.items():
        slower = us(f"{name} + statistic")
        ratio = None if slower is None else slower / row["us"] - 1
        yield asked(f"attention, {name}: more with the statistic", "≤ 15 %", ratio, at_most(0.15))
    for name, row in large.items():
        uniform = rows.get(name.replace(" zipf", " uniform"))
        if " zipf" in name and uniform is not None:
            each = (row["us"] / row["bytes"]) / (uniform["us"] / uniform["bytes"]) - 1
            what = f"attention, {name}: more per byte than uniform"
            yield asked(what, "≤ 5 %", each, at_most(0.05))
    for name in rows:
        if " b=64" in name and us(name.replace(" b=64", " b=16")) is not None:
            more = us(name.replace(" b=64", " b=16")) / us(name) - 1  # type: ignore[operator]
            what = name.replace(" b=64", "")
            yield asked(f"attention, {what}: more time with b = 16 than with 64", "", more)


def _rivals(rows: Parts, ours: Parts) -> Iterator[Question]:
    for name, row in rows.items():
        case, _, other = name.partition(": ")
        if own := ours.get(f"{case} b=16"):
            what = f"attention, {case}: time over that of {other}"
            # A dense cache has no pages to look for, and frees none.
            wanted, met = ("≤ 1×", at_most(1.0)) if "paged" in other else ("", None)
            yield asked(what, wanted, own["us"] / row["us"], met, "{:.2f}×")


def _steps(rows: Parts) -> Iterator[Question]:
    for name, row in rows.items():
        met = at_least(0.8) if re.search(r" 64 × .*, full$", name) else None
        what = f"decode step, {name}: of the copy bandwidth"
        yield asked(what, "≥ 80 %" if met else "", row["share_of_copy"], met)
    for name, row in rows.items():
        plain = rows.get(name.replace(LARGE_POOL, ""))
        if LARGE_POOL in name and plain is not None:
            more = row["us"] / plain["us"] - 1
            what = f"decode step, {name} of {row['pool_bytes'] / 1e9:.0f} GB: more than without"
            yield asked(what, "≤ 2 %", more, at_most(0.02))


def _throughput(rows: Parts) -> Iterator[Question]:
    rates = {row["rate"]: row for row in rows.values()}

    def ratio(rate: float) -> float | None:
        if rate not in rates or None not in rates:
            return None
        return served(rates[rate]) / served(rates[None])

    best = ratio(64.0)
    for least in (PAPER, GOAL):
        what = "tokens per second at 64× over none"
        yield asked(what, f"≥ {least:g}×", best, at_least(least), "{:.2f}×")
    one = ratio(1.0)
    slower = None if one is None else 1 - one
    yield asked("rate 1 slower than no compression", "≤ 2 %", slower, at_most(0.02), "{:.1%}")
    for row in rows.values():
        share = row["seconds_by_phase"]["host"] / row["seconds"]
        what = "no compression" if row["rate"] is None else f"rate {row['rate']:g}"
        yield asked(f"host's share, {what}", "≤ 3 %", share, at_most(0.03), "{:.1%}")


def served(row: Row) -> float:
    """Tokens per second, less the time in which steps were compiled on the way."""
    compiling = row["seconds_by_phase"]["compile"]
    return row["total_tokens_per_second"] * row["seconds"] / (row["seconds"] - compiling)


def at_least(least: float) -> Callable[[float], bool]:
    return lambda got: got >= least


def at_most(most: float) -> Callable[[float], bool]:
    return lambda got: got <= most


def marked(name: str, row: Row) -> str:
    """The name of a row in a table."""
    return name + EARLIER if row.get("earlier") else name


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def page(prefix: str, machine: dict[str, Any], parts: Parts) -> str:
    """A card's page, in Markdown."""
    dates = sorted({row["date"] for row in parts.values()})
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    card = machine["card"] or machine["device"]
    made = f"Made by `python -m benchmarks.card.report` from benchmarks/results/{prefix}-*.json."
    said = [f"# On a GPU: {prefix.upper()}", f"{card}; {versions}; {when}. {made}"]
    peaks = next((row for name, row in parts.items() if name.endswith(" peaks")), None)
    if peaks and "error" not in peaks:
        said.append(
            "Measured in the same run: "
            f"copies {peaks['copy_bytes_per_s'] / 1e12:.2f} TB/s (read plus written), "
            f"reads alone {peaks['read_bytes_per_s'] / 1e12:.2f} TB/s, "
            f"bfloat16 products {peaks['flop_per_s'] / 1e12:.0f} TFLOP/s."
        )
    sources = {(row["file"] == "throughput", row["source"]) for row in parts.values()}
    # Tokens per second depend on more of it.
    if len(sources) > len({served for served, _ in sources}):
        said.append(
            "Not all of it was measured with the same source of the package:"
            f"{EARLIER} marks rows of an earlier one."
        )
    verdicts = {True: "reached", False: "**missed**", None: ""}
    rows = [(q.asked, q.wanted, q.got, verdicts[q.met]) for q in questions(parts)]
    said += ["## Asked and answered", table(("asked", "wanted", "got", ""), rows)]
    said += list(_tables(parts))
    failed = {name: row["error"] for name, row in parts.items() if "error" in row}
    if failed:
        rows = [(name, error.replace("|", "/")) for name, error in failed.items()]
        said += ["## Not measured", table(("what", "why"), rows)]
    return "\n\n".join(said) + "\n"


def _tables(parts: Parts) -> Iterator[str]:
    """Every figure."""
    for title, kind, first in (
        ("Decode attention of one layer", "attention", "case"),
        ("What others take for the same bytes", "rival", "case"),
        ("Whole decode steps", "step", "step"),
    ):
        rows = [
            (
                marked(name, row),
                f"{row['us']:,.1f}",
                f"{row['bytes'] / 1e9:.3f}",
                f"{row['share_of_copy']:.1%}",
                f"{row['share_of_read']:.1%}",
                f"{row['tokens_per_second']:,}" if "tokens_per_second" in row else "",
            )
            for name, row in of(parts, kind).items()
        ]
        if rows:
            head = (first, "µs", "GB", "of the copy bandwidth", "of the read bandwidth", "tokens/s")
            yield f"## {title}"
            yield table(head, rows)
    if rows := of(parts, "throughput"):
        head = (
            "rate", "tokens/s, in and out", "out", "largest batch", "expected", "preempted",
            "prefill", "compress", "decode", "host", "compiled on the way", "of the roofline",
        )  # fmt: skip
        first = next(iter(rows.values()))
        yield "## Tokens per second"
        yield (
            f"{first['model']}, {first['num_prompts']} prompts of {first['input_len']:,} tokens, "
            f"{first['output_len']} out each, a pool of {first['pool_tokens']:,} tokens."
        )
        yield table(head, [_throughput_row(row) for row in rows.values()])
        if any(row["seconds_by_phase"]["compile"] > 0.05 for row in rows.values()):
            yield "Ratios of rates are of the time without what was compiled on the way."
    for kind in ("step", "trace"):
        for name, row in of(parts, kind).items():
            if (trace := row.get("trace")) and trace["kernels"]:
                yield from _kernels(marked(name, row), trace)
    if rows := {**of(parts, "right"), **of(parts, "ring")}:
        yield "## Right"
        lines = []
        for name, row in rows.items():
            worst = max(row["errors"].values())
            more = f"{row['wraps']:.0f} times around the ring" if row.get("wraps") else ""
            chosen = row["chosen"].partition(":")[0]
            lines.append((marked(name, row), chosen, f"{worst:.1e}", f"{row['limit']:.0e}", more))
        yield table(("call", "kernel", "worst error", "allowed", ""), lines)


def _kernels(name: str, trace: Row) -> Iterator[str]:
    """Which kernels ran, under the profiler."""
    busy, span = trace["busy_us"], trace["span_us"]
    yield f"## Kernels: {name}"
    yield (
        f"{busy / 1e3:,.1f} ms in which any ran, of {span / 1e3:,.1f} ms under the profiler, which "
        "makes the host slower."
    )
    lines = [
        (f"`{row['kernel']}`", f"{row['times']:,}", f"{row['us'] / row['times']:,.1f}",
         f"{row['us'] / busy:.1%}")
        for row in trace["kernels"][:KERNELS]
    ]  # fmt: skip
    yield table(("kernel", "times", "µs each", "of the busy time"), lines)


def _throughput_row(row: Row) -> tuple[str, ...]:
    phases = row["seconds_by_phase"]
    return (
        marked("none" if row["rate"] is None else f"{row['rate']:g}×", row),
        f"{row['total_tokens_per_second']:,.0f}",
        f"{row['output_tokens_per_second']:,.0f}",
        f"{row['max_batch']}",
        f"{row['expected_batch']}",
        f"{row['preemptions']}",
        *(f"{phases[name]:.1f} s" for name in TIMED),
        f"{row['roofline_share']:.0%}" if "roofline_share" in row else "",
    )


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m benchmarks.card.report", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder (%(default)s)")
    parser.add_argument("--prefix", help="of the files' names, for those of one card alone")
    options = parser.parse_args(arguments)
    if not options.results.is_dir():
        raise UserError(f"--results {options.results}: there is no such folder")
    prefixes = cards(options.results) if options.prefix is None else [options.prefix]
    read_ = {prefix: read(options.results, prefix) for prefix in prefixes}
    pages = [page(prefix, *found) for prefix, found in read_.items() if found[1]]
    print("\n".join(pages) or UNMEASURED, end="")
    return 0


if __name__ == "__main__":
    run_script(main)
