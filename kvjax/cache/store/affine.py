"""Codecs of whole numbers between the least and the largest entry of a row, as it stands: the plain
quantisation that papers compare theirs with."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache.store.codec import Codec
from kvjax.cache.store.scaled import PLANES, divisor, packed, rounded_up, unpacked
from kvjax.errors import UserError
from kvjax.kernels.rounding import rounded

Stored = dict[str, Array]
"""`codes` [*n, w], `scale` [*n] and `zero` [*n], bfloat16."""


@dataclasses.dataclass(frozen=True)
class Affine(Codec):
    """Codes 0 … 2ⁿ − 1 times a scale, and the row's least entry added.

    Source: KIVI (Liu et al. 2024), equation 1, per token in one group, without its residual window.
    """

    bits: int = 4

    @property
    def name(self) -> str:
        return f"affine{self.bits}"

    def check(self, head_dim: int) -> None:
        if head_dim % (8 // self.bits):
            raise UserError(
                f"cache_dtype {self.name} packs {8 // self.bits} numbers into a byte, and the head "
                f"dimension is {head_dim}: give int8"
            )

    def encode(self, rows: Float[Array, "*n d"]) -> Stored:
        rows = rows.astype(jnp.float32)
        finite = jnp.all(jnp.isfinite(rows), axis=-1)
        rows = jnp.where(finite[..., None], rows, 0)
        most = (1 << self.bits) - 1
        # Codes count from what is stored of the least entry.
        zero = rounded(jnp.min(rows, axis=-1), jnp.bfloat16)
        above = rows - zero[..., None]
        scale = rounded_up(jnp.maximum(jnp.max(above, axis=-1), 0) / most)
        codes = jnp.clip(jnp.round(above / divisor(scale)[..., None]), 0, most)
        scale = jnp.where(finite, scale, jnp.nan).astype(jnp.bfloat16)
        codes = packed(codes.astype(jnp.uint8), PLANES[self.bits])
        return {"codes": codes, "scale": scale, "zero": zero.astype(jnp.bfloat16)}

    def decode(self, stored: Stored) -> Float[Array, "*n d"]:
        scale, zero = (stored[name].astype(jnp.float32)[..., None] for name in ("scale", "zero"))
        codes = unpacked(stored["codes"], PLANES[self.bits]).astype(jnp.float32)
        return (codes * scale + zero).astype(self.dtype)
