"""Codecs that store some channels of a row and a bit for each: the others are 0."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from kvjax.cache.store.codec import Codec
from kvjax.errors import UserError

Stored = dict[str, Array]
"""`numbers` [*n, k], bfloat16, in the order of their channels; `held` [*n, d / 8], a bit for each
channel, the first in the lowest bit."""


@dataclasses.dataclass(frozen=True)
class Pruned(Codec):
    """The largest entries of every row, whichever they are.

    Source: Mustafar (Joo et al. 2025), section 3: magnitude per token, for keys after RoPE and for
    values. Of d entries d − ⌊s d⌋ stay; those of equal size go from the last on. The paper's
    newest 32 tokens are not exempt, and its bitmaps of 64 are not padded to 8 numbers.
    """

    share: float = 0.5
    """s, of the entries that go."""

    @property
    def name(self) -> str:
        return f"mustafar{100 * self.share:.0f}"

    def check(self, head_dim: int) -> None:
        if head_dim % 8:
            raise UserError(
                f"cache_dtype {self.name} has a bit for each of 8 channels in a byte, and the head "
                f"dimension is {head_dim}: give int8"
            )

    def encode(self, rows: Float[Array, "*n d"]) -> Stored:
        d = rows.shape[-1]
        size = jnp.abs(rows.astype(jnp.float32))
        size = jnp.where(jnp.isnan(size), jnp.inf, size)
        _, largest = lax.top_k(size, d - int(self.share * d))
        channel = jnp.sort(largest, axis=-1)
        held = jnp.any(channel[..., None] == jnp.arange(d), axis=-2)
        bits = held.reshape(*held.shape[:-1], -1, 8) << np.arange(8, dtype=np.uint8)
        numbers = jnp.take_along_axis(rows, channel, axis=-1).astype(jnp.bfloat16)
        return {"numbers": numbers, "held": jnp.sum(bits, axis=-1, dtype=jnp.uint8)}

    def decode(self, stored: Stored) -> Float[Array, "*n d"]:
        held = (stored["held"][..., None] >> np.arange(8, dtype=np.uint8)) & np.uint8(1)
        held = held.reshape(*held.shape[:-2], -1)
        at = jnp.maximum(jnp.cumsum(held.astype(jnp.int32), axis=-1) - 1, 0)
        numbers = jnp.take_along_axis(stored["numbers"], at, axis=-1)
        return jnp.where(held > 0, numbers, 0).astype(self.dtype)
