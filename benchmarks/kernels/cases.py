"""What is timed: caches with the lengths of real use, and rival kernels."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import Plain, as_codec
from kvjax.cache.store import KVPool
from kvjax.cache.store.codec import Pair
from kvjax.kernels import ExactKVs
from kvjax.kernels.paged_attention import spec

CODES = {
    f"{keys} {values} b={b} d={d}": spec.Shape(4, 2, 4, d, 97, b, 12, "bfloat16", (keys, values))
    for keys, values, b, d in (
        ("int8", "int8", 16, 128),
        ("int8", "int8", 8, 128),
        ("int8", "int8", 32, 96),
        ("int8", "int8", 64, 64),
        ("int8", "int4", 16, 128),
        ("int4", "int4", 16, 128),
        ("int4", "int4", 8, 64),
        ("int4+", "int4+", 16, 128),
        ("int4+", "int4+", 64, 64),
        ("int8", "int8", 16, 80),
        ("int4", "int4", 8, 96),
        ("int2", "int2", 16, 128),
        ("int2+", "int2+", 16, 64),
        ("e4m3", "e4m3", 16, 128),
        ("e5m2", "e5m2", 32, 64),
    )
}
"""Shapes of decode attention whose pools hold codes, by name."""


HALVES = {
    f"{form or dtype} halves b={b} r={r} d={d}": spec.Shape(
        4, 2, r, d, 97, b, 12, dtype, (form, form), halves=True
    )
    for form, dtype, b, r, d in (
        (None, "bfloat16", 16, 4, 64),
        (None, "bfloat16", 8, 8, 64),
        (None, "bfloat16", 64, 16, 64),
        (None, "bfloat16", 16, 4, 80),
        (None, "bfloat16", 16, 1, 96),
        (None, "float32", 16, 4, 64),
        (None, "float32", 16, 4, 96),
        ("int8", "bfloat16", 16, 4, 64),
        ("int8", "float32", 32, 3, 64),
        ("e4m3", "bfloat16", 64, 4, 64),
        ("e4m3", "bfloat16", 16, 4, 96),
        ("e5m2", "bfloat16", 8, 4, 64),
        ("int4", "bfloat16", 16, 4, 128),
        ("int4", "float32", 64, 8, 128),
        ("int4+", "bfloat16", 16, 4, 128),
        ("int4+", "bfloat16", 64, 8, 128),
        ("int4", "bfloat16", 64, 4, 64),
        ("int4", "bfloat16", 16, 3, 64),
        ("int4", "bfloat16", 32, 4, 96),
        ("int4+", "bfloat16", 32, 4, 64),
        ("int2", "bfloat16", 64, 4, 128),
        ("int2", "float32", 16, 16, 128),
        ("int2", "bfloat16", 16, 4, 64),
        ("int2+", "bfloat16", 8, 4, 128),
        ("int2+", "bfloat16", 64, 4, 64),
    )
}
"""The same of keys and values that are halves of rows, as TPUs have them."""


def coded(shape: spec.Shape, metric: bool = True) -> tuple:
    """`Shape.arguments` with the pool that the shape says, of codes in its forms or of rows."""
    q, *_, table, lengths, of = shape.arguments()
    codec = as_codec(shape.dtype, shape.dtype)
    if shape.forms != (None, None):
        keys, values = (as_codec(form, shape.dtype) for form in shape.forms)
        codec = keys if keys == values else Pair(shape.dtype, keys, values)
    pool = jax.eval_shape(
        lambda: KVPool.empty(
            codec, shape.blocks, shape.block_size, shape.head_dim, joined=shape.halves
        )
    )
    return (q, *pool.operands, table, lengths, of)[: 5 + metric]


EXACT = (
    "int8 int8 b=16 d=128",
    "int8 int8 b=64 d=64",
    "int4 int4 b=16 d=128",
    "e4m3 e4m3 b=16 d=128",
)
"""Of these, those that are also compiled with exact KVs beside the pool."""


def exact_of(shape: spec.Shape) -> ExactKVs:
    """`WINDOW` exact KVs of each head, without data."""
    heads = (shape.seqs, shape.heads, WINDOW)
    rows = jax.ShapeDtypeStruct((*heads, shape.head_dim), jnp.dtype(shape.dtype))
    return ExactKVs(rows, rows, jax.ShapeDtypeStruct(heads, jnp.int32))  # type: ignore[arg-type]


WINDOW = 16
"""Exact KVs of a head."""
CACHE_BYTES = 1 << 28
"""Timed calls walk over at least so much data, several times the L2 of the largest GPU."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One decode step of one layer."""

    model: str
    group: int
    seqs: int
    mean: int
    spread: str
    """"uniform" or "zipf": lengths of a sequence's heads ∝ 1 / rank, as compression leaves them."""
    dtype: str = "bfloat16"
    heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    @property
    def name(self) -> str:
        return f"{self.model} {self.seqs} × {self.mean} {self.spread}"

    def lengths(self) -> np.ndarray:
        """KVs of each head, [S, H]: their mean is `mean`."""
        shape = (self.seqs, self.heads)
        if self.spread == "uniform":
            return np.full(shape, self.mean, np.int32)
        rank = np.random.default_rng(0).permuted(
            np.broadcast_to(np.arange(1, self.heads + 1), shape), axis=1
        )
        share = (1 / rank) / np.sum(1 / np.arange(1, self.heads + 1))
        return np.maximum(1, np.round(share * self.mean * self.heads)).astype(np.int32)

    @property
    def kv_bytes(self) -> int:
        """Keys and values that one step must read."""
        per_kv = 2 * Plain(self.dtype).row_bytes(self.head_dim)
        return int(self.lengths().sum()) * per_kv


def decode_cases(small: bool) -> list[Case]:
    """The shapes of Llama-3.1-8B and 70B, short, middling and long."""
    if small:
        return [Case("8B", 4, 2, 64, spread, "float32") for spread in ("uniform", "zipf")]
    sizes = [("8B", 4, 256, 128), ("8B", 4, 256, 1024), ("8B", 4, 64, 1024), ("8B", 4, 32, 8192)]
    sizes += [("70B", 8, 256, 1024), ("70B", 8, 32, 8192)]
    return [Case(*size, spread) for size in sizes for spread in ("uniform", "zipf")]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedProblem:
    """Queries, a pool, and several caches in it that timed calls take in turns."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    metric: jax.Array
    tables: jax.Array
    lengths: jax.Array


def paged_problem(case: Case) -> PagedProblem:
    """A pool of shuffled pages with enough copies of the cache to outgrow the L2."""
    rng = np.random.default_rng(0)
    lengths = case.lengths()
    copies = min(64, max(1, math.ceil(CACHE_BYTES / case.kv_bytes)))
    pages = -(-lengths // case.block_size)
    blocks = copies * int(pages.sum())
    taken = pages.cumsum().reshape(pages.shape) - pages
    column = np.arange(pages.max())
    used = column < pages[..., None]
    order = rng.permutation(blocks).astype(np.int32).reshape(copies, -1)
    tables = np.where(
        used, order[:, np.where(used, taken[..., None] + column, 0)], np.int32(blocks)
    )
    pool = (blocks, case.block_size, case.head_dim)
    keys = jax.random.split(jax.random.key(0), 3)
    draw = functools.partial(jax.random.normal, dtype=jnp.dtype(case.dtype))
    return PagedProblem(
        q=draw(keys[0], (case.seqs, case.heads * case.group, case.head_dim)),
        k=draw(keys[1], pool),
        v=draw(keys[2], pool),
        metric=jnp.zeros(pool[:2], jnp.float32),
        tables=jnp.asarray(tables),
        lengths=jnp.asarray(lengths),
    )


def shipped(case: Case) -> Callable:
    """JAX's own GPU paged attention, (sequence × KV head) folded into its batch."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    rows, d = case.seqs * case.heads, case.head_dim

    def attend(q, k, v, table, lengths):
        width = 1 << (table.shape[2] - 1).bit_length()
        table = jnp.pad(table, ((0, 0), (0, 0), (0, width - table.shape[2])))
        table = jnp.minimum(table.reshape(rows, width), k.shape[0] - 1)
        splits = min(16, width)
        block = min(8, width // splits)
        scaled = (q * d**-0.5).astype(q.dtype).reshape(rows, case.group, d)
        out = paged_attention(
            scaled,
            k[None],
            v[None],
            table,
            lengths.reshape(rows),
            k_splits=splits,
            pages_per_compute_block=block,
        )
        return out.reshape(q.shape)

    return attend


def dense_cache(case: Case) -> tuple[jax.Array, jax.Array]:
    """Keys and values of the same bytes without pages, [S, T, H, d], all of one length."""
    shape = (case.seqs, case.mean, case.heads, case.head_dim)
    keys = jax.random.split(jax.random.key(1), 2)
    k, v = (jax.random.normal(x, shape, jnp.dtype(case.dtype)) for x in keys)
    return k, v
