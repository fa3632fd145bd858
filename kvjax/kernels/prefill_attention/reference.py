"""Causal attention of a prompt, or of a chunk of one behind a paged prefix, in plain JAX."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from kvjax.kernels import device

BLOCK = 256
"""Queries, and keys, of one tile of logits behind a prefix."""
ROWS = 192
"""Queries of a tile times the query heads of their group, about."""
LOOPS = 8
"""A prompt's tiles are dealt to so many loops. The tiles of one loop have the logits of all keys
that its last tile sees: a sixteenth of the square of tokens is computed and masked."""
LOOP = 256
"""Least tokens of such a loop. One of a single tile is none to XLA, and slower."""
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


def one_at_a_time(q: Array) -> bool:
    """Whether heads follow each other: the logits of a tile then stay in a CPU's caches."""
    return device.of(q).platform == "cpu"


class Observed(NamedTuple):
    """What is summed of all queries' attention."""

    weight: Float[Array, " T"]
    """What each query counts."""
    power: int
    excluded_distance: int


def causal(
    q: Float[Array, "T Hr d"], k: Float[Array, "T H d"], v: Float[Array, "T H d"], scale: float
) -> Partial:
    """Causal attention by tiles of queries, each with all keys that it may see."""
    return _causal(q, k, v, scale, None)[0]


def causal_with_received(
    q: Float[Array, "T Hr d"],
    k: Float[Array, "T H d"],
    v: Float[Array, "T H d"],
    scale: float,
    observed: Observed,
) -> tuple[Partial, Float[Array, "Hr T"]]:
    """`causal`, and Σ over the queries of weight · p^power for each key."""
    part, received = _causal(q, k, v, scale, observed)
    assert received is not None
    return part, received


def _causal(
    q: Float[Array, "T Hr d"],
    k: Float[Array, "T H d"],
    v: Float[Array, "T H d"],
    scale: float,
    observed: Observed | None,
) -> tuple[Partial, Float[Array, "Hr T"] | None]:
    """A tile has the logits of all its keys at once, so that its softmax is final: what keys
    receive is one more sum over it. Queries and keys have channels first, which is what the product
    of XLA for CPUs is fastest at.
    """
    num_tokens, num_query_heads, d = q.shape
    num_heads = k.shape[1]
    group = num_query_heads // num_heads
    size = min(max(ROWS // group, 1), num_tokens)
    tiles = -(-num_tokens // size)
    pad = tiles * size - num_tokens
    fill = ((0, pad), (0, 0), (0, 0))
    q = jnp.pad(q, fill).astype(jnp.float32) * scale
    q = q.reshape(tiles, size, num_heads, group, d).transpose(2, 0, 4, 3, 1)
    q = q.reshape(num_heads, tiles, d, group * size)
    k = jnp.pad(k, fill).astype(jnp.float32).transpose(1, 2, 0)
    v = jnp.pad(v, fill).astype(jnp.float32).transpose(1, 0, 2)
    weight = None
    if observed is not None:
        weight = jnp.pad(observed.weight, (0, pad)).reshape(tiles, size)

    def of_head(head):
        return _causal_head(*head, group=group, observed=observed, weight=weight)

    over_heads = lax.map if one_at_a_time(q) else lambda f, x: jax.vmap(f)(x)
    part, received = over_heads(of_head, (q, k, v))

    def ordered(x):
        """[H, n, r·s, …] as [H, r, T, …]."""
        x = jnp.moveaxis(x.reshape(num_heads, tiles, group, size, *x.shape[3:]), 1, 2)
        return x.reshape(num_heads, group, tiles * size, *x.shape[4:])[:, :, :num_tokens]

    if received is not None:
        received = received.reshape(num_query_heads, -1)[:, :num_tokens]
    return jax.tree.map(ordered, part), received


def _causal_head(
    q: Float[Array, "n d rs"],
    k: Float[Array, "d T"],
    v: Float[Array, "T d"],
    *,
    group: int,
    observed: Observed | None,
    weight: Float[Array, "n s"] | None,
) -> tuple[tuple[Array, Array, Array], Float[Array, "r T"] | None]:
    """`_causal` of one KV head: output [n, r·s, d], largest logit and sum of weights [n, r·s]."""
    tiles, _, rows = q.shape
    size = rows // group
    length = tiles * size
    # Added, not selected: XLA for CPUs has one loop then for mask, maximum and exponential. Row r
    # of a tile that begins at token t sees what lies up to column `length` + r of the band, in
    # which token 0 stands at column `length` − t.
    columns = jnp.arange(2 * length)
    band = jnp.where(columns <= length + jnp.arange(size)[:, None], 0.0, -jnp.inf)
    parts = []
    received = None if observed is None else jnp.zeros((group, length), jnp.float32)
    loops = max(min(LOOPS, length // LOOP, tiles // 2), 1)
    borders = [tiles * i // loops for i in range(loops + 1)]
    for first, last in itertools.pairwise(borders):
        end = last * size
        keys, values = k[:, :end], v[:end]

        def attend_tile(total, tile, first=first, end=end, keys=keys, values=values):
            i, q_i, weight_i = tile
            s = jnp.einsum("dq,dt->qt", q_i, keys).reshape(group, size, end)
            s = s + lax.dynamic_slice_in_dim(band, length - i * size, end, axis=1)
            top = jnp.max(s, axis=-1, keepdims=True)
            # Else XLA takes the exponentials once for each of those that read them.
            p = lax.optimization_barrier(jnp.exp(s - top)).reshape(rows, end)
            norm = jnp.sum(p, axis=-1)
            if observed is not None:
                share = weight_i / norm.reshape(group, size) ** observed.power
                total = total + _summed(p, share, i, first, observed)
            return total, (p @ values, top.reshape(rows), norm)

        inputs = jnp.arange(tiles), q, weight
        inputs = jax.tree.map(lambda x, first=first, last=last: x[first:last], inputs)
        total = None if received is None else received[:, :end]
        total, part = lax.scan(attend_tile, total, inputs)
        parts.append(part)
        if received is not None:
            received = received.at[:, :end].set(total)
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts), received


def _summed(
    p: Float[Array, "rs t"], share: Float[Array, "r s"], i: Array, first: int, observed: Observed
) -> Float[Array, "r t"]:
    """Σ share · p^power over the queries of tile i, whose loop begins with the first one."""
    group, size = share.shape
    p = p.reshape(group, size, -1)
    end = p.shape[-1]

    def over_queries(p):
        return jnp.einsum("rs,rst->rt", share, p**observed.power)

    # No distance is negative: p is 0 there.
    if observed.excluded_distance == 0:
        return over_queries(p)
    near = max(first * size - observed.excluded_distance, 0)
    at = i * size + jnp.arange(size)[:, None] - observed.excluded_distance
    given = over_queries(jnp.where(jnp.arange(near, end) <= at, p[..., near:], 0))
    if near == 0:
        return given
    return jnp.concatenate([over_queries(p[..., :near]), given], axis=1)


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
