"""What `--only check` compares: each kernel with the XLA reference in float32."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.kernels import cases
from kvjax.cache import as_codec
from kvjax.kernels import (
    Encoded,
    ExactKVs,
    Prefix,
    append_and_attend,
    explain,
    move_kvs,
    paged_attention,
    prefill_attention,
    prefill_attention_with_log_sum,
    window_metrics,
)
from kvjax.kernels.encoded import FINER, without_halves
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
    yield exact_check(longest=40 if small else 3000)
    for d in (64,) if small else (64, 80, 128):
        for with_prefix in (False, True):
            yield prefill_check(100 if small else 1500, d, with_prefix)
    yield move_check(100 if small else 3000)
    yield append_check("llama-3.1-8b", 40 if small else 3000)
    yield received_check(100 if small else 1500, 128)


def relative(got, wanted) -> float:
    """‖got − wanted‖ / ‖wanted‖; not a number if anything in `got` is not."""
    got, wanted = got.astype(jnp.float32), wanted.astype(jnp.float32)
    return float(jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted))


def decode_problem(shape: spec.Shape, longest: int) -> tuple[tuple, jax.Array, jax.Array]:
    """Ragged lengths, shuffled pages, free and unwritten slots poisoned, tables ending in N: a
    call, the metrics before it and the sequences that are observed."""
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
    return call, metric, jnp.arange(len(lengths)) % 2 == 0


INT4 = cases.CODES["int4 int4 b=16 d=128"]


def coded_problem(
    longest: int, shape: spec.Shape = INT4
) -> tuple[tuple, tuple, Array, Array, ExactKVs]:
    """`decode_problem` with a pool of codes, the newest KVs of each head exact beside it: the call,
    the same with the rows that these codes stand for in float32, and the rest of it."""
    (q, *pools, table, lengths), metric, observed = decode_problem(shape, longest)
    tag = None
    if shape.fine:
        # Every other block has finer codes, in one behind all others.
        n, blocks = metric.shape[0], jnp.arange(2 * metric.shape[0], dtype=jnp.int32)
        tag = jnp.where((blocks < n) & (blocks % 2 == 0), blocks + n, 2 * n)
        metric = jnp.pad(metric, ((0, n), (0, 0)))
        room = ((0, n), (0, 0), (0, 0))
        pools = [jnp.pad(pool, room, constant_values=jnp.nan) for pool in pools]
    encoded, decoded = [], []
    for form, pool in zip(shape.codes, pools, strict=True):
        written = ~jnp.isnan(pool[..., 0])
        encoded.append(coded(pool, written, form, tag))
        decoded.append(jnp.where(written[..., None], rows_of(encoded[-1]), jnp.nan))
    index = lengths[..., None] - 1 - jnp.arange(cases.WINDOW, dtype=jnp.int32)
    rng, size = np.random.default_rng(1), (2, *index.shape, shape.head_dim)
    k, v = jnp.asarray(rng.standard_normal(size), shape.dtype)
    exact = ExactKVs(k, v, jnp.maximum(index, -1))
    heads = (table, lengths)
    return (q, *encoded, *heads), (q, *decoded, *heads), metric, observed, exact


def coded(
    rows: Array, written: Array, form: str | None, tag: Array | np.ndarray | None = None
) -> Encoded:
    """A pool of the codes of some rows; where none was written, large ones times NaN. With tags,
    what these codes miss is coded as well, in the blocks that they name."""
    codec = as_codec(form, rows.dtype)
    rows = jnp.where(written[..., None], rows, 0)
    stored = codec.encode(rows)
    if tag is not None:
        missing = codec.encode(rows - codec.decode(stored))
        stored = {name: x.at[tag].set(missing[name], mode="drop") for name, x in stored.items()}
        written = written.at[tag].set(written, mode="drop")
    codes = jnp.where(written[..., None], stored["codes"], 96).astype(stored["codes"].dtype)
    scale = jnp.where(written, stored["scale"], jnp.nan)
    pool = codec.operand({"codes": codes, "scale": scale})
    return pool if tag is None else dataclasses.replace(pool, fine=jnp.asarray(tag))


def rows_of(pool: Encoded) -> Array:
    """The rows of such a pool in float32, as their products are."""
    codec = as_codec(pool.form.removesuffix(FINER), "float32")
    rows = codec.decode(without_halves(pool.stored))
    if pool.fine is None:
        return rows
    return rows + rows.at[pool.fine].get(mode="fill", fill_value=0)


def beside_exact(attend: Callable, call: tuple, metric: Array, observed: Array, exact: ExactKVs):
    """`all_statistics` with exact KVs beside the pool."""
    return all_statistics(functools.partial(attend, exact=exact), call, metric, observed)


PARTS = ("out", "out without metric", "metric", "metric of power 1, observed")
"""What `all_statistics` gives."""


def all_statistics(attend: Callable, call: tuple, metric: Array, observed: Array) -> tuple:
    """The outputs of one call with and without metric, and what is added to the metric.

    `attend(*call, metric=None, **statistic)` gives the output and the metric.
    """
    out, squares = attend(*call, metric=metric)
    _, first = attend(*call, metric=metric, power=1, observed=observed)
    return out, attend(*call)[0], squares - metric, first - metric


def exactly(call: tuple, metric: Array, observed: Array, exact: ExactKVs | None = None) -> tuple:
    """The same by the reference in float32, also with exact KVs beside the pool."""
    wide = (*(x.astype(jnp.float32) for x in call[:3]), *call[3:])
    attend = functools.partial(reference.paged_attention, scale=call[0].shape[-1] ** -0.5)

    def run(call, metric, observed, exact):
        out, squares = attend(*call, metric=metric, exact=exact)
        _, first = attend(*call, metric=metric, power=1, observed=observed, exact=exact)
        return out, out, squares - metric, first - metric

    with jax.default_matmul_precision("highest"):
        return jax.jit(run)(wide, metric, observed, exact)


def errors_of(got: tuple, exact: tuple) -> dict[str, float]:
    """Relative errors of `all_statistics` by name."""
    return {name: relative(*pair) for name, *pair in zip(PARTS, got, exact, strict=True)}


def reference_of(problem: Any) -> tuple[jax.Array, jax.Array]:
    """Output and metric of a `cases.PagedProblem`'s first cache, by the reference in float32."""
    call = (x.astype(jnp.float32) for x in (problem.q, problem.k, problem.v))
    attend = functools.partial(reference.paged_attention, scale=problem.q.shape[-1] ** -0.5)
    with jax.default_matmul_precision("highest"):
        out, metric = jax.jit(attend)(
            *call, problem.tables[0], problem.lengths, metric=problem.metric
        )
    assert metric is not None
    return out, metric


def public(*call: Array, metric: Array | None = None, **statistic: Any) -> tuple:
    """`paged_attention` as it is chosen here: output and metric."""
    found = paged_attention(*call, metric=metric, return_metric=metric is not None, **statistic)
    return tuple(found) if metric is not None else (found, None)


def decode_check(family: str, shape: spec.Shape, longest: int) -> Check:
    """The kernel that is chosen here on `decode_problem`."""
    call, metric, observed = decode_problem(shape, longest)
    got = jax.jit(functools.partial(all_statistics, public))(call, metric, observed)
    errors = errors_of(got, exactly(call, metric, observed))
    chosen = explain(paged_attention, *call)
    return f"decode {family}", chosen, errors, LIMITS[shape.dtype]


def exact_check(longest: int) -> Check:
    """The kernel that is chosen here for codes with exact KVs beside them."""
    call, rows, metric, observed, exact = coded_problem(longest)
    got = jax.jit(functools.partial(beside_exact, public))(call, metric, observed, exact)
    errors = errors_of(got, exactly(rows, metric, observed, exact))
    chosen = explain(paged_attention, *call, exact=exact)
    return "decode int4 beside exact KVs", chosen, errors, LIMITS["bfloat16"]


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


def without_newest(k: Array, v: Array, table: Array, lengths: Array) -> tuple[list, list]:
    """The newest key and value of every head, and the pools without them."""
    last = jnp.maximum(lengths - 1, 0)
    page = jnp.take_along_axis(table, (last // k.shape[1])[..., None], axis=-1)[..., 0]
    at = jnp.where(lengths > 0, page, k.shape[0]), last % k.shape[1]
    rows = [pool.at[at].get(mode="fill", fill_value=0) for pool in (k, v)]
    return rows, [pool.at[at].set(jnp.nan, mode="drop") for pool in (k, v)]


def append_check(family: str, longest: int) -> Check:
    """The newest KV of every head, which its page does not hold yet: pages must be exact."""
    (q, k, v, table, lengths), metric, _ = decode_problem(spec.FAMILIES[family], longest)
    rows, without = without_newest(k, v, table, lengths)
    call = jax.jit(functools.partial(append_and_attend, return_metric=True))
    pools, (out, added) = call(q, *rows, *without, table, lengths, metric=metric)
    exact = exactly((q, k, v, table, lengths), metric, lengths[:, 0] >= 0)
    errors = {"out": relative(out, exact[0]), "metric": relative(added - metric, exact[2])}
    for name, got, wanted in zip("kv", pools, (k, v), strict=True):
        errors[name] = 0.0 if bool(jnp.array_equal(got, wanted, equal_nan=True)) else math.inf
    chosen = explain(paged_attention, q, k, v, table, lengths)
    return f"append {family}", chosen, errors, LIMITS[spec.FAMILIES[family].dtype]


def received_check(tokens: int, d: int) -> Check:
    """Attention received from all queries of a prompt, whose log-sum-exp is known."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((tokens, n, d)), jnp.bfloat16) for n in (12, 3))
    at = jnp.arange(tokens, dtype=jnp.int32)

    def received(q, k, log_sum, implementation):
        return window_metrics(
            q, k, query_position=at, log_sum=log_sum, implementation=implementation
        )

    with jax.default_matmul_precision("highest"):
        wide = q.astype(jnp.float32), k.astype(jnp.float32)
        log_sum = prefill_attention_with_log_sum(*wide, wide[1], implementation="xla")[1]
        exact = received(*wide, log_sum, "xla")
    error = relative(jax.jit(received, static_argnums=3)(q, k, log_sum, None), exact)
    chosen = explain(window_metrics, q, k, log_sum=log_sum)
    return f"received d={d}", chosen, {"received": error}, LIMITS["bfloat16"]
