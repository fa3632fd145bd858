"""Mosaic GPU (Hopper) kernels of paged decode attention. `mosaic_gpu.py` calls them.

`attend` streams every tile of K and V once through shared memory: one warpgroup only copies, each
of its warps its own pages; one only computes. Both products are written transposed, with KVs and
channels on the 64-row side of the tensor core and the few query heads on its narrow side, so that
nothing is padded but the query heads (R = 8 or 16):

    sᵀ [tile, R] = K [tile, d] · qᵀ [d, R]        outᵀ [d, R] += Vᵀ [d, tile] · pᵀ [tile, R]

Heads without KVs get zeros, while the first tiles are on their way; those that several programs
share are finished by `mosaic_gpu_finish.py`. Logits and log-sum-exps are in units of log 2 (`scale`
carries log₂ e).

Where blocks have finer codes in others, pages of these come beside theirs, and a tile with any goes
through both products a second time: with these codes and their scales, nothing where a page has
none.

Where some KVs of a head are read elsewhere, exactly, whoever begins the head begins with what these
gave (output, largest logit, sum), and words of bits say which KVs of the pool they stand for.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.device import LOG2E
from kvjax.kernels.paged_attention import mosaic_gpu_codes as codes
from kvjax.kernels.paged_attention.exact import WORD
from kvjax.kernels.paged_attention.mosaic_gpu_config import TILE, WARPS, Config
from kvjax.kernels.paged_attention.worklist import Head, Span

MIDDLE, BEGINS, WHOLE, ENDS = range(4)
"""What of a head falls to one program."""
LOWEST = -1e30
"""Stands for minus infinity, which differs from itself by no number, as largest logit where all of
a tile may be read elsewhere."""
WORDS = TILE // WORD

WGMMA = plgpu.Layout.WGMMA
TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED
PER_QUERY_HEAD = WGMMA.reduce(0)


def repeat(x, like):
    """A value per query head, for every row of `like`."""
    return lax.broadcast_in_dim(x, like.shape, [1])


def _full(shape, value, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def row_iota(shape):
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA)


def _before(tile, end):
    """A tile with the rows from `end` on set to zero."""
    return jnp.where(row_iota(tile.shape) < end, tile, jnp.zeros_like(tile))


def _held(shape, end, words):
    """Which rows of a tile are KVs to attend to: before `end`, and not in words of bits."""
    row = row_iota(shape)
    held = row < end
    if words is None:
        return held
    word = jnp.where(row < WORD, *words)
    return held & (lax.shift_right_logical(word, row & (WORD - 1)) & 1 == 0)


def _product(shape, pairs):
    """Σ a · b over pairs of tiles in shared memory, in float32."""

    def accumulate(acc):
        for a, b in pairs:
            plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def _pairs(a, b, c: Config):
    """Parts of two operands whose products count: low · low does not."""
    used = [(0, 0), (0, 1), (1, 0)][: 1 + c.halves + c.split]
    return [(a(i), b(j)) for i, j in used]


def _store_parts(ref, value, c: Config):
    """Store a float32 value as tensor core operands: rounded, or as two halves."""
    high = value.astype(c.operand_dtype)
    ref[0] = high
    if c.halves:
        ref[1] = (value - high.astype(jnp.float32)).astype(c.operand_dtype)


def attend(
    heads,  # [rows, 4] i32
    spans,  # [P, 8] i32
    table,  # [rows, M] i32
    q,  # [rows, parts, R or more, d]
    k,  # [N, b, d]
    v,  # [N, b, d]
    k_scale,  # [N, b] bf16, or None
    v_scale,  # [N, b] bf16, or None
    fine,  # [rows, pages] i32, the blocks with the finer codes of the table's, N for none, or None
    finer,  # [rows, tiles] i32, a bit for each page of a tile that has such codes, or None
    newest,  # [rows, n, d], or None; k and v are written to then
    elsewhere,  # [rows, words] i32, a bit for each KV that is not read here, or None
    begun,  # [rows, begun rows, R] f32, see `Config.begun_rows`, or None
    out,  # [rows, r, d], of heads that no other program shares
    part,  # [2, P, ranges, channels, R] f32, of shared heads: what came before p, what begins there
    part_lse,  # [2, P + …, R] f32, the same
    lse,  # [rows, R] f32, of heads that no other program shares, or None
    logits,  # [r, line] f32, or None
    *,
    q_s,  # [2, parts, R, d]
    k_s,  # [stages, tile, d]; of finer codes behind those of codes
    v_s,  # [stages, tile, d]
    operand_s,  # [parts, tile, d], or None
    p_s,  # [parts, R, tile]
    out_s,  # [ranges, R, channels]
    logits_s,  # [2, R, tile] f32, or None
    newest_s,  # [2, k or v, padded d], or None
    begun_s,  # [2, begun rows, R] f32, or None
    q_full,
    q_free,
    k_full,
    v_full,
    free,
    scales_s,  # [stages, 2 pages, 64] bf16, or None
    flat_s,  # [rounds, 2 tile] f32, or None
    c: Config,
):
    """Attention of one stretch of the work list; see the module."""
    program = lax.axis_index("program")
    span = Span.read(spans, program)

    # One warpgroup copies.

    def newest_row(slot, n):
        return newest_s.at[slot, pl.ds(n, 1), pl.ds(0, c.head_dim)]

    def copy_if(wanted, pages, at, slot, first, j):
        into, inside = first + slot, pl.ds(j * c.block_size, c.block_size)

        def copy():
            page = pages[at]
            plgpu.copy_gmem_to_smem(k.at[page], k_s.at[into, inside], k_full.at[slot])
            plgpu.copy_gmem_to_smem(v.at[page], v_s.at[into, inside], v_full.at[slot])
            if scales_s is not None:
                codes.copy_scales(page, into, j, k_scale, v_scale, scales_s, k_full.at[slot])

        def skip():
            # The barriers count pages, so one that is not there arrives without a copy.
            for _ in range(c.copies):
                plgpu.barrier_arrive(k_full.at[slot])
            plgpu.barrier_arrive(v_full.at[slot])

        lax.cond(wanted, copy, skip)

    def copy_page(row, length, t, slot, j):
        page_index = t * c.pages + j
        inside = page_index * c.block_size < length
        at = row, page_index
        copy_if(inside, table, at, slot, 0, j)
        if fine is not None:
            copy_if(jnp.logical_and(inside, fine[at] < k.shape[0]), fine, at, slot, c.stages, j)

    def copy_tile(t, step, *, head, warp):
        slot = lax.rem(step, c.stages)

        @pl.when(step >= c.stages)
        def _wait():
            plgpu.barrier_wait(free.at[slot])

        for j in range(c.pages):
            copy = functools.partial(copy_page, head.row, head.length, t, slot, j)
            pl.when(warp == j % WARPS)(copy)
        return step + 1

    def copy_head(i, step, *, warp):
        head = Head.read(heads, span.first + i, span, TILE)
        slot = lax.rem(i, 2)

        @pl.when(warp == 0)
        def _query():
            @pl.when(i >= 2)
            def _wait():
                plgpu.barrier_wait(q_free.at[slot])

            # One by one: with both halves a tile of 16 query heads has more axes than a copy may.
            for part in range(c.parts):
                mine = q.at[head.row, part, pl.ds(0, c.padded_group)]
                plgpu.copy_gmem_to_smem(mine, q_s.at[slot, part], q_full.at[slot])
            for n in range(0 if c.newest_at is None else 2):
                rows = newest.at[head.row, pl.ds((c.newest_at or 0) + n, 1)]
                plgpu.copy_gmem_to_smem(rows, newest_row(slot, n), q_full.at[slot])
            if begun_s is not None:
                plgpu.copy_gmem_to_smem(begun.at[head.row], begun_s.at[slot], q_full.at[slot])

        copy = functools.partial(copy_tile, head=head, warp=warp)
        return lax.fori_loop(head.begin, head.end, copy, step)

    def copy_all(warp):
        copy = functools.partial(copy_head, warp=warp)
        steps = lax.fori_loop(0, span.count, copy, jnp.int32(0))
        # Whoever waits for a barrier at all must see each of its phases.
        for slot in range(c.stages):
            pl.when(slot < steps)(functools.partial(plgpu.barrier_wait, free.at[slot]))
        for slot in range(2):
            mine = jnp.logical_and(warp == 0, slot < span.count)
            pl.when(mine)(functools.partial(plgpu.barrier_wait, q_free.at[slot]))

    # The other computes.

    def split(tile, end):
        """Write both halves of a float32 tile to `operand_s`, a few columns at a time."""
        count = c.columns(c.operand_dtype)
        for first in range(0, c.head_dim, count):
            columns = (slice(None), pl.ds(first, count))
            value = plgpu.load(tile.at[columns], layout=WGMMA)
            _store_parts(operand_s.at[:, *columns], _before(value, end), c)
        plgpu.commit_smem()

    def put(tile_s, row_s, end):
        """A tile of rows with the newest one, the last before its head's end, and zeros behind."""
        count = c.columns(tile_s.dtype)
        for first in range(0, c.head_dim, count):
            columns = (slice(None), pl.ds(first, count))
            value = plgpu.load(tile_s.at[columns], layout=WGMMA)
            row = plgpu.load(row_s.at[pl.ds(first, count)], layout=PER_QUERY_HEAD, optimized=False)
            value = jnp.where(row_iota(value.shape) < end - 1, value, repeat(row, value))
            tile_s[columns] = _before(value, end)
        plgpu.commit_smem()

    def numbers(tile_s, n, end=None):
        """Codes of keys (0) or values (1) as operands. Beyond a head's end values are zeros."""
        assert c.forms is not None
        codes.convert(tile_s, operand_s.at[0], c.forms[n], end)
        plgpu.commit_smem()
        return lambda part: operand_s.at[part]

    def keys(slot):
        if c.forms is not None:
            return numbers(k_s.at[slot], 0)
        if c.split:
            # Another warp may still multiply by the values of the tile before.
            plgpu.commit_smem()
            split(k_s.at[slot], TILE)
        else:
            return lambda _: k_s.at[slot]
        return lambda part: operand_s.at[part]

    def values(slot, end):
        """Weight 0 does not silence a NaN, so what lies beyond a head's end is set to zero."""
        if c.forms is not None:
            return numbers(v_s.at[slot], 1, end)
        if c.split:
            split(v_s.at[slot], end)
            return lambda part: operand_s.at[part]

        def clear():
            v_s[slot] = _before(plgpu.load(v_s.at[slot], layout=WGMMA), end)
            plgpu.commit_smem()

        if newest_s is None:
            pl.when(end < TILE)(clear)
        return lambda _: v_s.at[slot]

    def there(x, i, pages):
        """Rows of a product of a tile with codes (i = 0) or finer codes (1), which some pages have,
        by their bits; else zeros."""
        if pages is None:
            return x
        page = lax.div(row_iota(x.shape), jnp.int32(c.block_size))
        bits = jnp.where(i == 0, -1, pages)
        return jnp.where(lax.shift_right_logical(bits, page) & 1 == 1, x, jnp.zeros_like(x))

    def added_up(of, total, pages):
        """A sum and what a tile's codes give, and its finer codes where it has any."""
        add = lambda i, total: jax.tree.map(jnp.add, total, of(i))  # noqa: E731
        if pages is None:
            return add(0, total)
        return lax.fori_loop(0, jnp.where(pages == 0, 1, 2), add, total)

    def attend_tile(t, carry, *, head, q_slot):
        accs, top, total, step = carry
        slot = lax.rem(step, c.stages)
        end = head.length - t * TILE
        words = None
        if elsewhere is not None:
            # Before anything is waited for.
            words = [elsewhere[head.row, t * WORDS + n] for n in range(WORDS)]
        pages = None if finer is None else finer[head.row, t]

        plgpu.barrier_wait(k_full.at[slot])
        queries = lambda i: q_s.at[q_slot, i].transpose((1, 0))  # noqa: E731
        if newest_s is not None:
            pl.when(end <= TILE)(lambda: put(k_s.at[slot], newest_s.at[q_slot, 0], end))

        def logits_of(i):
            at = slot + i * c.stages
            if flat_s is not None:
                # First, because warps meet there: one may still multiply by the tile before.
                codes.gather_scales(scales_s.at[at], flat_s.at[i])
            s = _product((TILE, c.padded_group), _pairs(keys(at), queries, c)) * c.scale
            if flat_s is not None:
                s = codes.times(s, codes.tile_scales(flat_s.at[i], False))
            return there(s, i, pages)

        s = added_up(logits_of, _full((TILE, c.padded_group), 0, WGMMA), pages)
        s = jnp.where(_held(s.shape, end, words), s, -jnp.inf)
        new_top = jnp.maximum(top, s.max(axis=0))
        decay = jnp.exp2(top - new_top)
        p = jnp.exp2(s - repeat(new_top, s))
        total = total * repeat(decay, s) + p

        def store_weights(i):
            weighted = p
            if flat_s is not None:
                weighted = codes.times(p, codes.tile_scales(flat_s.at[i], True) * c.unit)
                weighted = there(_before(weighted, end), i, pages)
            _store_parts(p_s.transpose((0, 2, 1)), weighted, c)

        if pages is None:
            store_weights(0)
        if logits is not None:
            mine = logits_s.at[lax.rem(step, 2)]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            mine.transpose((1, 0))[...] = plgpu.layout_cast(s, TRANSPOSED)
            plgpu.commit_smem()
            place = pl.ds(pl.multiple_of((head.start + t) * TILE, TILE), TILE)
            plgpu.copy_smem_to_gmem(mine.at[pl.ds(0, c.group)], logits.at[:, place])
        else:
            plgpu.commit_smem()

        plgpu.barrier_wait(v_full.at[slot])
        if newest_s is not None:
            pl.when(end <= TILE)(lambda: put(v_s.at[slot], newest_s.at[q_slot, 1], end))

        weights = lambda i: p_s.at[i].transpose((1, 0))  # noqa: E731

        def output_of(i):
            if pages is not None:
                # Another warp may still multiply by the tile before.
                plgpu.commit_smem()
                store_weights(i)
            tile = values(slot + i * c.stages, end)

            def update(first, count):
                part = lambda i: tile(i).at[:, pl.ds(first, count)].transpose((1, 0))  # noqa: E731
                return _product((count, c.padded_group), _pairs(part, weights, c))

            return tuple(update(*channels) for channels in c.channels)

        accs = tuple(acc * repeat(decay, acc) for acc in accs)
        accs = added_up(output_of, accs, pages)
        plgpu.barrier_arrive(free.at[slot])
        return accs, new_top, total, step + 1

    def nothing():
        """What is known of a head before its first tile: outputs, largest logits, sums by row."""
        accs = tuple(_full((n, c.padded_group), 0, WGMMA) for _, n in c.channels)
        lowest = _full((c.padded_group,), -jnp.inf, PER_QUERY_HEAD)
        return accs, lowest, _full((TILE, c.padded_group), 0, WGMMA)

    def begun_with(q_slot, first):
        """The same of a head with exact KVs: what these gave. Where that is not its first part, it
        is next to nothing beside any KV, and the part beside those before it."""
        load = functools.partial(plgpu.load, optimized=False)
        rows, accs, row = begun_s.at[q_slot], [], 0
        for _, count in c.channels:
            accs.append(load(rows.at[pl.ds(row, count)], layout=WGMMA))
            row += count
        top, sums = (load(rows.at[row + n], layout=PER_QUERY_HEAD) for n in range(2))
        total = lax.broadcast_in_dim(sums, (TILE, c.padded_group), [1])
        return tuple(accs), top + jnp.where(first, jnp.float32(0), LOWEST), _before(total, 1)

    def attend_head(i, step):
        head = Head.read(heads, span.first + i, span, TILE)
        q_slot = lax.rem(i, 2)
        plgpu.barrier_wait(q_full.at[q_slot])
        # What becomes of the head is one number while the loop runs: registers are short there.
        ends = head.end == head.tiles
        first, later = jnp.where(ends, WHOLE, BEGINS), jnp.where(ends, ENDS, MIDDLE)
        fate = head.row * 4 + jnp.where(head.begin == 0, first, later)
        before = nothing() if begun_s is None else begun_with(q_slot, head.begin == 0)
        accs, top, total, step = lax.fori_loop(
            head.begin,
            head.end,
            functools.partial(attend_tile, head=head, q_slot=q_slot),
            (*before, step),
        )
        row, part_of_head = lax.div(fate, 4), lax.rem(fate, 4)
        if newest_s is not None:

            @pl.when(part_of_head >= WHOLE)
            def _append():
                last = head.length - 1
                page = table[row, lax.div(last, c.block_size)]
                place = pl.ds(lax.rem(last, c.block_size), 1)
                for n, pool in enumerate((k, v)):
                    plgpu.copy_smem_to_gmem(newest_row(q_slot, n), pool.at[page, place])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        plgpu.barrier_arrive(q_free.at[q_slot])
        weight = total.sum(axis=0)
        accs = [acc / repeat(weight * c.unit, acc) for acc in accs]
        head_lse = top + jnp.log(weight) * LOG2E

        @pl.when(part_of_head == WHOLE)
        def _finish():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            write_out(row, accs, out, out_s, c)
            if lse is not None:
                lse[row] = head_lse

        @pl.when(part_of_head != WHOLE)
        def _hand_over():
            begins = jnp.where(part_of_head == BEGINS, 1, 0)
            for n, acc in enumerate(accs):
                part[begins, program, n] = acc
            part_lse[begins, program] = head_lse

        return step

    def clear_heads():
        store_out([_full((n, c.padded_group), 0, WGMMA) for _, n in c.channels], out_s, c)

        @pl.loop(span.empty_begin, span.empty_end)
        def _clear(i):
            copy_out(heads[i, 0], out, out_s, c)

    thread = lax.axis_index("thread")

    @pl.when(thread == 0)
    def _compute():
        pl.when(span.empty_begin < span.empty_end)(clear_heads)
        lax.fori_loop(0, span.count, attend_head, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(thread == 1)
    def _copy():
        @plgpu.warp_map
        def _warp(warp):
            # A warp without pages would wait for barriers that nothing makes wait for it: they
            # could pass two phases unseen, which no waiter can tell from none.
            pl.when(warp < c.pages)(functools.partial(copy_all, warp))


def store_out(accs, out_s, c: Config):
    """Put a head's output, [channels, R] of each range, where copies read it."""
    for n, acc in enumerate(accs):
        out_s.at[n].transpose((1, 0))[...] = plgpu.layout_cast(acc, TRANSPOSED).astype(c.out_dtype)
    plgpu.commit_smem()


def copy_out(row, out, out_s, c: Config):
    """Begin to copy a head's output to its row."""
    for n, (first, count) in enumerate(c.channels):
        if n:
            # Overlapping ranges hold the same values, but two copies may not be under way at once.
            plgpu.wait_smem_to_gmem(0)
        mine = out_s.at[n, pl.ds(0, c.group)]
        plgpu.copy_smem_to_gmem(mine, out.at[row, :, pl.ds(first, count)])


def write_out(row, accs, out, out_s, c: Config):
    """Store a head's output and begin to copy it; no earlier copy may still read `out_s`."""
    store_out(accs, out_s, c)
    copy_out(row, out, out_s, c)
