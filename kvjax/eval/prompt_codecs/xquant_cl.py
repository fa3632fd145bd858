"""XQuant-CL (Tomar et al. 2025): codes of how what enters attention differs from layer to layer.

The paper's section on similarity across layers, of which an abstract and third parties' accounts
were at hand, and no code. A layer adds to the residual stream, so what enters attention, normed, X,
is near to what entered it a layer before. Stored are codes of X less the sum of what is stored of
the layers before it; the reader goes through the layers in order, adds up, and computes keys and
values of the sum. Where queries share heads, codes are of the difference times U of the singular
value decomposition [W_k W_v] = U S V, and what is added up is times Uᵀ again. The first three
layers have 4 bits, of which the first one has X in them, and not a difference.

Each difference is from what a reader has, so the codes' losses do not add up over layers, and what
a layer's U leaves out costs keys and values of that layer nothing. X is behind the norm and its
weight, as those accounts have it, although it is the stream before it that changes least.

Assumed: scales by token, for 128 columns at most (third parties have these of differences, and
those of keys by channel elsewhere); in the first three layers differences, too. The sum is float32:
it is no part of what is stored. Where a key and a value of all heads are together no narrower than
X, as where queries share no heads, X itself takes fewer codes, and U is the identity. Keys that are
normalised (Qwen3) are refused, as by XQuant.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from kvjax.cache.policy import Artefacts
from kvjax.cache.policy.rotary import ROPE_FREQUENCY, turned
from kvjax.engine.dense import DensePass
from kvjax.eval.prompt_codecs.base import ModelShape, PromptCodec, Rows
from kvjax.eval.prompt_codecs.codes import NUMBER, code_bytes, group_size, in_groups
from kvjax.eval.prompt_codecs.xquant import keys_and_values
from kvjax.models import LoadedModel

INPUT, OUTPUT = "difference_input", "difference_output"
"""U [L, D, r] and S V [L, r, 2 · H · d] of the weights of keys and values, float32."""


@dataclasses.dataclass(frozen=True)
class XQuantCL(PromptCodec):
    """Codes of differences between layers of what enters attention."""

    artefacts = (ROPE_FREQUENCY, INPUT, OUTPUT)

    bits: int = 4
    group: int = 128
    first: int = 3
    """Layers that have 4 bits whatever the others have."""

    @property
    def name(self) -> str:
        return f"xquantcl{self.bits}"

    def from_weights(self, model: LoadedModel) -> Artefacts:
        weight = jnp.concatenate(keys_and_values(model, self), axis=-1)
        num_layers, size, columns = weight.shape
        if size <= columns:
            return {
                INPUT: jnp.broadcast_to(jnp.eye(size), (num_layers, size, size)),
                OUTPUT: weight,
            }
        left, value, right = jnp.linalg.svd(weight, full_matrices=False)
        return {INPUT: left, OUTPUT: value[..., None] * right}

    def restore(self, dense: DensePass, length: Int32[Array, ""], artefacts: Artefacts) -> Rows:
        num_tokens = dense.k.shape[1]
        token = jnp.arange(num_tokens, dtype=jnp.int32)

        def of_layer(held, part):
            layer, k, v, hidden, frequency, inner, outer = part
            difference = (hidden.astype(jnp.float32) - held) @ inner
            four, fewer = (in_groups(difference, bits, self.group) for bits in (4, self.bits))
            stored = jnp.where(layer < self.first, four, fewer)
            # What is added behind the products, a bias and RoPE, is exact.
            lost = jnp.split((difference - stored) @ outer, 2, axis=-1)
            key, value = (x.reshape(k.shape) for x in lost)
            angle = (token[:, None] * frequency)[:, None]
            key = turned(key, jnp.cos(angle), jnp.sin(angle))
            rows = k.astype(jnp.float32) - key, v.astype(jnp.float32) - value
            return held + stored @ inner.T, rows

        layers = jnp.arange(len(dense.k), dtype=jnp.int32)
        parts = layers, dense.k, dense.v, dense.hidden
        nothing = jnp.zeros(dense.hidden.shape[1:], jnp.float32)
        of_model = tuple(artefacts[name] for name in self.artefacts)
        return lax.scan(of_layer, nothing, (*parts, *of_model))[1]

    def stored_bytes(self, shape: ModelShape, length: int) -> int:
        row = min(shape.hidden_size, 2 * shape.num_kv_heads * shape.head_dim)
        first = min(self.first, shape.num_layers)
        codes = sum(
            layers * code_bytes(length * row, bits)
            for layers, bits in ((first, 4), (shape.num_layers - first, self.bits))
        )
        groups = row // group_size(row, self.group)
        return codes + shape.num_layers * length * groups * 2 * NUMBER
