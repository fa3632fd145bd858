"""Paged attention of one decode step in plain JAX: the reference of every kernel and the fallback.

Heads are cut into pieces of as many pages each, and pieces are worked on in groups of one size, one
group after the other, whosever they are: the work follows the sum of the lengths. Each piece has
its own softmax; a head merges those of its pieces by their log-sum-exps (flash-decoding), in their
order and by themselves, so that what it computes is the same wherever it stands. Of encoded pools
that have factors the codes are multiplied: queries and outputs are turned instead of rows, and
logits and weights scaled.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Num

from kvjax.kernels.encoded import Encoded, Factors, factors_of, turned

PIECE_TOKENS = 64
"""KVs of a piece, or those of one page."""
PIECES_ON_CPU = 32
"""Most pieces that are worked on at once: their pages stay in the caches of a core."""
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
    num_blocks, b = pool.shape[:2]
    last = jnp.maximum(context_len - 1, 0)
    block = jnp.take_along_axis(block_table, (last // b)[..., None], axis=-1)[..., 0]
    block = jnp.where(context_len > 0, block, num_blocks)
    return pool.at[block, last % b].set(values.astype(pool.dtype), mode="drop")


def paged_attention(
    q: Float[Array, "S Hr d"],
    k: Float[Array, "N b d"] | Encoded,
    v: Float[Array, "N b d"] | Encoded,
    block_table: Int32[Array, "S H M"],
    context_len: Int32[Array, "S H"],
    *,
    scale: float,
    pieces_at_once: int | None = None,
    metric: Float[Array, "N b"] | None = None,
    power: int = 2,
    observed: Bool[Array, " S"] | None = None,
) -> tuple[Float[Array, "S Hr d"], Float[Array, "N b"] | None]:
    """See `kvjax.kernels.paged_attention`. Softmax and sums in float32.

    `pieces_at_once` pieces are worked on at a time, by default as many as there are heads.

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
    )
    kept = parts * group * 4 * (d + (0 if metric is None else pages * b))
    at_once = max(1, min(heads, RESULT_BYTES // kept))
    size = min(pieces_at_once or at_once, at_once * parts)

    def attend(metric, rows):
        q, table, lengths, touched = rows
        return _attend_heads(
            q, table, lengths, touched, k, v, size=size, metric=metric, power=power
        )

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
    k: Float[Array, "N b d"] | Encoded,
    v: Float[Array, "N b d"] | Encoded,
    *,
    size: int,
    metric: Float[Array, "N b"] | None,
    power: int,
) -> tuple[Float[Array, "N b"] | None, Float[Array, "h r d"]]:
    """Attention of some heads, of up to P pieces of p pages each, `size` pieces at a time."""
    heads, group, d = queries.shape
    parts, pages = table.shape[1:]
    num_blocks, b, _ = k.shape
    piece = pages * b
    pieces = -(-heads * parts // size) * size
    count = (lengths + piece - 1) // piece
    ends = jnp.cumsum(count)
    first, turns = ends - count, (ends[-1] + size - 1) // size

    def members(turn):
        """Of each piece of a turn: its head, its pages, and how many KVs there are from its first
        one on (0 where there is no such piece)."""
        rank = turn * size + jnp.arange(size, dtype=jnp.int32)
        head = jnp.searchsorted(ends, rank, side="right", method="compare_all")
        head = jnp.minimum(head, heads - 1).astype(jnp.int32)
        part = jnp.minimum(rank - first[head], parts - 1)
        left = jnp.where(rank < ends[-1], lengths[head] - part * piece, 0)
        return head, table[head, part], left

    def read(pool, page) -> Factors:
        """The pages of some pieces: codes [size, piece, d], and what belongs to each KV."""
        found = factors_of(pool, jnp.minimum(page, num_blocks - 1).reshape(-1))
        return jax.tree.map(lambda x: x.reshape(size, piece, *x.shape[2:]), found)

    def attend_pieces(turn, carry):
        head, page, left = members(turn)
        valid = jnp.arange(piece) < left[:, None]
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
        p = jnp.exp(s - _finite(top)[..., None])
        weights = _times(p, values.scale, valid)
        out = jnp.einsum("nrt,ntd->nrd", weights, v_c, preferred_element_type=jnp.float32)
        new = (out, top, jnp.sum(p, axis=-1), p)
        return tuple(
            whole if whole is None else lax.dynamic_update_slice_in_dim(whole, some, turn * size, 0)
            for whole, some in zip(carry, new)
        )

    state = (
        jnp.zeros((pieces, group, d), jnp.float32),
        jnp.zeros((pieces, group), jnp.float32),
        jnp.zeros((pieces, group), jnp.float32),
        None if metric is None else jnp.zeros((pieces, group, piece), jnp.float32),
    )
    outs, tops, totals, weights = lax.fori_loop(0, turns, attend_pieces, state)
    merged = min(parts, PARTS_MERGED)

    def merge_parts(i, carry):
        """The i-th `merged` pieces of every head, after those before them."""
        out, top, total = carry
        part = i * merged + jnp.arange(merged, dtype=jnp.int32)
        there = (part < count[:, None])[..., None]
        at = jnp.minimum(first[:, None] + part, pieces - 1)
        top_of = jnp.where(there, tops[at], -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(top_of, axis=1))
        decay, share = jnp.exp(top - _finite(new_top)), jnp.exp(top_of - _finite(new_top)[:, None])
        added = jnp.sum(jnp.where(there[..., None], share[..., None] * outs[at], 0), axis=1)
        total_of = jnp.sum(jnp.where(there, share * totals[at], 0), axis=1)
        return out * decay[..., None] + added, new_top, total * decay + total_of

    nothing = jnp.zeros((heads, group), jnp.float32)
    out, top, total = lax.fori_loop(
        0,
        (jnp.max(count) + merged - 1) // merged,
        merge_parts,
        (jnp.zeros((heads, group, d), jnp.float32), nothing - jnp.inf, nothing),
    )
    some = jnp.where(total > 0, total, 1)
    out = out / some[..., None]
    if metric is None:
        return None, out
    log_total = _finite(top) + jnp.log(some)

    def add_metric(turn, metric):
        """What a turn's KVs received: their weights were normalised by their pieces alone."""
        head, page, left = members(turn)
        p, of_piece = (lax.dynamic_slice_in_dim(x, turn * size, size) for x in (weights, tops))
        share = jnp.exp(_finite(of_piece) - log_total[head])
        powers = jnp.sum((p * share[..., None]) ** power, axis=1).reshape(size, pages, b)
        held = touched[head, None] & (jnp.arange(pages) * b < left[:, None])
        return metric.at[jnp.where(held, page, num_blocks)].add(powers, mode="drop")

    return lax.fori_loop(0, turns, add_metric, metric), out


def _finite(top: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Largest logits, 0 where there are none: what differs from them then has an exponential."""
    return jnp.where(jnp.isfinite(top), top, 0)


def _times(
    p: Float[Array, "n r t"], factor: Float[Array, "n t"] | None, valid: Bool[Array, "n t"]
) -> Float[Array, "n r t"]:
    """Weights times a number of each KV; what lies in slots that nobody wrote counts nothing."""
    return p if factor is None else p * jnp.where(valid, factor, 0)[:, None].astype(jnp.float32)
