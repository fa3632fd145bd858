"""XQuant (Tomar et al. 2025): codes of what enters attention, from which keys and values follow.

Section 3, of which an abstract and third parties' accounts were at hand, and no code: codes of what
enters each attention block, normed, X, are stored, and keys and values are X W again when they are
read. Where queries share heads X is wider than a key and a value, so parts of it are stored: X U of
the singular value decomposition W = U S V of the keys' weights, and of the values'. The first three
layers have 4 bits.

Assumed: X U of keys has scales by channel, for 128 tokens each, X U of values by token, for 128
channels at most. What is added to keys behind the product (a bias, RoPE) is exact. Keys that are
normalised (Qwen3) do not follow from a difference of X, and are refused. X itself, for models whose
queries share no heads, is not there. Differences of layers are in `xquant_cl.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache.policy import Artefacts, LayerView
from kvjax.cache.policy.rotary import ROPE_FREQUENCY, turned
from kvjax.cache.store.spec import KVShape
from kvjax.errors import UserError
from kvjax.eval.prompt_codecs.base import PromptCodec, Rows
from kvjax.eval.prompt_codecs.codes import (
    NUMBER,
    code_bytes,
    first_tokens,
    group_size,
    in_groups,
)
from kvjax.eval.prompt_codecs.kivi import KeysByChannel
from kvjax.models import LoadedModel
from kvjax.models.decoder import is_stacked
from kvjax.models.family import scale_of

KEY_INPUT, KEY_OUTPUT = "key_input", "key_output"
"""U [L, D, r] and S V [L, r, H · d] of the keys' weights, float32."""
VALUE_INPUT, VALUE_OUTPUT = "value_input", "value_output"
"""Of the values'."""


@dataclasses.dataclass(frozen=True)
class XQuant(PromptCodec):
    """Codes of two parts of what enters attention."""

    artefacts = (ROPE_FREQUENCY, KEY_INPUT, KEY_OUTPUT, VALUE_INPUT, VALUE_OUTPUT)

    bits: int = 4
    group: int = 128
    first: int = 3
    """Layers that have 4 bits whatever the others have."""

    @property
    def name(self) -> str:
        return f"xquant{self.bits}"

    def from_weights(self, model: LoadedModel) -> Artefacts:
        found = {}
        weights = keys_and_values(model, self)
        for weight, names in zip(weights, ((KEY_INPUT, KEY_OUTPUT), (VALUE_INPUT, VALUE_OUTPUT))):
            left, size, right = jnp.linalg.svd(weight, full_matrices=False)
            found |= dict(zip(names, (left, size[..., None] * right)))
        return found

    def layer(self, view: LayerView, artefacts: Artefacts) -> Rows:
        k, v, hidden = view.k, view.v, view.hidden
        assert v is not None
        assert hidden is not None
        x, four = hidden.astype(jnp.float32), view.layer < self.first
        valid = first_tokens(len(x), view.length)[:, None, None]

        def by_channel(x: Array, bits: int) -> Array:
            return KeysByChannel(bits, self.group).keys(x[:, None], valid)[:, 0]

        def by_token(x: Array, bits: int) -> Array:
            return in_groups(x, bits, self.group)

        def lost(coded: Any, inner: str, outer: str) -> Array:
            part = x @ artefacts[inner]
            stored = jnp.where(four, coded(part, 4), coded(part, self.bits))
            return ((part - stored) @ artefacts[outer]).reshape(k.shape)

        token = jnp.arange(len(x), dtype=jnp.int32)
        angle = (token[:, None] * artefacts[ROPE_FREQUENCY])[:, None]
        keys = turned(lost(by_channel, KEY_INPUT, KEY_OUTPUT), jnp.cos(angle), jnp.sin(angle))
        return k - keys, v - lost(by_token, VALUE_INPUT, VALUE_OUTPUT)

    def stored_bytes(self, shape: KVShape, length: int) -> int:
        row = shape.num_kv_heads * shape.head_dim
        first = min(self.first, shape.num_layers)
        codes = sum(
            2 * layers * code_bytes(length * row, bits)
            for layers, bits in ((first, 4), (shape.num_layers - first, self.bits))
        )
        scales = row * -(-length // self.group) + length * (row // group_size(row, self.group))
        return codes + shape.num_layers * scales * 2 * NUMBER


def keys_and_values(
    model: LoadedModel, codec: PromptCodec
) -> tuple[Float[Array, "L D width"], Float[Array, "L D width"]]:
    """The weights of keys and of values, all heads of a layer side by side, float32.

    Raises:
        UserError: the model normalises keys, so that they are no product of them.
    """
    layers: Any = model.params["layers"]
    stacked = is_stacked(model.params)
    each: list[Mapping[str, Any]] = (
        [layers] if stacked else [layers[i] for i in range(model.config.num_layers)]
    )
    if "k_norm" in each[0]:
        raise UserError(
            f"{codec.name} rebuilds keys from what enters attention, and {model.config.name} "
            f"normalises them: give kvquant{codec.name[-1]}"
        )

    def of(at: int) -> Array:
        parts = [whole(layer)[..., at, :] for layer in each]
        weight = parts[0] if stacked else jnp.stack(parts)
        return weight.reshape(*weight.shape[:2], -1).astype(jnp.float32)

    return of(-2), of(-1)


def whole(layer: Mapping[str, Any]) -> Array:
    """The weights of queries, keys and values, [*L, D, H, r + 2, d], times their scale."""
    weight, scale = layer["qkv"][...], layer.get(scale_of("qkv"))
    return weight if scale is None else weight * scale[...][..., None, :, :, :]
