"""What the engine costs on a CPU, as ratios against a peer or a bound measured in the same run.

Decode and prefill of SmolLM2-135M's shapes in float32, in bfloat16 and with int8 weights, against
Hugging Face transformers on the same cores, the share of a prompt's prefill that compression takes,
by method too, how metrics and eviction grow with the prompt, one layer's attention over a prompt
with and without the sums of all queries, that of decode steps by Numba and by XLA, products with
the weights by each implementation, and the bytes that the cache holds afterwards.

    python -m benchmarks.cpu --peer-python ~/torch/bin/python --json bench.json
    python -m benchmarks.cpu --only compression scaling

`--peer-python` is a Python that has torch and transformers (kvjax itself needs neither). Weights
are random, as only their shapes matter; the section "calibrated" takes SmolLM2-135M itself, with
the calibration that ships. The last line is one JSON object.
"""

from kvjax.startup import guard

guard(__name__)

import argparse
import dataclasses
import functools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cpu.paged import measure_paged
from benchmarks.cpu.products import measure_products
from kvjax.cache import (
    CompressionConfig,
    compress,
    get_method,
    init_cache,
    schedule_evictions,
    write_prompt,
)
from kvjax.cache.config import CALIBRATED
from kvjax.checks import check_whole
from kvjax.cli import ArgumentParser, Progress, check_output_file, run_script
from kvjax.engine import LLM, EngineConfig, SamplingParams, pool_tokens_for
from kvjax.engine.compilation import enable_compilation_cache
from kvjax.errors import UserError
from kvjax.eval.sizes import cache_spec
from kvjax.kernels import (
    prefill_attention,
    prefill_attention_with_log_sum,
    prefill_attention_with_received,
    window_metrics,
)
from kvjax.models import load_model

FEW_ROWS = 1, 4, 8, 16, 32
"""Of products as decode steps have them."""
SECTIONS = (
    *("peer", "compression", "methods", "calibrated", "scaling", "attention", "paged"),
    "products",
)
METHODS = (
    "full",
    "random",
    "streaming-llm",
    "snapkv",
    "pyramidkv-exact",
    "kv-compress",
    "kv-compress-w32-l2",
    "kv-compress-full-l2",
    "h2o",
    "shared-reads",
    "kvcrush:snapkv",
    "kmeans:snapkv",
)
"""Of the section "methods"."""
CALIBRATED_METHODS = ("full", "random", CALIBRATED.partition(":")[2], CALIBRATED)
"""Of the section "calibrated": two that observe nothing, reads predicted, and matched."""
PEER = Path(__file__).with_name("peer.py")


def best(run: Callable[[], Any], repeats: int) -> float:
    """Least seconds of some runs, after one that does not count."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return min(times)


def make_llm(model: Any, compression: CompressionConfig, length: int, slots: int = 1) -> LLM:
    """An engine that runs prompts of this length in one piece, for `slots` of them at once."""
    sizes = EngineConfig(
        max_batch=slots, max_len=length + 512, prefill_chunk=length, prefill_scratch=length
    )
    pool = slots * pool_tokens_for(model.config, sizes, compression, length, 256)
    return LLM(model, compression, dataclasses.replace(sizes, pool_tokens=pool))


def prompt_of(model: Any, length: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, model.config.vocab_size, length).astype(np.int32)


def phase_seconds(llm: LLM, phase: str) -> float:
    """Seconds that an engine has spent on a phase so far."""
    return llm.metrics.as_dict()[f'kvjax_seconds_total{{phase="{phase}"}}']


def measure_prompt(llm: LLM, prompt: np.ndarray, repeats: int) -> tuple[dict[str, float], int]:
    """Least seconds of each phase of a prompt's way in, and the blocks it took there."""
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    blocks, found = 0, []
    for _ in range(repeats):
        before = {phase: phase_seconds(llm, phase) for phase in ("prefill", "compress")}
        (output,) = llm.generate([prompt], sampling)
        blocks = output.stats.blocks_after
        found.append({phase: phase_seconds(llm, phase) - x for phase, x in before.items()})
    return {phase: min(seconds[phase] for seconds in found) for phase in found[0]}, blocks


def measure_ours(model: Any, length: int, repeats: int, progress: Progress) -> dict[str, float]:
    """Tokens per second of prefill and of decoding with 1 and 8 sequences, full cache."""
    full = CompressionConfig(method="full")
    sampling = SamplingParams(max_tokens=250, ignore_eos=True)
    prompt = prompt_of(model, length)
    found: dict[str, float] = {}
    for slots in (1, 8):
        progress(f"kvjax, {slots} sequences")
        llm = make_llm(model, full, length, slots)
        if slots == 1:
            found["prefill"] = length / measure_prompt(llm, prompt, repeats)[0]["prefill"]
        for _ in range(slots):
            llm.add_request(prompt, sampling)
        while len(llm.scheduler.running) < slots:
            llm.step()
        # From here on each step decodes all sequences, the host's share included.
        tokens = slots * llm.config.decode_steps_per_sync
        found[f"decode_{slots}"] = tokens / best(llm.step, 6)
    return found


def compare_with_peer(options: argparse.Namespace, model: Any, progress: Progress) -> dict:
    """Ours and transformers' speed at `--length` tokens of context."""
    ours = measure_ours(model, options.length, options.repeats, progress)
    few = load_model("smollm2-135m", dummy_weights=True, weight_dtype="int8")
    half = load_model("smollm2-135m", dummy_weights=True, dtype="bfloat16")
    in_half = measure_ours(half, options.length, options.repeats, progress)
    result: dict[str, Any] = {
        "length": options.length,
        "kvjax_tokens_per_second": ours,
        "with_int8_weights": measure_ours(few, options.length, options.repeats, progress),
        "in_bfloat16": {"kvjax_tokens_per_second": in_half},
    }
    result["batch_8_over_batch_1"] = ours["decode_8"] / ours["decode_1"]
    if options.peer_python is None:
        print("no --peer-python: transformers is left out", file=sys.stderr)
        return result
    peer = result["peer"] = measure_peer(options, "float32", progress)
    half = result["in_bfloat16"]["peer"] = measure_peer(options, "bfloat16", progress)
    for name in ("prefill", "decode_1"):
        result[f"{name}_over_peer"] = ours[name] / peer[name]
        result[f"{name}_with_int8_weights_over_peer"] = (
            result["with_int8_weights"][name] / peer[name]
        )
        own = result["in_bfloat16"]["kvjax_tokens_per_second"]
        result["in_bfloat16"][f"{name}_over_peer"] = own[name] / half[name]
    return result


def measure_peer(options: argparse.Namespace, dtype: str, progress: Progress) -> dict:
    """What transformers tells of itself (`peer.py`)."""
    progress(f"transformers, {dtype}")
    numbers = str(options.length), str(options.repeats)
    command = [options.peer_python, str(PEER), *numbers, dtype]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except OSError as error:
        raise UserError(f"--peer-python {options.peer_python}: {error.strerror}") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(f"--peer-python {options.peer_python} failed: {last}") from error
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure_compression(model: Any, rate: float, repeats: int, progress: Progress) -> dict:
    """Share of a 4 k-token prompt's prefill that its compression takes, and the bytes left."""
    length, spec = 4096, cache_spec(model)
    prompt = prompt_of(model, length)
    prefill: dict[str, float] = {}
    writing: dict[str, float] = {}
    bytes_after = held = 0
    default = str(CompressionConfig().method)
    for method in ("full", default):
        progress(f"prefill, {method}")
        compression = CompressionConfig(method=method, rate=None if method == "full" else rate)
        llm = make_llm(model, compression, length)
        seconds, blocks = measure_prompt(llm, prompt, repeats + 1)
        prefill[method], writing[method] = seconds["prefill"], seconds["compress"]
        bytes_after, held = blocks * spec.block_bytes, blocks * spec.block_size
    full_bytes = length * spec.heads * spec.kv_bytes
    one_block = spec.block_size * spec.heads * spec.kv_bytes
    return {
        "length": length,
        "rate": rate,
        "method": default,
        "prefill_seconds": prefill,
        "write_seconds": writing,
        # The whole: observing, choosing and writing the survivors. The full cache writes too.
        "share_of_prefill": writing[default] / prefill[default],
        "observing_share": prefill[default] / prefill["full"] - 1,
        "cache_bytes": bytes_after,
        "bytes_allowed": full_bytes / rate + one_block + spec.number_bytes * held,
    }


def measure_methods(model: Any, rate: float, repeats: int, progress: Progress) -> dict:
    """What methods add to a 2 k-token prompt and 128 tokens after it, against the full cache.

    Rounds over all methods, the least of each, so that a machine that slows down slows all.
    """
    length, new_tokens = 2048, 128
    prompt = prompt_of(model, length)
    engines = {}
    for method in METHODS:
        compression = CompressionConfig(method=method, rate=None if method == "full" else rate)
        engines[method] = make_llm(model, compression, length)
    found: dict[str, dict[str, float]] = {}
    for _ in range(repeats + 1):
        for method, llm in engines.items():
            progress(f"prefill and choice, {method}")
            seconds, _ = measure_prompt(llm, prompt, 1)
            known = found.setdefault(method, seconds)
            found[method] = {phase: min(x, known[phase]) for phase, x in seconds.items()}
    for method, llm in engines.items():
        progress(f"decode, {method}")
        before = phase_seconds(llm, "decode")
        llm.generate([prompt], SamplingParams(max_tokens=new_tokens, ignore_eos=True))
        found[method]["decode"] = phase_seconds(llm, "decode") - before
    full = found["full"]
    for method, row in found.items():
        row["observing_share_of_prefill"] = row["prefill"] / full["prefill"] - 1
        # Writing the whole cache is no choice, so what it takes is left in.
        row["choosing_share_of_prefill"] = row["compress"] / full["prefill"]
        base = found.get(method.partition(":")[2])
        if base is not None:
            total = sum(row[phase] for phase in ("prefill", "compress", "decode"))
            row["share_of_latency_over_base"] = (row["compress"] - base["compress"]) / total
    return {"length": length, "new_tokens": new_tokens, "rate": rate, "methods": found}


def measure_calibrated(rate: float, repeats: int, progress: Progress) -> dict:
    """What the default of a calibrated model adds to a prompt of 1 k tokens and to a decode step.

    All methods in turns, five times as often as the rest here: what it observes is less than what
    one prefill differs from the next. Medians, and the quartiles of the rounds' ratios.
    """
    length, new_tokens = 1024, 32
    model = load_model("smollm2-135m")
    prompt = prompt_of(model, length)
    engines, seconds = {}, {}
    for method in CALIBRATED_METHODS:
        compression = CompressionConfig(method=method, rate=None if method == "full" else rate)
        engines[method] = make_llm(model, compression, length)
        seconds[method] = {phase: [] for phase in ("prefill", "compress", "decode")}
    sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    rounds = 5 * repeats
    for done in range(-1, rounds):
        progress(f"calibrated, round {done + 1} of {rounds}")
        for method, llm in engines.items():
            before = {phase: phase_seconds(llm, phase) for phase in seconds[method]}
            llm.generate([prompt], sampling)
            for phase, all_of in seconds[method].items():
                if done >= 0:
                    all_of.append(phase_seconds(llm, phase) - before[phase])

    def over(phase: str, one: str, other: str) -> list[float]:
        ratio = np.array(seconds[one][phase]) / np.array(seconds[other][phase])
        return np.percentile(ratio, [25, 50, 75]).round(4).tolist()

    predicted, matched = CALIBRATED_METHODS[2:]
    return {
        "length": length,
        "new_tokens": new_tokens,
        "rate": rate,
        "rounds": rounds,
        "median_seconds": {
            method: {phase: round(float(np.median(x)), 4) for phase, x in of.items()}
            for method, of in seconds.items()
        },
        "prefill_over_full": {m: over("prefill", m, "full") for m in (predicted, matched)},
        "decode_over_random": {m: over("decode", m, "random") for m in (predicted, matched)},
    }


def measure_scaling(model: Any, repeats: int, progress: Progress) -> list[dict]:
    """Seconds of one layer's window metrics and of a whole eviction, by prompt length."""
    config, rows = model.config, []
    rng = np.random.default_rng(0)
    for length in (1024, 2048, 4096, 8192):
        progress(f"{length} tokens")
        q = jnp.asarray(rng.standard_normal((8, config.num_heads, config.head_dim)), jnp.float32)
        shape = (length, config.num_kv_heads, config.head_dim)
        k = jnp.asarray(rng.standard_normal(shape), jnp.float32)
        at = jnp.arange(length - 8, length, dtype=jnp.int32)
        observe = jax.jit(lambda q, k, at: window_metrics(q, k, query_position=at))
        heads = config.num_layers * config.num_kv_heads
        blocks = heads * length // 16
        cache = init_cache(
            num_slots=1,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            num_blocks=blocks,
            max_blocks_per_head=length // 16,
        )
        kv = jnp.zeros((config.num_layers, *shape), jnp.float32)
        metric = jnp.asarray(rng.random((config.num_layers, config.num_kv_heads, length)))
        write = jax.jit(write_prompt, donate_argnums=0)
        cache, _ = write(cache, 0, kv, kv, metric.astype(jnp.float32), length)
        slots, evict = jnp.zeros(1, jnp.int32), jnp.full(1, blocks * 7 // 8, jnp.int32)
        method = get_method("kv-compress")
        schedule = jax.jit(functools.partial(schedule_evictions, method=method))
        whole = jax.jit(functools.partial(compress, method=method), donate_argnums=0)

        def compress_copy(cache=cache, whole=whole, args=(slots, blocks - evict)) -> float:
            copy = jax.block_until_ready(jax.tree.map(jnp.copy, cache))
            start = time.perf_counter()
            jax.block_until_ready(whole(copy, *args))
            return time.perf_counter() - start

        rows.append(
            {
                "length": length,
                "metrics_seconds": best(lambda f=observe, a=(q, k, at): f(*a), repeats),
                "schedule_seconds": best(
                    lambda f=schedule, a=(cache, slots, evict): f(*a), repeats
                ),
                "compress_seconds": min([compress_copy() for _ in range(repeats + 1)][1:]),
            }
        )
    for row in rows:
        for name in ("metrics", "schedule", "compress"):
            per_kv = row[f"{name}_seconds"] / row["length"]
            row[f"{name}_per_kv_over_shortest"] = (
                per_kv * rows[0]["length"] / rows[0][f"{name}_seconds"]
            )
    return rows


def measure_attention(model: Any, length: int, repeats: int, progress: Progress) -> dict:
    """Median milliseconds of one layer's attention over a prompt, alone and with what keys receive
    of all queries: told by the attention, and in a pass of its own; all in turns, three times as
    often as the rest here."""
    config, rng = model.config, np.random.default_rng(0)
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    shapes = ((length, number, config.head_dim) for number in heads)
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    weight, at = jnp.ones(length), jnp.arange(length, dtype=jnp.int32)

    def told(power: int, excluded: int) -> Callable[..., Any]:
        return lambda q, k, v: prefill_attention_with_received(
            q, k, v, query_weight=weight, power=power, excluded_distance=excluded
        )[::2]

    def another_pass(q: Any, k: Any, v: Any) -> Any:
        out, log_sum = prefill_attention_with_log_sum(q, k, v)
        return out, window_metrics(q, k, query_position=at, power=1, log_sum=log_sum)

    variants = {
        "alone": prefill_attention,
        "sums": told(1, 0),
        "squares_10_apart": told(2, 10),
        "sums_in_another_pass": another_pass,
    }
    compiled = {}
    for name, function in variants.items():
        progress(f"attention, {name}")
        compiled[name] = jax.jit(function).lower(*arrays).compile()
    wall: dict[str, list[float]] = {name: [] for name in variants}
    processor: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(3 * repeats):
        for name, run in compiled.items():
            start, used = time.perf_counter(), time.process_time()
            jax.block_until_ready(run(*arrays))
            processor[name].append(time.process_time() - used)
            wall[name].append(time.perf_counter() - start)
    return {
        "length": length,
        "milliseconds": {name: 1e3 * float(np.median(x)) for name, x in wall.items()},
        "processor_milliseconds": {name: 1e3 * min(x) for name, x in processor.items()},
    }


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__)
    parser.add_argument("--peer-python", help="a Python with torch and transformers")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument(
        "--length", type=int, default=2048, help="tokens of peer, attention and paged"
    )
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="also write the JSON object to a file")
    options = parser.parse_args(arguments)
    check_whole("--length", options.length, 64, 10**6)
    check_whole("--repeats", options.repeats, 1, 10**6)
    CompressionConfig(rate=options.rate)
    if options.json is not None:
        check_output_file("--json", options.json)
    if jax.default_backend() != "cpu":
        raise UserError(f"this is a benchmark of the CPU, JAX runs on {jax.default_backend()}")
    enable_compilation_cache()
    progress = Progress()
    model = load_model("smollm2-135m", dummy_weights=True)
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }
    if "peer" in options.only:
        result["peer"] = compare_with_peer(options, model, progress)
    if "compression" in options.only:
        result["compression"] = measure_compression(model, options.rate, options.repeats, progress)
    if "methods" in options.only:
        result["methods"] = measure_methods(model, options.rate, options.repeats, progress)
    if "calibrated" in options.only:
        result["calibrated"] = measure_calibrated(options.rate, options.repeats, progress)
    if "scaling" in options.only:
        result["scaling"] = measure_scaling(model, options.repeats, progress)
    if "attention" in options.only:
        result["attention"] = measure_attention(model, options.length, options.repeats, progress)
    if "paged" in options.only:
        cores, length = os.cpu_count() or 1, options.length
        found = measure_paged(model.config, length, options.repeats, cores, progress)
        result["paged"] = found
    if "products" in options.only:
        rows = *FEW_ROWS, options.length
        result["products"] = measure_products(model.config, rows, options.repeats, progress)
    progress.clear()
    print(json.dumps(result, indent=2))
    line = json.dumps(result)
    if options.json is not None:
        try:
            Path(options.json).write_text(line + "\n")
        except OSError as error:
            raise UserError(f"cannot write {options.json}: {error.strerror}") from error
    print(line)
    return 0


if __name__ == "__main__":
    run_script(main)
