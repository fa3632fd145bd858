"""Rows that attention reads in place of what a pool of codes has of the same KVs.

They are one more piece of their head: a softmax of its own, merged with the others by their
log-sum-exps, and the pool's pieces leave these KVs out. Device kernels begin each head with what
this piece gives, in place of nothing.
"""

import dataclasses
from typing import NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from kvjax.kernels.encoded import Encoded, Half, turned

WORD = 32
"""KVs of a word of `Piece.words`."""


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExactKVs:
    """Up to W keys and values of each head as they were computed.

    No two rows of a head are of one KV. What the pool has of these is finite, and counts nothing.
    """

    k: Float[Array, "S H W d"]
    v: Float[Array, "S H W d"]
    index: Int32[Array, "S H W"]
    """Which KV of its head each row is, from 0 on; −1 where there is none, and what `context_len`
    does not count is none either."""


class Piece(NamedTuple):
    """Attention of some heads over their exact KVs, with a softmax of its own."""

    out: Float[Array, "h r d"]
    top: Float[Array, "h r"]
    """The largest logit; −inf where there is no KV."""
    weights: Float[Array, "h r W"]
    """e to the logits less `top`."""
    index: Int32[Array, "h W"]
    """Which KV of its head each is."""
    behind: Int32[Array, "h W"]
    """KVs of its head from each on, itself among them; 0 where there is none."""

    @property
    def total(self) -> Float[Array, "h r"]:
        """The sum of the weights."""
        return jnp.sum(self.weights, axis=-1)

    def leaves_out(
        self, head: Int32[Array, " n"], behind: Int32[Array, "n t"]
    ) -> Bool[Array, "n t"]:
        """Which KVs of the pool, so many from the end of their heads, it has instead."""
        return jnp.any(behind[..., None] == self.behind[head][:, None], axis=-1)

    def words(self, num_kvs: int) -> Int32[Array, "h n"]:
        """Which of the first `num_kvs` KVs of each head it has, the first in the lowest bit of the
        first word."""
        word = jnp.where(self.behind > 0, self.index // WORD, -1)
        bit = jnp.left_shift(jnp.uint32(1), (self.index % WORD).astype(jnp.uint32))
        mine = word[..., None] == jnp.arange(-(-num_kvs // WORD))
        bits = jnp.where(mine, bit[..., None], jnp.uint32(0))
        found = lax.reduce(bits, jnp.uint32(0), lax.bitwise_or, [1])
        return lax.bitcast_convert_type(found, jnp.int32)

    def received(
        self,
        metric: Float[Array, "N b"],
        table: Int32[Array, "h M"],
        touched: Bool[Array, " h"] | None,
        log_total: Float[Array, "h r"],
        power: int,
    ) -> Float[Array, "N b"]:
        """The metric with Σ p^power over each query group added to its KVs, of heads that are
        touched (None for all); `log_total` is the log-sum-exp over all KVs of a head."""
        num_blocks, b = metric.shape
        p = self.weights * jnp.exp(finite(self.top) - log_total)[..., None]
        column = jnp.clip(self.index // b, 0, table.shape[-1] - 1)
        block = jnp.take_along_axis(table, column, axis=-1)
        there = self.behind > 0
        if touched is not None:
            there &= touched[:, None]
        block = jnp.where(there, block, num_blocks)
        return metric.at[block, self.index % b].add(jnp.sum(p**power, axis=1), mode="drop")


def attend_exact(
    queries: Float[Array, "h r d"],
    k: Float[Array, "h W d"],
    v: Float[Array, "h W d"],
    index: Int32[Array, "h W"],
    lengths: Int32[Array, " h"],
) -> Piece:
    """Attention of some heads, of so many KVs, over their exact ones; softmax and sums in float32.

    Queries are scaled, and as rows are, not turned for codes.
    """
    there = (index >= 0) & (index < lengths[:, None])
    s = jnp.einsum("hrd,hwd->hrw", queries, k.astype(jnp.float32))
    s = jnp.where(there[:, None], s, -jnp.inf)
    top = jnp.max(s, axis=-1)
    weights = jnp.exp(s - finite(top)[..., None])
    # Weight 0 does not silence a NaN.
    values = jnp.where(there[..., None], v, 0).astype(jnp.float32)
    out = jnp.einsum("hrw,hwd->hrd", weights, values)
    return Piece(out, top, weights, index, jnp.where(there, lengths[:, None] - index, 0))


def piece_of(
    q: Float[Array, "S Hr d"],
    exact: ExactKVs,
    v: Float[Array, "N b d"] | Encoded | Half,
    context_len: Int32[Array, "S H"],
    scale: float,
) -> Piece:
    """Attention of all heads of a call over their exact KVs, its output in the basis of the codes
    of `v`."""
    lengths = context_len.reshape(-1)
    queries = (q.astype(jnp.float32) * scale).reshape(len(lengths), -1, q.shape[2])
    k, v_rows, index = (
        x.reshape(len(lengths), *x.shape[2:]) for x in (exact.k, exact.v, exact.index)
    )
    piece = attend_exact(queries, k, v_rows, index, lengths)
    return piece._replace(out=turned(v, piece.out))


def finite(top: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Largest logits, 0 where there are none: what differs from them then has an exponential."""
    return jnp.where(jnp.isfinite(top), top, 0)
