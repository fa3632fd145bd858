"""Keys as codes hold them best: without what all keys of a head share, each channel to its scale.

Where keys have biases a few channels of every key are many times larger than the rest, and one
scale for a row takes the levels from all others. Two things change nothing that attention computes:
what is taken from all keys of a head changes all its logits alike, and the softmax not at all; and
what divides a channel of the keys can multiply that of the queries.

Source: SageAttention (2024), section 4.2 (the mean of the keys is taken off), and SmoothQuant
(2022), equations 3 and 4 (a scale per channel moves between two factors of a product).
"""

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeySmoothing:
    """Of every layer and KV head: what is stored of a key is (k − shift) / scale."""

    shift: Float32[Array, "*L H d"]
    scale: Float32[Array, "*L H d"]
    """Powers of two, so that it rounds nothing."""

    @classmethod
    def of(
        cls,
        mean: Float[Array, "L H d"],
        variance: Float[Array, "L H d"],
        queries: Float[Array, "L H d"],
    ) -> "KeySmoothing":
        """That of keys with a mean and a variance, beside the mean square of their queries.

        The error of codes that share a scale, rotated or not, grows with the length of a row, and
        that of a logit with the length of the query: Σ k² / s² times Σ s² q² is least where s² is
        √(Σ k²) / √(Σ q²) of each channel. Both channels of a pair that RoPE rotates (i, i + d / 2)
        have the scale of both, so that it does not depend on where a text lets them point.
        """

        def pairs(x: Float[Array, "L H d"]) -> Float[Array, "L H d"]:
            half = x.shape[-1] // 2
            both = x[..., :half] + x[..., half:]
            return jnp.concatenate([both, both], axis=-1)

        keys, asked = pairs(variance), pairs(queries)
        # Empty places of a device have neither.
        there = (keys > 0) & (asked > 0)
        power = jnp.log2(jnp.where(there, keys, 1) / jnp.where(there, asked, 1)) / 4
        return cls(mean.astype(jnp.float32), jnp.exp2(jnp.round(power)).astype(jnp.float32))

    def of_layer(self, layer: Int32[Array, "*R"], rows: bool = False) -> "KeySmoothing":
        """That of one layer, or of several; with `rows`, for arrays with an axis of KVs behind that
        of heads."""
        found = self.shift[layer], self.scale[layer]
        return KeySmoothing(*(x[..., None, :] if rows else x for x in found))

    def stored(self, k: Float[Array, "..."]) -> Float[Array, "..."]:
        """Keys as they are stored."""
        return ((k.astype(jnp.float32) - self.shift) / self.scale).astype(k.dtype)

    def read(self, k: Float[Array, "..."]) -> Float[Array, "..."]:
        """Keys of which these are stored."""
        return (k.astype(jnp.float32) * self.scale + self.shift).astype(k.dtype)

    def asked(self, q: Float[Array, "*n Hr d"]) -> Float[Array, "*n Hr d"]:
        """Queries for keys as they are stored."""
        scale = jnp.repeat(self.scale, q.shape[-2] // self.scale.shape[-2], axis=-2)
        return q * scale.astype(q.dtype)
