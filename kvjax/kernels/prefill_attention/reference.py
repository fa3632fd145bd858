"""Causal attention of a prompt, or of a chunk of one behind a paged prefix, in plain JAX."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

BLOCK = 256
"""Queries, and keys, of one tile of the causal part."""
PREFIX_TOKENS = 512
"""KVs of the prefix gathered from each head at once."""

Partial = tuple[Float[Array, "H r T d"], Float[Array, "H r T"], Float[Array, "H r T"]]
"""Unnormalised output, largest logit and sum of weights, float32."""


def causal(
    q: Float[Array, "T Hr d"], k: Float[Array, "T H d"], v: Float[Array, "T H d"], scale: float
) -> Partial:
    """Causal attention by tiles of `BLOCK` × `BLOCK` under an online softmax.

    Tiles above the diagonal are never computed, and one tile of logits exists at a time.
    """
    num_tokens, num_query_heads, d = q.shape
    num_heads = k.shape[1]
    group = num_query_heads // num_heads
    size = min(BLOCK, num_tokens)
    tiles = -(-num_tokens // size)
    pad = ((0, tiles * size - num_tokens), (0, 0), (0, 0))
    q = jnp.pad(q, pad).astype(jnp.float32) * scale
    q = q.reshape(tiles, size, num_heads, group, d).transpose(0, 2, 3, 1, 4)
    q = q.reshape(tiles, num_heads, group * size, d)
    k = jnp.swapaxes(jnp.pad(k, pad), 0, 1).astype(jnp.float32)
    v = jnp.swapaxes(jnp.pad(v, pad), 0, 1).astype(jnp.float32)
    within = jnp.arange(size)
    on_diagonal = jnp.tile(within, group)[:, None] >= within
    rows = (num_heads, group * size)

    def attend_tiles(_, tile):
        i, q_i = tile

        def attend_tile(j, carry):
            out, top, total = carry
            k_j = lax.dynamic_slice_in_dim(k, j * size, size, axis=1)
            v_j = lax.dynamic_slice_in_dim(v, j * size, size, axis=1)
            s = jnp.einsum("hqd,htd->hqt", q_i, k_j)
            s = jnp.where((j < i) | on_diagonal, s, -jnp.inf)
            # Every row sees a key of every tile it gets to, so the maximum is finite.
            new_top = jnp.maximum(top, jnp.max(s, axis=-1))
            p = jnp.exp(s - new_top[..., None])
            decay = jnp.exp(top - new_top)
            out = out * decay[..., None] + jnp.einsum("hqt,htd->hqd", p, v_j)
            return out, new_top, total * decay + jnp.sum(p, axis=-1)

        return None, lax.fori_loop(
            0,
            i + 1,
            attend_tile,
            (
                jnp.zeros((*rows, d), jnp.float32),
                jnp.full(rows, -jnp.inf, jnp.float32),
                jnp.zeros(rows, jnp.float32),
            ),
        )

    _, parts = lax.scan(attend_tiles, None, (jnp.arange(tiles), q))

    def in_order(x):
        # [tiles, H, r·size, ...] -> [H, r, T, ...]
        x = x.reshape(tiles, num_heads, group, size, *x.shape[3:])
        x = jnp.moveaxis(x, 0, 2).reshape(num_heads, group, tiles * size, *x.shape[4:])
        return x[:, :, :num_tokens]

    out, top, total = parts
    return in_order(out), in_order(top), in_order(total)


def over_prefix(
    q: Float[Array, "T Hr d"],
    k_pool: Float[Array, "N b d"],
    v_pool: Float[Array, "N b d"],
    block_table: Int32[Array, "H M"],
    context_len: Int32[Array, " H"],
    scale: float,
) -> Partial:
    """Attention of all queries over everything that one sequence's heads hold in the pool."""
    num_tokens, num_query_heads, d = q.shape
    num_blocks, b, _ = k_pool.shape
    num_heads, max_blocks = block_table.shape
    group = num_query_heads // num_heads
    pages = max(1, min(max_blocks, PREFIX_TOKENS // b))
    table = jnp.minimum(block_table, num_blocks - 1)
    table = jnp.pad(table, ((0, 0), (0, -max_blocks % pages)))
    chunk = pages * b
    q = q.reshape(num_tokens, num_heads, group, d).transpose(1, 2, 0, 3).astype(jnp.float32)
    q = q.reshape(num_heads, group * num_tokens, d) * scale

    def attend_chunk(i, carry):
        out, top, total = carry
        page = lax.dynamic_slice_in_dim(table, i * pages, pages, axis=1)
        valid = i * chunk + jnp.arange(chunk) < context_len[:, None]
        k_c = k_pool[page].reshape(num_heads, chunk, d).astype(jnp.float32)
        v_c = jnp.where(valid[..., None], v_pool[page].reshape(num_heads, chunk, d), 0)
        s = jnp.einsum("hqd,htd->hqt", q, k_c)
        s = jnp.where(valid[:, None], s, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(s, axis=-1))
        finite = jnp.where(jnp.isfinite(new_top), new_top, 0)
        p = jnp.exp(s - finite[..., None])
        decay = jnp.exp(top - finite)
        out = out * decay[..., None] + jnp.einsum("hqt,htd->hqd", p, v_c.astype(jnp.float32))
        return out, new_top, total * decay + jnp.sum(p, axis=-1)

    rows = (num_heads, group * num_tokens)
    out, top, total = lax.fori_loop(
        0,
        (jnp.max(context_len) + chunk - 1) // chunk,
        attend_chunk,
        (
            jnp.zeros((*rows, d), jnp.float32),
            jnp.full(rows, -jnp.inf, jnp.float32),
            jnp.zeros(rows, jnp.float32),
        ),
    )
    shape = (num_heads, group, num_tokens)
    return out.reshape(*shape, d), top.reshape(shape), total.reshape(shape)


def merged(first: Partial, second: Partial) -> Partial:
    """One partial result over the union of two disjoint sets of KVs."""
    top = jnp.maximum(first[1], second[1])
    finite = jnp.where(jnp.isfinite(top), top, 0)
    a, b = jnp.exp(first[1] - finite), jnp.exp(second[1] - finite)
    out = first[0] * a[..., None] + second[0] * b[..., None]
    return out, top, first[2] * a + second[2] * b


def normalised(part: Partial, dtype) -> Float[Array, "T Hr d"]:
    """The attention output, [T, H·r, d]."""
    out, _, total = part
    out = out / jnp.where(total > 0, total, 1)[..., None]
    num_heads, group, num_tokens, d = out.shape
    return out.transpose(2, 0, 1, 3).reshape(num_tokens, num_heads * group, d).astype(dtype)
