"""Compare kvjax's methods with kvpress's, on the same prompts, weights and kept KVs.

Ours run first and say how many KVs they really held of every prompt; each press of kvpress then
gets that number as its compression ratio. Both are scored on the true answer (exact match, NLL,
KL against the full cache) and on a greedy answer that is given no beginning. Before anything is
compared, the logits of both models are.

    python -m benchmarks.kvpress --peer-python ~/torch/bin/python --data ./data
    python -m benchmarks.kvpress --peer-python PYTHON --prompts mine.jsonl \\
        --presses snapkv,streaming-llm --protocols chat,agnostic --rates 8,32

--peer-python is a Python with torch and kvpress (kvjax itself needs neither). Results are
appended to a JSONL file, and a run that was stopped goes on where it was; a Markdown table stands
beside it. The last line is one JSON object.
"""

from kvjax.startup import guard

guard(__name__)

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.kvpress.checkpoint import export
from benchmarks.kvpress.ours import check_same, kept_positions
from benchmarks.kvpress.presses import (
    PRESSES,
    agreement,
    budgets,
    choose_presses,
    find_equal,
    group_equal,
    peer_method,
    relabelled,
)
from benchmarks.kvpress.process import PeerProcess, peer_versions
from benchmarks.kvpress.report import overlaps, pairs_of, report
from kvjax.cache.config import CALIBRATED
from kvjax.cli import (
    ArgumentParser,
    Progress,
    add_model_options,
    check_model_options,
    load_chosen_model,
    run_script,
)
from kvjax.cli.models import add_calibration_option, chosen_calibration
from kvjax.cli.progress import TimeLeft, spell
from kvjax.cli.rows import (
    add_row_options,
    choose_methods,
    choose_protocols,
    collect_rows,
    fill_in,
    rates_of,
    split_list,
    table_beside,
)
from kvjax.errors import UserError, unmasked

USUAL = {"tasks": "needle,passkey,kv", "length": "1024", "rows": 8}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(prog="python -m benchmarks.kvpress", description=__doc__)
    parser.add_argument("--peer-python", required=True, help="a Python with torch and kvpress")
    add_model_options(parser, files_only=True)
    add_calibration_option(parser)
    parser.add_argument(
        "--export", type=Path, metavar="FOLDER", help="keep the weights for the peer here"
    )
    what = parser.add_argument_group("what is compared (lists are separated by commas)")
    what.add_argument("--presses", default="all", help=f"of {', '.join(PRESSES)} (%(default)s)")
    what.add_argument(
        "--reference",
        default=CALIBRATED,
        help="our method at whose KVs every press runs (%(default)s)",
    )
    what.add_argument(
        "--reference-only", action="store_true", help="do not run our methods of the same name"
    )
    what.add_argument("--rates", default="8,32", help="(%(default)s)")
    add_row_options(parser, what, usual=USUAL, target_tokens=32)
    what.add_argument(
        "--positions",
        type=int,
        default=2,
        help="rows of each task whose kept positions are compared (%(default)s)",
    )
    parser.add_argument("--block-size", type=int, default=16, help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("compare.jsonl"), help="(%(default)s)")
    parser.add_argument("--table", type=Path, help="Markdown page (beside --out)")
    options = parser.parse_args(arguments)
    fill_in(options, USUAL)
    return options


def free_answer(row: Any, tokens: list[int] | None, tokenizer: Any) -> dict[str, Any]:
    """The peer's answer without a given beginning as text, and its score."""
    from kvjax.eval.scorers import finish_answer, score_free

    if tokens is None or row.metric == "nll":
        return {"free": None, "free_answer": None}
    text = finish_answer(tokenizer.decode(tokens), row.stop)
    score = score_free(row.metric, text, row.answers or (row.target,), row.classes)
    return {"free": score, "free_answer": text}


def peer_rows(
    row: Any,
    tokens: Any,
    protocol: str,
    asked: list[dict[str, Any]],
    answer: dict[str, Any],
    tokenizer: Any,
) -> list[dict[str, Any]]:
    """Results of the peer as rows like ours, one per name that a run stands for."""
    from kvjax.eval.run import digest

    rows = []
    for entry, found in zip(asked, answer["results"]):
        if "error" in found:
            continue
        scores = {name: found[name] for name in ("em", "nll", "kl", "agree")}
        scores |= free_answer(row, found.get("free"), tokenizer)
        for name in entry["names"]:
            rows.append(
                {
                    "id": row.id,
                    "task": row.task,
                    "length": row.length,
                    "depth": row.depth,
                    "method": peer_method(entry["press"], name),
                    "rate": entry["rate"],
                    "protocol": protocol,
                    "prompt_tokens": len(tokens.prompt),
                    "compressed_tokens": tokens.cut(protocol),
                    "target_tokens": len(tokens.target),
                    "removed_tokens": tokens.removed,
                    "kvs_full": entry["kvs_full"],
                    "kvs_wanted": entry["kvs"],
                    "kvs": found["kvs"],
                    "ratio": found["ratio"],
                    "simulated": found["simulated"],
                    "bytes": found["bytes"],
                    "metric": row.metric if row.metric == "nll" else "em",
                    "score": None if row.metric == "nll" else float(found["em"]),
                    **scores,
                    "full": answer["full"],
                    "agreement": entry["agreement"].get(name),
                    "recall": None,
                    "seconds": {
                        "prefill": answer["prefill"],
                        "select": found["compress_seconds"],
                        "score": found["score_seconds"],
                        "decode": 0.0,
                    },
                    "digest": digest(tokens),
                }
            )
    return rows


def run_peer(
    options: argparse.Namespace,
    evaluator: Any,
    rows: list[Any],
    protocols: list[str],
    rates: list[float],
    presses: list[str],
    file: Any,
    peer: PeerProcess,
    progress: Any,
) -> None:
    """Ask the peer for what the file lacks, one prompt and protocol at a time."""
    from kvjax.eval.sizes import Variant

    done = 0
    seen: dict[tuple[str, str], int] = {}
    for row, tokens in rows:
        for protocol in protocols:
            held = {
                (r["method"], float(r["rate"])): r
                for r in file.results
                if r["id"] == row.id and r["protocol"] == protocol
            }
            seen[row.task, protocol] = seen.get((row.task, protocol), 0) + 1
            looks = seen[row.task, protocol] <= options.positions
            asked: list[dict[str, Any]] = []
            again: list[dict[str, Any]] = []
            for rate in rates:
                kept = {name: r["kvs"] for (name, at), r in held.items() if at == rate}
                for press in presses:
                    names = [options.reference]
                    if not options.reference_only:
                        names = budgets(press, options.reference, kept)
                    wanted = {
                        name: kept[name]
                        for name in names
                        if (peer_method(press, name), rate) not in held
                    }
                    for name in list(wanted):
                        # Another reference at the same KVs: what the press does is known.
                        if known := find_equal(held.values(), press, wanted[name]):
                            again.append(relabelled(known, press, name, rate))
                            del wanted[name]
                    for names in group_equal(wanted):
                        like = PRESSES[press].like
                        asked.append(
                            {
                                "press": press,
                                "rate": rate,
                                "names": names,
                                "kvs": wanted[names[0]],
                                "kvs_full": evaluator.heads * tokens.cut(protocol),
                                "positions": looks and PRESSES[press].positions and like in names,
                                "agreement": {},
                            }
                        )
            file.add(again)
            if not asked:
                continue
            progress(f"kvpress, {row.id}", done)
            fields = ("press", "kvs", "positions")
            job = {
                "prompt": tokens.prompt.tolist(),
                "cut": tokens.cut(protocol),
                "opened": tokens.opened,
                "free_tokens": 0 if row.metric == "nll" else options.free_tokens,
                "eos": list(evaluator.model.tokenizer.eos_ids),
                "head": len(tokens.segments[0]),
                "target": tokens.target.tolist(),
                "presses": [{name: entry[name] for name in fields} for entry in asked],
            }
            answer = peer.ask(job)
            for entry, found in zip(asked, answer["results"]):
                if "error" in found:
                    reason = f"{entry['press']} at rate {entry['rate']:g} of {row.id}"
                    print(f"skipped {reason}: {found['error']}", file=sys.stderr)
            looked = [n for n, entry in enumerate(asked) if entry["positions"]]
            compared = [n for n in looked if "error" not in answer["results"][n]]
            variants = [
                Variant(str(PRESSES[asked[n]["press"]].like), asked[n]["rate"]) for n in compared
            ]
            cut = tokens.cut(protocol)
            ours = kept_positions(evaluator, row, tokens, cut, variants) if variants else []
            for n, variant, positions in zip(compared, variants, ours):
                layers = answer["results"][n]["positions"]
                theirs = [head for layer in layers for head in layer]
                asked[n]["agreement"][variant.method] = agreement(positions, theirs)
            tokenizer = evaluator.model.tokenizer
            results = peer_rows(row, tokens, protocol, asked, answer, tokenizer)
            file.add(results)
            done += len(results)
            progress(f"kvpress, {row.id}", done)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from kvjax.cache.methods import get_method
    from kvjax.eval.sizes import EvaluatorConfig

    presses = choose_presses(split_list("presses", options.presses))
    get_method(options.reference)
    liked = [like for press in presses if (like := PRESSES[press].like)]
    liked = [] if options.reference_only else liked
    methods = choose_methods(",".join([options.reference, *liked]))
    rates = rates_of(options.rates)
    if 1 in rates:
        raise UserError("--rates 1: nothing is evicted, give rates above 1")
    protocols = choose_protocols(options.protocols)
    check_model_options(options)
    table = table_beside(options)
    config = EvaluatorConfig(
        block_size=options.block_size, answers=False, free_tokens=options.free_tokens
    )
    versions = peer_versions(options.peer_python)
    with Progress() as progress, tempfile.TemporaryDirectory() as scratch:
        folder = options.export or Path(scratch) / "model"
        choices = methods, rates, protocols, presses
        return compare(options, config, choices, versions, table, folder, progress)


def compare(
    options: argparse.Namespace,
    config: Any,
    choices: tuple[list[str], list[float], list[str], list[str]],
    versions: dict[str, str],
    table: Path,
    folder: Path,
    progress: Progress,
) -> int:
    """Load, run ours, run theirs, write the table."""
    from kvjax.cache.methods import get_method
    from kvjax.engine.compilation import enable_compilation_cache
    from kvjax.eval.evaluator import Evaluator
    from kvjax.eval.results import OF_WEIGHTS, ResultsFile
    from kvjax.eval.rows import Skipped
    from kvjax.eval.run import run, tokenised, variants_of

    start = time.perf_counter()
    methods, rates, protocols, presses = choices
    enable_compilation_cache()
    model, _ = load_chosen_model(options, progress)
    named = [get_method(name) for name in methods]
    calibration = chosen_calibration(options, model, named, progress)
    evaluator = Evaluator(model, config, {} if calibration is None else calibration.on_device())
    skipped = Skipped()
    progress("prompts")
    rows = tokenised(evaluator, collect_rows(options, model.tokenizer, skipped), skipped)
    for row, _ in rows:
        if row.turns or row.metric == "own":
            raise UserError(f"task {row.task}: kvpress is asked one question with a known answer")
    progress.clear()
    for reason in skipped.reasons:
        print(f"skipped {reason}", file=sys.stderr)
    export(model.config, model.tokenizer, Path(model.source), folder, progress)
    settings = {
        "model": model.config.name,
        "weights": Path(model.source).name,
        OF_WEIGHTS: model.fingerprint,
        "dtype": "float32",
        "block_size": config.block_size,
        "answers": False,
        "free_tokens": config.free_tokens,
        "peer": " ".join(f"{name} {version}" for name, version in versions.items()),
    }
    if calibration is not None:
        settings["calibration"] = calibration.digest()
    status = 0
    with (
        ResultsFile(options.out, settings) as file,
        PeerProcess(options.peer_python, folder) as peer,
    ):
        held = len(file.results)
        difference = check_same(evaluator, peer, *rows[0], folder)
        print(f"logits after {rows[0][0].id}: largest difference {difference:.2g}", file=sys.stderr)
        try:
            variants = variants_of(methods, rates)
            with unmasked():
                run(evaluator, rows, protocols, variants, file, TimeLeft(progress))
            kept = dict.fromkeys(methods, 0)
            wanted = [(p, n) for p in presses for n in budgets(p, options.reference, kept)]
            lacking = sum(
                not file.has((row.id, protocol, peer_method(press, name), rate))
                for row, _ in rows
                for protocol in protocols
                for rate in rates
                for press, name in wanted
            )
            left = TimeLeft(progress)

            def say(what: str, done: int) -> None:
                left(what, done, max(1, lacking))

            run_peer(options, evaluator, rows, protocols, rates, presses, file, peer, say)
        except KeyboardInterrupt:
            status = 130
        progress.clear()
        notes = [
            f"{model.config.name} ({settings['weights']}, float32), blocks of {config.block_size}",
            settings["peer"],
            f"{len(rows)} prompts; rows skipped: {len(skipped.reasons)}",
            f"logits of both models after one prompt differ by at most {difference:.2g}",
        ]
        page = report(file.results, notes, options.reference)
        table.write_text(page, encoding="utf-8")
        print(page)
        print(json.dumps(summary(file.results, settings, difference)))
    print(
        f"{len(file.results) - held} results in {spell(time.perf_counter() - start)}, {held} from "
        f"before; {options.out}, {table}",
        file=sys.stderr,
    )
    if status:
        print("interrupted: the same command goes on from here", file=sys.stderr)
    return status


def summary(
    results: list[dict[str, Any]], settings: dict[str, Any], difference: float
) -> dict[str, Any]:
    """The pairs as one JSON object."""
    pairs = [
        {
            "task": pair.task,
            "protocol": pair.protocol,
            "rate": pair.rate,
            "kvpress": pair.press,
            "kvjax": pair.method,
            "prompts": pair.prompts,
            "kvs": pair.kvs,
            "score": [score and round(score.mean, 4) for score in pair.score],
            "free": [free and round(free.mean, 4) for free in pair.free],
            "nll_ratio": [ratio and round(ratio.mean, 4) for ratio in pair.nll_ratio],
            "kl": [kl and round(kl.mean, 4) for kl in pair.kl],
            "intervals_meet": overlaps(pair),
            "equal_positions": pair.positions,
        }
        for pair in pairs_of(results)
    ]
    return {**settings, "logits_difference": difference, "pairs": pairs}


if __name__ == "__main__":
    run_script(main, lazy_imports=True)
