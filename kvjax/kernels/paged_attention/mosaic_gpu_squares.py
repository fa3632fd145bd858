"""Mosaic GPU (Hopper) kernel of the attention statistic. `mosaic_gpu.py` calls it.

`attend` keeps its logits; once every head's log-sum-exp is known, this kernel adds Σ p^power over
the query group to the pages of the metric, without reading K again.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.paged_attention.mosaic_gpu_attend import TILE, WARPS, Config
from kvjax.kernels.paged_attention.worklist import Head, Span

UNIT = 256
"""KVs handled at once."""
WORKERS = 4
"""Programs for each program of the work list."""
ALIGNMENT = 32
"""float32 values in 128 bytes, to which copies of shared memory are aligned."""


def scratch(c: Config) -> dict:
    """Shared memory and barriers of `add_squares`."""
    pages = UNIT // c.block_size
    return {
        "metric_s": plgpu.SMEM((pages, max(c.block_size, ALIGNMENT)), jnp.float32),
        "loaded": plgpu.Barrier(num_arrivals=pages),
    }


def _layout(block_size: int):
    """Registers of [UNIT / b, b] values: pages in order, two values per thread."""
    rows = UNIT // block_size
    if block_size >= ALIGNMENT:
        return plgpu.Layout.WG_STRIDED((rows, block_size), vec_size=2)
    tiling = plgpu.Tiling(((rows, block_size), (rows // WARPS, block_size), (2,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def add_squares(
    heads,  # [rows, 4] i32
    spans,  # [P, 8] i32
    table,  # [rows, M] i32
    logits,  # [r, line / b, b] f32
    lse,  # [rows, R] f32
    metric,  # [N, b] f32, in place
    observed,  # [rows] i32, whether the metrics of a head are touched, or None for all
    *,
    metric_s,  # [UNIT / b, max(b, 32)] f32
    loaded,
    c: Config,
    power: int,
):
    """Add Σ_g exp2(power (s_g − lse_g)) to the metric of KVs. Pages belong to one head each."""
    b = c.block_size
    pages = UNIT // b
    layout = _layout(b)
    load = functools.partial(plgpu.load, layout=layout, optimized=False)
    span = Span.read(spans, lax.axis_index("program"))
    worker = lax.axis_index("worker")

    def my_pages(warp, begin, end, inside, beyond=None):
        """Page j belongs to warp j mod 4: `inside(j, its KV)` before KV `end`, else `beyond()`."""
        for j in range(pages):
            token = begin + j * b
            mine = warp == j % WARPS
            pl.when(jnp.logical_and(mine, token < end))(functools.partial(inside, j, token))
            if beyond is not None:
                pl.when(jnp.logical_and(mine, token >= end))(beyond)

    def add_unit(unit, head):
        begin = head.begin * TILE + unit * UNIT
        end = jnp.minimum(head.end * TILE, head.length)

        def places(j, token):
            page = table[head.row, lax.div(token, b)]
            return metric.at[pl.ds(page, 1)], metric_s.at[pl.ds(j, 1), pl.ds(0, b)]

        @plgpu.warp_map
        def _load(warp):
            def load_page(j, token):
                plgpu.copy_gmem_to_smem(*places(j, token), loaded)

            skip_page = functools.partial(plgpu.barrier_arrive, loaded)
            my_pages(warp, begin, end, load_page, skip_page)

        first_page = lax.div(head.start * TILE + begin, b)
        squares = plgpu.layout_cast(jnp.zeros((pages, b), jnp.float32), layout)
        for g in range(c.group):
            s = load(logits.at[g, pl.ds(first_page, pages)])
            squares += jnp.exp2(power * (s - lse[head.row, g]))
        token = plgpu.broadcasted_iota(jnp.int32, (pages, b), 0, layout=layout) * b
        token += plgpu.broadcasted_iota(jnp.int32, (pages, b), 1, layout=layout)
        squares = jnp.where(token < end - begin, squares, jnp.zeros_like(squares))
        plgpu.barrier_wait(loaded)
        place = metric_s.at[:, pl.ds(0, b)]
        place[...] = load(place) + squares
        plgpu.commit_smem()

        @plgpu.warp_map
        def _store(warp):
            def store_page(j, token):
                there, here = places(j, token)
                plgpu.copy_smem_to_gmem(here, there)

            my_pages(warp, begin, end, store_page)
            # Only the warp that began a copy can wait for it.
            plgpu.wait_smem_to_gmem(0)

    @pl.loop(0, span.count)
    def _head(i):
        head = Head.read(heads, span.first + i, span, TILE)
        units = lax.div((head.end - head.begin) * TILE + UNIT - 1, UNIT)
        if observed is not None:
            units *= observed[head.row]
        # Heads of one unit each would otherwise all fall to the first worker.
        first = lax.rem(worker + i, WORKERS)

        @pl.loop(0, lax.div(units - first + WORKERS - 1, WORKERS))
        def _unit(turn):
            add_unit(first + turn * WORKERS, head)
