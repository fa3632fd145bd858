"""Tokens per second of the engine, by compression rate and prompt length.

    python scripts/throughput.py --rate v 1 16 --input-len 1900 --output-len 128 \\
        --num-prompts 32 --pool-tokens 6144
    python scripts/throughput.py --model llama3.1-8b --dummy-weights --emulate l4 \\
        --input-len 6000 --rate v 1 8 64 --out results.jsonl --plot-dir plots
    python scripts/throughput.py --trace AzureLLMInferenceTrace_conv.csv.gz --request-rate 0.5 \\
        --num-prompts 64 --rate v 8

All prompts are submitted at once, each of one length, and every answer has its full length
(KV-Compress, section 5.3); with --trace they arrive one by one. Rate "v" is the same engine with
compression left out. The largest batch that the arithmetic allows stands beside the one reached,
and the elapsed time beside the time that the machine's matrix rate and copy bandwidth, measured
in the same run, would need. Each result is one line of JSON; the last line is the last result.
"""

from kvjax.startup import guard

guard(__name__)

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from kvjax.checks import check_number, check_whole, shown
from kvjax.cli import (
    DTYPES,
    ArgumentParser,
    Progress,
    check_output_file,
    load_chosen_model,
    run_script,
)
from kvjax.errors import UserError

LENGTHS = [500, 1000, 2000, 4000, 6000, 8000, 10000, 12000]
RATES = ["v", "1", "2", "4", "8", "16", "32", "64"]
EMULATED = {"l4": 19_500, "h100": 40_000}
"""KV pools, in tokens, of the papers' two cards beside their models' weights."""

MOST = 10_000_000
"""Prompts, tokens, sequences: more than any machine serves."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="name of a model (what --weights holds; without both, smollm2-135m)")
    add("--weights", help="folder, GGUF file, Orbax checkpoint, or hub id")
    add("--dummy-weights", action="store_true", help="random weights of the true shapes")
    add("--dtype", choices=DTYPES, help="of weights and cache")
    add("--rate", nargs="+", default=RATES, help='compression rates, "v" for none (%(default)s)')
    add("--input-len", nargs="+", type=int, default=LENGTHS, help="prompt lengths (%(default)s)")
    add("--output-len", type=int, default=500, help="tokens of each answer (%(default)s)")
    add("--num-prompts", type=int, default=256, help="(%(default)s)")
    add("--method", default="kv-compress-continual", help="compression method (%(default)s)")
    add("--pool-tokens", type=int, help="size of the pool in tokens' worth of KVs")
    add("--emulate", choices=EMULATED, help="the pool of one of the papers' cards")
    add("--max-batch", type=int, default=256, help="most sequences at once (%(default)s)")
    add("--prefill-chunk", type=int, default=2048, help="(%(default)s tokens)")
    add("--prefill-scratch", type=int, default=16384, help="(%(default)s tokens)")
    add("--steps-per-visit", type=int, default=8, help="(%(default)s)")
    add("--temperature", type=float, default=1.0, help="(%(default)s)")
    add("--repeated-word", action="store_true", help="prompts of one repeated word, as the papers'")
    add("--prompt-file", help="text that prompts are cut from (Python's documentation)")
    add("--trace", help="arrivals: Azure's CSV, Mooncake's JSONL, or lengths alone (.gz too)")
    add("--request-rate", type=float, help="requests per second of --trace (its own by default)")
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
    add("--peer-python", help="a Python with torch and transformers: serve the same there")
    return parser.parse_args(arguments)


def compression_of(rate: str, method: str) -> Any:
    """The settings of a row; rate "v" leaves compression out."""
    from kvjax.cache import CompressionConfig

    if rate == "v":
        return CompressionConfig(method="full")
    try:
        return CompressionConfig(method=method, rate=float(rate))
    except ValueError as error:
        raise UserError(f'--rate {shown(rate)}: give numbers of at least 1, or "v"') from error


def check(options: argparse.Namespace) -> None:
    """Refuse what can be refused without a model.

    Raises:
        UserError: a number is out of range, or a file cannot be written.
    """
    from kvjax.engine.sampling import SamplingParams

    for name in ("num_prompts", "output_len", "max_batch"):
        check_whole(f"--{name.replace('_', '-')}", getattr(options, name), 1, MOST)
    for length in options.input_len:
        check_whole("--input-len", length, 1, MOST)
    if options.request_rate is not None:
        check_number("--request-rate", options.request_rate, 0, above=True)
    check_whole("--seed", options.seed, 0)
    SamplingParams(temperature=options.temperature, max_tokens=options.output_len)
    if options.emulate and options.pool_tokens is not None:
        raise UserError("--emulate and --pool-tokens both size the pool: give one of them")
    engine_config(options, max_len=None)
    for rate in options.rate:
        compression_of(rate, options.method)
    if options.out is not None:
        check_output_file("--out", options.out)
    if options.plot_dir is not None and not Path(options.plot_dir).is_dir():
        raise UserError(f"--plot-dir {shown(options.plot_dir)}: there is no such folder")


def engine_config(options: argparse.Namespace, max_len: int | None) -> Any:
    """The sizes of the engine for sequences of at most `max_len` tokens."""
    from kvjax.engine.config import EngineConfig

    return EngineConfig(
        max_batch=min(options.max_batch, options.num_prompts),
        max_len=max_len,
        prefill_chunk=options.prefill_chunk,
        prefill_scratch=max(options.prefill_scratch, options.prefill_chunk),
        steps_per_visit=options.steps_per_visit,
        pool_tokens=EMULATED[options.emulate] if options.emulate else options.pool_tokens,
    )


def make_engine(model: Any, options: argparse.Namespace, compression: Any, max_len: int) -> Any:
    from kvjax.engine.llm import LLM

    return LLM(model, compression, engine_config(options, max_len))


def expected_batch(llm: Any, compression: Any, input_len: int, output_len: int, most: int) -> int:
    """Sequences that the pool holds once all of them are at their budget, or half grown."""
    from kvjax.engine.request import Request

    b, heads = llm.config.block_size, llm.plan.heads
    budget = Request.budget_of(llm.model.config, compression, input_len, b)
    grown = heads * -(-(input_len + output_len // 2) // b)
    # While it decodes each head has a block that is not full yet.
    each = grown if budget is None else min(grown, budget + heads)
    return min(most, llm.plan.num_blocks // each)


def measure_limits() -> dict[str, float]:
    """Copy bandwidth in bytes/s (read plus written) and matrix rate in FLOP/s of the device."""
    import jax
    import jax.numpy as jnp
    from bench_kernels import copy_bandwidth, median_seconds

    cpu = jax.default_backend() == "cpu"
    n, dtype = (2048, jnp.float32) if cpu else (8192, jnp.bfloat16)
    x = jax.random.normal(jax.random.key(0), (n, n), dtype)
    product = jax.jit(jnp.matmul)
    rate = 2 * n**3 / median_seconds(lambda: product(x, x))
    return {
        "copy_bytes_per_s": copy_bandwidth(1 << (26 if cpu else 31), 2e10 if cpu else 4e12),
        "flop_per_s": rate,
    }


def roofline_seconds(llm: Any, limits: dict[str, float], spent: dict[str, float]) -> float:
    """The least time for what was done: prefill's FLOPs, and decoding's bytes and FLOPs."""
    import jax

    model = llm.model.config
    matrices = sum(x.size for x in jax.tree.leaves(llm.model.params) if x.ndim >= 2)
    embedding = model.vocab_size * model.hidden_size
    multiplied = matrices - (0 if model.tie_word_embeddings else embedding)
    per_pair = 4 * model.num_layers * model.num_heads * model.head_dim
    body = multiplied - embedding
    flops = 2 * body * spent["prompt_tokens"] + per_pair * spent["prompt_pairs"]
    weights = multiplied * jax.tree.leaves(llm.model.params)[0].dtype.itemsize
    kv = 2 * model.head_dim * llm.plan.cache_dtype.itemsize
    read = spent["decode_steps"] * weights + spent["kvs_read"] * kv
    decode_flops = 2 * multiplied * spent["output_tokens"]
    # A copy reads and writes; decoding reads, at the same bytes per second.
    decode = max(read / limits["copy_bytes_per_s"], decode_flops / limits["flop_per_s"])
    return flops / limits["flop_per_s"] + decode


def serve(llm: Any, prompts: list, arrivals: list, temperature: float, progress: Any) -> list:
    """Run all requests, each from its arrival on; returns their last outputs in order."""
    from kvjax.engine.sampling import SamplingParams

    ended: dict[str, Any] = {}
    coming = list(range(len(prompts)))
    done, start = 0, time.perf_counter()
    while done < len(prompts):
        now = time.perf_counter() - start
        while coming and arrivals[coming[0]].seconds <= now:
            at = coming.pop(0)
            sampling = SamplingParams(
                temperature=temperature,
                seed=at,
                max_tokens=arrivals[at].output_len,
                ignore_eos=True,
                detokenize=False,
            )
            llm.add_request(prompts[at], sampling, request_id=f"{at}")
        if not llm.has_unfinished():
            time.sleep(max(0.0, arrivals[coming[0]].seconds - now))
            continue
        for output in llm.step():
            if output.finished:
                ended[output.request_id] = output
                done += 1
                progress("serve", done, len(prompts))
    return [ended[f"{at}"] for at in range(len(prompts))]


def percentiles(values: list[float]) -> dict[str, float] | None:
    import numpy as np

    if not values:
        return None
    return {f"p{q}": round(float(np.percentile(values, q)), 4) for q in (50, 90, 99)}


def measure(
    model: Any, options: argparse.Namespace, rate: str, lengths: list[int], arrivals: list,
    source: Any, limits: dict[str, float] | None, progress: Any,
) -> dict[str, Any]:  # fmt: skip
    """One row: serve everything at one compression rate."""
    from throughput_work import prompts_of

    from kvjax.engine.metrics import PHASES

    compression = compression_of(rate, options.method)
    outputs_len = max(row.output_len for row in arrivals)
    max_len = max(n + row.output_len for n, row in zip(lengths, arrivals, strict=True))
    llm = make_engine(model, options, compression, max_len)
    progress.clear()
    print(f"memory: {llm.plan}", file=sys.stderr)
    expected = expected_batch(llm, compression, max(lengths), outputs_len, llm.config.max_batch)
    if options.warmup:
        progress("compile")
        llm.warm_up(sorted(set(lengths)))
        took = llm.worker.compile_seconds
        progress.clear()
        print(f"{len(llm.worker.compilations)} steps ready in {took:.1f} s", file=sys.stderr)
    prompts = prompts_of(source, lengths, options.seed)
    before, compiled = llm.metrics.as_dict(), len(llm.worker.compilations)
    began = time.perf_counter()
    outputs = serve(llm, prompts, arrivals, options.temperature, progress)
    seconds = time.perf_counter() - began
    wrong = [o for o in outputs if o.finish_reason != "length"]
    if wrong:
        raise UserError(f"{len(wrong)} requests did not end by length: {wrong[0].finish_reason}")
    found = llm.metrics.as_dict()

    def spent(name: str) -> float:
        return found[f"kvjax_{name}"] - before.get(f"kvjax_{name}", 0.0)

    generated, prompt_tokens = sum(len(o.token_ids) for o in outputs), sum(lengths)
    steps = spent("decode_steps_total")
    firsts = [o.stats.time_to_first_token for o in outputs]
    each = [o.stats.time_per_output_token(len(o.token_ids)) for o in outputs]
    row = {
        "model": model.config.name,
        "weights": Path(model.source).name,
        "rate": None if rate == "v" else float(rate),
        "reached_rate": prompt_tokens
        / sum(n / o.stats.rate for n, o in zip(lengths, outputs, strict=True)),
        "method": "full" if rate == "v" else options.method,
        "input_len": lengths[0] if len(set(lengths)) == 1 else None,
        "output_len": outputs_len if len({a.output_len for a in arrivals}) == 1 else None,
        "trace": Path(options.trace).name if options.trace else None,
        "request_rate": options.request_rate,
        "num_prompts": len(prompts),
        "pool_tokens": llm.plan.pool_tokens,
        "seconds": seconds,
        "total_tokens_per_second": (prompt_tokens + generated) / seconds,
        "output_tokens_per_second": generated / seconds,
        "max_batch": int(found["kvjax_batch_largest"]),
        "expected_batch": expected,
        "mean_batch": (generated - len(prompts)) / steps if steps else 0.0,
        "preemptions": int(spent("preemptions_total")),
        "evicted_blocks": int(spent("evicted_blocks_total")),
        "blocks_peak": int(found["kvjax_blocks_peak"]),
        "num_blocks": llm.plan.num_blocks,
        "seconds_by_phase": {phase: spent(f'seconds_total{{phase="{phase}"}}') for phase in PHASES},
        "compiled_steps": compiled,
        "compile_seconds": before["kvjax_compile_seconds"],
        "compiled_while_serving": len(llm.worker.compilations) - compiled,
        "memory": llm.memory(),
        "time_to_first_token": percentiles([x for x in firsts if x is not None]),
        "time_per_output_token": percentiles([x for x in each if x is not None]),
        "device": str(_device()),
        "dtype": str(llm.plan.cache_dtype),
        "versions": _versions(),
    }
    decoding = row["seconds_by_phase"]["decode"]
    row["decode_tokens_per_second"] = (generated - len(prompts)) / decoding if decoding else None
    if limits is not None:
        work = {
            "prompt_tokens": spent("prompt_tokens_total"),
            "prompt_pairs": sum(n * (n + 1) / 2 for n in lengths),
            "decode_steps": steps,
            "kvs_read": spent("kvs_read_total"),
            "output_tokens": generated,
        }
        bound = roofline_seconds(llm, limits, work)
        row |= {"limits": limits, "roofline_seconds": bound, "roofline_share": bound / seconds}
    return row


def _device() -> str:
    import jax

    return jax.devices()[0].device_kind


def _versions() -> dict[str, str]:
    import datetime
    import platform

    import jax

    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"jax": jax.__version__, "python": platform.python_version(), "date": today}


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


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    check(options)

    import numpy as np
    from throughput_work import REPEATED, Arrival, at_rate, read_trace, source_tokens

    from kvjax.engine.compilation import enable_compilation_cache

    trace = read_trace(options.trace, options.num_prompts) if options.trace else None
    enable_compilation_cache()
    rows: list[dict[str, Any]] = []
    with Progress() as progress:
        model, _ = load_chosen_model(options, progress)
        if options.repeated_word:
            source = np.asarray(model.tokenizer.encode(REPEATED)[:1], np.int32)
        else:
            source = source_tokens(model.tokenizer, options.prompt_file)
        progress("measure the machine")
        limits = measure_limits() if options.limits else None
        if trace is None:
            works = [
                ([n] * options.num_prompts, [Arrival(0.0, n, options.output_len)])
                for n in options.input_len
            ]
            works = [(lengths, row * options.num_prompts) for lengths, row in works]
        else:
            arrivals = at_rate(trace, options.request_rate, options.seed)
            works = [([row.input_len for row in arrivals], arrivals)]
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
        from throughput_peer import ask_peer

        row = ask_peer(options, model, rows[-1])
        rows.append(row)
        line = json.dumps(row)
    show(rows)
    if options.plot_dir:
        from throughput_plots import plot_all

        for file in plot_all(rows, Path(options.plot_dir)):
            print(f"wrote {file}", file=sys.stderr)
    print(line, flush=True)
    return 0


if __name__ == "__main__":
    run_script(main, lazy_imports=True)
