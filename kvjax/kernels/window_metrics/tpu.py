"""Attention that keys receive from all queries of a prompt, on TPUs: one pass over the logits.

The log-sum-exp of every query is known, so a logit becomes a weight at once and never leaves the
chip. A grid step is one tile of logits of one query head; those of one tile of keys follow each
other and add up in vector memory.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

KEYS = QUERIES = 512
"""Of one tile of logits."""
SUBLANES = 8


def check(head_dim: int, dtype: jnp.dtype) -> None:
    """
    Raises:
        NotImplementedError: the kernel does not serve it, with the reason.
    """
    if str(dtype) not in ("bfloat16", "float32"):
        raise NotImplementedError(f"{dtype} keys, served are bfloat16, float32")


def _received(of_queries, key_at, q, k, out, *, first_seen, excluded_distance, factor):
    """One tile of logits: of_queries [8, QUERIES] (offsets, positions), key_at [1, KEYS] i32."""
    i = pl.program_id(2)

    @pl.when(i == 0)
    def _first():
        out[...] = jnp.zeros_like(out)

    @pl.when(i >= first_seen(pl.program_id(1)))
    def _add():
        precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        s = lax.dot_general(
            q[...], k[...], (((1,), (1,)), ((), ())),
            precision=precision, preferred_element_type=jnp.float32,
        )  # fmt: skip
        columns = of_queries[...].T
        offset, at = columns[:, :1], columns[:, 1:2].astype(jnp.int32)
        since = key_at[...]
        counts = (since >= 0) & (at - since >= excluded_distance)
        weight = jnp.where(counts, jnp.exp2(s * factor - offset), 0)
        out[...] += jnp.sum(weight, axis=0, keepdims=True)


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
    interpret: Any = False,
) -> Float[Array, "Hr T"]:
    """See `kvjax.kernels.window_metrics.mosaic_gpu.received`. `interpret`: as of `pallas_call`."""
    num_queries, num_query_heads, d = q.shape
    num_heads, num_keys, _ = k.shape
    group, tiles = num_query_heads // num_heads, num_keys // KEYS
    held = (num_keys - num_own) // KEYS

    def first_seen(tile):
        return jnp.maximum(tile - held, 0) * KEYS // QUERIES

    # Positions are exact in float32 as far as any model's reach.
    rows = jnp.stack([offset, jnp.broadcast_to(query_at, offset.shape).astype(jnp.float32)], axis=1)
    rows = jnp.pad(rows, ((0, 0), (0, SUBLANES - rows.shape[1]), (0, 0)))

    def query_tile(tile, i):
        # What no query of a tile sees is not fetched: the tile before stays.
        return jnp.maximum(i, first_seen(tile))

    call = pl.pallas_call(
        functools.partial(
            _received, first_seen=first_seen, excluded_distance=excluded_distance, factor=factor
        ),
        grid=(num_query_heads, tiles, num_queries // QUERIES),
        in_specs=[
            pl.BlockSpec((None, SUBLANES, QUERIES), lambda h, j, i: (h, 0, query_tile(j, i))),
            pl.BlockSpec((None, 1, KEYS), lambda h, j, i: (h // group, 0, j)),
            pl.BlockSpec((None, QUERIES, d), lambda h, j, i: (h, query_tile(j, i), 0)),
            pl.BlockSpec((None, KEYS, d), lambda h, j, i: (h // group, j, 0)),
        ],
        out_specs=pl.BlockSpec((None, 1, KEYS), lambda h, j, i: (h, 0, j)),
        out_shape=jax.ShapeDtypeStruct((num_query_heads, 1, num_keys), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="attention_received",
    )
    return call(rows, key_at[:, None], jnp.swapaxes(q, 0, 1), k)[:, 0]
