"""What taking and giving back blocks costs, by the size of the pool: it should not depend on it.

    python -m benchmarks.allocation
    python -m benchmarks.allocation --blocks 4096,4194304 --repeats 30

A cache with the heads of SmolLM2 whose keys and values are one number each, so that what is
measured is the bookkeeping: a decode step's append (per step, of 32 in a loop), a prompt that is
written, compressed to half and released. Least times in milliseconds, the sizes in turns; the last
line is one JSON object.
"""

from kvjax.startup import guard

guard(__name__)

import argparse
import functools
import json
import time
from typing import Any

from benchmarks.options import wholes
from kvjax.checks import check_whole
from kvjax.cli import ArgumentParser, run_script

SLOTS, LAYERS, HEADS, BLOCK, TOKENS, STEPS = 8, 30, 3, 4, 256, 32
LAST = SLOTS - 1
"""The slot of the prompt that comes and goes; the others decode."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(prog="python -m benchmarks.allocation", description=__doc__)
    parser.add_argument("--blocks", type=wholes, default=[1 << 15, 1 << 18, 1 << 21])
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args(arguments)
    least = LAYERS * HEADS * (SLOTS * (STEPS // BLOCK + 1) + TOKENS // BLOCK)
    for blocks in options.blocks:
        check_whole("--blocks", blocks, least, 1 << 28)
    check_whole("--repeats", options.repeats, 1)
    return options


def steps() -> dict[str, Any]:
    """Jitted functions of a cache, in the order in which they run."""
    import jax
    import jax.numpy as jnp

    from kvjax.cache import begin_append, compress, get_method, release, write_prompt

    others = jnp.arange(SLOTS) < LAST
    kv = jnp.zeros((LAYERS, TOKENS, HEADS, 1))
    metric = jax.random.uniform(jax.random.key(0), (LAYERS, HEADS, TOKENS))
    keep = jnp.full(1, LAYERS * HEADS * TOKENS // BLOCK // 2, jnp.int32)
    method = get_method("kv-compress")

    def append(cache: Any) -> Any:
        return jax.lax.fori_loop(0, STEPS, lambda _, c: begin_append(c, others)[0], cache)

    def write(cache: Any) -> Any:
        return write_prompt(cache, LAST, kv, kv, metric, TOKENS)[0]

    def evict(cache: Any) -> Any:
        return compress(cache, jnp.full(1, LAST, jnp.int32), keep, method)[0]

    def drop(cache: Any) -> Any:
        return release(cache, ~others)

    def drop_all(cache: Any) -> Any:
        return release(cache, jnp.ones(SLOTS, bool))

    named = {"append": append, "write": write, "evict": evict, "release": drop, "all": drop_all}
    return {name: jax.jit(step, donate_argnums=0) for name, step in named.items()}


def new_cache(blocks: int) -> Any:
    from kvjax.cache import init_cache

    return init_cache(
        num_slots=SLOTS, num_layers=LAYERS, num_kv_heads=HEADS, head_dim=1, num_blocks=blocks,
        max_blocks_per_head=TOKENS // BLOCK, block_size=BLOCK,
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    import jax

    run, found = steps(), {blocks: {} for blocks in options.blocks}
    caches = {blocks: jax.jit(functools.partial(new_cache, blocks))() for blocks in options.blocks}
    for turn in range(options.repeats + 1):
        for blocks, times in found.items():
            cache = caches.pop(blocks)
            for name, step in run.items():
                start = time.perf_counter()
                cache = jax.block_until_ready(step(cache))
                taken = (time.perf_counter() - start) / (STEPS if name == "append" else 1)
                # The first turn compiles.
                times[name] = min(taken, times.get(name, taken)) if turn > 1 else taken
            caches[blocks] = cache
    print("| blocks | " + " | ".join(f"{name}, ms" for name in run) + " |")
    print("|---|" + "---|" * len(run))
    for blocks, times in found.items():
        print(f"| {blocks:,} | " + " | ".join(f"{times[name] * 1e3:.3f}" for name in run) + " |")
    told = {b: {name: x * 1e3 for name, x in times.items()} for b, times in found.items()}
    print(json.dumps({"milliseconds": told}))
    return 0


if __name__ == "__main__":
    run_script(main, lazy_imports=True)
