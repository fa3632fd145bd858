"""Mosaic GPU (Hopper) kernel that finishes paged decode attention. `mosaic_gpu.py` calls it.

What waits for all programs of `attend` happens in one launch: heads that several programs share are
merged, and the statistic, which needs final log-sum-exps, is added to the metric. For it `attend`
keeps its logits: K is not read again. Nobody waits for anybody here: whoever needs the log-sum-exp
of a shared head adds it up from its parts, a few floats each.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.paged_attention.mosaic_gpu_attend import (
    PER_QUERY_HEAD,
    WGMMA,
    repeat,
    row_iota,
    write_out,
)
from kvjax.kernels.paged_attention.mosaic_gpu_config import LOG2E, TILE, WARPS, Config
from kvjax.kernels.paged_attention.worklist import Head, Span

UNIT = 256
"""KVs whose statistic is handled at once."""
WORKERS = 4
"""Programs that add statistics, for each program of the work list; one more merges."""
ALIGNMENT = 32
"""float32 values in 128 bytes, to which copies of shared memory are aligned."""
PARTS_AT_ONCE = 64
"""Parts of a head whose log-sum-exps are read at once: the rows of a register layout."""


def grid(c: Config) -> tuple[int, int]:
    """Programs of the work list, and how many of this kernel each of them gets."""
    return c.programs, WORKERS + 1 if c.keep_logits else 1


def scratch(c: Config) -> dict:
    """Shared memory and barriers of `finish`."""
    if not c.keep_logits:
        return {"out_s": c.out_scratch()}
    pages = UNIT // c.block_size
    return {
        "out_s": c.out_scratch(),
        "lse_s": plgpu.SMEM((c.padded_group,), jnp.float32),
        "metric_s": plgpu.SMEM((pages, max(c.block_size, ALIGNMENT)), jnp.float32),
        "loaded": plgpu.Barrier(num_arrivals=pages),
    }


def finish(
    heads,  # [rows, 4] i32
    spans,  # [P, 8] i32
    part,  # [2, P, ranges, channels, R] f32
    part_lse,  # [2, P + …, R] f32
    out,  # [rows, r, d], in place
    table=None,  # [rows, M] i32; from here on None without the statistic
    logits=None,  # [r, line / b, b] f32
    lse=None,  # [rows, R] f32, of heads that no other program shares
    metric=None,  # [N, b] f32, in place
    observed=None,  # [rows] i32, whether the metrics of a head are touched, or None for all
    *,
    out_s,  # [ranges, R, channels]
    c: Config,
    power: int = 2,
    complete: bool = False,
    **statistic_scratch,
):
    """Merge shared heads and add Σ_g exp2(power (s_g − lse_g)) to the metric of KVs; with
    `complete` write the log-sum-exps of shared heads, too."""
    program, worker = lax.axis_index("program"), lax.axis_index("worker")
    span = Span.read(spans, program)
    merging = functools.partial(
        _merge, heads, spans, part, part_lse, out, out_s, span=span, program=program, c=c,
        lse_out=lse if complete else None,
    )  # fmt: skip
    if metric is None:
        merging()
        return

    @pl.when(worker < WORKERS)
    def _statistic():
        log_sum = functools.partial(_shared_lse, spans=spans, part_lse=part_lse)
        _add_statistic(
            heads, table, logits, lse, metric, observed, **statistic_scratch,
            log_sum=log_sum, span=span, worker=worker, c=c, power=power,
        )  # fmt: skip

    pl.when(worker == WORKERS)(merging)


def _load(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)


def _programs_of(head: Head, spans):
    """First and last program that a head's tiles fall to."""
    share = Span.read(spans, 0).end
    return lax.div(head.start, share), lax.div(head.start + head.tiles - 1, share)


def _shared_lse(head: Head, spans, part_lse):
    """Log-sum-exp [R] of a head that several programs share."""
    first, last = _programs_of(head, spans)

    def add(turn, carry):
        top, total = carry
        begin = first + 1 + turn * PARTS_AT_ONCE
        parts = _load(part_lse.at[0, pl.ds(begin, PARTS_AT_ONCE)], WGMMA)
        parts = jnp.where(row_iota(parts.shape) <= last - begin, parts, -jnp.inf)
        new_top = jnp.maximum(top, parts.max(axis=0))
        added = jnp.exp2(parts - repeat(new_top, parts)).sum(axis=0)
        return new_top, total * jnp.exp2(top - new_top) + added

    top = _load(part_lse.at[1, first], PER_QUERY_HEAD)
    turns = lax.div(last - first + PARTS_AT_ONCE - 1, PARTS_AT_ONCE)
    top, total = lax.fori_loop(0, turns, add, (top, jnp.ones_like(top)))
    return top + jnp.log(total) * LOG2E


def _merge(
    heads, spans, part, part_lse, out, out_s, *, span: Span, program, c: Config, lse_out=None
):
    """Program p finishes the head that begins in its stretch and ends in a later one, if any."""
    head = Head.read(heads, jnp.maximum(span.first + span.count - 1, 0), span, TILE)
    begins_here = jnp.logical_and(span.count > 0, head.start >= span.begin)

    @pl.when(jnp.logical_and(begins_here, head.end < head.tiles))
    def _shared():
        lse = _shared_lse(head, spans, part_lse)
        if lse_out is not None:
            lse_out[head.row] = lse

        def weighted(begins, other):
            weight = jnp.exp2(_load(part_lse.at[begins, other], PER_QUERY_HEAD) - lse)
            accs = [_load(part.at[begins, other, n], WGMMA) for n in range(len(c.channels))]
            return tuple(acc * repeat(weight, acc) for acc in accs)

        def add(other, accs):
            return tuple(a + b for a, b in zip(accs, weighted(0, other), strict=True))

        _, last = _programs_of(head, spans)
        accs = lax.fori_loop(program + 1, last + 1, add, weighted(1, program))
        write_out(head.row, accs, out, out_s, c)
        plgpu.wait_smem_to_gmem(0)


def _layout(block_size: int):
    """Registers of [UNIT / b, b] values: pages in order, two values per thread."""
    rows = UNIT // block_size
    if block_size >= ALIGNMENT:
        return plgpu.Layout.WG_STRIDED((rows, block_size), vec_size=2)
    tiling = plgpu.Tiling(((rows, block_size), (rows // WARPS, block_size), (2,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def _add_statistic(
    heads,
    table,
    logits,
    lse,
    metric,
    observed,
    *,
    lse_s,  # [R] f32
    metric_s,  # [UNIT / b, max(b, 32)] f32
    loaded,
    log_sum,
    span: Span,
    worker,
    c: Config,
    power: int,
):
    """What a worker adds to the metrics of a stretch. Pages belong to one head each."""
    b = c.block_size
    pages = UNIT // b
    layout = _layout(b)

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
        def _load_pages(warp):
            def load_page(j, token):
                plgpu.copy_gmem_to_smem(*places(j, token), loaded)

            skip_page = functools.partial(plgpu.barrier_arrive, loaded)
            my_pages(warp, begin, end, load_page, skip_page)

        first_page = lax.div(head.start * TILE + begin, b)
        added = plgpu.layout_cast(jnp.zeros((pages, b), jnp.float32), layout)
        for g in range(c.group):
            s = _load(logits.at[g, pl.ds(first_page, pages)], layout)
            added += jnp.exp2(power * (s - lse_s[g]))
        token = plgpu.broadcasted_iota(jnp.int32, (pages, b), 0, layout=layout) * b
        token += plgpu.broadcasted_iota(jnp.int32, (pages, b), 1, layout=layout)
        added = jnp.where(token < end - begin, added, jnp.zeros_like(added))
        plgpu.barrier_wait(loaded)
        place = metric_s.at[:, pl.ds(0, b)]
        place[...] = _load(place, layout) + added
        plgpu.commit_smem()

        @plgpu.warp_map
        def _store_pages(warp):
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
        whole = jnp.logical_and(head.begin == 0, head.end == head.tiles)

        @pl.when(jnp.logical_and(first < units, whole))
        def _alone():
            lse_s[...] = _load(lse.at[head.row], PER_QUERY_HEAD)

        @pl.when(jnp.logical_and(first < units, jnp.logical_not(whole)))
        def _shared():
            lse_s[...] = log_sum(head)

        @pl.loop(0, lax.div(units - first + WORKERS - 1, WORKERS))
        def _unit(turn):
            add_unit(first + turn * WORKERS, head)
