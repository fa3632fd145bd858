"""Mosaic GPU (Hopper) kernel that finishes paged decode attention. `mosaic_gpu.py` calls it.

What waits for all programs of `attend` happens in one launch: heads that several programs share are
merged, and the statistic, which needs final log-sum-exps, is added to the metric. For it `attend`
keeps its logits: K is not read again. Nobody waits for anybody here: whoever needs the log-sum-exp
of a shared head adds it up from its parts, a few floats each.

Pages of the metric never come to a multiprocessor: what is added to them goes out in copies that
add, where the memory's cache does. Logits are copied in a unit of KVs ahead.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.device import LOG2E
from kvjax.kernels.paged_attention.mosaic_gpu_attend import (
    PER_QUERY_HEAD,
    WGMMA,
    repeat,
    row_iota,
    write_out,
)
from kvjax.kernels.paged_attention.mosaic_gpu_config import TILE, WARPS, Config
from kvjax.kernels.paged_attention.worklist import Head, Span

UNIT = 256
"""KVs whose statistic is handled at once."""
UNIT_TILES = UNIT // TILE
WORKERS = 4
"""Programs that add statistics, for each program of the work list; one more merges."""
SLOTS = 2
"""Units whose logits are in shared memory, and units whose sums are."""
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
        "lse_s": plgpu.SMEM((SLOTS + 1, ALIGNMENT), jnp.float32),
        "logits_s": plgpu.SMEM((SLOTS, c.group, pages, c.block_size), jnp.float32),
        "added_s": plgpu.SMEM((SLOTS, pages, max(c.block_size, ALIGNMENT)), jnp.float32),
        "full": plgpu.Barrier(num_arrivals=c.group + 1, num_barriers=SLOTS),
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
    interpreted: bool = False,
    **statistic_scratch,
):
    """Merge shared heads and add Σ_g exp2(power (s_g − lse_g)) to the metric of KVs; with
    `complete` write the log-sum-exps of shared heads, too. `interpreted`: copies do not add."""
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
            log_sum=log_sum, span=span, worker=worker, c=c, power=power, interpreted=interpreted,
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


def _part_of(span: Span, worker):
    """A worker's share of a stretch, in whole units but the last: one may begin inside a head."""
    units = lax.div(span.end - span.begin + UNIT_TILES - 1, UNIT_TILES)
    share = lax.div(units + WORKERS - 1, WORKERS) * UNIT_TILES
    begin = jnp.minimum(span.begin + worker * share, span.end)
    return span._replace(begin=begin, end=jnp.minimum(begin + share, span.end))


def _head_at(heads, span: Span):
    """Index of the head that a part of a stretch begins in."""

    def halve(bounds):
        low, high = bounds
        middle = lax.div(low + high + 1, 2)
        begun = heads[middle, 1] <= span.begin
        return jnp.where(begun, middle, low), jnp.where(begun, high, middle - 1)

    bounds = span.first, span.first + jnp.maximum(span.count - 1, 0)
    return lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, bounds)[0]


def _add_statistic(
    heads,
    table,
    logits,
    lse,
    metric,
    observed,
    *,
    lse_s,  # [slots + 1, R or more] f32, the last row for a shared head
    logits_s,  # [slots, r, UNIT / b, b] f32
    added_s,  # [slots, UNIT / b, max(b, 32)] f32
    full,
    log_sum,
    span: Span,
    worker,
    c: Config,
    power: int,
    interpreted: bool,
):
    """What a worker adds to the metrics of a stretch. Pages belong to one head each."""
    b, group = c.block_size, c.group
    pages = UNIT // b
    layout = _layout(b)
    mine = _part_of(span, worker)
    last = jnp.maximum(span.first + span.count - 1, 0)

    def read(index):
        """A head inside the worker's part, if it is the stretch's, and the units to be done."""
        head = Head.read(heads, jnp.minimum(index, last), mine, TILE)
        units = lax.div(head.end - head.begin + UNIT_TILES - 1, UNIT_TILES)
        if observed is not None:
            units *= observed[head.row]
        return head, jnp.where(index <= last, jnp.maximum(units, 0), 0)

    def is_whole(head: Head):
        ends = head.start + head.tiles <= span.end
        return jnp.logical_and(head.start >= span.begin, ends)

    def load(head: Head, unit, slot):
        """Begin to copy in what a unit needs; warps meet, so its slot is no longer read."""
        tile = head.start + head.begin + unit * UNIT_TILES
        place = pl.ds(tile * (TILE // b), pages)
        whole = is_whole(head)
        shared = jnp.logical_not(whole)

        def copy_lse():
            row = lse_s.at[slot, pl.ds(0, c.padded_group)]
            plgpu.copy_gmem_to_smem(lse.at[head.row], row, full.at[slot])

        def copy_logits(g):
            plgpu.copy_gmem_to_smem(logits.at[g, place], logits_s.at[slot, g], full.at[slot])

        @plgpu.warp_map
        def _copies(warp):
            for g in range(group):
                pl.when(warp == g % WARPS)(functools.partial(copy_logits, g))
            own = warp == group % WARPS
            pl.when(jnp.logical_and(own, whole))(copy_lse)
            skip = functools.partial(plgpu.barrier_arrive, full.at[slot])
            pl.when(jnp.logical_and(own, shared))(skip)

    def add_unit(head: Head, unit, slot):
        begin = head.begin * TILE + unit * UNIT
        end = jnp.minimum(head.end * TILE, head.length)
        of_head = jnp.where(is_whole(head), slot, SLOTS)
        plgpu.barrier_wait(full.at[slot])
        added = plgpu.layout_cast(jnp.zeros((pages, b), jnp.float32), layout)
        for g in range(group):
            s = _load(logits_s.at[slot, g], layout)
            added += jnp.exp2(power * (s - lse_s[of_head, g]))
        token = plgpu.broadcasted_iota(jnp.int32, (pages, b), 0, layout=layout) * b
        token += plgpu.broadcasted_iota(jnp.int32, (pages, b), 1, layout=layout)
        added = jnp.where(token < end - begin, added, jnp.zeros_like(added))
        added_s[slot, :, pl.ds(0, b)] = added
        plgpu.commit_smem()

        @plgpu.warp_map
        def _add_pages(warp):
            # Page j belongs to warp j mod 4. Table entries first: they come at the same time.
            own = [warp + j for j in range(0, pages, WARPS)]
            first, last_page = lax.div(begin, b), lax.div(end - 1, b)
            found = [table[head.row, jnp.minimum(first + j, last_page)] for j in own]
            # Only the warp that began a copy can wait for it: those of the unit before have read
            # the slot that the next one writes.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for j, page in zip(own, found, strict=True):
                here, there = added_s.at[slot, pl.ds(j, 1), pl.ds(0, b)], metric.at[pl.ds(page, 1)]
                pl.when(first + j <= last_page)(functools.partial(add_page, here, there))

    def add_page(here, there):
        if interpreted:
            here[...] += there[...]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(here, there)
        else:
            plgpu.copy_smem_to_gmem(here, there, reduction_op="add")

    def add_head(carry):
        index, head, units, ahead, step = carry
        following, next_units = read(index + 1)
        begins = jnp.logical_and(units > 0, ahead == 0)
        pl.when(begins)(lambda: load(head, 0, lax.rem(step, SLOTS)))

        @pl.when(jnp.logical_and(units > 0, jnp.logical_not(is_whole(head))))
        def _shared():
            lse_s[SLOTS, pl.ds(0, c.padded_group)] = log_sum(head)

        def turn(unit, step):
            more = unit + 1 < units
            then = Head(*(jnp.where(more, x, y) for x, y in zip(head, following, strict=True)))
            slot = lax.rem(step + 1, SLOTS)
            there_is = jnp.logical_or(more, next_units > 0)
            pl.when(there_is)(lambda: load(then, jnp.where(more, unit + 1, 0), slot))
            add_unit(head, unit, lax.rem(step, SLOTS))
            return step + 1

        step = lax.fori_loop(0, units, turn, step)
        ahead = jnp.logical_and(units > 0, next_units > 0).astype(jnp.int32)
        return index + 1, following, next_units, ahead, step

    def unfinished(carry):
        index, head = carry[:2]
        return jnp.logical_and(index <= last, head.start < mine.end)

    index = _head_at(heads, mine)
    carry = index, *read(index), jnp.int32(0), jnp.int32(0)
    lax.while_loop(unfinished, add_head, carry)

    @plgpu.warp_map
    def _drain(_):
        plgpu.wait_smem_to_gmem(0)
