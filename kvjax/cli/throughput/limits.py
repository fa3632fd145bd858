"""What the machine can do, measured: the bound beside every result."""

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

TIMED_SECONDS = 0.05
"""Work per timed loop: long beside what starting and ending it takes."""
ROUNDS = 5


def median_seconds(run: Callable[[], Any]) -> float:
    """Median time of a call that returns arrays, after one warm-up."""
    jax.block_until_ready(run())
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return sorted(times)[ROUNDS // 2]


def loop_seconds(body: Callable, carry: Any, estimate: float, *fixed: Any) -> float:
    """Seconds per turn of `carry = body(i, carry, *fixed)`, looped on the device.

    The number of turns is static, so the device never waits for the host between them.
    """
    turns = max(4, min(400, math.ceil(TIMED_SECONDS / estimate)))

    @jax.jit
    def looped(carry, fixed):
        return lax.fori_loop(0, turns, lambda i, c: body(i, c, *fixed), carry)

    return median_seconds(lambda: looped(carry, fixed)) / turns


def copy_bandwidth(size: int, expected: float = 4e12) -> float:
    """Bytes read and written per second by the better of a copy and an elementwise pass.

    `expected`: about as many as the machine can; says how often to repeat.
    """
    x = jnp.ones(size // 4, jnp.float32)
    copy = jax.jit(jnp.copy)
    passes = loop_seconds(lambda _, x: -x, x, 2 * size / expected)
    return 2 * size / min(median_seconds(lambda: copy(x)), passes)


def measure_limits() -> dict[str, float]:
    """Copy bandwidth in bytes/s (read plus written) and matrix rate in FLOP/s of the device."""
    cpu = jax.default_backend() == "cpu"
    n, dtype = (2048, jnp.float32) if cpu else (8192, jnp.bfloat16)
    x = jax.random.normal(jax.random.key(0), (n, n), dtype)
    if cpu:
        product = jax.jit(jnp.matmul)
        seconds = median_seconds(lambda: product(x, x))
    else:
        # One by one they would wait for the host; in a loop their values must not grow.
        seconds = loop_seconds(lambda _, x, y: jnp.matmul(x, y), x, 2 * n**3 / 8e14, x / n**0.5)
    return {
        "copy_bytes_per_s": copy_bandwidth(1 << (26 if cpu else 31), 2e10 if cpu else 4e12),
        "flop_per_s": 2 * n**3 / seconds,
    }


def roofline_seconds(llm: Any, limits: dict[str, float], spent: dict[str, float]) -> float:
    """The least time for what was done: prefill's FLOPs, and decoding's bytes and FLOPs."""
    model = llm.model.config
    leaves = [x for x in jax.tree.leaves(llm.model.params) if x.ndim >= 2]
    matrices = sum(x.size for x in leaves)
    embedding = model.vocab_size * model.hidden_size
    multiplied = matrices - (0 if model.tie_word_embeddings else embedding)
    per_pair = 4 * model.num_layers * model.num_heads * model.head_dim
    body = multiplied - embedding
    flops = 2 * body * spent["prompt_tokens"] + per_pair * spent["prompt_pairs"]
    weights = multiplied * sum(x.nbytes for x in leaves) / matrices
    read = spent["decode_steps"] * weights + spent["kvs_read"] * llm.plan.spec.kv_bytes
    decode_flops = 2 * multiplied * spent["output_tokens"]
    # A copy reads and writes; decoding reads, at the same bytes per second.
    decode = max(read / limits["copy_bytes_per_s"], decode_flops / limits["flop_per_s"])
    return flops / limits["flop_per_s"] + decode
