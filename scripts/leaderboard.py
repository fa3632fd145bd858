"""Write docs/leaderboard.md from results of `kvjax evaluate`: one row per model and method.

python scripts/leaderboard.py                     # the page, of what benchmarks/results holds
python scripts/leaderboard.py --check             # say whether it is as the results have it
python scripts/leaderboard.py --measure snapkv --data DATA             # and with this method's row
python scripts/leaderboard.py --measure snapkv --data DATA --kv-dtype int8
python scripts/leaderboard.py --measure snapkv,h2o --data DATA --length 4096
python scripts/leaderboard.py --measure snapkv --data DATA --weights FILE

What is measured lies in benchmarks/results/leaderboard-MODEL-METHOD.jsonl (with the length behind
it, where that is not the first) and goes on where it was broken off; whole ones are packed by gzip.
A method has a row where it was run on every prompt that the full cache was run on.
"""

import argparse
import collections
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvjax.cli import ArgumentParser, run_script
from kvjax.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs" / "leaderboard.md", ROOT / "benchmarks" / "results"
SPLIT, LENGTHS, SEED, ROWS = "dev", (1024, 4096, 7900), 5, 4
TASKS, TEXT = ("needle", "passkey", "fact"), "continuation"
RATES, PROTOCOLS = (8.0, 32.0), ("chat", "agnostic")
IDS = re.compile(
    rf"({'|'.join((*TASKS, TEXT))})/{SPLIT}/({'|'.join(map(str, LENGTHS))})/{SEED}/[0-{ROWS - 1}]"
)
HEAD = (
    *("method", "model", "`chat`", "`agnostic`", "continuation", "reached rate", "fewer bytes"),
    *("prefill", "decode"),
)

INTRODUCTION = f"""Written by `python scripts/leaderboard.py`; one more row:
`python scripts/leaderboard.py --measure METHOD --data DATA`.

Development prompts ({", ".join(TASKS)}: {ROWS} each, seed {SEED}) and {ROWS} continued texts,
compressed once. `chat` and `agnostic`: exact matches in %.
Continuation: KL(full cache ‖ compressed), `chat`. Brackets are 95 % bootstrap intervals over
prompts: so few prompts tell the best from the worst, and no neighbours apart. Reached rate: KVs of
the full cache / KVs held; fewer bytes: the same of bytes, with all that is kept beside a KV.
Prefill: what observing, choosing and writing add to it, as timed on shared CPU cores, in the
evaluation, which takes metrics in a pass of its own (most of it where all queries count, as in
`h2o`); what an engine takes is in [results.md](results.md#what-a-method-costs). Decode: KVs that a
step reads, of the full cache's. –: not run on all of these prompts. Some types store a
prompt as a whole (`gear4` and others): [methods.md](methods.md) says which no cache can be of.
[evaluation.md](evaluation.md) has protocols and tasks."""


def command(options: argparse.Namespace, out: Path) -> list[str]:
    """What `kvjax evaluate` is given for rows."""
    return [
        *(("--weights", options.weights) if options.weights else ("--model", options.model)),
        *("--data", options.data, "--methods", options.measure, "--out", str(out)),
        *("--split", SPLIT, "--length", f"{options.length}", "--seed", f"{SEED}"),
        *("--rows", f"{ROWS}", "--block-size", "16"),
        *("--tasks", ",".join((*TASKS, TEXT)), "--protocols", ",".join(PROTOCOLS)),
        *("--rates", ",".join(f"{rate:g}" for rate in RATES), "--details", "0"),
        # No page of its own: the leaderboard is written from the rows.
        *("--table", os.devnull),
        *("--free-tokens", "0", *(("--kv-dtype", options.kv_dtype) if options.kv_dtype else ())),
    ]


def paths_in(folder: Path) -> list[Path]:
    """Files of results in the order in which later ones win: what was just measured wins over what
    was packed."""
    found = {*folder.glob("evaluation-*.jsonl.gz"), *folder.glob("leaderboard-*.jsonl*")}
    return sorted(found, key=lambda path: (path.suffix != ".gz", path.name))


def results_of(paths: Iterable[Path]) -> list[dict]:
    """The results of the leaderboard's prompts in some files, each once; later files win."""
    from kvjax.eval.results import key_of, read_results

    found = {}
    for path in paths:
        for row in read_results(path):
            if IDS.fullmatch(row["id"]) and row["protocol"] in PROTOCOLS:
                found[_weights(row), *key_of(row)] = row
    return list(found.values())


def rows_at(results: Sequence[dict], rate: float) -> list[tuple[str, ...]]:
    """The cells of `HEAD` at a rate: the full cache first, then what keeps the most."""
    from kvjax.eval.table import FULL, bootstrap

    prompts: dict[tuple, set[str]] = {}
    for row in results:
        if row["method"] == FULL:
            prompts.setdefault(_group(row), set()).add(row["digest"])
    entries: dict[tuple[tuple[str, str], str], dict[tuple[str, bool], list[dict]]] = {}
    for row in results:
        if row["rate"] in (rate, 1.0) and row["digest"] in prompts.get(_group(row), ()):
            entry = entries.setdefault((_group(row)[0], row["method"]), {})
            entry.setdefault(_group(row)[1:], []).append(row)
    names = collections.Counter(name for name, _ in {_weights(row) for row in results})
    table = []
    for (model, method), groups in entries.items():
        groups = {
            group: rows
            for group, rows in groups.items()
            if {row["digest"] for row in rows} == prompts[model, *group]
        }
        every = [row for rows in groups.values() for row in rows]
        if not every:
            continue
        found = {
            group: bootstrap([row["kl" if group[1] else "em"] for row in rows])
            for group, rows in groups.items()
        }
        scores = [found.get((protocol, False)) for protocol in PROTOCOLS]
        text = found.get((PROTOCOLS[0], True))
        held = [row["kvs"] / row["kvs_full"] for row in every]
        costs = [row["seconds"]["select"] / row["seconds"]["prefill"] for row in every]
        sizes = [row["bytes"] / row["bytes_full"] for row in every if "bytes_full" in row]
        cells = (
            f"`{method}`", model[0] if names[model[0]] == 1 else " ".join(model),
            *("–" if x is None else _percent(x) for x in scores),
            "–" if text is None else text.shown(3),
            f"{len(held) / sum(held):.1f}",
            f"{len(sizes) / sum(sizes):.1f}" if sizes else "–",
            f"+{100 * sum(costs) / len(costs):.1f} %",
            f"{100 * sum(held) / len(held):.0f} %",
        )  # fmt: skip
        best = scores[0].mean if scores[0] else -1.0
        table.append(((*model, method != FULL, -best, text.mean if text else 1e9), cells))
    return [cells for _, cells in sorted(table)]


def _weights(row: dict) -> tuple[str, str]:
    """A model's name and the file of its weights: several may have the name."""
    return row["settings"]["model"], row["settings"]["weights"]


def _group(row: dict) -> tuple[tuple[str, str], str, bool]:
    """Weights, protocol and whether it is continued text."""
    return _weights(row), row["protocol"], row["metric"] == "nll"


def _percent(interval) -> str:
    return f"{100 * interval.mean:.0f} [{100 * interval.low:.0f}, {100 * interval.high:.0f}]"


def page(results: Sequence[dict]) -> str:
    """The whole page."""
    lines = ["# Leaderboard", "", INTRODUCTION, ""]
    for length in LENGTHS:
        of_length = [row for row in results if f"/{length}/" in row["id"]]
        for rate in RATES if of_length else ():
            table = [HEAD, ("---",) * len(HEAD), *rows_at(of_length, rate)]
            lines += [f"## {length:,} tokens, {rate:g}×", ""]
            lines += [*("| " + " | ".join(cells) + " |" for cells in table), ""]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it differs")
    parser.add_argument("--measure", metavar="METHOD", help="run a method first")
    parser.add_argument("--data", help="folder of data, for --measure")
    parser.add_argument("--model", default="smollm2-135m", help="for --measure (%(default)s)")
    parser.add_argument("--weights", help="for --measure, in place of --model")
    parser.add_argument(
        "--length",
        type=int,
        choices=LENGTHS,
        default=LENGTHS[0],
        help="for --measure (%(default)s)",
    )
    parser.add_argument("--kv-dtype", default="", metavar="TYPES", help="for --measure")
    options = parser.parse_args(arguments)
    if options.measure:
        if options.data is None:
            raise UserError("--measure needs --data, the folder that kvjax evaluate reads")
        from kvjax.cli.main import main as kvjax

        model = Path(options.weights).stem if options.weights else options.model
        name = f"leaderboard-{model}-{options.measure}"
        if options.length != LENGTHS[0]:
            name += f"-{options.length}"
        name = re.sub(r"[^\w.-]", "-", name) + ".jsonl"
        if status := kvjax(["evaluate", *command(options, RESULTS / name)]):
            return status
    found = page(results_of(paths_in(RESULTS)))
    if options.check:
        same = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == found
        print("as the results have it" if same else "differs: run scripts/leaderboard.py")
        return int(not same)
    PAGE.write_text(found, encoding="utf-8")
    print(PAGE, file=sys.stderr)
    return 0


if __name__ == "__main__":
    run_script(main)
