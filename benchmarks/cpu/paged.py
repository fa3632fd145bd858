"""Attention of decode steps by Numba and by XLA, beside what the memory gives to a sum."""

import importlib.util
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import as_codec
from kvjax.cache.store import KVPool
from kvjax.cli import Progress
from kvjax.kernels import paged_attention
from kvjax.models import ModelConfig

BLOCK_SIZE = 16
SUMMED_BYTES = 1 << 29
LAYERS = 8
"""Calls of a run, each over pools of its own: no cache holds them all."""


def memory_bandwidth(threads: int) -> float:
    """Gigabytes per second that threads read of an array that they sum up, the best of five."""
    parts = np.array_split(np.ones(SUMMED_BYTES // 4, np.float32), threads)
    best = float("inf")
    for _ in range(5):
        running = [threading.Thread(target=part.sum) for part in parts]
        start = time.perf_counter()
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        best = min(best, time.perf_counter() - start)
    return SUMMED_BYTES / best / 1e9


def measure_paged(
    config: ModelConfig, length: int, repeats: int, threads: int, progress: Progress
) -> dict[str, Any]:
    """Milliseconds of a layer's attention, the least of all rounds, implementations in turns.

    For 1 and 8 sequences of `length` KVs, pages in order and anywhere in the pool, rows of two
    types and int8 codes, with Σ p² and without.
    """
    names = ["numba", "xla"] if importlib.util.find_spec("numba") else ["xla"]
    cases = [
        (seqs, "float32", order, metric)
        for seqs in (1, 8)
        for order in (True, False)
        for metric in (False, True)
    ]
    cases += [(8, stored, False, False) for stored in ("bfloat16", "int8")]
    rows = []
    for seqs, stored, order, metric in cases:
        progress(f"paged attention, {seqs} sequences in {stored}")
        arguments = _arguments(config, seqs, length, stored, order)
        runs = {name: _run(name, metric, *arguments) for name in names}
        taken = {name: float("inf") for name in names}
        for _ in range(3 * repeats):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                taken[name] = min(taken[name], time.perf_counter() - start)
        row = {"sequences": seqs, "stored": stored, "in_order": order, "metric": metric}
        row["bytes"] = sum(x.nbytes for x in jax.tree.leaves(arguments[1])) // LAYERS
        rows.append(row | {name: 1e3 * t / LAYERS for name, t in taken.items()})
    return {"length": length, "memory_gb_per_second": memory_bandwidth(threads), "rows": rows}


def _arguments(
    config: ModelConfig, seqs: int, length: int, stored: str, order: bool
) -> tuple[Any, Any, Any, Any]:
    """Queries, the pools of all layers, and the table and lengths of all of them."""
    rng, d, heads = np.random.default_rng(0), config.head_dim, config.num_kv_heads
    blocks = -(-length // BLOCK_SIZE)
    count = seqs * heads * blocks
    q = jnp.asarray(rng.standard_normal((seqs, config.num_heads, d)), jnp.float32)
    pools = []
    for _ in range(LAYERS):
        k, v = (jnp.asarray(rng.standard_normal((count, BLOCK_SIZE, d)), jnp.float32) for _ in "kv")
        pool = KVPool.empty(as_codec(stored, jnp.float32), count, BLOCK_SIZE, d)
        pools.append(pool.write((jnp.arange(count),), k, v).operands)
    ids = np.arange(count) if order else rng.permutation(count)
    table = jnp.asarray(ids.reshape(seqs, heads, blocks), jnp.int32)
    return q, pools, table, jnp.full((seqs, heads), length, jnp.int32)


def _run(name: str, metric: bool, q: Any, pools: Any, table: Any, lengths: Any) -> Any:
    """One call after the other, the next one's queries of what the one before gave."""
    kept = [jnp.zeros((table.size, BLOCK_SIZE)) for _ in pools] if metric else None

    @jax.jit
    def all_layers(q, pools, kept):
        received = []
        for i, (k, v) in enumerate(pools):
            options: dict[str, Any] = {"implementation": name}
            if kept is not None:
                options |= {"metric": kept[i], "return_metric": True}
            found = paged_attention(q, k, v, table, lengths, **options)
            received.append(found)
            q = q + (found if kept is None else found[0])
        return q, received

    def run() -> None:
        jax.block_until_ready(all_layers(q, pools, kept))

    run()
    return run
