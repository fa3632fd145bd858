"""KIVI and what GEAR calls KCVT: codes that keys share by channel and values by token.

KIVI (Liu et al. 2024), section 3: a key's channels have outliers, the same ones in every token, so
a channel has a scale of its own, over `group` tokens; a value's do not, so a token has. KCVT
(GEAR, Kang et al. 2024, section 4) is the same with a single group: a scale for a channel of the
whole prompt, and one for a token's values of all heads of a layer. Read in GEAR's code. The newest
tokens that KIVI leaves as they are, are here those behind the prompt.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.cache.policy import Artefacts, LayerView
from kvjax.cache.store.spec import KVShape
from kvjax.eval.prompt_codecs.base import PromptCodec, Rows
from kvjax.eval.prompt_codecs.codes import (
    NUMBER,
    code_bytes,
    first_tokens,
    group_size,
    in_codes,
    in_groups,
)


@dataclasses.dataclass(frozen=True)
class KeysByChannel(PromptCodec):
    """Codes 0 … 2^bits − 1, keys by channel and values by token."""

    bits: int = 4
    group: int | None = None
    """Tokens of a key's channel, and at most so many channels of a token's values, that share a
    scale and a least number; None for all."""

    @property
    def name(self) -> str:
        return f"{'kcvt' if self.group is None else 'kivi'}{self.bits}"

    def layer(self, view: LayerView, artefacts: Artefacts) -> Rows:
        assert view.v is not None
        valid = first_tokens(len(view.k), view.length)[:, None, None]
        return self.keys(view.k, valid), self.values(view.v)

    def keys(
        self, k: Float[Array, "T H d"], valid: Bool[Array, "T #H #d"]
    ) -> Float[Array, "T H d"]:
        """Keys as their codes have them."""
        tokens = len(k)
        size = tokens if self.group is None else self.group
        pad = [(0, -tokens % size), (0, 0), (0, 0)]
        groups = jnp.pad(k, pad).reshape(-1, size, *k.shape[1:])
        counts = jnp.pad(valid, pad).reshape(-1, size, *valid.shape[1:])
        return in_codes(groups, self.bits, 1, counts).reshape(-1, *k.shape[1:])[:tokens]

    def values(self, v: Float[Array, "T H d"]) -> Float[Array, "T H d"]:
        """Values as their codes have them."""
        rows = v.reshape(len(v), -1)
        return in_groups(rows, self.bits, self.group or rows.shape[-1]).reshape(v.shape)

    def stored_bytes(self, shape: KVShape, length: int) -> int:
        row = shape.num_kv_heads * shape.head_dim
        key_scales = row * (1 if self.group is None else -(-length // self.group))
        value_scales = length * (row // group_size(row, self.group or row))
        codes = 2 * code_bytes(length * row, self.bits)
        return shape.num_layers * (codes + 2 * NUMBER * (key_scales + value_scales))


KCVT = KeysByChannel()
"""Of 4 bits, in one group."""
KIVI = KeysByChannel(bits=2, group=64)
"""Of 2 bits."""
