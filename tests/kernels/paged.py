"""Random paged caches, the float64 answer to them, and every implementation by name."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from benchmarks.kernels import checks
from kvjax.kernels import Encoded, ExactKVs, Half
from kvjax.kernels.encoded import folded
from kvjax.kernels.paged_attention import mosaic_gpu, numba_cpu, reference, spec, tpu
from tests.oracle import attend

POISON = float("nan")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Arguments of one call, and its exact answer for the values after rounding to the dtype."""

    arguments: tuple
    metric: jnp.ndarray
    scale: float
    out: np.ndarray
    new_metric: np.ndarray
    power: int = 2
    observed: jnp.ndarray | None = None

    @property
    def shape(self) -> spec.Shape:
        q, k, v, table, lengths = self.arguments
        return spec.checked(q, k, v, table, lengths, self.metric)

    def statistic(self, with_metric: bool) -> dict:
        """Keyword arguments of the statistic, on or off."""
        if not with_metric:
            return {"metric": None}
        return {"metric": self.metric, "power": self.power, "observed": self.observed}


def problem(
    lengths,
    shape: spec.Shape,
    seed: int = 0,
    spread: float = 1.0,
    power: int = 2,
    observed: Sequence[bool] | None = None,
) -> Problem:
    """A cache with these lengths: permuted pages, free blocks and unwritten slots poisoned.

    Table entries that may not be followed hold N. `spread` scales the logits. With `shape.forms`
    the pools hold codes, and half of the blocks may have finer ones in free blocks; with
    `shape.halves` keys and values are halves of one array's rows.
    """
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths, np.int32)
    seqs, heads = lengths.shape
    b, d, r = shape.block_size, shape.head_dim, shape.group
    pages = -(-lengths // b)
    blocks = int(pages.sum()) * (1 + shape.fine) + 3
    shuffled = rng.permutation(blocks).astype(np.int32)
    table = np.full((seqs, heads, max(shape.max_blocks, int(pages.max()))), blocks, np.int32)
    pool = np.full((2, blocks, b, d), POISON, np.float32)
    metric = rng.random((blocks, b), np.float32)
    q = rng.standard_normal((seqs, heads * r, d)).astype(np.float32) * spread
    taken = 0
    for s, h in np.ndindex(seqs, heads):
        mine = shuffled[taken : taken + pages[s, h]]
        taken += len(mine)
        table[s, h, : len(mine)] = mine
        for t in range(lengths[s, h]):
            pool[:, mine[t // b], t % b] = rng.standard_normal((2, d))
    q, k, v = (jnp.asarray(x, shape.dtype) for x in (q, *pool))
    scale = 1 / math.sqrt(d)
    touched = np.ones(seqs, bool) if observed is None else np.asarray(observed, bool)
    if shape.forms != (None, None):
        written = ~jnp.isnan(k[..., 0])
        tag = None
        if shape.fine:
            mine = shuffled[:taken][rng.random(taken) < 0.5]
            tag = np.full(blocks, blocks, np.int32)
            tag[mine] = shuffled[taken : taken + len(mine)]
        k, v = (
            checks.coded(x, written, form, tag) for x, form in zip((k, v), shape.codes, strict=True)
        )
    out, new_metric = exact(
        q, rows_of(k), rows_of(v), table, lengths, scale, metric, power, touched
    )
    if shape.halves:
        k, v = joined(k, v)
    arguments = (q, k, v, jnp.asarray(table), jnp.asarray(lengths))
    of = None if observed is None else jnp.asarray(touched)
    return Problem(arguments, jnp.asarray(metric), scale, out, new_metric, power, of)


def joined(k, v):
    """Two pools as the halves of one."""
    if isinstance(k, Encoded):
        both = joined(k.stored["codes"], v.stored["codes"])
        pairs = zip((k, v), both, strict=True)
        return [dataclasses.replace(x, stored={**x.stored, "codes": half}) for x, half in pairs]
    width, both = k.shape[2], folded(jnp.concatenate([k, v], axis=2))
    return Half(both, width, False), Half(both, width, True)


def rows_of(pool):
    """The rows of a pool; of codes in float32, as their products are."""
    if isinstance(pool, Half):
        return pool.of(pool.both)
    if not isinstance(pool, Encoded):
        return pool
    return checks.rows_of(pool)


def exact(q, k, v, table, lengths, scale, metric, power, touched):
    """Output and metric in float64, head by head over contiguous keys and values."""
    q, k, v = (np.asarray(x.astype(jnp.float32)) for x in (q, k, v))
    heads, b = table.shape[1], k.shape[1]
    group = q.shape[1] // heads
    out = np.zeros(q.shape)
    metric = metric.astype(np.float64)
    for s, h in np.ndindex(*lengths.shape):
        token = np.arange(lengths[s, h])
        page, slot = table[s, h, token // b], token % b
        rows = slice(h * group, (h + 1) * group)
        out[s, rows], p = attend(q[s, rows], k[page, slot], v[page, slot], scale)
        if touched[s]:
            metric[page, slot] += np.sum(p**power, axis=0)
    return out, metric


def tolerance(name: str, p: Problem) -> tuple[float, float]:
    """Largest absolute error of (output, metric).

    A logit is off by ε ‖q‖ ‖k‖ scale, where ε = 2^-21 covers float32 sums over d channels (products
    of 16-bit inputs are exact) and 2^-17 the two bfloat16 halves that float32 takes on Hopper; a
    weight by as much relatively, and by its rounding to the pool's type for the second product
    (2^-9 for bfloat16, 2^-12 for float16); so is the output, of at most max |v|. Codes are exact,
    and their products with queries are, too; queries that are turned for them are rounded again.
    """
    q, *pools = p.arguments[:3]
    pools = [rows_of(pool) for pool in pools]
    q, k, v = (np.nan_to_num(np.asarray(x.astype(jnp.float32))) for x in (q, *pools))
    dtype = str(p.arguments[1].dtype)
    halves = dtype == "float32" and name == "mosaic_gpu"
    longest = [np.linalg.norm(x, axis=-1).max() for x in (q, k)]
    bits = 17 if halves else 21
    if p.shape.codes[0] in ("int4", "int2") and dtype == "bfloat16":
        bits = 9
    logit = 2.0**-bits * float(np.prod(longest)) * p.scale
    rounding = 2.0 ** {"bfloat16": -8, "float16": -11, "float32": -16 if halves else -20}[dtype]
    return max(1.0, float(np.abs(v).max())) * (rounding + 2 * logit), 4 * logit + 1e-6


def run_xla(
    p: Problem,
    with_metric: bool,
    exact: ExactKVs | None = None,
    pieces: tuple[int, ...] | None = None,
):
    c = {"scale": p.scale, "pieces_at_once": pieces, "exact": exact}
    return reference.paged_attention(*p.arguments, **c, **p.statistic(with_metric))


def run_numba(p: Problem, with_metric: bool, exact: ExactKVs | None = None):
    options = {"keep_weights": with_metric, "exact": exact is not None}
    c = numba_cpu.config(p.shape, scale=p.scale, **options)
    return numba_cpu.paged_attention(*p.arguments, c=c, **p.statistic(with_metric))


def run_tpu(
    p: Problem,
    with_metric: bool,
    exact: ExactKVs | None = None,
    interpret: bool | pltpu.InterpretParams = True,
):
    given: dict = {"keep_logits": with_metric, "exact": exact is not None}
    c = tpu.config(p.shape, scale=p.scale, **given)
    statistic = {**p.statistic(with_metric), "exact": exact}
    return tpu.paged_attention(*p.arguments, c=c, **statistic, interpret=interpret)


def run_mosaic_gpu(p: Problem, with_metric: bool, exact: ExactKVs | None = None, cores: int = 1):
    """Few programs and few stages: the interpreter pays for each, and borders come often."""
    options = {"keep_logits": with_metric, "exact": exact is not None, "cores": cores}
    c = mosaic_gpu.config(p.shape, scale=p.scale, **options)
    c = dataclasses.replace(c, stages=2, programs=3 * cores)
    statistic = {**p.statistic(with_metric), "exact": exact}
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    return mosaic_gpu.paged_attention(*p.arguments, c=c, **statistic, interpret=interpret)


IMPLEMENTATIONS = {
    "xla": run_xla,
    "numba": run_numba,
    "tpu": run_tpu,
    "tpu_checked": functools.partial(run_tpu, interpret=pltpu.InterpretParams(detect_races=True)),
    "mosaic_gpu": run_mosaic_gpu,
}


def assert_exact(
    name: str, p: Problem, with_metric: bool = True, exact: ExactKVs | None = None
) -> None:
    """Run one implementation and compare it with float64; no race may have been seen."""
    out, metric = IMPLEMENTATIONS[name](p, with_metric, exact)
    allowed_out, allowed_metric = tolerance(name, p)
    got = np.asarray(out.astype(jnp.float32), np.float64)
    assert got.shape == p.out.shape
    assert out.dtype in (p.arguments[1].dtype, jnp.float32)
    np.testing.assert_allclose(got, p.out, rtol=0, atol=allowed_out)
    if with_metric:
        np.testing.assert_allclose(np.asarray(metric), p.new_metric, rtol=0, atol=allowed_metric)
    else:
        assert metric is None
    assert not races_seen(name)


def races_seen(name: str) -> bool:
    """Whether the interpreter found a race in what it ran last."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as on_tpu
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as on_gpu

    if name == "mosaic_gpu":
        return on_gpu.get_races().races_found
    return name == "tpu_checked" and on_tpu.races is not None and on_tpu.races.races_found
