"""Draw the results of `kvjax evaluate`.

Pictures of a results file, as many as its rows allow: score by compression (score-*), answers that
are given no beginning (free-*), continued text (text-*), both score and text over bytes where keys
and values have several types (bytes-*), needles by depth (needle-*), KVs kept by layer and head
(kept-*), attention recall by layer (recall-*), for each protocol.

    kvjax plot results.jsonl --out pictures
    kvjax plot results.jsonl --methods kv-compress,snapkv,random --rate 32
"""

import argparse
from pathlib import Path

from kvjax.cli.command import make_folder
from kvjax.cli.rows import split_list
from kvjax.errors import UserError


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, help="results file, .jsonl or .jsonl.gz")
    parser.add_argument(
        "--out", type=Path, default=Path("pictures"), help="folder (%(default)s, made if absent)"
    )
    parser.add_argument("--methods", help="only these methods, separated by commas")
    parser.add_argument("--rate", type=float, help="of kept and recall (the middle one)")
    parser.add_argument("--format", default="png", choices=("png", "svg", "pdf"))


def run(options: argparse.Namespace) -> int:
    from kvjax.eval.plots import check_plots, save_figure
    from kvjax.eval.result_plots import (
        plot_bytes,
        plot_kept,
        plot_needles,
        plot_recall,
        plot_scores,
        plot_text,
    )
    from kvjax.eval.results import read_results

    check_plots("kvjax plot")
    rows = read_results(options.results)
    if not rows:
        raise UserError(f"{options.results} holds no result")
    if options.methods is not None:
        wanted = split_list("methods", options.methods)
        held = dict.fromkeys(row["method"] for row in rows)
        if missing := [name for name in wanted if name not in held]:
            raise UserError(f"{options.results} has no {missing[0]}; it has {', '.join(held)}")
        rows = [row for row in rows if row["method"] in (*wanted, "full")]
        rows.sort(key=lambda row: wanted.index(row["method"]) if row["method"] in wanted else -1)
    rates = sorted({row["rate"] for row in rows if row["method"] != "full"})
    if options.rate is not None and options.rate not in rates:
        raise UserError(f"no results at rate {options.rate:g}; there are {rates}")
    rate = options.rate or (rates[len(rates) // 2] if rates else 1.0)
    make_folder("--out", options.out)
    written = []
    for protocol in dict.fromkeys(row["protocol"] for row in rows):
        own = [row for row in rows if row["protocol"] == protocol]
        figures = {
            f"score-{protocol}": plot_scores(own, protocol),
            f"free-{protocol}": plot_scores(own, protocol, "free"),
            f"text-{protocol}": plot_text(own, protocol),
            f"bytes-{protocol}": plot_bytes(own, protocol),
            f"kept-{protocol}": plot_kept(own, protocol, rate),
            f"recall-{protocol}": plot_recall(own, protocol, rate),
        }
        for task in dict.fromkeys(row["task"] for row in own if row["depth"] is not None):
            name = f"needle-{task.replace('/', '-')}-{protocol}"
            while name in figures:  # two tasks may come to one name
                name += "-"
            figures[name] = plot_needles(own, protocol, task)
        for name, figure in figures.items():
            if figure is not None:
                path = options.out / f"{name}.{options.format}"
                save_figure(figure, path)
                written.append(str(path))
    if not written:
        raise UserError(f"{options.results} has nothing to draw: only the full cache's results")
    print("\n".join(written))
    return 0
