"""Paged attention of one decode step in plain JAX: the reference of every kernel and the fallback.

Heads are cut into pieces of as many pages each, and pieces are worked on in groups of one size, one
group after the other, whosever they are: the work follows the sum of the lengths. Each piece has
its own softmax; a head merges those of its pieces by their log-sum-exps (flash-decoding), in their
order and by themselves, so that what it computes is the same wherever it stands. Of encoded pools
that have factors the codes are multiplied: queries and outputs are turned instead of rows, and
logits and weights scaled.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Num

from kvjax.kernels.encoded import Encoded, Factors, Half, factors_of, turned
from kvjax.kernels.paged_attention.exact import ExactKVs, Piece, attend_exact, finite

PIECE_TOKENS = 64
"""KVs of a piece, or those of one page."""
PIECES_ON_CPU = (96, 16)
"""Pieces that are worked on at once, while there are as many, and of what is left then. More of
them leave the caches of a core, of fewer each turn costs more than what it does."""
PARTS_MERGED = 32
"""Pieces of each head that are merged at once."""
RESULT_BYTES = 1 << 28
"""What pieces give is kept for so many heads at a time as these bytes hold."""


def write_newest(
    pool: Num[Array, "N b *w"],
    block_table: Int32[Array, "S H M"],
    context_len: Int32[Array, "S H"],
    values: Num[Array, "S H *w"],
) -> Num[Array, "N b *w"]:
    """A pool with the value of the newest KV of every head that has any: the last that
    `context_len` counts."""
    at = newest(block_table, context_len, *pool.shape[:2])
    return pool.at[at].set(values.astype(pool.dtype), mode="drop")


def newest(
    block_table: Int32[Array, "S H M"],
    context_len: Int32[Array, "S H"],
    num_blocks: int,
    block_size: int,
) -> tuple[Int32[Array, "S H"], Int32[Array, "S H"]]:
    """Block and offset of the newest KV of every head, the last that `context_len` counts; block N
    where there is none."""
    last = jnp.maximum(context_len - 1, 0)
    block = jnp.take_along_axis(block_table, (last // block_size)[..., None], axis=-1)[..., 0]
    return jnp.where(context_len > 0, block, num_blocks), last % block_size


def paged_attention(
    q: Float[Array, "S Hr d"],
    k: Float[Array, "N b d"] | Encoded | Half,
    v: Float[Array, "N b d"] | Encoded | Half,
    block_table: Int32[Array, "S H M"],
    context_len: Int32[Array, "S H"],
    *,
    scale: float,
    pieces_at_once: tuple[int, ...] | None = None,
    metric: Float[Array, "N b"] | None = None,
    power: int = 2,
    observed: Bool[Array, " S"] | None = None,
    exact: ExactKVs | None = None,
) -> tuple[Float[Array, "S Hr d"], Float[Array, "N b"] | None]:
    """See `kvjax.kernels.paged_attention`. Softmax and sums in float32.

    `pieces_at_once[0]` pieces are worked on at a time, while there are as many, then as many as
    the next says; by default as many as there are heads.

    Returns the output, and `metric` with Σ p^power over each query group added to every KV (None if
    no metric was given).
    """
    num_seqs, num_query_heads, d = q.shape
    num_blocks, b, _ = k.shape
    num_heads, max_blocks = block_table.shape[1:]
    group, heads = num_query_heads // num_heads, num_seqs * num_heads
    pages = max(1, min(max_blocks, PIECE_TOKENS // b))
    parts = -(-max_blocks // pages)
    queries = turned(k, q.astype(jnp.float32)) * scale
    # Ids of N stand for no block. They are followed by nobody, and what is added there is dropped.
    table = jnp.pad(
        block_table.reshape(heads, max_blocks),
        ((0, 0), (0, parts * pages - max_blocks)),
        constant_values=num_blocks,
    )
    touched = jnp.ones(num_seqs, bool) if observed is None else observed
    rows = (
        queries.reshape(heads, group, d),
        table.reshape(heads, parts, pages),
        context_len.reshape(heads),
        jnp.repeat(touched, num_heads),
        None,
    )
    if exact is not None:
        plain = (q.astype(jnp.float32) * scale).reshape(heads, group, d)
        beside = (x.reshape(heads, *x.shape[2:]) for x in (exact.k, exact.v, exact.index))
        rows = (*rows[:-1], (plain, *beside))
    kept = parts * group * 4 * (d + (0 if metric is None else pages * b))
    at_once = max(1, min(heads, RESULT_BYTES // kept))
    most = at_once * parts
    sizes = tuple(size for size in pieces_at_once or (at_once,) if size < most) or (most,)

    def attend(metric, rows):
        q, table, lengths, touched, beside = rows
        newest = None
        if beside is not None:
            plain, own_k, own_v, index = beside
            newest = attend_exact(plain, own_k, own_v, index, lengths)
            newest = newest._replace(out=turned(v, newest.out))
        return _attend_heads(
            q, table, lengths, touched, k, v,
            sizes=sizes, metric=metric, power=power, exact=newest,
        )  # fmt: skip

    if at_once == heads:
        metric, out = attend(metric, rows)
    else:
        times = -(-heads // at_once)

        def dealt(x):
            x = jnp.pad(x, ((0, times * at_once - heads), *((0, 0) for _ in x.shape[1:])))
            return x.reshape(times, at_once, *x.shape[1:])

        metric, out = lax.scan(attend, metric, jax.tree.map(dealt, rows))
        out = out.reshape(times * at_once, group, d)[:heads]
    return turned(v, out.reshape(num_seqs, num_query_heads, d)).astype(q.dtype), metric


def _attend_heads(
    queries: Float[Array, "h r d"],
    table: Int32[Array, "h P p"],
    lengths: Int32[Array, " h"],
    touched: Bool[Array, " h"],
    k: Float[Array, "N b d"] | Encoded | Half,
    v: Float[Array, "N b d"] | Encoded | Half,
    *,
    sizes: tuple[int, ...],
    metric: Float[Array, "N b"] | None,
    power: int,
    exact: Piece | None = None,
) -> tuple[Float[Array, "N b"] | None, Float[Array, "h r d"]]:
    """Attention of some heads, of up to P pieces of p pages each, and of what is exact of them in
    place of the pool's."""
    heads, group, d = queries.shape
    parts, pages = table.shape[1:]
    num_blocks, b, _ = k.shape
    piece = pages * b
    pieces = heads * parts + sizes[-1]
    count = (lengths + piece - 1) // piece
    ends = jnp.cumsum(count)
    first = ends - count

    def members(start, size):
        """Of some pieces: their heads, their pages, and how many KVs there are from their first
        ones on (0 where there is no such piece)."""
        rank = start + jnp.arange(size, dtype=jnp.int32)
        head = jnp.searchsorted(ends, rank, side="right", method="compare_all")
        head = jnp.minimum(head, heads - 1).astype(jnp.int32)
        part = jnp.minimum(rank - first[head], parts - 1)
        left = jnp.where(rank < ends[-1], lengths[head] - part * piece, 0)
        return head, table[head, part], left

    def in_turns(do: Callable, carry: Any) -> Any:
        """`do(start, size, carry)` for all pieces: as many as the first size at a time while there
        are as many, then as many as the next."""
        start = jnp.int32(0)
        for size in sizes:
            left = ends[-1] - start
            turns = (left + size - 1) // size if size == sizes[-1] else left // size
            turn = functools.partial(_turn, do, start, size)
            carry, start = lax.fori_loop(0, turns, turn, carry), start + turns * size
        return carry

    def read(pool, page) -> Factors:
        """The pages of some pieces: codes [size, piece, d], and what belongs to each KV."""
        found = factors_of(pool, jnp.minimum(page, num_blocks - 1).reshape(-1))
        return jax.tree.map(lambda x: x.reshape(len(page), piece, *x.shape[2:]), found)

    def attend_pieces(start, size, carry):
        head, page, left = members(start, size)
        valid = jnp.arange(piece) < left[:, None]
        if exact is not None:
            valid &= ~exact.leaves_out(head, left[:, None] - jnp.arange(piece))
        keys, values = read(k, page), read(v, page)
        k_c, v_c = keys.codes.astype(jnp.float32), values.codes
        # Weight 0 does not silence a NaN in a slot nobody wrote: such values must be 0 themselves.
        if values.scale is None:
            v_c = jnp.where(valid[..., None], v_c, 0)
        v_c, q_c = v_c.astype(jnp.float32), queries[head]
        s = jnp.einsum("nrd,ntd->nrt", q_c, k_c, preferred_element_type=jnp.float32)
        if keys.scale is not None:
            s = s * keys.scale[:, None].astype(jnp.float32)
        s = jnp.where(valid[:, None], s, -jnp.inf)
        top = jnp.max(s, axis=-1)
        p = jnp.exp(s - finite(top)[..., None])
        weights = _times(p, values.scale, valid)
        out = jnp.einsum("nrt,ntd->nrd", weights, v_c, preferred_element_type=jnp.float32)
        new = (out, top, jnp.sum(p, axis=-1), p)
        return tuple(
            whole if whole is None else lax.dynamic_update_slice_in_dim(whole, some, start, 0)
            for whole, some in zip(carry, new)
        )

    state = (
        jnp.zeros((pieces, group, d), jnp.float32),
        jnp.zeros((pieces, group), jnp.float32),
        jnp.zeros((pieces, group), jnp.float32),
        None if metric is None else jnp.zeros((pieces, group, piece), jnp.float32),
    )
    outs, tops, totals, weights = in_turns(attend_pieces, state)
    merged = min(parts, PARTS_MERGED)

    def merge_parts(i, carry):
        """The i-th `merged` pieces of every head, after those before them."""
        out, top, total = carry
        part = i * merged + jnp.arange(merged, dtype=jnp.int32)
        there = (part < count[:, None])[..., None]
        at = jnp.minimum(first[:, None] + part, pieces - 1)
        top_of = jnp.where(there, tops[at], -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(top_of, axis=1))
        decay, share = jnp.exp(top - finite(new_top)), jnp.exp(top_of - finite(new_top)[:, None])
        added = jnp.einsum("hmr,hmrd->hrd", share, jnp.where(there[..., None], outs[at], 0))
        total_of = jnp.sum(jnp.where(there, share * totals[at], 0), axis=1)
        return out * decay[..., None] + added, new_top, total * decay + total_of

    nothing = jnp.zeros((heads, group), jnp.float32)
    rounds = (jnp.max(count) + merged - 1) // merged
    before = (jnp.zeros((heads, group, d), jnp.float32), nothing - jnp.inf, nothing)
    if exact is not None:
        before = (exact.out, exact.top, exact.total)
    out, top, total = lax.fori_loop(0, rounds, merge_parts, before)
    some = jnp.where(total > 0, total, 1)
    out = out / some[..., None]
    if metric is None:
        return None, out
    log_total = finite(top) + jnp.log(some)

    def add_metric(start, size, metric):
        """What some KVs received: their weights were normalised by their pieces alone."""
        head, page, left = members(start, size)
        p, of_piece = (lax.dynamic_slice_in_dim(x, start, size) for x in (weights, tops))
        share = jnp.exp(finite(of_piece) - log_total[head])
        if exact is not None:
            # A piece may have none of its KVs left, and then no number to be scaled by.
            share = jnp.where(of_piece == -jnp.inf, 0, share)
        powers = jnp.sum((p * share[..., None]) ** power, axis=1).reshape(size, pages, b)
        held = touched[head, None] & (jnp.arange(pages) * b < left[:, None])
        return metric.at[jnp.where(held, page, num_blocks)].add(powers, mode="drop")

    added = in_turns(add_metric, metric)
    if exact is not None:
        added = exact.received(added, table.reshape(heads, -1), touched, log_total, power)
    return added, out


def _turn(do: Callable, start: Array, size: int, turn: Array, carry: Any) -> Any:
    return do(start + turn * size, size, carry)


def _times(
    p: Float[Array, "n r t"], factor: Float[Array, "n t"] | None, valid: Bool[Array, "n t"]
) -> Float[Array, "n r t"]:
    """Weights times a number of each KV; what lies in slots that nobody wrote counts nothing."""
    return p if factor is None else p * jnp.where(valid, factor, 0)[:, None].astype(jnp.float32)
