"""GEAR (Kang et al. 2024): codes, a low-rank term for what they lose, and outliers beside both.

Section 3 and algorithm 1, with the constants of the authors' code: of every vector that shares a
scale (a key's channel, a token's values of all heads) the 1 % least and the 1 % largest numbers are
kept as they are, and the vector's mean stands in their place while it is coded. Of what is lost
then, X − X̂ of each head, rank 4 is kept: three steps of the power iteration, the last one with
orthonormal bases. The codes are KCVT's in 4 bits and KIVI's in groups of 64 in 2, as in the paper.
The authors' code counts a key's outliers by the width of the model; here they are 1 % of its tokens
at either end, as the paper says. The iteration starts from numbers drawn with a fixed seed.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache.policy import Artefacts, LayerView
from kvjax.cache.store.spec import KVShape
from kvjax.eval.prompt_codecs.base import PromptCodec, Rows
from kvjax.eval.prompt_codecs.codes import (
    NUMBER,
    first_tokens,
    in_bfloat16,
    index_bytes,
    permille,
    ranks,
)
from kvjax.eval.prompt_codecs.kivi import KCVT, KeysByChannel


@dataclasses.dataclass(frozen=True)
class Gear(PromptCodec):
    """Codes, outliers and a low-rank term."""

    codes: KeysByChannel = KCVT
    outliers: int = 10
    """Thousandths of a vector that are kept at either end."""
    rank: int = 4
    """Of what is kept of each head's loss; 0 for nothing."""
    steps: int = 3

    @property
    def name(self) -> str:
        return f"gear{self.codes.bits}"

    def layer(self, view: LayerView, artefacts: Artefacts) -> Rows:
        k, v, valid = view.k, view.v, first_tokens(len(view.k), view.length)[:, None, None]
        assert v is not None
        rows = v.reshape(len(v), -1)
        k_out, k_filled = filled(k, valid, permille(self.outliers, view.length), 0)
        v_out, v_filled = filled(rows, valid[..., 0], permille(self.outliers, rows.shape[1]), 1)
        v_out, v_filled = v_out.reshape(v.shape), v_filled.reshape(v.shape)

        def stored(x: Array, out: Array, coded: Array) -> Array:
            coded = jnp.where(out, in_bfloat16(x), coded)
            return coded + self.low_rank(jnp.where(valid, x - coded, 0))

        keys = stored(k, k_out, self.codes.keys(k_filled, valid))
        return keys, stored(v, v_out, self.codes.values(v_filled))

    def low_rank(self, lost: Float[Array, "T H d"]) -> Float[Array, "T H d"]:
        """What the low-rank term gives back of each head's loss."""
        if not self.rank:
            return jnp.zeros_like(lost)
        lost = lost.swapaxes(0, 1)
        first = start(lost.shape[-1], self.rank)
        right = jnp.broadcast_to(first, (len(lost), *first.shape))
        for step in range(1, self.steps + 1):
            if step == self.steps:
                right = jnp.linalg.qr(right)[0]
            left = lost @ right
            if step == self.steps:
                left = jnp.linalg.qr(left)[0]
            right = lost.swapaxes(1, 2) @ left
        return (in_bfloat16(left) @ in_bfloat16(right).swapaxes(1, 2)).swapaxes(0, 1)

    def stored_bytes(self, shape: KVShape, length: int) -> int:
        heads, d = shape.num_kv_heads, shape.head_dim
        row = heads * d
        keys = 2 * permille(self.outliers, length) * row * (NUMBER + index_bytes(length))
        values = 2 * permille(self.outliers, row) * length * (NUMBER + index_bytes(row))
        low_rank = 2 * heads * (length + d) * self.rank * NUMBER
        return self.codes.stored_bytes(shape, length) + shape.num_layers * (
            keys + values + low_rank
        )


def start(d: int, rank: int) -> Float[Array, "d r"]:
    """What the power iteration begins with."""
    return jax.random.normal(jax.random.key(0), (d, rank))


def filled(
    x: Float[Array, "*n"],
    valid: Bool[Array, "*#n"],
    count: Int32[Array, ""] | int,
    axis: int,
) -> tuple[Bool[Array, "*n"], Float[Array, "*n"]]:
    """Which numbers are the `count` least or largest of their vector along an axis, and the numbers
    with the vector's mean in their place."""
    valid = jnp.broadcast_to(valid, x.shape)
    size = jnp.sum(valid, axis=axis, keepdims=True)
    place = ranks(jnp.where(valid, x, jnp.inf), axis)
    out = valid & ((place < count) | (place >= size - count))
    mean = jnp.sum(jnp.where(valid, x, 0), axis=axis, keepdims=True) / jnp.maximum(size, 1)
    return out, jnp.where(out, mean, x)
