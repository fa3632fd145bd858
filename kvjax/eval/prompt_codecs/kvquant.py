"""KVQuant (Hooper et al. 2024), without its calibration: bent levels, and outliers beside them.

Section 3: keys before RoPE have a range by channel, values one by token (of all heads of a layer).
In each of these vectors 1 % of the numbers, half at either end, stays as it is and does not count;
the others lie between −1 and 1 on 2^bits levels, by k-means, that all keys of a layer share, and
all its values. The first token stays as it is. The paper calibrates levels and the keys' ranges on
16 texts and weighs numbers by their gradients (Fisher); so does `kvquant_calibrated.py`. Here both
come of the prompt itself, and nothing is weighed: what is stored has to say them. Lloyd's iteration
begins at quantiles. Q-Norm is not there.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache.policy import Artefacts, LayerView
from kvjax.cache.policy.rotary import ROPE_FREQUENCY, turned, turned_back
from kvjax.cache.store.scaled import divisor
from kvjax.cache.store.spec import KVShape
from kvjax.eval.prompt_codecs.base import PromptCodec, Rows
from kvjax.eval.prompt_codecs.codes import (
    NUMBER,
    code_bytes,
    first_tokens,
    in_bfloat16,
    index_bytes,
    ranks,
)


@dataclasses.dataclass(frozen=True)
class KVQuant(PromptCodec):
    """Codes of levels by k-means, and outliers."""

    artefacts = (ROPE_FREQUENCY,)

    bits: int = 3
    outliers: int = 5
    """Thousandths of a vector that are kept at either end, rounded up."""
    exact: int = 1
    """First tokens that are kept as they are."""
    steps: int = 50

    @property
    def name(self) -> str:
        return f"kvquant{self.bits}"

    def at_either_end[N: (int, Array)](self, size: N) -> N:
        return (size * self.outliers + 999) // 1000

    def layer(self, view: LayerView, artefacts: Artefacts) -> Rows:
        k, v = view.k, view.v
        assert v is not None
        token = jnp.arange(len(k), dtype=jnp.int32)
        coded = first_tokens(len(k), view.length) & (token >= self.exact)
        before = self.on_levels(
            turned_back(k, token, artefacts[ROPE_FREQUENCY]).reshape(len(k), -1), coded, 0
        )
        angle = (token[:, None] * artefacts[ROPE_FREQUENCY])[:, None]
        keys = turned(before.reshape(k.shape), jnp.cos(angle), jnp.sin(angle))
        return keys, self.on_levels(v.reshape(len(v), -1), coded, 1).reshape(v.shape)

    def on_levels(
        self, x: Float[Array, "T c"], coded: Bool[Array, " T"], axis: int
    ) -> Float[Array, "T c"]:
        """Numbers as they are stored; those along an axis share a range."""
        inner, middle, half = self.ranges(x, coded, axis)
        scaled = (x - middle) / half
        levels = in_bfloat16(k_means(scaled, inner, 1 << self.bits, self.steps))
        level = levels[jnp.searchsorted((levels[1:] + levels[:-1]) / 2, scaled)]
        return jnp.where(inner, level * half + middle, in_bfloat16(x))

    def ranges(
        self, x: Float[Array, "T c"], coded: Bool[Array, " T"], axis: int
    ) -> tuple[Bool[Array, "T c"], Array, Array]:
        """Which numbers are coded, and middle and half width of what they lie in, by vector."""
        counts = jnp.broadcast_to(coded[:, None], x.shape)
        size = jnp.sum(counts, axis=axis, keepdims=True)
        ends = self.at_either_end(size)
        place = ranks(jnp.where(counts, x, jnp.inf), axis)
        inner = counts & (place >= ends) & (place < size - ends)
        low = jnp.min(jnp.where(inner, x, jnp.inf), axis, keepdims=True)
        high = jnp.max(jnp.where(inner, x, -jnp.inf), axis, keepdims=True)
        low, high = (jnp.where(jnp.isfinite(end), end, 0) for end in (low, high))
        return inner, in_bfloat16((low + high) / 2), in_bfloat16(divisor((high - low) / 2))

    def stored_bytes(self, shape: KVShape, length: int) -> int:
        row, coded = shape.num_kv_heads * shape.head_dim, max(0, length - self.exact)

        def stored(vectors: int, size: int) -> int:
            kept = min(size, 2 * self.at_either_end(size)) * (NUMBER + index_bytes(size))
            return code_bytes(vectors * size, self.bits) + vectors * (kept + 2 * NUMBER)

        levels = 2 * (1 << self.bits) * NUMBER
        exact = 2 * (length - coded) * row * NUMBER
        layer = stored(row, coded) + stored(coded, row) + levels + exact
        return shape.num_layers * layer


def middles_of(levels: int, size: Int32[Array, ""]) -> Int32[Array, " levels"]:
    """The middle of each of so many equal parts of a size, in whole numbers below 2³¹."""
    middle = 2 * jnp.arange(levels, dtype=jnp.int32) + 1
    return middle * (size // (2 * levels)) + middle * (size % (2 * levels)) // (2 * levels)


def k_means(
    x: Float[Array, "*n"], counts: Bool[Array, "*n"], levels: int, steps: int
) -> Float[Array, " levels"]:
    """Ascending levels of least squared error to the numbers that count, by Lloyd's iteration.

    A level that is nearest to none stays where it is.
    """
    ordered = jnp.sort(jnp.where(counts, x, jnp.inf).reshape(-1))
    size = jnp.sum(counts)
    finite = jnp.where(jnp.isfinite(ordered), ordered, 0)
    sums = jnp.concatenate([jnp.zeros(1), jnp.cumsum(finite)])
    at = middles_of(levels, size)

    def step(_, centres):
        middles = (centres[1:] + centres[:-1]) / 2
        inner = jnp.searchsorted(ordered, middles)
        ends = jnp.concatenate([jnp.zeros(1, inner.dtype), inner, size[None].astype(inner.dtype)])
        number = ends[1:] - ends[:-1]
        mean = (sums[ends[1:]] - sums[ends[:-1]]) / jnp.maximum(number, 1)
        return jnp.where(number > 0, mean, centres)

    return lax.fori_loop(0, steps, step, finite[at])
