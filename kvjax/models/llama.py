"""The Llama decoder in Flax NNX: parameters, forward pass, logits.

It knows neither a cache nor kernels: attention is a callback that gets rotated queries and keys
and threads a carry (for instance the KV pool) through the layers.

Parameters (D hidden, F intermediate, V vocabulary, L layers, H KV heads, r query heads per KV
head, d head dimension). Weights lie [in, out]; ``layers`` leaves have a leading axis L when
stacked, or are one sub-state per layer (keys 0..L-1) when not.

=================  ================  ===================================  =====================
path               shape             logical axes                         initialiser
=================  ================  ===================================  =====================
embed              [V, D]            vocab, embed                         std 0.02
layers/attn_norm   [D]               embed                                ones
layers/qkv         [D, H, r+2, d]    embed, kv_heads, group, head_dim     std 1/sqrt(D)
layers/qkv_bias    [H, r+2, d]       kv_heads, group, head_dim            std 0.02; only with
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
``kvjax.models.layout`` says which checkpoint tensor fills which part.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from kvjax.models.config import LlamaConfig
from kvjax.models.rope import rope_angles, rotate


@runtime_checkable
class Attend[Carry](Protocol):
    """Attention of one layer: ``(carry, layer, q, k, v) -> (carry, out, aux)``.

    ``layer`` is an i32 scalar; q is [B, T, H r, d], k and v are [B, T, H, d], q and k after RoPE;
    out has the shape of q. ``aux`` is any pytree of arrays, stacked over the layers afterwards.
    """

    def __call__(
        self, carry: Carry, layer: Array, q: Array, k: Array, v: Array, /
    ) -> tuple[Carry, Array, Any]: ...


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: its shape, the name of each axis, and the std of its random initial values.

    ``std`` None means ones. ``index`` tells parameters apart when they are initialised.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    std: float | None
    index: int

    def init(self, dtype: DTypeLike, seed: Array | int, layer: Array | int) -> Array:
        """Initial values, uniform with standard deviation ``std``.

        They come from hashing the coordinates, so that a device writes them in one pass without
        a buffer of random bits beside them, and each shard of a mesh can make its own part.
        """
        if self.std is None:
            return jnp.ones(self.shape, dtype)
        bits = jnp.uint32(self.index)
        for salt in (jnp.asarray(seed), jnp.asarray(layer)):
            bits = _mix(bits * jnp.uint32(0x85157AF5) + salt.astype(jnp.uint32))
        for axis in range(len(self.shape)):
            coordinate = jax.lax.broadcasted_iota(jnp.uint32, self.shape, axis)
            bits = _mix(bits + coordinate * jnp.uint32(0x9E3779B1))
        # The upper 24 bits fill a f32 in [-1, 1) exactly.
        unit = (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-23) - jnp.float32(1.0)
        return (unit * jnp.float32(self.std * math.sqrt(3.0))).astype(dtype)


def _mix(x: Array) -> Array:
    """A 32-bit integer hash: xor-shifts and odd multiplications."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def layer_table(config: LlamaConfig) -> dict[str, ParamSpec]:
    """The parameters of one layer by name."""
    dim, ffn, d = config.hidden_size, config.intermediate_size, config.head_dim
    heads, group = config.num_kv_heads, config.group_size
    table = {
        "attn_norm": ParamSpec((dim,), ("embed",), None, 0),
        "qkv": ParamSpec(
            (dim, heads, group + 2, d),
            ("embed", "kv_heads", "group", "head_dim"),
            dim**-0.5,
            1,
        ),
        "out": ParamSpec(
            (heads, group, d, dim),
            ("kv_heads", "group", "head_dim", "embed"),
            (config.num_heads * d) ** -0.5,
            2,
        ),
        "mlp_norm": ParamSpec((dim,), ("embed",), None, 3),
        "gate_up": ParamSpec((dim, 2, ffn), ("embed", "gate_up", "mlp"), dim**-0.5, 4),
        "down": ParamSpec((ffn, dim), ("mlp", "embed"), ffn**-0.5, 5),
    }
    if config.attention_bias:
        table["qkv_bias"] = ParamSpec(
            (heads, group + 2, d), ("kv_heads", "group", "head_dim"), 0.02, 6
        )
    return table


def model_table(config: LlamaConfig) -> dict[str, ParamSpec]:
    """The parameters outside the layers by name."""
    vocab, dim = config.vocab_size, config.hidden_size
    table = {
        "embed": ParamSpec((vocab, dim), ("vocab", "embed"), 0.02, 7),
        "final_norm": ParamSpec((dim,), ("embed",), None, 8),
    }
    if not config.tie_word_embeddings:
        table["lm_head"] = ParamSpec((dim, vocab), ("embed", "vocab"), dim**-0.5, 9)
    return table


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)


def _matmul(x: Array, weight: Array, inputs: int = 1) -> Array:
    """x [..., in] times weight whose first ``inputs`` axes are in, the others out."""
    size = math.prod(weight.shape[:inputs])
    out = x.reshape(-1, size) @ weight.reshape(size, -1)
    return out.reshape(*x.shape[:-1], *weight.shape[inputs:])


class Layer(nnx.Module):
    """One decoder layer: parameters, and the two halves around attention."""

    attn_norm: nnx.Param
    qkv: nnx.Param
    qkv_bias: nnx.Param
    out: nnx.Param
    mlp_norm: nnx.Param
    gate_up: nnx.Param
    down: nnx.Param

    def __init__(
        self, config: LlamaConfig, dtype: DTypeLike, seed: Array | int, layer: Array | int
    ):
        for name, spec in layer_table(config).items():
            setattr(self, name, nnx.Param(spec.init(dtype, seed, layer)))

    def project(
        self, config: LlamaConfig, x: Array, cos: Array, sin: Array
    ) -> tuple[Array, Array, Array]:
        """Residual stream [B, T, D] -> rotated q [B, T, H r, d], rotated k and v [B, T, H, d]."""
        qkv = _matmul(_rms_norm(x, self.attn_norm[...], config.rms_norm_eps), self.qkv[...])
        if config.attention_bias:
            qkv = qkv + self.qkv_bias[...]
        r = config.group_size
        q = qkv[..., :r, :].reshape(*x.shape[:-1], config.num_heads, config.head_dim)
        return rotate(q, cos, sin), rotate(qkv[..., r, :], cos, sin), qkv[..., r + 1, :]

    def finish(self, config: LlamaConfig, x: Array, attended: Array) -> Array:
        """Adds the output projection of ``attended`` [B, T, H r, d] and the MLP to x."""
        attended = attended.reshape(*x.shape[:-1], -1).astype(x.dtype)
        x = x + _matmul(attended, self.out[...], inputs=3)
        normed = _rms_norm(x, self.mlp_norm[...], config.rms_norm_eps)
        gate_up = _matmul(normed, self.gate_up[...])
        hidden = jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]
        return x + _matmul(hidden, self.down[...])


class Llama(nnx.Module):
    """The whole model; ``layers`` is one stacked Layer or a list of them."""

    embed: nnx.Param
    final_norm: nnx.Param
    lm_head: nnx.Param

    def __init__(
        self, config: LlamaConfig, dtype: DTypeLike, seed: Array | int = 0, stacked: bool = True
    ):
        for name, spec in model_table(config).items():
            setattr(self, name, nnx.Param(spec.init(dtype, seed, 0)))
        make = functools.partial(Layer, config, dtype, seed)
        if stacked:
            self.layers = nnx.vmap(make)(jnp.arange(config.num_layers))
        else:
            self.layers = nnx.List([make(i) for i in range(config.num_layers)])


def _build(config: LlamaConfig, dtype: DTypeLike, seed: Array | int, stacked: bool) -> nnx.State:
    return nnx.split(Llama(config, dtype, seed, stacked), nnx.Param)[1]


def abstract_params(config: LlamaConfig, dtype: DTypeLike, stacked: bool = True) -> nnx.State:
    """The parameters as ``jax.ShapeDtypeStruct`` leaves of ``dtype``; nothing is allocated."""
    return jax.eval_shape(lambda: _build(config, dtype, 0, stacked))


def init_params(
    config: LlamaConfig, dtype: DTypeLike, seed: int = 0, stacked: bool = True
) -> nnx.State:
    """Random weights of the true shapes, made on the default device without a second copy.

    The same seed gives the same values, stacked or not.
    """
    salt = np.uint32(seed & 0xFFFFFFFF)
    return jax.jit(_build, static_argnums=(0, 1, 3))(config, jnp.dtype(dtype), salt, stacked)


def logical_axes(config: LlamaConfig, stacked: bool = True) -> dict[tuple[str | int, ...], tuple]:
    """Path of every parameter -> the names of its axes (``layers`` first when stacked)."""
    axes: dict[tuple[str | int, ...], tuple] = {
        (name,): spec.axes for name, spec in model_table(config).items()
    }
    for name, spec in layer_table(config).items():
        if stacked:
            axes[("layers", name)] = ("layers", *spec.axes)
        else:
            axes.update({("layers", i, name): spec.axes for i in range(config.num_layers)})
    return axes


def is_stacked(params: nnx.State) -> bool:
    """Whether the layers are stacked along a leading axis (else one sub-state per layer)."""
    return not any(isinstance(key, int) for key in cast(nnx.State, params["layers"]))


def unstack_layers(params: nnx.State, donate: bool = False) -> nnx.State:
    """The same parameters with one array per layer and name.

    XLA's CPU backend copies a layer out of a stacked array before it multiplies by it, which
    doubles the memory traffic of decoding; with single arrays nothing is copied. Compiled
    programs grow with the number of layers, so this pays on CPU only.

    Args:
        params: stacked parameters (others are returned as they are).
        donate: free each stacked array once it is split, so that at most one exists twice.
    """
    if not is_stacked(params):
        return params
    layers = cast(nnx.State, params["layers"])
    split: list[dict[str, Any]] = []
    for name, leaf in layers.items():
        value = leaf[...]
        parts = jax.block_until_ready([value[i] for i in range(value.shape[0])])
        if donate:
            value.delete()
        split = split or [{} for _ in parts]
        for target, part in zip(split, parts, strict=True):
            target[name] = leaf.replace(part)
    rest = {name: value for name, value in params.items() if name != "layers"}
    return nnx.State({**rest, "layers": dict(enumerate(split))})


@functools.lru_cache(maxsize=64)
def _graphdef(config: LlamaConfig, stacked: bool) -> Any:
    """Structure of the model, made without arrays."""
    return nnx.split(nnx.eval_shape(lambda: Llama(config, jnp.float32, 0, stacked)))[0]


def forward[Carry](
    config: LlamaConfig,
    params: nnx.State,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attend: Attend[Carry],
    carry: Carry,
) -> tuple[Float[Array, "B T D"], Carry, PyTree]:
    """Runs all layers on a batch of tokens.

    Args:
        config: the model (static).
        params: as ``abstract_params(config, dtype)`` describes them, stacked or not; their dtype
            is the dtype of the residual stream.
        tokens: token ids.
        positions: position of each token in its sequence; queries and keys are rotated by it.
        attend: attention of one layer, see ``Attend``.
        carry: threaded through the layers in order; updated in place by XLA when the caller
            donates it.

    Returns:
        The hidden states after the final norm, the last carry, and every leaf of ``aux`` stacked
        along a leading layer axis.

    Raises:
        ValueError: tokens and positions differ in shape or are not of rank 2.
    """
    if tokens.ndim != 2 or tokens.shape != positions.shape:
        raise ValueError(
            "tokens and positions must have one shape [B, T], got "
            f"{tokens.shape} and {positions.shape}"
        )
    stacked = is_stacked(params)
    model = nnx.merge(_graphdef(config, stacked), params)
    cos, sin = rope_angles(config, positions)
    x = jnp.take(model.embed[...], tokens, axis=0)

    def run(layer: Layer, index: Array, x: Array, carry: Carry) -> tuple[Array, Carry, Any]:
        q, k, v = layer.project(config, x, cos, sin)
        carry, attended, aux = attend(carry, index, q, k, v)
        return layer.finish(config, x, attended), carry, aux

    if stacked:
        graphdef, layers = nnx.split(model.layers)

        def body(state: tuple[Array, Carry], inputs: tuple[Array, nnx.State]) -> Any:
            x, carry, aux = run(nnx.merge(graphdef, inputs[1]), inputs[0], *state)
            return (x, carry), aux

        indices = jnp.arange(config.num_layers, dtype=jnp.int32)
        (x, carry), aux = jax.lax.scan(body, (x, carry), (indices, layers))
    else:
        # Jitted, so that one trace serves every layer.
        graphdef = nnx.split(model.layers[0])[0]

        @jax.jit
        def run_split(layer: nnx.State, index: Array, x: Array, carry: Carry):
            return run(nnx.merge(graphdef, layer), index, x, carry)

        collected = []
        for i, layer in enumerate(model.layers):
            x, carry, aux = run_split(nnx.split(layer)[1], jnp.int32(i), x, carry)
            collected.append(aux)
        aux = jax.tree.map(lambda *leaves: jnp.stack(leaves), *collected)
    return _rms_norm(x, model.final_norm[...], config.rms_norm_eps), carry, aux


def logits(
    config: LlamaConfig, params: nnx.State, hidden: Float[Array, "... D"]
) -> Float[Array, "... V"]:
    """Vocabulary logits in f32 of hidden states as ``forward`` returns them."""
    name, axis = ("embed", 1) if config.tie_word_embeddings else ("lm_head", 0)
    head = cast(nnx.Param, params[name])[...]
    dims = (((hidden.ndim - 1,), (axis,)), ((), ()))
    return jax.lax.dot_general(hidden, head, dims, preferred_element_type=jnp.float32)
