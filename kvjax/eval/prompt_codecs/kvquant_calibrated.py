"""KVQuant (Hooper et al. 2024) with its calibration: levels, keys' ranges, and Q-Norm in 2 bits.

Section 3 and the authors' code. `kvjax calibrate --levels` finds levels by k-means that weighs
numbers by their gradients, the range of each channel of keys before RoPE, and what Q-Norm reads
levels by (`kvjax.engine.calibrate.levels`). They are the model's and no part of what is stored of a
prompt. Values have the ranges of their own tokens, which are stored.

A key's number beyond its channel's range stays as it is, but of a token at most half a per cent at
either end, rounded up, those that are farthest beyond it in parts of the range (the code's cap for
keys); what is left over goes to the last level. So a token has room for as many outliers of its key
as of its value, whether it has so many or not, and that room is counted. The first token stays as
it is.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache.policy import Artefacts, LayerView
from kvjax.cache.policy.rotary import ROPE_FREQUENCY, turned, turned_back
from kvjax.cache.store.spec import KVShape
from kvjax.engine.calibrate.levels import EXACT, KEY_RANGE, LEVELS, NORM, OUTLIERS
from kvjax.eval.prompt_codecs.base import Rows
from kvjax.eval.prompt_codecs.codes import (
    NUMBER,
    code_bytes,
    first_tokens,
    in_bfloat16,
    index_bytes,
    largest,
)
from kvjax.eval.prompt_codecs.kvquant import KVQuant


@dataclasses.dataclass(frozen=True)
class CalibratedKVQuant(KVQuant):
    """Codes of calibrated levels, and outliers."""

    calibrated = (KEY_RANGE, *LEVELS.values(), NORM)
    artefacts = (ROPE_FREQUENCY, *calibrated)

    outliers: int = OUTLIERS
    exact: int = EXACT

    @property
    def name(self) -> str:
        return f"kvquant{self.bits}c"

    def layer(self, view: LayerView, artefacts: Artefacts) -> Rows:
        k, v = view.k, view.v
        assert v is not None
        token = jnp.arange(len(k), dtype=jnp.int32)
        coded = first_tokens(len(k), view.length) & (token >= self.exact)
        levels, norm = artefacts[LEVELS[self.bits]], artefacts[NORM]
        # Codes are of the levels; Q-Norm is for what they are read as.
        read = levels * norm[:, :1] + norm[:, 1:] if self.bits == 2 else levels

        before = turned_back(k, token, artefacts[ROPE_FREQUENCY]).reshape(len(k), -1)
        middle, half = artefacts[KEY_RANGE]
        scaled = (before - middle) / half
        most = self.at_either_end(scaled.shape[1])
        kept = largest(jnp.where(scaled > 1, scaled, -jnp.inf), most)
        kept |= largest(jnp.where(scaled < -1, -scaled, -jnp.inf), most)
        keys = on(scaled, levels[0], read[0]) * half + middle
        keys = jnp.where(kept | ~coded[:, None], in_bfloat16(before), keys)
        angle = (token[:, None] * artefacts[ROPE_FREQUENCY])[:, None]
        keys = turned(keys.reshape(k.shape), jnp.cos(angle), jnp.sin(angle))

        rows = v.reshape(len(v), -1)
        inner, middle, half = self.ranges(rows, coded, 1)
        values = on((rows - middle) / half, levels[1], read[1]) * half + middle
        return keys, jnp.where(inner, values, in_bfloat16(rows)).reshape(v.shape)

    def stored_bytes(self, shape: KVShape, length: int) -> int:
        row, coded = shape.num_kv_heads * shape.head_dim, max(0, length - self.exact)
        kept = min(row, 2 * self.at_either_end(row)) * (NUMBER + index_bytes(row))
        codes = 2 * code_bytes(coded * row, self.bits)
        exact = 2 * (length - coded) * row * NUMBER
        # A token's key and its value have outliers, the value a range as well.
        return shape.num_layers * (codes + coded * (2 * kept + 2 * NUMBER) + exact)


def on(
    x: Float[Array, "*n"], levels: Float[Array, " levels"], read: Float[Array, " levels"]
) -> Float[Array, "*n"]:
    """What numbers are read as whose codes are those of the nearest levels."""
    return read[jnp.searchsorted((levels[1:] + levels[:-1]) / 2, x)]
