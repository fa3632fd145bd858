"""Llama: the decoder of Touvron et al. (2023), and what differs from it by configuration alone.

Grouped queries, Llama 3.1's stretched RoPE, tied embeddings, and the biases on q, k and v that
Qwen2 adds. Mistral without sliding windows is the same.

Parameters (D hidden, F intermediate, V vocabulary, L layers, H KV heads, r query heads per KV
head, d head dimension). Weights lie [in, out]; ``layers`` leaves have a leading axis L when
stacked, or are one sub-state per layer (keys 0..L-1) when not.

=================  ================  ===================================  =====================
path               shape             logical axes                         initialiser
=================  ================  ===================================  =====================
embed              [V, D]            vocab, embed                         std 0.02
layers/attn_norm   [D]               embed                                ones
layers/qkv         [D, H, r+2, d]    embed, kv_heads, group_and_kv,       std 1/sqrt(D)
                                     head_dim
layers/qkv_bias    [H, r+2, d]       kv_heads, group_and_kv, head_dim     std 0.02; only with
                                                                          attention_bias
layers/out         [H, r, d, D]      kv_heads, group, head_dim, embed     std 1/sqrt(H r d)
layers/mlp_norm    [D]               embed                                ones
layers/gate_up     [D, 2, F]         embed, gate_up, mlp                  std 1/sqrt(D)
layers/down        [F, D]            mlp, embed                           std 1/sqrt(F)
final_norm         [D]               embed                                ones
lm_head            [D, V]            embed, vocab                         std 1/sqrt(D); only
                                                                          if untied
=================  ================  ===================================  =====================

In ``qkv`` the group axis of KV head h holds its r query heads (global heads h r .. h r + r - 1),
then its key, then its value; so a mesh splits it along ``kv_heads``. In
``gate_up`` index 0 of the middle axis is the gate, index 1 the up projection.

With `ModelConfig.weight_dtype`, matrices and ``embed`` are of that dtype, and each has a
``…_scale`` beside it, of its output axes (those of ``embed`` are its rows).
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from kvjax import kernels
from kvjax.kernels import device
from kvjax.models.config import ModelConfig
from kvjax.models.family import CheckpointTensor, Layer, Model, ParamSpec, scale_of
from kvjax.models.narrow import scaled_product
from kvjax.models.parallel import added_up, looked_up, of_vocabulary, whole_groups
from kvjax.models.rope import rotate

_ALL = slice(None)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x over the root of the mean square of its last axis, times weight; in f32, as x's dtype."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)


def matmul(x: Array, weight: Array, inputs: int = 1, scale: Array | None = None) -> Array:
    """x [..., in] times weight whose first ``inputs`` axes are in, the others out."""
    size = math.prod(weight.shape[:inputs])
    x2, weight2 = x.reshape(-1, size), weight.reshape(size, -1)
    if scale is None:
        out = kernels.matmul(x2, weight2)
    else:
        out = scaled_product(x2, weight2, scale.reshape(-1)).astype(x.dtype)
    return out.reshape(*x.shape[:-1], *weight.shape[inputs:])


def _by_xla(x: Array, weight: Array, axis: int) -> bool:
    """Whether XLA multiplies by a matrix."""
    return kernels.matmul.choice(x, weight, axis=axis).name == "xla"


def _by_head(hidden: Array, head: Array, axis: int) -> Array:
    """Hidden states [..., D] times a matrix whose inputs lie on an axis, in f32."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    count = len(rows)
    one_of_few_bits = count == 1 and rows.dtype == jnp.bfloat16
    if one_of_few_bits and device.of().platform == "cpu" and _by_xla(rows, head, axis):
        # XLA for CPUs takes ten times as long for one row of bfloat16 as for two.
        rows = jnp.pad(rows, ((0, 1), (0, 0)))
    out = kernels.matmul(rows, head, axis=axis, dtype=jnp.float32)
    return out[:count].reshape(*hidden.shape[:-1], out.shape[1])


def norm_spec(size: int, axis: str, index: int, hf: str, gguf: str) -> ParamSpec:
    """The weight of a norm: one number per element of an axis."""
    return ParamSpec((size,), (axis,), None, index, (CheckpointTensor(hf, gguf),))


def _qkv_tensors(config: ModelConfig, kind: str, at: tuple[slice, ...]) -> tuple:
    """The tensors of q, k and v ("weight" or "bias"), one after the other on the group axis."""
    r = config.group_size
    parts = {"q": slice(0, r), "k": slice(r, r + 1), "v": slice(r + 1, r + 2)}
    return tuple(
        CheckpointTensor(
            f"self_attn.{letter}_proj.{kind}",
            f"attn_{letter}.{kind}",
            (*at, part),
            rotated=letter != "v",
        )
        for letter, part in parts.items()
    )


class LlamaLayer(Layer):
    """One decoder layer."""

    attn_norm: nnx.Param
    qkv: nnx.Param
    qkv_bias: nnx.Param
    out: nnx.Param
    mlp_norm: nnx.Param
    gate_up: nnx.Param
    down: nnx.Param

    @classmethod
    def table(cls, config: ModelConfig) -> dict[str, ParamSpec]:
        dim, ffn, d = config.hidden_size, config.intermediate_size, config.head_dim
        heads, group = config.num_kv_heads, config.group_size
        names = CheckpointTensor
        table = {
            "attn_norm": norm_spec(dim, "embed", 0, "input_layernorm.weight", "attn_norm.weight"),
            "qkv": ParamSpec(
                (dim, heads, group + 2, d),
                ("embed", "kv_heads", "group_and_kv", "head_dim"),
                dim**-0.5,
                1,
                _qkv_tensors(config, "weight", (_ALL, _ALL)),
                inputs=1,
            ),
            "out": ParamSpec(
                (heads, group, d, dim),
                ("kv_heads", "group", "head_dim", "embed"),
                (config.num_heads * d) ** -0.5,
                2,
                (names("self_attn.o_proj.weight", "attn_output.weight"),),
                inputs=3,
            ),
            "mlp_norm": norm_spec(
                dim, "embed", 3, "post_attention_layernorm.weight", "ffn_norm.weight"
            ),
            "gate_up": ParamSpec(
                (dim, 2, ffn),
                ("embed", "gate_up", "mlp"),
                dim**-0.5,
                4,
                (
                    names("mlp.gate_proj.weight", "ffn_gate.weight", (_ALL, slice(0, 1))),
                    names("mlp.up_proj.weight", "ffn_up.weight", (_ALL, slice(1, 2))),
                ),
                inputs=1,
            ),
            "down": ParamSpec(
                (ffn, dim),
                ("mlp", "embed"),
                ffn**-0.5,
                5,
                (names("mlp.down_proj.weight", "ffn_down.weight"),),
                inputs=1,
            ),
        }
        if config.attention_bias:
            table["qkv_bias"] = ParamSpec(
                (heads, group + 2, d),
                ("kv_heads", "group_and_kv", "head_dim"),
                0.02,
                6,
                _qkv_tensors(config, "bias", (_ALL,)),
            )
        return table

    def times(self, x: Array, name: str, inputs: int = 1) -> Array:
        """x times the matrix of that name, see `matmul`."""
        scale = getattr(self, scale_of(name), None)
        weight = getattr(self, name)[...]
        return matmul(x, weight, inputs, None if scale is None else scale[...])

    def enter(self, config: ModelConfig, x: Array) -> Array:
        return rms_norm(x, self.attn_norm[...], config.rms_norm_eps)

    def unrotated(self, config: ModelConfig, hidden: Array) -> tuple[Array, Array, Array]:
        """What enters attention [B, T, D] -> q [B, T, H r, d], k, v [B, T, H, d] before RoPE."""
        qkv = self.times(hidden, "qkv")
        if config.attention_bias:
            qkv = qkv + self.qkv_bias[...]
        q = whole_groups(config, qkv[..., :-2, :])
        q = q.reshape(*hidden.shape[:-1], config.num_heads, config.head_dim)
        return q, qkv[..., -2, :], qkv[..., -1, :]

    def project(
        self, config: ModelConfig, hidden: Array, cos: Array, sin: Array
    ) -> tuple[Array, Array, Array]:
        q, k, v = self.unrotated(config, hidden)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def added(self, config: ModelConfig, attended: Array) -> Array:
        flat = attended.reshape(*attended.shape[:-2], -1)
        return added_up(config, self.times(flat, "out", inputs=3))

    def finish(self, config: ModelConfig, x: Array, attended: Array) -> Array:
        x = x + self.added(config, attended.astype(x.dtype))
        normed = rms_norm(x, self.mlp_norm[...], config.rms_norm_eps)
        gate_up = self.times(normed, "gate_up")
        hidden = jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]
        return x + added_up(config, self.times(hidden, "down"))


class Llama(Model):
    """The whole model."""

    layer_class = LlamaLayer
    embed: nnx.Param
    final_norm: nnx.Param
    lm_head: nnx.Param

    @classmethod
    def table(cls, config: ModelConfig) -> dict[str, ParamSpec]:
        vocab, dim = config.vocab_size, config.hidden_size
        names = CheckpointTensor
        table = {
            "embed": ParamSpec(
                (vocab, dim),
                ("vocab", "embed"),
                0.02,
                7,
                (names("model.embed_tokens.weight", "token_embd.weight"),),
                rows=True,
            ),
            "final_norm": norm_spec(dim, "embed", 8, "model.norm.weight", "output_norm.weight"),
        }
        if not config.tie_word_embeddings:
            table["lm_head"] = ParamSpec(
                (dim, vocab),
                ("embed", "vocab"),
                dim**-0.5,
                9,
                (names("lm_head.weight", "output.weight"),),
                inputs=1,
            )
        return table

    def embed_tokens(self, config: ModelConfig, tokens: Array) -> Array:
        scale = getattr(self, scale_of("embed"), None)
        return looked_up(config, self.embed[...], tokens, None if scale is None else scale[...])

    def last_hidden(self, config: ModelConfig, x: Array) -> Array:
        return rms_norm(x, self.final_norm[...], config.rms_norm_eps)

    def logits(self, config: ModelConfig, hidden: Array) -> Array:
        name, axis = ("embed", 1) if config.tie_word_embeddings else ("lm_head", 0)
        head, scale = getattr(self, name)[...], getattr(self, scale_of(name), None)
        if scale is not None:
            return of_vocabulary(config, scaled_product(hidden, head, scale[...], axis))
        return of_vocabulary(config, _by_head(hidden, head, axis))
