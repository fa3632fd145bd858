"""What codes cost and save while decoding: seconds of a step, and bytes of a KV, by type.

    python -m benchmarks.codecs                               # SmolLM2, 4 sequences of 2,000 tokens
    python -m benchmarks.codecs --types bfloat16,int8 --rounds 9

The same model decodes behind the same prompts with one pool per type, nothing evicted. Rounds are
interleaved, so that what else the machine does meets all of them, and so are calls of attention
alone, over lengths of the same size. Pools are twice as large as all KVs: so that nobody waits,
and those with finer codes (`int4+`) have them of all. Compiling is not timed. The last line is one
JSON object.
"""

from kvjax.startup import guard

guard(__name__)

import argparse
import functools
import json
import statistics
import time
from typing import Any

from kvjax.cli import ArgumentParser, check_output_file, run_script

ROOM = 2
"""How many times all KVs a pool has room for."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(prog="python -m benchmarks.codecs", description=__doc__)
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="(%(default)s)")
    add("--types", default="bfloat16,int8,int4,int2,e4m3", help="what is stored (%(default)s)")
    add("--tokens", type=int, default=2000, help="of each prompt (%(default)s)")
    add("--sequences", type=int, default=4, help="at once (%(default)s)")
    add("--steps", type=int, default=32, help="decoded in each round (%(default)s)")
    add("--rounds", type=int, default=5, help="of each type (%(default)s)")
    add("--out", metavar="FILE", help="write the JSON object here, too")
    options = parser.parse_args(arguments)
    if options.out:
        check_output_file("--out", options.out)
    return options


def engine_rounds(options: argparse.Namespace, types: list[str]) -> dict[str, dict[str, Any]]:
    """Seconds of a decode step of an engine, by type."""
    import numpy as np

    from kvjax import LLM, EngineConfig, SamplingParams
    from kvjax.models import load_model

    model = load_model(options.model)
    length = options.tokens + options.steps + 16
    sizes = EngineConfig(
        max_batch=options.sequences, max_len=length, prefill_chunk=2048, prefill_scratch=2048,
        pool_tokens=ROOM * options.sequences * length, decode_steps_per_sync=16,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    prompts = [
        rng.integers(10, 10_000, options.tokens).astype(np.int32) for _ in range(options.sequences)
    ]
    sampling = SamplingParams(max_tokens=options.steps + 1, ignore_eos=True, detokenize=False)
    name = 'kvjax_seconds_total{phase="decode"}'
    engines = {kind: LLM(model, config=sizes, cache_dtype=kind) for kind in types}
    seconds: dict[str, list[float]] = {kind: [] for kind in types}
    for number in range(options.rounds + 1):
        for kind, llm in engines.items():
            before = llm.metrics.as_dict()[name]
            outputs = llm.generate(prompts, sampling)
            assert all(output.error is None for output in outputs)
            if number:
                seconds[kind].append((llm.metrics.as_dict()[name] - before) / options.steps)
    return {
        kind: {
            "kv_bytes": llm.plan.spec.kv_bytes,
            "kv_bytes_with_numbers": llm.plan.spec.kv_bytes + llm.plan.spec.number_bytes,
            "step_ms": summary(seconds[kind]),
        }
        for kind, llm in engines.items()
    }


def attention_rounds(options: argparse.Namespace, types: list[str]) -> dict[str, dict[str, Any]]:
    """Seconds of one layer's decode attention, by type."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from kvjax.cache import as_codec, init_cache, write_prompt
    from kvjax.kernels import paged_attention
    from kvjax.models.config import get_model_entry

    model, rng = get_model_entry(options.model).config, np.random.default_rng(0)
    heads, d, width = model.num_kv_heads, model.head_dim, -(-options.tokens // 16)
    k, v = (
        jnp.asarray(rng.standard_normal((1, options.tokens, heads, d)), jnp.float32)
        for _ in range(2)
    )
    q = jnp.asarray(rng.standard_normal((options.sequences, model.num_heads, d)), jnp.float32)
    metric = jnp.zeros((1, heads, options.tokens), jnp.float32)
    calls, write = {}, jax.jit(write_prompt, donate_argnums=0)
    for kind in types:
        cache = init_cache(
            num_slots=options.sequences, num_layers=1, num_kv_heads=heads, head_dim=d,
            num_blocks=ROOM * options.sequences * heads * width, max_blocks_per_head=width,
            codec=as_codec(kind, "float32"),
        )  # fmt: skip
        for slot in range(options.sequences):
            cache, _ = write(cache, slot, k, v, metric, options.tokens)
        arrays = (*cache.kv.operands, cache.block_table[:, 0], cache.context_len[:, 0])
        exact = None if cache.window is None else cache.window.of_layer(jnp.int32(0))
        call = jax.jit(paged_attention).lower(q, *arrays, exact=exact).compile()
        run = functools.partial(call, q, *arrays, exact=exact)
        calls[kind] = lambda run=run: jax.block_until_ready(run())
        calls[kind]()
    seconds: dict[str, list[float]] = {kind: [] for kind in types}
    for _ in range(20 * options.rounds):
        for kind, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[kind].append(time.perf_counter() - start)
    return {kind: {"attention_ms": summary(seconds[kind])} for kind in types}


def summary(seconds: list[float]) -> dict[str, float]:
    """Median and extremes, in milliseconds."""
    of = {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}
    return {name: round(1e3 * value, 3) for name, value in of.items()}


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from kvjax.cli.models import check_cache_dtypes
    from kvjax.engine.compilation import enable_compilation_cache

    types = list(dict.fromkeys(options.types.split(",")))
    check_cache_dtypes(types)
    enable_compilation_cache()
    alone = attention_rounds(options, types)
    whole = engine_rounds(options, types)
    for kind in types:
        row = whole[kind] | alone[kind]
        print(
            f"{kind:>10}: {row['kv_bytes']} bytes of a KV, a step in "
            f"{row['step_ms']['median']:.1f} ms, attention of a layer in "
            f"{row['attention_ms']['median']:.2f} ms"
        )
    found = {**vars(options), "types": {kind: whole[kind] | alone[kind] for kind in types}}
    line = json.dumps(found)
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            file.write(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    run_script(main, lazy_imports=True)
