"""One row of `kvjax throughput`: an engine, what it serves, and what that took."""

import argparse
import datetime
import gc
import platform
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax.cache import CompressionConfig
from kvjax.cache.budget import FLOOR_TOKENS
from kvjax.cache.methods import get_method
from kvjax.checks import shown
from kvjax.cli.models import floor_of
from kvjax.cli.throughput import EMULATED, LENGTHS
from kvjax.cli.throughput.limits import roofline_seconds
from kvjax.cli.throughput.work import Arrival, prompts_of
from kvjax.engine import LLM, EngineConfig, SamplingParams
from kvjax.engine.metrics import PHASES
from kvjax.errors import UserError
from kvjax.models.config import ModelConfig
from kvjax.models.hub import Progress


def compression_of(rate: str, method: str, floor: int = FLOOR_TOKENS) -> CompressionConfig:
    """The settings of a row; rate "v" leaves compression out."""
    if rate == "v":
        get_method(method)  # a name that is none is told whatever rates there are
        return CompressionConfig(method="full")
    try:
        return CompressionConfig(method=method, rate=float(rate), floor=floor)
    except ValueError as error:
        raise UserError(f'--rate {shown(rate)}: give numbers of at least 1, or "v"') from error


def context_of(options: argparse.Namespace, config: ModelConfig) -> int:
    """Most tokens of a prompt and its answer."""
    return options.context_length or config.max_position_embeddings


def lengths_of(options: argparse.Namespace, config: ModelConfig) -> list[int]:
    """Prompt lengths: those asked for, or the usual ones that leave room for an answer."""
    if options.input_len is not None:
        return options.input_len
    room = context_of(options, config) - options.output_len
    # The shortest one where none does: `check_context` says what would.
    return [n for n in LENGTHS if n <= room] or LENGTHS[:1]


def check_context(
    options: argparse.Namespace, config: ModelConfig, arrivals: list[Arrival]
) -> None:
    """Refuse, before anything is measured, what is longer than the model's context.

    Raises:
        UserError: a prompt is, with its answer.
    """
    limit = context_of(options, config)
    longest = max(arrivals, key=lambda row: row.input_len + row.output_len)
    if longest.input_len + longest.output_len <= limit:
        return
    room, traced = limit - longest.output_len, options.trace is not None
    if room < 1:
        way = "shorten its answers" if traced else f"give an --output-len below {limit}"
    else:
        way = f"shorten prompts to {room} tokens" if traced else f"give at most --input-len {room}"
    raise UserError(
        f"{f'--trace {options.trace}: ' if traced else ''}a prompt of {longest.input_len} tokens "
        f"and its answer of {longest.output_len} are longer than the context of {config.name}, "
        f"which is {limit}: {way} or give --context-length"
    )


def engine_config(
    options: argparse.Namespace, max_len: int | None, requests: int | None = None
) -> EngineConfig:
    """The sizes of the engine for so many sequences of at most `max_len` tokens."""
    return EngineConfig(
        max_batch=min(options.max_batch, requests or options.num_prompts),
        max_len=max_len,
        prefill_chunk=options.prefill_chunk,
        prefill_scratch=max(options.prefill_scratch, options.prefill_chunk),
        decode_steps_per_sync=options.decode_steps_per_sync,
        pool_tokens=EMULATED[options.emulate] if options.emulate else options.pool_tokens,
        tensor_parallel=options.tensor_parallel,
        kv_replicas=options.kv_replicas,
    )


def expected_batch(
    llm: LLM, compression: CompressionConfig, input_len: int, output_len: int, most: int
) -> int:
    """Sequences that the pool holds once all of them are at their budget, or half grown."""
    b, heads = llm.plan.spec.block_size, llm.plan.heads
    budget = compression.blocks(input_len, heads, b)
    grown = heads * -(-(input_len + output_len // 2) // b)
    # While it decodes each head has a block that is not full yet.
    each = grown if budget is None else min(grown, budget + heads)
    return min(most, llm.plan.num_blocks // each)


def serve(
    llm: LLM, prompts: list, arrivals: list[Arrival], temperature: float, progress: Progress
) -> tuple[list, list[float]]:
    """Run all requests, each from its arrival on.

    Returns their last outputs in order, and when each arrived, by the engine's clock: the round
    that runs meanwhile has to end before it is added.
    """
    ended: dict[str, Any] = {}
    coming = list(range(len(prompts)))
    done, start = 0, time.perf_counter()
    arrived = [llm.engine.clock() + arrival.seconds for arrival in arrivals]
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
    return [ended[f"{at}"] for at in range(len(prompts))], arrived


def percentiles(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {f"p{q}": round(float(np.percentile(values, q)), 4) for q in (50, 90, 99)}


def measure(
    model: Any, options: argparse.Namespace, rate: str, lengths: list[int], arrivals: list,
    source: Any, limits: dict[str, float] | None, progress: Any,
) -> dict[str, Any]:  # fmt: skip
    """One row: serve everything at one compression rate."""
    compression = compression_of(rate, options.method, floor_of(options))
    outputs_len = max(row.output_len for row in arrivals)
    max_len = max(n + row.output_len for n, row in zip(lengths, arrivals, strict=True))
    sizes = engine_config(options, max_len, len(arrivals))
    # The pool of the row before is this one's to have: engines are parts of cycles.
    gc.collect()
    llm = LLM(model, compression, sizes, cache_dtype=options.cache_dtype)
    progress.clear()
    print(f"memory: {llm.plan}", file=sys.stderr)
    expected = expected_batch(llm, compression, max(lengths), outputs_len, llm.config.max_batch)
    if options.warmup:
        progress("compile")
        llm.warm_up(sorted(set(lengths)))
        took = llm.worker.compile_seconds
        progress.clear()
        print(f"{len(llm.worker.compiled.seconds)} steps ready in {took:.1f} s", file=sys.stderr)
    prompts = prompts_of(source, lengths, options.seed)
    before, compiled = llm.metrics.as_dict(), len(llm.worker.compiled.seconds)
    began = time.perf_counter()
    outputs, arrived = serve(llm, prompts, arrivals, options.temperature, progress)
    seconds = time.perf_counter() - began
    wrong = [o for o in outputs if o.finish_reason != "length"]
    if wrong:
        raise UserError(f"{len(wrong)} requests did not end by length: {wrong[0].finish_reason}")
    found = llm.metrics.as_dict()

    def spent(name: str) -> float:
        return found[f"kvjax_{name}"] - before.get(f"kvjax_{name}", 0.0)

    generated, prompt_tokens = sum(len(o.token_ids) for o in outputs), sum(lengths)
    steps = spent("decode_steps_total")
    firsts = [
        None if o.stats.first_token is None else o.stats.first_token - at
        for o, at in zip(outputs, arrived, strict=True)
    ]
    each = [o.stats.time_per_output_token(len(o.token_ids)) for o in outputs]
    row = {
        "model": model.config.name,
        "weights": Path(model.source).name,
        "rate": None if rate == "v" else float(rate),
        "reached_rate": prompt_tokens
        / sum(n / o.stats.rate for n, o in zip(lengths, outputs, strict=True)),
        "method": "full" if rate == "v" else options.method,
        "floor": compression.floor,
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
        "compiled_while_serving": len(llm.worker.compiled.seconds) - compiled,
        "memory": llm.memory(),
        "time_to_first_token": percentiles([x for x in firsts if x is not None]),
        "time_per_output_token": percentiles([x for x in each if x is not None]),
        "device": jax.devices()[0].device_kind,
        "dtype": llm.plan.spec.codec.name,
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


def _versions() -> dict[str, str]:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"jax": jax.__version__, "python": platform.python_version(), "date": today}
