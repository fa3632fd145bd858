"""Causal attention of a prompt, or of a chunk of one behind a paged prefix, in plain JAX."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

BLOCK = 256
"""Queries, and keys, of one tile of logits."""
Partial = tuple[Float[Array, "H r T d"], Float[Array, "H r T"], Float[Array, "H r T"]]
"""Unnormalised output, largest logit and sum of weights, float32."""


def _tiles(q: Float[Array, "T Hr d"], num_heads: int, scale: float) -> Float[Array, "n H rs d"]:
    """Scaled queries in tiles of s = min(BLOCK, T) tokens, the r heads of a group side by side."""
    num_tokens, num_query_heads, d = q.shape
    group, size = num_query_heads // num_heads, min(BLOCK, num_tokens)
    tiles = -(-num_tokens // size)
    q = jnp.pad(q, ((0, tiles * size - num_tokens), (0, 0), (0, 0))).astype(jnp.float32) * scale
    q = q.reshape(tiles, size, num_heads, group, d).transpose(0, 2, 3, 1, 4)
    return q.reshape(tiles, num_heads, group * size, d)


def _nothing_yet(num_heads: int, rows: int, d: int) -> tuple[Array, Array, Array]:
    """Output, largest logit and sum of weights before any key."""
    return (
        jnp.zeros((num_heads, rows, d), jnp.float32),
        jnp.full((num_heads, rows), -jnp.inf, jnp.float32),
        jnp.zeros((num_heads, rows), jnp.float32),
    )


def _one_more_tile(
    carry: tuple[Array, Array, Array], s: Array, v: Float[Array, "H t d"]
) -> tuple[Array, Array, Array]:
    """Online softmax: the carry after a tile of logits s [H, rows, t] and its values."""
    out, top, total = carry
    new_top = jnp.maximum(top, jnp.max(s, axis=-1))
    # A row that has seen no key yet has no finite maximum.
    finite = jnp.where(jnp.isfinite(new_top), new_top, 0)
    p = jnp.exp(s - finite[..., None])
    decay = jnp.exp(top - finite)
    out = out * decay[..., None] + jnp.einsum("hqt,htd->hqd", p, v)
    return out, new_top, total * decay + jnp.sum(p, axis=-1)


def _in_order(part: tuple[Array, Array, Array], group: int, num_tokens: int) -> Partial:
    """Stacked tiles [n, H, r·s, …] as [H, r, T, …]."""

    def ordered(x):
        tiles, num_heads, rows = x.shape[:3]
        x = x.reshape(tiles, num_heads, group, rows // group, *x.shape[3:])
        x = jnp.moveaxis(x, 0, 2).reshape(num_heads, group, -1, *x.shape[4:])
        return x[:, :, :num_tokens]

    out, top, total = part
    return ordered(out), ordered(top), ordered(total)


def causal(
    q: Float[Array, "T Hr d"], k: Float[Array, "T H d"], v: Float[Array, "T H d"], scale: float
) -> Partial:
    """Causal attention by tiles of `BLOCK` × `BLOCK` under an online softmax.

    Tiles above the diagonal are never computed, and one tile of logits exists at a time.
    """
    num_tokens, num_query_heads, d = q.shape
    num_heads = k.shape[1]
    group = num_query_heads // num_heads
    q = _tiles(q, num_heads, scale)
    tiles, _, rows, _ = q.shape
    size = rows // group
    pad = ((0, tiles * size - num_tokens), (0, 0), (0, 0))
    k = jnp.swapaxes(jnp.pad(k, pad), 0, 1).astype(jnp.float32)
    v = jnp.swapaxes(jnp.pad(v, pad), 0, 1).astype(jnp.float32)
    within = jnp.arange(size)
    on_diagonal = jnp.tile(within, group)[:, None] >= within

    def attend_tiles(_, tile):
        i, q_i = tile

        def attend_tile(j, carry):
            k_j = lax.dynamic_slice_in_dim(k, j * size, size, axis=1)
            v_j = lax.dynamic_slice_in_dim(v, j * size, size, axis=1)
            s = jnp.einsum("hqd,htd->hqt", q_i, k_j)
            return _one_more_tile(carry, jnp.where((j < i) | on_diagonal, s, -jnp.inf), v_j)

        return None, lax.fori_loop(0, i + 1, attend_tile, _nothing_yet(num_heads, rows, d))

    _, part = lax.scan(attend_tiles, None, (jnp.arange(tiles), q))
    return _in_order(part, group, num_tokens)


def over_prefix(
    q: Float[Array, "T Hr d"],
    k: Float[Array, "H P d"],
    v: Float[Array, "H P d"],
    length: Int32[Array, " H"],
    scale: float,
) -> Partial:
    """Attention of all queries over the first `length` KVs of each head."""
    num_tokens, num_query_heads, d = q.shape
    num_heads, num_held, _ = k.shape
    size = min(BLOCK, num_held)
    pad = ((0, 0), (0, -num_held % size), (0, 0))
    k, v = jnp.pad(k, pad), jnp.pad(v, pad)
    num_tiles = (jnp.max(length) + size - 1) // size
    q = _tiles(q, num_heads, scale)

    def attend_tiles(_, q_i):
        def attend_tile(j, carry):
            valid = j * size + jnp.arange(size) < length[:, None]
            k_j = lax.dynamic_slice_in_dim(k, j * size, size, axis=1).astype(jnp.float32)
            v_j = lax.dynamic_slice_in_dim(v, j * size, size, axis=1)
            # Weight 0 does not silence a NaN in a slot nobody wrote.
            v_j = jnp.where(valid[..., None], v_j, 0).astype(jnp.float32)
            s = jnp.where(valid[:, None], jnp.einsum("hqd,htd->hqt", q_i, k_j), -jnp.inf)
            return _one_more_tile(carry, s, v_j)

        start = _nothing_yet(num_heads, q_i.shape[1], d)
        return None, lax.fori_loop(0, num_tiles, attend_tile, start)

    _, part = lax.scan(attend_tiles, None, q)
    return _in_order(part, num_query_heads // num_heads, num_tokens)


def merged(first: Partial, second: Partial) -> Partial:
    """One partial result over the union of two disjoint sets of KVs."""
    top = jnp.maximum(first[1], second[1])
    finite = jnp.where(jnp.isfinite(top), top, 0)
    a, b = jnp.exp(first[1] - finite), jnp.exp(second[1] - finite)
    out = first[0] * a[..., None] + second[0] * b[..., None]
    return out, top, first[2] * a + second[2] * b


def log_sum(part: Partial) -> Float[Array, "Hr T"]:
    """The log-sum-exp of each query's logits; −∞ for one that sees no key."""
    _, top, total = part
    return (top + jnp.log(total)).reshape(-1, top.shape[-1])


def normalised(part: Partial, dtype) -> Float[Array, "T Hr d"]:
    """The attention output, [T, H·r, d]."""
    out, _, total = part
    out = out / jnp.where(total > 0, total, 1)[..., None]
    num_heads, group, num_tokens, d = out.shape
    return out.transpose(2, 0, 1, 3).reshape(num_tokens, num_heads * group, d).astype(dtype)
