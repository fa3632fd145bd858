"""Attention that keys receive from all queries of a prompt, on Hopper GPUs: one pass over logits.

The log-sum-exp of every query is known, so a logit becomes a weight at once and never leaves the
chip. A program has one tile of keys of one query head; a warpgroup of it copies queries ahead, the
other multiplies them and adds up. Products are written as sᵀ = K qᵀ, so that what a key receives is
a sum over a thread's own registers first.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from kvjax.kernels.device import HEAD_DIMS

KEYS = 64
"""Keys per program: the rows of one tensor core instruction."""
QUERIES = 128
"""Queries of one tile of logits."""
STAGES = 2
"""Tiles of queries in flight per program."""
DTYPES = ("bfloat16", "float16")

WGMMA = plgpu.Layout.WGMMA
PER_KEY, PER_QUERY = WGMMA.reduce(1), WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class Config:
    """Static description of one kernel instance."""

    group: int
    """r, query heads per KV head."""
    first_own: int
    """Tiles of keys before those of the queries; the own ones see only queries behind them."""
    own: int
    """Tiles of own keys."""
    queries: int
    """Tiles of queries."""
    factor: float
    """Of the logits, power and log₂ e included."""
    excluded_distance: int


def check(head_dim: int, dtype: jnp.dtype) -> None:
    """
    Raises:
        NotImplementedError: the kernel does not serve it, with the reason.
    """
    if str(dtype) not in DTYPES:
        raise NotImplementedError(f"{dtype} keys, served are {', '.join(DTYPES)}")
    if head_dim not in HEAD_DIMS:
        served = ", ".join(map(str, HEAD_DIMS))
        raise NotImplementedError(f"head dimension {head_dim}, served are {served}")


def _rows(*shape: int, dtype: jnp.dtype):
    """Shared memory for rows of queries or keys, in tiles of the widest swizzle."""
    itemsize = dtype.itemsize
    columns = next(n for n in (128, 64, 32) if shape[-1] * itemsize % n == 0) // itemsize
    transforms = (
        plgpu.TilingTransform((8, columns)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(columns * itemsize),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _received(
    q,  # [queries QUERIES, Hr, d]
    k,  # [H, tiles KEYS, d]
    offset,  # [Hr, queries QUERIES] f32, what is taken off a logit; infinite for nobody
    query_at,  # [queries QUERIES] i32
    key_at,  # [H, tiles KEYS] i32, −1 for none
    out,  # [Hr, tiles KEYS] f32
    *,
    q_s,  # [stages, QUERIES, d]
    k_s,  # [KEYS, d]
    offset_s,  # [stages, QUERIES] f32
    query_at_s,  # [stages, QUERIES] i32
    k_full,
    full,
    free,
    c: Config,
):
    """What one tile of keys receives from one query head."""
    tile, head = lax.axis_index("tile"), lax.axis_index("head")
    kv_head = lax.div(head, c.group)
    keys = pl.ds(tile * KEYS, KEYS)
    # An own key is seen by queries from its own place on.
    begin = lax.div(jnp.maximum(tile - c.first_own, 0) * KEYS, QUERIES)
    turns = c.queries - begin

    def copy(turn, _):
        slot = lax.rem(turn, STAGES)

        @pl.when(turn >= STAGES)
        def _wait():
            plgpu.barrier_wait(free.at[slot])

        mine = pl.ds((begin + turn) * QUERIES, QUERIES)
        plgpu.copy_gmem_to_smem(q.at[mine, head], q_s.at[slot], full.at[slot])
        plgpu.copy_gmem_to_smem(offset.at[head, mine], offset_s.at[slot], full.at[slot])
        plgpu.copy_gmem_to_smem(query_at.at[mine], query_at_s.at[slot], full.at[slot])

    def load(ref, layout):
        return plgpu.load(ref, layout=layout, optimized=False)

    def add(turn, received, *, key_at_mine):
        slot = lax.rem(turn, STAGES)
        plgpu.barrier_wait(full.at[slot])

        def product(acc):
            plgpu.wgmma(acc, k_s, q_s.at[slot].transpose((1, 0)))
            return acc[...]

        s = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((KEYS, QUERIES), jnp.float32))
        less = lax.broadcast_in_dim(load(offset_s.at[slot], PER_QUERY), s.shape, [1])
        at = lax.broadcast_in_dim(load(query_at_s.at[slot], PER_QUERY), s.shape, [1])
        plgpu.barrier_arrive(free.at[slot])
        since = lax.broadcast_in_dim(key_at_mine, s.shape, [0])
        weight = jnp.exp2(s * c.factor - less)
        weight = jnp.where(at >= since, weight, jnp.zeros_like(weight))
        return received + weight.sum(axis=1)

    thread = lax.axis_index("thread")

    @pl.when(thread == 0)
    def _compute():
        # A key that is not there is seen by no position.
        since = load(key_at.at[kv_head, keys], PER_KEY)
        since = jnp.where(since >= 0, since + c.excluded_distance, jnp.full_like(since, NEVER))
        plgpu.barrier_wait(k_full)
        nothing = plgpu.layout_cast(jnp.zeros((KEYS,), jnp.float32), PER_KEY)
        body = functools.partial(add, key_at_mine=since)
        out[head, keys] = lax.fori_loop(0, turns, body, nothing)

    @pl.when(thread == 1)
    def _copy():
        @plgpu.warp_map
        def _warp(warp):
            @pl.when(warp == 0)
            def _first():
                plgpu.copy_gmem_to_smem(k.at[kv_head, keys], k_s, k_full)
                lax.fori_loop(0, turns, copy, None)
                # Whoever waits for a barrier at all must see each of its phases.
                for slot in range(STAGES):
                    pl.when(slot < turns)(functools.partial(plgpu.barrier_wait, free.at[slot]))


NEVER = 2**31 - 1


def received(
    q: Float[Array, "w Hr d"],
    k: Float[Array, "H T d"],
    offset: Float[Array, "Hr w"],
    query_at: Int32[Array, " w"],
    key_at: Int32[Array, "H T"],
    *,
    num_own: int,
    excluded_distance: int,
    factor: float,
    interpret: Any = None,
) -> Float[Array, "Hr T"]:
    """Σ over queries of exp2(factor · logit − offset) for each key, of the queries that it counts
    for: those at its position plus `excluded_distance` or behind.

    The last `num_own` keys, those of the first queries in order, follow the others at a multiple of
    `KEYS`. Queries and keys are whole tiles; `key_at` is −1 for keys that are none, `offset`
    infinite for queries that are none. `interpret`: an `InterpretGPUParams`.
    """
    num_queries, num_query_heads, d = q.shape
    num_heads, num_keys, _ = k.shape
    c = Config(
        group=num_query_heads // num_heads,
        first_own=(num_keys - num_own) // KEYS,
        own=num_own // KEYS,
        queries=num_queries // QUERIES,
        factor=factor,
        excluded_distance=excluded_distance,
    )
    return plgpu.kernel(
        functools.partial(_received, c=c),
        out_type=jax.ShapeDtypeStruct((num_query_heads, num_keys), jnp.float32),
        grid=(num_keys // KEYS, num_query_heads),
        grid_names=("tile", "head"),
        num_threads=2,
        thread_name="thread",
        scratch_types={
            "q_s": _rows(STAGES, QUERIES, d, dtype=q.dtype),
            "k_s": _rows(KEYS, d, dtype=k.dtype),
            "offset_s": plgpu.SMEM((STAGES, QUERIES), jnp.float32),
            "query_at_s": plgpu.SMEM((STAGES, QUERIES), jnp.int32),
            "k_full": plgpu.Barrier(),
            "full": plgpu.Barrier(num_arrivals=3, num_barriers=STAGES),
            "free": plgpu.Barrier(num_barriers=STAGES),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="attention_received",
    )(q, k, offset, query_at, key_at)
