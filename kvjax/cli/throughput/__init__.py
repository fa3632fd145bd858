"""Tokens per second of the engine, by compression rate and prompt length.

    kvjax throughput --rate v 1 16 --input-len 1900 --output-len 128 \\
        --num-prompts 32 --pool-tokens 6144
    kvjax throughput --model llama3.1-8b --dummy-weights --emulate l4 \\
        --input-len 6000 --rate v 1 8 64 --out results.jsonl --plot-dir plots
    kvjax throughput --trace AzureLLMInferenceTrace_conv.csv.gz --request-rate 0.5 \\
        --num-prompts 64 --rate v 8
    kvjax throughput --server http://127.0.0.1:8000 --input-len 1000 --output-len 64 \\
        --num-prompts 32 --rate v 8

All prompts are submitted at once, each of one length, and every answer has its full length
(KV-Compress, section 5.3); with --trace they arrive one by one. Rate "v" is the same engine with
compression left out. The largest batch that the arithmetic allows stands beside the one reached,
and the elapsed time beside the time that the machine's matrix rate and copy bandwidth, measured
in the same run, would need. With --server a running `kvjax serve` is loaded instead, and what its
clients wait for is measured. Each result is one line of JSON; the last line is the last result.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from kvjax.checks import check_number, check_whole, shown
from kvjax.cli.command import check_output_file, make_folder
from kvjax.cli.models import (
    DTYPES,
    add_cache_dtype_option,
    add_devices_option,
    add_floor_option,
    add_weight_dtype_option,
    check_cache_dtypes,
    floor_of,
    load_chosen_model,
)
from kvjax.cli.progress import Progress
from kvjax.cli.told import differs
from kvjax.errors import UserError

LENGTHS = [500, 1000, 2000, 4000, 6000, 8000, 10000, 12000]
"""Of prompts, where none is given: those of them that the model's context holds."""
RATES = ["v", "1", "2", "4", "8", "16", "32", "64"]
EMULATED = {"l4": 19_500, "h100": 40_000}
"""KV pools, in tokens, of the papers' two cards beside their models' weights."""

OF_A_MODEL = ("model", "weights", "dummy_weights", "dtype", "weight_dtype", "context_length")
UNUSED = (
    *((name, "server", "the server has a model of its own") for name in OF_A_MODEL),
    ("kv_dtype", "server", "the server has a pool of its own"),
    ("pool_tokens", "server", "the server has a pool of its own"),
    ("emulate", "server", "the server has a pool of its own"),
    ("peer_python", "server", "a peer is compared with an engine here"),
    ("plot_dir", "server", "pictures are of engines here"),
    ("plot_dir", "trace", "pictures are of prompts of one length"),
    ("input_len", "trace", "a trace has lengths of its own"),
    ("prompt_file", "repeated_word", "prompts of one word are cut from no text"),
)
"""Options that say nothing beside another one, and why."""
MOST = 10_000_000
"""Prompts, tokens, sequences: more than any machine serves."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help="name of a model (what --weights holds; without both, smollm2-135m)")
    add("--weights", help="folder, GGUF file, Orbax checkpoint, or hub id")
    add("--dummy-weights", action="store_true", help="random weights of the true shapes")
    add("--dtype", choices=DTYPES, help="of weights and cache")
    add("--context-length", type=int, help="most tokens, instead of the model's own limit")
    add_weight_dtype_option(parser)
    add("--rate", nargs="+", default=RATES, help='compression rates, "v" for none (%(default)s)')
    usual = f"{', '.join(map(str, LENGTHS))}, as far as the context holds them"
    add("--input-len", nargs="+", type=int, help=f"prompt lengths ({usual})")
    add("--output-len", type=int, default=500, help="tokens of each answer (%(default)s)")
    add("--num-prompts", type=int, default=256, help="(%(default)s)")
    add_floor_option(parser)
    add("--method", default="kv-compress-continual", help="compression method (%(default)s)")
    add("--pool-tokens", type=int, help="size of the pool in tokens' worth of KVs")
    add("--emulate", choices=EMULATED, help="the pool of one of the papers' cards")
    add_cache_dtype_option(parser)
    add_devices_option(parser)
    add("--max-batch", type=int, default=256, help="most sequences at once (%(default)s)")
    add("--prefill-chunk", type=int, default=2048, help="(%(default)s tokens)")
    add("--prefill-scratch", type=int, default=16384, help="(%(default)s tokens)")
    add("--decode-steps-per-sync", type=int, default=8, help="(%(default)s)")
    add("--temperature", type=float, default=1.0, help="(%(default)s)")
    add("--repeated-word", action="store_true", help="prompts of one repeated word, as the papers'")
    add("--prompt-file", help="text that prompts are cut from (Python's documentation)")
    add("--trace", help="arrivals: Azure's CSV, Mooncake's JSONL, or lengths alone (.gz too)")
    add("--request-rate", type=float, help="requests per second, with --trace or --server")
    add("--seed", type=int, default=0, help="(%(default)s)")
    add(
        "--warmup",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compile everything before measuring (yes)",
    )
    add("--no-limits", dest="limits", action="store_false", help="do not measure the machine")
    add("--out", metavar="FILE", help="append each result to this JSONL file")
    add("--plot-dir", metavar="FOLDER", help="pictures by rate and by length")
    add("--server", metavar="URL", help="load a running server instead of an engine here")
    add("--api-key", help="of that server (KVJAX_API_KEY)")
    add("--peer-python", help="a Python with torch and transformers: serve the same there")


def check(options: argparse.Namespace) -> None:
    """Refuse what can be refused without a model.

    Raises:
        UserError: a number is out of range, or a file cannot be written.
    """
    from kvjax.cli.throughput.measure import compression_of, engine_config
    from kvjax.engine import SamplingParams
    from kvjax.eval.plots import check_plots

    for name in ("num_prompts", "output_len", "max_batch"):
        check_whole(f"--{name.replace('_', '-')}", getattr(options, name), 1, MOST)
    for length in options.input_len or ():
        check_whole("--input-len", length, 1, MOST)
    if options.context_length is not None:
        check_whole("--context-length", options.context_length, 1)
    if options.request_rate is not None:
        check_number("--request-rate", options.request_rate, 0, above=True)
        if options.trace is None and options.server is None:
            raise UserError(
                f"--request-rate {options.request_rate:g}: prompts of --input-len are submitted "
                "all at once: leave it out, or give --trace or --server"
            )
    given = {**vars(options), "kv_dtype": options.cache_dtype}
    for name, other, why in UNUSED:
        if given[name] and given[other]:
            both = f"--{name} with --{other}".replace("_", "-")
            raise UserError(f"{both}: {why}; leave one of them out")
    check_whole("--seed", options.seed, 0)
    SamplingParams(temperature=options.temperature, max_tokens=options.output_len)
    if options.emulate and options.pool_tokens is not None:
        raise UserError("--emulate and --pool-tokens both size the pool: give one of them")
    check_cache_dtypes([options.cache_dtype])
    engine_config(options, max_len=None)
    for rate in options.rate:
        compression_of(rate, options.method, floor_of(options))
    if options.out is not None:
        check_output_file("--out", options.out)
    if options.peer_python is not None:
        if options.trace is not None:
            raise UserError("--peer-python serves prompts of one length: leave --trace out")
        if shutil.which(options.peer_python) is None:
            raise UserError(f"--peer-python {shown(options.peer_python)}: there is no such program")
    if options.plot_dir is not None:
        check_plots("--plot-dir")
        make_folder("--plot-dir", Path(options.plot_dir))


def show(rows: list[dict[str, Any]]) -> None:
    """The table, on stderr."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_edge=False)
    names = ("length", "rate", "total tok/s", "output tok/s", "vs v", "batch", "mean", "expected")
    phases = ("prefill", "compress", "decode", "host")
    for name in (*names, "preempted", *phases, "roofline"):
        table.add_column(name, justify="right")

    def cell(row: dict[str, Any], name: str, form: str) -> str:
        return form.format(row[name]) if row.get(name) is not None else ""

    for row in rows:
        vanilla = [
            other["total_tokens_per_second"]
            for other in rows
            if other["input_len"] == row["input_len"] and other.get("rate", 0) is None
        ]
        rate = "peer" if row.get("peer") else cell(row, "rate", "{:g}") or "v"
        reached = row.get("reached_rate")
        if row.get("rate") and reached and differs(row["rate"], reached):
            rate += f" ({reached:.1f})"
        table.add_row(
            cell(row, "input_len", "{}") or "trace",
            rate,
            cell(row, "total_tokens_per_second", "{:,.1f}"),
            cell(row, "output_tokens_per_second", "{:,.1f}"),
            f"{row['total_tokens_per_second'] / vanilla[0]:.2f}×" if vanilla else "",
            cell(row, "max_batch", "{}"),
            cell(row, "mean_batch", "{:.1f}"),
            cell(row, "expected_batch", "{}"),
            cell(row, "preemptions", "{}"),
            *(cell(row.get("seconds_by_phase", {}), phase, "{:.1f} s") for phase in phases),
            cell(row, "roofline_share", "{:.0%}"),
        )
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 160)
    console.print(table)


def load_server(options: argparse.Namespace) -> int:
    """Rows of a server: one for each length and rate."""
    from kvjax.cli.throughput.remote import Remote, measure_remote
    from kvjax.cli.throughput.work import Arrival, at_rate, read_trace, source_tokens

    # As the server reads it: any of several will do.
    keys = (options.api_key or os.environ.get("KVJAX_API_KEY") or "").split(",")
    remote = Remote(options.server, next(filter(None, keys), None))
    source = source_tokens(remote, options.prompt_file, repeated=options.repeated_word)
    if options.trace is not None:
        arrivals = at_rate(
            read_trace(options.trace, options.num_prompts), options.request_rate, options.seed
        )
        works = [([row.input_len for row in arrivals], arrivals)]
    else:
        works = []
        most = remote.status["max_len"] - options.output_len
        for length in options.input_len or [n for n in LENGTHS if n <= most] or LENGTHS[:1]:
            row = Arrival(0.0, length, options.output_len)
            arrivals = at_rate([row] * options.num_prompts, options.request_rate, options.seed)
            works.append(([length] * options.num_prompts, arrivals))
    for _, arrivals in works:
        longest = max(arrivals, key=lambda row: row.input_len + row.output_len)
        if longest.input_len + longest.output_len > remote.status["max_len"]:
            raise UserError(
                f"--server {options.server}: a prompt of {longest.input_len} tokens and its answer "
                f"of {longest.output_len} are longer than its context, which is "
                f"{remote.status['max_len']}: ask for shorter ones"
            )
    for lengths, arrivals in works:
        for rate in options.rate:
            line = json.dumps(measure_remote(remote, options, rate, lengths, arrivals, source))
            if options.out:
                with open(options.out, "a", encoding="utf-8") as file:
                    file.write(line + "\n")
            print(line, flush=True)
    return 0


def run(options: argparse.Namespace) -> int:
    check(options)
    if options.server is not None:
        return load_server(options)

    from kvjax.cli.throughput.limits import measure_limits
    from kvjax.cli.throughput.measure import check_context, lengths_of, measure
    from kvjax.cli.throughput.work import Arrival, at_rate, read_trace, source_tokens
    from kvjax.engine.compilation import enable_compilation_cache

    trace = None
    if options.trace is not None:
        trace = read_trace(options.trace, options.num_prompts)
    enable_compilation_cache()
    rows: list[dict[str, Any]] = []
    with Progress() as progress:
        model, _ = load_chosen_model(options, progress)
        source = source_tokens(model.tokenizer, options.prompt_file, repeated=options.repeated_word)
        if trace is None:
            works = [
                ([n] * options.num_prompts, [Arrival(0.0, n, options.output_len)])
                for n in lengths_of(options, model.config)
            ]
            works = [(lengths, row * options.num_prompts) for lengths, row in works]
        else:
            arrivals = at_rate(trace, options.request_rate, options.seed)
            works = [([row.input_len for row in arrivals], arrivals)]
        for _, arrivals in works:
            check_context(options, model.config, arrivals)
        progress("measure the machine")
        limits = measure_limits() if options.limits else None
        for lengths, arrivals in works:
            for rate in options.rate:
                row = measure(model, options, rate, lengths, arrivals, source, limits, progress)
                rows.append(row)
                line = json.dumps(row)
                if options.out:
                    with open(options.out, "a", encoding="utf-8") as file:
                        file.write(line + "\n")
                progress.clear()
                if len(works) * len(options.rate) > len(rows) or options.peer_python:
                    print(line, flush=True)
    if options.peer_python:
        from kvjax.cli.throughput.peer import ask_peer

        row = ask_peer(options, model, rows[-1])
        rows.append(row)
        line = json.dumps(row)
    show(rows)
    if options.plot_dir:
        from kvjax.cli.throughput.plots import plot_all

        for file in plot_all(rows, Path(options.plot_dir)):
            print(f"wrote {file}", file=sys.stderr)
    print(line, flush=True)
    return 0
