"""What `--only check` compares: each kernel with the XLA reference in float32."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.kernels import Prefix, explain, move_kvs, paged_attention, prefill_attention
from kvjax.kernels.paged_attention import reference, spec

LIMITS = {"float32": 2e-4, "float16": 2e-3, "bfloat16": 1e-2}
"""Largest ‖got − wanted‖ / ‖wanted‖: two roundings of weights and output, and headroom."""

Check = tuple[str, str, dict[str, float], float]
"""Name, implementation, relative errors by part, what they may be."""


def checks(small: bool) -> Iterator[Check]:
    """Every kernel and every family of shapes; only a few when `small`."""
    families = [f for f, shape in spec.FAMILIES.items() if shape.blocks < 1 << 20]
    for family in families[: 2 if small else None]:
        yield decode_check(family, spec.FAMILIES[family], longest=40 if small else 3000)
    for d in (64,) if small else (64, 80, 128):
        for with_prefix in (False, True):
            yield prefill_check(100 if small else 1500, d, with_prefix)
    yield move_check(100 if small else 3000)


def relative(got, wanted) -> float:
    """‖got − wanted‖ / ‖wanted‖; not a number if anything in `got` is not."""
    got, wanted = got.astype(jnp.float32), wanted.astype(jnp.float32)
    return float(jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted))


def decode_check(family: str, shape: spec.Shape, longest: int) -> Check:
    """Ragged lengths, shuffled pages, free and unwritten slots poisoned, tables ending in N."""
    rng = np.random.default_rng(0)
    b, d, heads = shape.block_size, shape.head_dim, 3
    lengths = rng.integers(0, longest, (5, heads)).astype(np.int32)
    lengths[0, 0] = 0
    pages = -(-lengths // b)
    blocks = int(pages.sum()) + 5
    order = rng.permutation(blocks).astype(np.int32)
    table = np.full((*lengths.shape, int(pages.max())), blocks, np.int32)
    pool = np.full((2, blocks, b, d), np.nan, np.float32)
    taken = 0
    for s, h in np.ndindex(*lengths.shape):
        mine = order[taken : taken + pages[s, h]]
        taken += len(mine)
        table[s, h, : len(mine)] = mine
        token = np.arange(int(lengths[s, h]))
        pool[:, mine[token // b], token % b] = rng.standard_normal((2, len(token), d))
    q = rng.standard_normal((len(lengths), heads * shape.group, d))
    q, k, v = (jnp.asarray(x, shape.dtype) for x in (q, *pool))
    call = (q, k, v, jnp.asarray(table), jnp.asarray(lengths))
    metric = jnp.asarray(rng.random((blocks, b)), jnp.float32)
    observed = jnp.arange(len(lengths)) % 2 == 0
    wide = [x.astype(jnp.float32) for x in (q, k, v)]

    @jax.jit
    def ours(call, metric):
        out, squares = paged_attention(*call, metric=metric, return_metric=True)
        _, first = paged_attention(
            *call, metric=metric, return_metric=True, power=1, observed=observed
        )
        return out, paged_attention(*call), squares - metric, first - metric

    @jax.jit
    def theirs(wide, call, metric):
        attend = functools.partial(
            reference.paged_attention, *wide, *call[3:], scale=d**-0.5, metric=metric
        )
        out, squares = attend()
        _, first = attend(power=1, observed=observed)
        return out, out, squares - metric, first - metric

    with jax.default_matmul_precision("highest"):
        exact = theirs(wide, call, metric)
    names = ("out", "out without metric", "metric", "metric of power 1, observed")
    pairs = zip(names, ours(call, metric), exact, strict=True)
    errors = {name: relative(got, wanted) for name, got, wanted in pairs}
    return (
        f"decode {family}",
        explain(paged_attention, *call),
        errors,
        LIMITS[shape.dtype],
    )


def prefill_check(tokens: int, d: int, with_prefix: bool) -> Check:
    """A prompt whose length fits no tile, alone or behind heads of unlike lengths."""
    rng = np.random.default_rng(0)
    shapes = (
        (tokens, 12, d),
        (tokens, 3, d),
        (tokens, 3, d),
        (3, 2 * tokens, d),
        (3, 2 * tokens, d),
    )
    q, k, v, *held = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in shapes)
    length = jnp.asarray([0, 7, 2 * tokens - 3], jnp.int32)
    held = [x.at[1, 7:].set(jnp.nan) for x in held]
    prefix = Prefix(held[0], held[1], length) if with_prefix else None
    wide = [x.astype(jnp.float32) for x in (q, k, v, *held)]
    wide_prefix = Prefix(wide[3], wide[4], length) if with_prefix else None
    out = jax.jit(prefill_attention)(q, k, v, prefix=prefix)
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(prefill_attention, static_argnames="implementation")(
            *wide[:3], prefix=wide_prefix, implementation="xla"
        )
    name = f"prefill d={d}{' + prefix' if with_prefix else ''}"
    chosen = explain(prefill_attention, q, k, v)
    return name, chosen, {"out": relative(out, exact)}, LIMITS["bfloat16"]


def move_check(width: int) -> Check:
    """Moves must be exact."""
    rng = np.random.default_rng(0)
    rows, b, d = 7, 16, 128
    count = rng.integers(0, width, rows).astype(np.int32)
    blocks = 2 * rows * width // b + 1
    k, v = (jnp.asarray(rng.standard_normal((blocks, b, d)), jnp.bfloat16) for _ in "kv")
    slots = jnp.asarray(rng.permutation(blocks * b)[: 2 * rows * width], jnp.int32)
    source, target = slots.reshape(2, rows, width)
    call = (k, v, source, target, jnp.asarray(count))
    pairs = zip(move_kvs(*call), move_kvs(*call, implementation="xla"), strict=True)
    errors = {name: relative(*pair) for name, pair in zip("kv", pairs, strict=True)}
    return "move", explain(move_kvs, *call), errors, 0.0
