"""How many conversations a pool holds: what clients wait for, by their number and by rate.

    python -m benchmarks.conversations --out conversations.jsonl --plot-dir plots

For each rate ("v": the same engine with a full cache) a server of its own with the same pool is
given 1, 2, 4 … conversations. All take their turns at once: a first prompt, then what was said
before, the answer, and some new tokens. A next turn goes on from what is left of the one before, if
the pool still holds it; else all of it runs again. A pool holds so many conversations within the
bound if nearly all of their next turns are found in it and the 90th percentile of their time per
token is at most a multiple of what a conversation alone has in this run with a full cache. Numbers
of conversations grow until that fails. The time to the first token has no bound: all ask at once,
so it grows with their number whatever the pool holds; rows and plot show it.

One line of JSON for each number, then one with the conversations held per GB of pool. Tokens are
cut from Python's documentation; answers have their full length.
"""

from kvjax.startup import guard

guard(__name__)

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving import address, begin_server
from kvjax.cache.config import CALIBRATED
from kvjax.cli import ArgumentParser, run_script
from kvjax.cli.command import check_output_file
from kvjax.cli.throughput.measure import percentiles
from kvjax.cli.throughput.remote import Remote
from kvjax.cli.throughput.work import Arrival, prompts_of, source_tokens
from kvjax.errors import UserError
from kvjax.startup import started

Row = dict[str, Any]
WARM = 500
"""Added to the seed of what is not measured."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(prog="python -m benchmarks.conversations", description=__doc__)
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="name of a model (%(default)s)")
    add("--method", default=CALIBRATED, help="one that shares (%(default)s)")
    add("--rate", nargs="+", default=["v", "1", "8", "16"], help='"v" for a full cache')
    add("--conversations", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32], help="(%(default)s)")
    add("--turns", type=int, default=2, help="of each (%(default)s)")
    add("--input-len", type=int, default=1024, help="of first prompts (%(default)s)")
    add("--turn-len", type=int, default=32, help="new tokens of a next turn (%(default)s)")
    add("--output-len", type=int, default=32, help="(%(default)s)")
    add("--floor", type=int, default=32, help="least tokens that a rate keeps (%(default)s)")
    add("--pool-tokens", type=int, default=4608, help="of full caches (%(default)s)")
    add("--token-bound", type=float, default=4.0, help="multiple (%(default)s)")
    add("--least-held", type=float, default=0.9, help="share of next turns (%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    add("--out", metavar="FILE", help="write the rows there")
    add("--plot-dir", metavar="FOLDER", help="draw latencies by number of conversations")
    return parser.parse_args(arguments)


def server_sizes(options: argparse.Namespace, most: int) -> dict[str, Any]:
    """The server's options: all that `most` conversations need is compiled before it is ready."""
    added = options.output_len + options.turn_len
    lengths = [options.input_len + turn * added for turn in range(options.turns)]
    return {
        "model": options.model, "method": options.method, "rate": 8, "share-prefix": "auto",
        "retained-prefixes": 2 * most, "max-batch": most, "max-waiting": 4 * most,
        # The answers' texts may be a few more tokens than they were.
        "max-len": lengths[-1] + 2 * options.output_len, "pool-tokens": options.pool_tokens,
        "warm-up": ",".join(map(str, lengths)), "deadline": 0,
    }  # fmt: skip


def converse(
    remote: Remote, options: argparse.Namespace, rate: str, prompts: list[np.ndarray]
) -> list[list[Row]]:
    """All turns of some conversations, those of one turn at once.

    Returns:
        The answers of each turn.

    Raises:
        UserError: one was not given.
    """
    compression: Row = {"method": "full"}
    if rate != "v":
        compression = {"rate": float(rate), "floor": options.floor}
    settings = {"temperature": 0, "compression": compression}
    source = source_tokens(remote, None)
    turns: list[list[Row]] = []
    for turn in range(options.turns):
        if turn:
            lengths = [options.turn_len] * len(prompts)
            new = prompts_of(source, lengths, options.seed + 1000 * turn)
            said = [remote.encode(answer["text"]) for answer in turns[-1]]
            prompts = [
                np.concatenate([prompt, np.asarray(answer, np.int32), tokens])
                for prompt, answer, tokens in zip(prompts, said, new, strict=True)
            ]
        arrivals = [Arrival(0.0, len(prompt), options.output_len) for prompt in prompts]
        turns.append(asyncio.run(remote.serve(prompts, arrivals, settings)))
        if wrong := [answer["error"] for answer in turns[-1] if answer["error"]]:
            raise UserError(f"the server did not answer: {wrong[0]}")
    return turns


def waits_of(answers: list[Row]) -> Row:
    """Percentiles of what the readers of some answers waited for, in seconds."""
    spans = [(answer["times"][-1] - answer["times"][0], answer["tokens"]) for answer in answers]
    parts = [gap for answer in answers for gap in np.diff(answer["times"]).tolist()]
    return {
        "time_to_first_token": percentiles([a["times"][0] - a["began"] for a in answers]),
        "time_per_output_token": percentiles([span / (tokens - 1) for span, tokens in spans]),
        "time_between_parts": percentiles(parts),
    }


def measure(
    remote: Remote, options: argparse.Namespace, rate: str, count: int, seed: int = 0
) -> Row:
    """One row; `seed` is added to the run's."""
    source = source_tokens(remote, None)
    prompts = prompts_of(source, [options.input_len] * count, options.seed + seed + count)
    began = time.perf_counter()
    first, *later = converse(remote, options, rate, prompts)
    nexts = [answer for turn in later for answer in turn]
    held = sum(answer["cached_tokens"] >= options.input_len // 2 for answer in nexts)
    return {
        "rate": None if rate == "v" else float(rate),
        "conversations": count,
        "seconds": round(time.perf_counter() - began, 2),
        "load_average": round(os.getloadavg()[0], 1),
        "first_turn": waits_of(first),
        "next_turns": waits_of(nexts),
        "held": held / len(nexts),
        "preemptions": sum(answer["kvjax"]["preemptions"] for answer in [*first, *nexts]),
    }


def within(row: Row, bound: float, least_held: float) -> bool:
    """Whether all but a few next turns are found, and tokens come within `bound` seconds."""
    wait = row["next_turns"]["time_per_output_token"]["p90"]
    return wait <= bound and row["held"] >= least_held


def run_rate(
    options: argparse.Namespace, rate: str, bound: float | None
) -> tuple[list[Row], float]:
    """Rows of one rate, to the first that is not within the bound, and the bound: this one, or,
    where there is none yet, that of the first row."""
    rows: list[Row] = []
    # What is appended stays in order while it is read here.
    with tempfile.TemporaryFile("a+") as log:
        server = begin_server(server_sizes(options, max(options.conversations)), log)
        try:
            remote = Remote(address(server, log), None)
            pool = remote.status["blocks"] * remote.status["block_bytes"] / 1e9
            # For what is left to compile; of the same prompts, first turns would be held.
            measure(remote, options, rate, 1, WARM)
            for count in options.conversations:
                row = {**measure(remote, options, rate, count), "pool_gb": round(pool, 4)}
                if bound is None:
                    alone = row["next_turns"]["time_per_output_token"]["p50"]
                    bound = float(options.token_bound * alone)
                row["within"] = within(row, bound, options.least_held)
                rows.append(row)
                print(json.dumps(row), flush=True)
                if not row["within"]:
                    break
        finally:
            server.terminate()
            server.wait(120)
    assert bound is not None
    return rows, bound


def headline(options: argparse.Namespace, rows: list[Row], bound: float) -> Row:
    """Conversations that each rate holds within the bound, of the numbers that were tried."""
    held = {}
    for rate in options.rate:
        number = None if rate == "v" else float(rate)
        counts = [r["conversations"] for r in rows if r["rate"] == number and r["within"]]
        held[rate] = max(counts, default=0)
    pool = rows[0]["pool_gb"]
    settings = {k: v for k, v in vars(options).items() if k not in ("out", "plot_dir")}
    return {
        **settings,
        "bound_seconds": round(bound, 4),
        "held": held,
        "held_per_gb": {rate: round(count / pool, 1) for rate, count in held.items()},
    }


def plot(rows: list[Row], bound: float, path: Path) -> None:
    """Both latencies of next turns by number of conversations, a line for each rate."""
    from kvjax.eval.plots import new_figure, save_figure

    figure = new_figure(9, 4)
    panels = figure.subplots(1, 2)
    names = {"time_to_first_token": "first token", "time_per_output_token": "per token"}
    for axes, (name, label) in zip(panels, names.items(), strict=True):
        for number, rate in enumerate(dict.fromkeys(row["rate"] for row in rows)):
            some = [row for row in rows if row["rate"] == rate]
            label_of = "full cache" if rate is None else f"rate {rate:g}"
            x = [row["conversations"] for row in some]
            y = [row["next_turns"][name]["p90"] for row in some]
            axes.plot(x, y, "ko-" if rate is None else f"C{number}o-", label=label_of)
        axes.set_xscale("log", base=2)
        counts = sorted({row["conversations"] for row in rows})
        axes.set_xticks(counts, map(str, counts))
        axes.set_yscale("log")
        axes.set(xlabel="conversations at once", ylabel=f"{label}, 90th percentile (s)")
        axes.grid(alpha=0.3)
    panels[1].axhline(bound, color="grey", linestyle=":", label="bound")
    panels[1].legend(fontsize="small")
    figure.suptitle(f"next turns; a pool of {rows[0]['pool_gb']:.2f} GB", fontsize="medium")
    save_figure(figure, path)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.turns < 2 or options.output_len < 2:
        raise UserError("give --turns and --output-len of at least 2")
    if options.rate[0] != "v" or options.conversations[0] != 1:
        raise UserError("the bound is that of 1 conversation and a full cache: begin with them")
    if options.out:
        check_output_file("--out", options.out)
    if options.plot_dir:
        Path(options.plot_dir).mkdir(parents=True, exist_ok=True)
    started()
    rows: list[Row] = []
    bound: float | None = None
    for rate in options.rate:
        found, bound = run_rate(options, rate, bound)
        rows += found
    assert bound is not None
    last = headline(options, rows, bound)
    print(json.dumps(last), flush=True)
    if options.out:
        Path(options.out).write_text("".join(json.dumps(row) + "\n" for row in [*rows, last]))
    if options.plot_dir:
        plot(rows, bound, Path(options.plot_dir) / "conversations.png")
    return 0


if __name__ == "__main__":
    run_script(main, lazy_imports=True)
