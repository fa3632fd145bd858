"""Paged attention of one decode step in plain JAX: the reference of every kernel and the fallback.

Pages are gathered a few at a time under an online softmax. Heads come in the order of their
lengths, so that later pages are gathered for those alone that have them: the work follows the KVs
that are really there, and no head is gathered whole. Of encoded pools that have factors the codes
are multiplied: queries and outputs are turned instead of rows, and logits and weights scaled.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Num

from kvjax.kernels.encoded import Encoded, Factors, factors_of, turned

CHUNK_TOKENS = 128
"""KVs gathered from each head at once."""
ROWS_ON_CPU = 32
"""Heads that are worked on at once: their pages stay in the caches of a core."""


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
    rows_at_once: int | None = None,
    metric: Float[Array, "N b"] | None = None,
    power: int = 2,
    observed: Bool[Array, " S"] | None = None,
) -> tuple[Float[Array, "S Hr d"], Float[Array, "N b"] | None]:
    """See `kvjax.kernels.paged_attention`. Softmax and sums in float32.

    `rows_at_once` heads are worked on at a time, by default all of them.

    Returns the output, and `metric` with Σ p^power over each query group added to every KV (None if
    no metric was given).
    """
    num_seqs, num_query_heads, d = q.shape
    dtype = q.dtype
    num_blocks, b, _ = k.shape
    num_heads, max_blocks = block_table.shape[1:]
    group, heads = num_query_heads // num_heads, num_seqs * num_heads
    pages = max(1, min(max_blocks, CHUNK_TOKENS // b))
    chunk, width = pages * b, -(-max_blocks // pages) * pages
    size = min(rows_at_once or heads, heads)
    rows = -(-heads // size) * size
    lengths = context_len.reshape(heads)
    # Ties by index: what a head computes is the same wherever it stands.
    order = jnp.argsort(-lengths)

    def in_order(x):
        """[S, H, …] as rows by length, filled up with empty ones."""
        x = x.reshape(heads, *x.shape[2:])[order]
        return jnp.pad(x, ((0, rows - heads), *((0, 0) for _ in x.shape[1:])))

    table = in_order(jnp.minimum(block_table, num_blocks - 1))
    table = jnp.pad(table, ((0, 0), (0, width - max_blocks)))
    lengths = in_order(context_len)
    queries = turned(k, q.astype(jnp.float32)) * scale
    queries = in_order(queries.reshape(num_seqs, num_heads, group, d))

    def read(pool, page) -> Factors:
        """A chunk of `size` heads: codes [size, chunk, d], and what belongs to each KV."""
        found = factors_of(pool, page)
        return jax.tree.map(lambda x: x.reshape(size, chunk, *x.shape[3:]), found)

    def attend_rows(i, carry, part):
        """One more chunk, the `part`-th, of `size` rows from i · size on."""

        def rows_of(x):
            return lax.dynamic_slice_in_dim(x, i * size, size)

        (out, top, total), logits = (rows_of(x) for x in carry[:3]), carry[3]
        page = lax.dynamic_slice_in_dim(rows_of(table), part * pages, pages, axis=1)
        valid = part * chunk + jnp.arange(chunk) < rows_of(lengths)[:, None]
        keys, values = read(k, page), read(v, page)
        k_c, v_c = keys.codes.astype(jnp.float32), values.codes
        # Weight 0 does not silence a NaN in a slot nobody wrote: such values must be 0 themselves.
        if values.scale is None:
            v_c = jnp.where(valid[..., None], v_c, 0)
        v_c, q_c = v_c.astype(jnp.float32), rows_of(queries)
        s = jnp.einsum("nrd,ntd->nrt", q_c, k_c, preferred_element_type=jnp.float32)
        if keys.scale is not None:
            s = s * keys.scale[:, None].astype(jnp.float32)
        s = jnp.where(valid[:, None], s, -jnp.inf)
        if logits is not None:
            logits = lax.dynamic_update_slice(logits, s, (i * size, 0, part * chunk))
        new_top = jnp.maximum(top, jnp.max(s, axis=-1))
        finite = jnp.where(jnp.isfinite(new_top), new_top, 0)
        p = jnp.exp(s - finite[..., None])
        decay = jnp.exp(top - finite)
        weights = _times(p, values.scale, valid)
        added = jnp.einsum("nrt,ntd->nrd", weights, v_c, preferred_element_type=jnp.float32)
        out = out * decay[..., None] + added
        new = (out, new_top, total * decay + jnp.sum(p, axis=-1))
        kept = (
            lax.dynamic_update_slice_in_dim(whole, some, i * size, axis=0)
            for whole, some in zip(carry[:3], new)
        )
        return (*kept, logits)

    def attend_chunk(part, carry):
        longer = jnp.sum(lengths > part * chunk, dtype=jnp.int32)
        return lax.fori_loop(
            0, (longer + size - 1) // size, lambda i, carry: attend_rows(i, carry, part), carry
        )

    logits = None
    if metric is not None:
        logits = jnp.full((rows, group, width * b), -jnp.inf, jnp.float32)
    state = (
        jnp.zeros((rows, group, d), jnp.float32),
        jnp.full((rows, group), -jnp.inf, jnp.float32),
        jnp.zeros((rows, group), jnp.float32),
        logits,
    )
    num_chunks = (lengths[0] + chunk - 1) // chunk
    out, top, total, logits = lax.fori_loop(0, num_chunks, attend_chunk, state)
    place = jnp.zeros(heads, jnp.int32).at[order].set(jnp.arange(heads, dtype=jnp.int32))
    out, total = out[place], total[place]
    out = out / jnp.where(total > 0, total, 1)[..., None]
    if metric is not None:
        assert logits is not None
        top, logits = top[place], logits[place]
        log_total = jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1)), 0)
        powers = jnp.sum(jnp.exp(power * (logits - log_total[..., None])), axis=1)
        powers = powers.reshape(num_seqs, num_heads, width, b)[:, :, :max_blocks]
        touched = jnp.arange(max_blocks) < ((context_len + b - 1) // b)[..., None]
        if observed is not None:
            touched &= observed[:, None, None]
        metric = metric.at[jnp.where(touched, block_table, num_blocks)].add(powers, mode="drop")
    return turned(v, out.reshape(num_seqs, num_query_heads, d)).astype(dtype), metric


def _times(
    p: Float[Array, "n r t"], factor: Float[Array, "n t"] | None, valid: Bool[Array, "n t"]
) -> Float[Array, "n r t"]:
    """Weights times a number of each KV; what lies in slots that nobody wrote counts nothing."""
    return p if factor is None else p * jnp.where(valid, factor, 0)[:, None].astype(jnp.float32)
