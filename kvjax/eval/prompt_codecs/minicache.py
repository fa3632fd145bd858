"""MiniCache (Liu et al. 2024): from the middle of the depth on, two layers share a direction.

Section 3: keys and values of two neighbouring layers, token by token and head by head, become one
direction (spherical interpolation, with a weight of 0.6 for the deeper one) and two norms. Tokens
whose pair is farthest apart stay as they are: the authors' γ of 0.05 is here the share of them in
each head. Known from third parties; the paper's threshold, between the least and the largest angle,
keeps as many as happen to be above it. Layers pair from half of the depth on; an odd one out at the
end stays as it is. What is kept is in 16 bits, where the paper's best figures have codes, too.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.cache.policy import Artefacts
from kvjax.cache.store.scaled import divisor
from kvjax.cache.store.spec import KVShape
from kvjax.engine.dense import DensePass
from kvjax.eval.prompt_codecs.base import PromptCodec, Rows
from kvjax.eval.prompt_codecs.codes import (
    NUMBER,
    first_tokens,
    in_bfloat16,
    index_bytes,
    largest,
    permille,
)


@dataclasses.dataclass(frozen=True)
class MiniCache(PromptCodec):
    """Pairs of layers from half of the depth on."""

    weight: float = 0.6
    """Of the deeper layer's direction."""
    apart: int = 50
    """Thousandths of the tokens that are not merged."""

    @property
    def name(self) -> str:
        return "minicache"

    def restore(self, dense: DensePass, length: Int32[Array, ""], artefacts: Artefacts) -> Rows:
        k, v = (self.merged(x.astype(jnp.float32), length) for x in (dense.k, dense.v))
        return k, v

    def merged(self, x: Float[Array, "L T H d"], length: Int32[Array, ""]) -> Array:
        """Keys or values of all layers as they are stored."""
        first, pairs = pairs_of(len(x))
        last = first + 2 * pairs
        whole = in_bfloat16(x)
        both = x[first:last].reshape(pairs, 2, *x.shape[1:])
        norm = jnp.sqrt(jnp.sum(both**2, axis=-1, keepdims=True))
        one, other = jnp.unstack(both / divisor(norm), axis=1)
        # Of the chord: the cosine says nothing of small angles in float32.
        chord = jnp.sqrt(jnp.sum((one - other) ** 2, axis=-1))
        angle = 2 * jnp.arcsin(jnp.minimum(chord / 2, 1))
        sine = jnp.sin(angle)
        near = sine < 1e-6
        shares = (
            jnp.where(near, share, jnp.sin(share * angle) / jnp.where(near, 1, sine))[..., None]
            for share in (1 - self.weight, self.weight)
        )
        shared = sum(share * way for share, way in zip(shares, (one, other)))
        shared = in_bfloat16(shared / divisor(jnp.sqrt(jnp.sum(shared**2, axis=-1, keepdims=True))))
        valid = first_tokens(x.shape[1], length)[:, None]
        kept = largest(jnp.where(valid, angle, -jnp.inf), permille(self.apart, length), axis=1)
        merged = in_bfloat16(norm) * shared[:, None]
        merged = jnp.where(kept[:, None, ..., None], in_bfloat16(both), merged)
        return jnp.concatenate([whole[:first], merged.reshape(-1, *x.shape[1:]), whole[last:]])

    def stored_bytes(self, shape: KVShape, length: int) -> int:
        pairs, row = pairs_of(shape.num_layers)[1], shape.head_dim * NUMBER
        kept = permille(self.apart, length)
        pair = (length - kept) * (row + 2 * NUMBER) + kept * (2 * row + index_bytes(length))
        alone = (shape.num_layers - 2 * pairs) * length * row
        return 2 * shape.num_kv_heads * (pairs * pair + alone)


def pairs_of(num_layers: int) -> tuple[int, int]:
    """The first layer that shares, and how many pairs there are."""
    first = num_layers // 2
    return first, (num_layers - first) // 2
