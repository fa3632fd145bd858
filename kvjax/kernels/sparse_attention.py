"""Attention of a prompt's queries to a few keys of each head and to those next to each query."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from kvjax.kernels.checks import check_dtype, check_prompt, wanted
from kvjax.kernels.prefill_attention import prefill_attention
from kvjax.kernels.prefill_attention.reference import one_at_a_time

BLOCK = 64
"""Queries that have the same keys, but for those behind each."""
AT_ONCE = 512
"""Verticals whose logits stand in memory."""


def sparse_prefill_attention(
    q: Float[Array, "T Hr d"],
    k: Float[Array, "T H d"],
    v: Float[Array, "T H d"],
    *,
    verticals: Int32[Array, "H n"],
    local: int,
    block: int = BLOCK,
    scale: float | None = None,
) -> Float[Array, "T Hr d"]:
    """Attention of a prompt to verticals and a local band, in T · (n + local) products.

    Query t sees key u ≤ t where u ≥ ⌊t / block⌋ · block − local, or where u is one of the
    verticals of its KV head: the pattern of MInference's vertical-slash kernel (Jiang et al. 2024)
    with the slashes 0, block, …, local. In plain JAX: keys of verticals are gathered once, a block
    of queries has the logits of its band and of the verticals before it, and no others.

    Args:
        q: queries of T consecutive tokens; query head i reads KV head i // r.
        k: keys of the same tokens.
        v: values of the same tokens.
        verticals: distinct keys of each KV head, ascending; T and above stand for none.
        local: keys before a query's block that it sees (static); a multiple of `block`.
        block: queries of a block (static).
        scale: factor of the logits, 1/√d by default.

    Returns:
        The output, of v's dtype; softmax and sums are float32.

    Raises:
        ValueError: an argument does not fit; names it, what it got and what is wanted.
    """
    num_tokens, num_heads, d = check_prompt(q, k, "T")
    if q.shape[0] != num_tokens:
        raise wanted("q shape", list(q.shape), [num_tokens, *q.shape[1:]])
    if v.shape != k.shape:
        raise wanted("v shape", list(v.shape), f"that of k, {list(k.shape)}")
    check_dtype("v", v, jnp.floating, "a floating-point type")
    if verticals.ndim != 2 or verticals.shape[0] != num_heads:
        raise wanted("verticals shape", list(verticals.shape), f"[{num_heads}, n]")
    check_dtype("verticals", verticals, jnp.integer, "an integer type")
    if block < 1 or local < block or local % block:
        raise wanted("local", local, f"a multiple of the block of {block}, at least one")
    scale = 1 / math.sqrt(d) if scale is None else scale
    # Their bands reach back to the first key.
    out = prefill_attention(q[:local], k[:local], v[:local], scale=scale)
    if num_tokens <= local:
        return out
    behind = _behind(q[local:], k, v, verticals, local, block, scale)
    return jnp.concatenate([out, behind])


def _behind(
    q: Float[Array, "t Hr d"],
    k: Float[Array, "T H d"],
    v: Float[Array, "T H d"],
    verticals: Int32[Array, "H n"],
    local: int,
    block: int,
    scale: float,
) -> Float[Array, "t Hr d"]:
    """The outputs of the queries from `local` on."""
    rest, num_query_heads, d = q.shape
    num_heads = k.shape[1]
    group, tiles, dtype = num_query_heads // num_heads, -(-rest // block), v.dtype
    fill = ((0, tiles * block - rest), (0, 0), (0, 0))
    q = jnp.pad(q, fill).astype(jnp.float32) * scale
    q = q.reshape(tiles, block, num_heads, group, d).transpose(2, 0, 4, 3, 1)
    q = q.reshape(num_heads, tiles, d, group * block)
    k = jnp.pad(k, fill).astype(jnp.float32).transpose(1, 2, 0)
    v = jnp.pad(v, fill).astype(jnp.float32).transpose(1, 0, 2)
    short = -verticals.shape[1] % min(AT_ONCE, max(verticals.shape[1], 1))
    none = jnp.full((num_heads, short), k.shape[2], verticals.dtype)
    verticals = jnp.concatenate([verticals, none], axis=1)

    def of_head(head):
        return _head(*head, local=local, block=block, group=group)

    over_heads = lax.map if one_at_a_time(q) else lambda f, x: jax.vmap(f)(x)
    out = over_heads(of_head, (q, k, v, verticals))
    out = out.reshape(num_heads, tiles, group, block, d).transpose(1, 3, 0, 2, 4)
    return out.reshape(tiles * block, num_query_heads, d)[:rest].astype(dtype)


def _head(
    q: Float[Array, "m d rs"],
    k: Float[Array, "d T"],
    v: Float[Array, "T d"],
    verticals: Int32[Array, " n"],
    *,
    local: int,
    block: int,
    group: int,
) -> Float[Array, "m rs d"]:
    """`_behind` of one KV head, by blocks of queries."""
    width, size = local + block, min(AT_ONCE, len(verticals))
    chosen_k = jnp.take(k, verticals, axis=1, mode="clip")
    chosen_v = jnp.take(v, verticals, axis=0, mode="clip")
    # The band of block i begins at key i · block.
    seen = np.arange(width) <= local + np.arange(block)[:, None]
    band = jnp.asarray(np.tile(np.where(seen, 0.0, -np.inf), (group, 1)), jnp.float32)
    starts = jnp.arange(len(q), dtype=jnp.int32) * block
    counts = jnp.searchsorted(verticals, starts)

    def attend(_, tile):
        q_i, start, count = tile
        keys = lax.dynamic_slice_in_dim(k, start, width, axis=1)
        s = jnp.einsum("dq,dt->qt", q_i, keys) + band
        top = jnp.max(s, axis=-1)
        p = jnp.exp(s - top[:, None])
        out = p @ lax.dynamic_slice_in_dim(v, start, width, axis=0)

        def attend_verticals(j, carry):
            out, top, total = carry
            before = j * size + jnp.arange(size) < count
            s = jnp.einsum(
                "dq,dt->qt", q_i, lax.dynamic_slice_in_dim(chosen_k, j * size, size, axis=1)
            )
            s = jnp.where(before, s, -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(s, axis=-1))
            p, decay = jnp.exp(s - new_top[:, None]), jnp.exp(top - new_top)
            out = out * decay[:, None] + p @ lax.dynamic_slice_in_dim(chosen_v, j * size, size)
            return out, new_top, total * decay + jnp.sum(p, axis=-1)

        carry = out, top, jnp.sum(p, axis=-1)
        if size:
            carry = lax.fori_loop(0, -(-count // size), attend_verticals, carry)
        out, _, total = carry
        return None, out / total[:, None]

    return lax.scan(attend, None, (q, starts, counts))[1]
