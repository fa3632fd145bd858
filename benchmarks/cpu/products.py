"""A model's products with its weights, by every implementation that serves them."""

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cli import Progress
from kvjax.kernels import matmul
from kvjax.models import ModelConfig
from kvjax.models.families import family_of
from kvjax.models.narrow import scaled_product

KINDS = (("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "int8"))
"""Dtypes of activations and of weights."""
NAMES = ("amx", "numba", "xla")


def measure_products(
    config: ModelConfig, rows: tuple[int, ...], repeats: int, progress: Progress
) -> list[dict[str, Any]]:
    """Milliseconds of the matrices of all layers times some rows, and of the vocabulary's, the
    least of all rounds, implementations in turns. Each layer has weights of its own: no cache holds
    them all."""
    table = family_of(config).layer_class.table(config)
    shapes = [
        (math.prod(spec.shape[: spec.inputs]), math.prod(spec.shape[spec.inputs :]))
        for spec in table.values()
        if spec.inputs
    ]
    found = []
    for of_x, of_weight in KINDS:
        layers = [
            [jnp.asarray(_numbers(i, shape), of_weight) for shape in shapes]
            for i in range(config.num_layers)
        ]
        # As tied embeddings lie, their inputs along rows.
        size = config.vocab_size, config.hidden_size
        embed = jnp.asarray(_numbers(0, size), of_weight)
        for count in rows:
            progress(f"products, {count} rows by {of_weight}")
            x = [jnp.asarray(_numbers(count, (count, n)), of_x) for n, _ in shapes]
            own = jnp.asarray(_numbers(count, (count, config.hidden_size)), of_x)
            served = [name for name in NAMES if _serves(name, x, layers[0], 0)]
            runs = {name: _run(name, layers, x) for name in served}
            others = [name for name in NAMES if _serves(name, [own], [embed], 1)]
            of_words = {name: _once(name, own, embed) for name in others}
            found.append({
                "rows": count, "weights": of_weight, "milliseconds": _least(runs, repeats),
                "vocabulary": _least(of_words, repeats),
            })  # fmt: skip
    return found


def _least(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Milliseconds of each, the least of some rounds."""
    taken = {name: float("inf") for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            taken[name] = min(taken[name], time.perf_counter() - start)
    return {name: 1e3 * seconds for name, seconds in taken.items()}


def _numbers(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).integers(-127, 128, shape).astype(np.float32)


def _product(name: str, x: jax.Array, weight: jax.Array, axis: int = 0) -> jax.Array:
    if name == "xla" and weight.dtype == jnp.int8:
        # By integers, where no kernel serves.
        return scaled_product(x[None], weight, jnp.ones(weight.shape[1 - axis]), axis)[0]
    return matmul(x, weight, axis=axis, dtype="float32", implementation=name)


def _serves(name: str, x: list[jax.Array], weights: list[jax.Array], axis: int) -> bool:
    try:
        for one, weight in zip(x, weights):
            jax.eval_shape(functools.partial(_product, name, axis=axis), one, weight)
    except ValueError:
        return False
    return True


def _once(name: str, x: jax.Array, weight: jax.Array) -> Callable[[], Any]:
    compiled = jax.jit(functools.partial(_product, name, axis=1))
    return lambda: compiled(x, weight)


def _run(name: str, layers: list[list[jax.Array]], x: list[jax.Array]) -> Callable[[], Any]:
    """All layers one after the other, as steps run them: each a branch to its weights."""

    def whole(layers: list[list[jax.Array]], x: list[jax.Array]) -> jax.Array:
        def layer(i: jax.Array, total: jax.Array) -> jax.Array:
            def one(own: list[jax.Array], x: list[jax.Array]) -> jax.Array:
                return jnp.stack([_product(name, a, w)[0, 0] for a, w in zip(x, own)]).sum()

            # What comes depends on what was: nothing is computed once for all.
            later = [a.at[0, 0].add(total.astype(a.dtype) * 0) for a in x]
            branches = [lambda x, own=own: one(own, x) for own in layers]
            return total + jax.lax.switch(i, branches, later)

        return jax.lax.fori_loop(0, len(layers), layer, jnp.float32(0))

    compiled = jax.jit(whole)
    return lambda: compiled(layers, x)
