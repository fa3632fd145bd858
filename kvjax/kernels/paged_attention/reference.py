"""Paged attention of one decode step in plain JAX: the reference of every kernel and the fallback.

Pages are gathered a few at a time under an online softmax, so the work follows the longest head
that is really there, not the width of the block table, and no head is gathered whole.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

CHUNK_TOKENS = 256
"""KVs gathered from each head at once."""


def paged_attention(
    q: Float[Array, "S Hr d"],
    k: Float[Array, "N b d"],
    v: Float[Array, "N b d"],
    block_table: Int32[Array, "S H M"],
    context_len: Int32[Array, "S H"],
    *,
    scale: float,
    metric: Float[Array, "N b"] | None = None,
    power: int = 2,
    observed: Bool[Array, " S"] | None = None,
) -> tuple[Float[Array, "S Hr d"], Float[Array, "N b"] | None]:
    """See `kvjax.kernels.paged_attention`. Softmax and sums in float32.

    Returns the output, and `metric` with Σ p^power over each query group added to every KV (None if
    no metric was given).
    """
    num_seqs, num_query_heads, d = q.shape
    dtype = q.dtype
    num_blocks, b, _ = k.shape
    num_heads, max_blocks = block_table.shape[1:]
    group = num_query_heads // num_heads
    pages = max(1, min(max_blocks, CHUNK_TOKENS // b))
    width = -(-max_blocks // pages) * pages
    table = jnp.minimum(block_table, num_blocks - 1)
    table = jnp.pad(table, ((0, 0), (0, 0), (0, width - max_blocks)))
    chunk = pages * b
    q = q.reshape(num_seqs, num_heads, group, d).astype(jnp.float32) * scale
    num_chunks = (jnp.max(context_len) + chunk - 1) // chunk
    heads = (num_seqs, num_heads)

    def attend_chunk(i, carry):
        out, top, total, logits = carry
        page = lax.dynamic_slice_in_dim(table, i * pages, pages, axis=2)
        valid = i * chunk + jnp.arange(chunk) < context_len[..., None]
        k_c = k[page].reshape(*heads, chunk, d).astype(jnp.float32)
        # Weight 0 does not silence a NaN in a slot nobody wrote: such values must be 0 themselves.
        v_c = jnp.where(valid[..., None], v[page].reshape(*heads, chunk, d), 0).astype(jnp.float32)
        s = jnp.einsum("shrd,shtd->shrt", q, k_c, preferred_element_type=jnp.float32)
        s = jnp.where(valid[:, :, None], s, -jnp.inf)
        if logits is not None:
            logits = lax.dynamic_update_slice_in_dim(logits, s, i * chunk, axis=3)
        new_top = jnp.maximum(top, jnp.max(s, axis=-1))
        finite = jnp.where(jnp.isfinite(new_top), new_top, 0)
        p = jnp.exp(s - finite[..., None])
        decay = jnp.exp(top - finite)
        out = out * decay[..., None] + jnp.einsum(
            "shrt,shtd->shrd", p, v_c, preferred_element_type=jnp.float32
        )
        return out, new_top, total * decay + jnp.sum(p, axis=-1), logits

    rows = (*heads, group)
    logits = None
    if metric is not None:
        logits = jnp.full((*rows, width * b), -jnp.inf, jnp.float32)
    out, top, total, logits = lax.fori_loop(
        0,
        num_chunks,
        attend_chunk,
        (
            jnp.zeros((*rows, d), jnp.float32),
            jnp.full(rows, -jnp.inf, jnp.float32),
            jnp.zeros(rows, jnp.float32),
            logits,
        ),
    )
    out = out / jnp.where(total > 0, total, 1)[..., None]
    if metric is not None:
        log_total = jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1)), 0)
        powers = jnp.sum(jnp.exp(power * (logits - log_total[..., None])), axis=2)
        powers = powers.reshape(*heads, width, b)[:, :, :max_blocks]
        touched = jnp.arange(max_blocks) < ((context_len + b - 1) // b)[..., None]
        if observed is not None:
            touched &= observed[:, None, None]
        metric = metric.at[jnp.where(touched, block_table, num_blocks)].add(powers, mode="drop")
    return out.reshape(num_seqs, num_query_heads, d).astype(dtype), metric
