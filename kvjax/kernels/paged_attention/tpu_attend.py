"""Paged decode attention on TPUs.

One grid step per (sequence, KV head), in order, on one core. Pages are fetched by hand into a ring
of chunks: the next ones of this head, then the first of the next head, stream in while the matrix
unit works. With the statistic on, a head's logits stay in vector memory until its normaliser is
known; then Σ p² is added to the pages of the metric in place, while those of the next chunk come in
and those of the last one go out.

Where keys and values are halves of one array's rows, a chunk of them serves both products: queries
have zeros beside the values, and of the outputs the half beside the keys counts nothing.

Codes are fetched as they are stored, with their scales, and become numbers in vector registers. The
scale of a key multiplies its logit, that of a value its weight. Where a byte holds several numbers,
those of each part of a row are operands of their own, with the queries' part; they have no sign,
and what is to be taken of each is taken of sums of products. Where rows of the array have several
KVs, queries for each lie beside zeros, and a chunk's KVs come in another order: of every page those
of the rows' first parts, then those of their second.

Where blocks have finer codes in others, pages of these come beside theirs, and a chunk with any
goes through both products a second time, with these codes and their scales.

Where some KVs of a head are read elsewhere, exactly, the head begins with what these gave, and
words of bits say which KVs of the pool they stand for.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.kernels.paged_attention.exact import WORD


@dataclasses.dataclass(frozen=True)
class Config:
    """Static description of one kernel instance."""

    scale: float
    keep_logits: bool
    vector_memory: int
    halves: bool = False
    packed: int = 1
    """Numbers in what is stored: one, or several of no sign, those of the first part of a row in
    the lowest bits."""
    fold: int = 1
    """KVs of a row of the array."""
    fine: bool = False
    """Whether blocks may have finer codes in others."""

    @property
    def bits(self) -> int:
        """Of a number, where there are several."""
        return 8 // self.packed

    @property
    def less(self) -> float:
        """What is to be taken of each number."""
        return ((1 << self.bits) - 1) / 2 if self.packed > 1 else 0.0


def attend(
    lengths,  # [rows] i32, prefetched
    observed,  # [rows] i32, prefetched: whether the metrics of a head are touched, or None for all
    table,  # [1, 1, M] i32 of this head
    next_table,  # [1, 1, M] i32 of the next head
    fine,  # [1, 1, M] i32, the blocks with the finer codes of these, N for none, or None
    next_fine,  # the same of the next head, or None
    elsewhere,  # [1, 1, words] i32 of this head, a bit for each KV that is not read here, or None
    begun,  # [fold · packed, R, d] f32, the output that the head begins with, or None
    begun_sums,  # [R, 128] f32, its largest logits and its sums in the first two lanes, or None
    q,  # [fold · packed, R, d], each part of a row beside zeros
    k,  # [N, b / fold, d] in HBM; of halves their array, and d is its width everywhere
    v,  # [N, b, d] in HBM, or None
    scales,  # [N, 2, w] in HBM, of keys and of values, or None
    out,  # [fold · packed, R, d]
    metric,  # [N, 1, b] f32 in HBM, in place, or None
    lse,  # [R, 128] f32, alike in all lanes, or None
    *,
    k_s,  # [ring, pages, b / fold, d]; of finer codes behind those of codes
    v_s,  # [ring, pages, b, d], or None
    fetched,  # semaphores [ring, k or v]
    turn,  # [2] i32, buffer of this head's first chunk, and how many of its chunks are fetched
    scales_s,  # [ring, pages, 2, w], or None
    logits_s,  # [chunks, R, chunk_size] f32, or None
    squares_s,  # [2, pages, 1, b] f32, or None
    updated,  # semaphores [buffer, in or out], or None
    c: Config,
    group: int,
    power: int,
):
    row, num_rows = pl.program_id(0), pl.num_programs(0)
    pages, page_rows, d = k_s.shape[1:]
    b, ring = page_rows * c.fold, fetched.shape[0]
    chunk_size, chunk_rows = pages * b, pages * page_rows
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def num_pages(length, chunk):
        """Pages of a chunk that exist."""
        return jnp.clip(pl.cdiv(length, b) - chunk * pages, 0, pages)

    def page_copies(page, slot, first, j):
        pairs = [(k, k_s)] if v is None else [(k, k_s), (v, v_s)]
        if scales is not None:
            pairs.append((scales, scales_s))
        return [
            pltpu.make_async_copy(there.at[page], here.at[first + slot, j], fetched.at[slot, n % 2])
            for n, (there, here) in enumerate(pairs)
        ]

    def numbers(pages_of):
        """A chunk of keys or values, the parts of its rows; codes in the type of the queries,
        without scales and before `Config.less` is taken."""
        chunk = pages_of.reshape(chunk_rows, d)
        if scales is None:
            return [chunk]
        if c.packed == 1:
            return [chunk.astype(q.dtype)]
        # Four bytes at a time.
        words, mask = pltpu.bitcast(chunk, jnp.int32), ((1 << c.bits) - 1) * 0x01010101
        parts = [lax.shift_right_logical(words, c.bits * n) & mask for n in range(c.packed)]
        return [pltpu.bitcast(part, jnp.int8).astype(q.dtype) for part in parts]

    def tile_scales(values, i, chunk, slot):
        """Scales of the keys or values of a chunk, [1, chunk size] f32: of codes (i = 0) or finer
        codes (1), zeros for pages without these."""
        rows = (scales_s[slot + i * ring, j].astype(jnp.float32) for j in range(pages))
        of_pages = [row[int(values) : int(values) + 1, :b] for row in rows]
        if fine is not None:
            there = [(i == 0) | has_finer(fine, chunk, j) for j in range(pages)]
            of_pages = [jnp.where(*x, 0.0) for x in zip(there, of_pages)]
        firsts = range(0, b, page_rows)
        return jnp.concatenate(
            [page[:, n : n + page_rows] for n in firsts for page in of_pages], axis=1
        )

    def of_page(x, j):
        """What belongs to one page, of [1, chunk_size] in the order of a chunk."""
        firsts = range(j * page_rows, chunk_size, chunk_rows)
        return jnp.concatenate([x[:, n : n + page_rows] for n in firsts], axis=1)

    def tokens(shape):
        """Which KV of a chunk each column is of."""
        column = lax.broadcasted_iota(jnp.int32, shape, 1)
        if c.fold == 1:
            return column
        part, row = column // chunk_rows, column % chunk_rows
        return row // page_rows * b + part * page_rows + row % page_rows

    def has_finer(head_fine, chunk, j):
        return head_fine[0, 0, chunk * pages + j] < k.shape[0]

    def each_copy(tables, length, chunk, slot, wait):
        """Begin or await the copies of a chunk's pages."""
        head_table, head_fine = tables

        def go(page, first, j):
            for copy in page_copies(page, slot, first, j):
                copy.wait() if wait else copy.start()

        @pl.loop(0, num_pages(length, chunk))
        def _page(j):
            go(head_table[0, 0, chunk * pages + j], 0, j)
            if head_fine is not None:
                finer = head_fine[0, 0, chunk * pages + j]
                pl.when(finer < k.shape[0])(lambda: go(finer, ring, j))

    length = lengths[row]
    next_length = jnp.where(row + 1 < num_rows, lengths[jnp.minimum(row + 1, num_rows - 1)], 0)
    chunks = pl.cdiv(length, chunk_size)

    @pl.when(row == 0)
    def _first_head():
        turn[0] = turn[1] = 0

    first_slot = turn[0]

    def fetch_ahead(i):
        """The i-th chunk from this head's first one on: its own, or one of the next head."""
        slot = lax.rem(first_slot + i, ring)

        @pl.when(i < chunks)
        def _this_head():
            each_copy((table, fine), length, i, slot, wait=False)

        @pl.when(i >= chunks)
        def _next_head():
            each_copy((next_table, next_fine), next_length, i - chunks, slot, wait=False)

    pl.loop(turn[1], ring - 1)(fetch_ahead)

    def metric_pages(i, out: bool, wait: bool):
        """Begin or await the copies of the metrics of a chunk."""
        slot = lax.rem(i, 2)

        @pl.loop(0, num_pages(length, i))
        def _page(j):
            ends = metric.at[table[0, 0, i * pages + j]], squares_s.at[slot, j]
            ends = ends[::-1] if out else ends
            copy = pltpu.make_async_copy(*ends, updated.at[slot, int(out)])
            copy.wait() if wait else copy.start()

    touched = chunks if observed is None else chunks * observed[row]
    if metric is not None:
        pl.when(touched > 0)(lambda: metric_pages(0, out=False, wait=False))

    def added_up(of, total, chunk):
        """A sum and what a chunk's codes give, and its finer codes where it has any."""
        add = functools.partial(jax.tree.map, jnp.add)
        total = of(0) if total is None else add(total, of(0))
        if fine is None:
            return total
        some = functools.reduce(lax.bitwise_or, (has_finer(fine, chunk, j) for j in range(pages)))
        return lax.cond(some, lambda total: add(total, of(1)), lambda total: total, total)

    def attend_chunk(i, carry):
        accs, top, total = carry
        slot = lax.rem(first_slot + i, ring)
        fetch_ahead(i + ring - 1)

        each_copy((table, fine), length, i, slot, wait=True)
        valid = length - i * chunk_size

        def logits_of(n):
            parts = numbers(k_s[slot + n * ring])

            def of_fold(f):
                products = (
                    lax.dot_general(
                        q[f * c.packed + part],
                        keys,
                        (((1,), (1,)), ((), ())),
                        preferred_element_type=jnp.float32,
                        precision=precision,
                    )
                    for part, keys in enumerate(parts)
                )
                return functools.reduce(jnp.add, products)

            s = jnp.concatenate([of_fold(f) for f in range(c.fold)], axis=1)
            if c.less:
                s -= less_of_queries
            return s if scales is None else s * tile_scales(False, n, i, slot)

        s = c.scale * added_up(logits_of, None, i)
        token = tokens(s.shape)
        held = token < valid
        if elsewhere is not None:
            words = chunk_size // WORD
            word = elsewhere[0, 0, i * words]
            for n in range(1, words):
                word = jnp.where(token >= n * WORD, elsewhere[0, 0, i * words + n], word)
            held &= lax.shift_right_logical(word, token & (WORD - 1)) & 1 == 0
        s = jnp.where(held, s, -jnp.inf)
        if logits_s is not None:
            logits_s[i] = s
        new_top = jnp.maximum(top, jnp.max(s, axis=1, keepdims=True))
        p = jnp.exp(s - new_top)
        decay = jnp.exp(top - new_top)

        def output_of(n):
            parts = numbers((k_s if v_s is None else v_s)[slot + n * ring])
            if c.packed == 1:
                # Weight 0 does not silence a NaN in a slot nobody wrote: clear what lies beyond.
                written = lax.broadcasted_iota(jnp.int32, parts[0].shape, 0) < valid
                parts = [jnp.where(written, x, jnp.zeros_like(x)) for x in parts]
            weights = p
            if scales is not None:
                weights = jnp.where(held, p * tile_scales(True, n, i, slot), 0)
            weights = weights.astype(parts[0].dtype)

            def of_fold(f):
                mine = weights[:, f * chunk_rows : (f + 1) * chunk_rows]
                less = c.less * jnp.sum(mine.astype(jnp.float32), axis=1, keepdims=True)
                for values in parts:
                    product = jnp.dot(
                        mine, values, preferred_element_type=jnp.float32, precision=precision
                    )
                    yield product - less if c.less else product

            return tuple(product for f in range(c.fold) for product in of_fold(f))

        accs = added_up(output_of, tuple(acc * decay for acc in accs), i)
        return accs, new_top, total * decay + jnp.sum(p, axis=1, keepdims=True)

    num_queries = q.shape[1]
    if c.less:
        parts = (jnp.sum(q[n].astype(jnp.float32), axis=1, keepdims=True) for n in range(c.packed))
        less_of_queries = c.less * functools.reduce(jnp.add, parts)
    if begun is None:
        before = (
            tuple(jnp.zeros((num_queries, d), jnp.float32) for _ in range(q.shape[0])),
            jnp.full((num_queries, 1), -jnp.inf, jnp.float32),
            jnp.zeros((num_queries, 1), jnp.float32),
        )
    else:
        before = tuple(begun[n] for n in range(q.shape[0])), begun_sums[:, :1], begun_sums[:, 1:2]
    accs, top, total = lax.fori_loop(0, chunks, attend_chunk, before)

    turn[0] = lax.rem(first_slot + chunks, ring)
    turn[1] = jnp.minimum(ring - 1, pl.cdiv(next_length, chunk_size))
    total = jnp.where(total > 0, total, 1.0)
    for n, acc in enumerate(accs):
        out[n] = (acc / total).astype(out.dtype)
    if metric is None:
        return
    log_total = top + jnp.log(total)
    if lse is not None:
        lse[...] = jnp.broadcast_to(log_total, lse.shape)

    @pl.loop(0, touched)
    def _add_squares(i):
        @pl.when(i + 1 < touched)
        def _next_chunk():
            pl.when(i > 0)(lambda: metric_pages(i - 1, out=True, wait=True))
            metric_pages(i + 1, out=False, wait=False)

        metric_pages(i, out=False, wait=True)
        squares = jnp.exp(power * (logits_s[i] - log_total))[:group]
        squares = jnp.sum(squares, axis=0, keepdims=True)
        for j in range(pages):
            squares_s[lax.rem(i, 2), j] += of_page(squares, j)
        metric_pages(i, out=True, wait=False)

    for last in (2, 1):

        @pl.when(touched >= last)
        def _written(last=last):
            metric_pages(touched - last, out=True, wait=True)
