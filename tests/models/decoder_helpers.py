"""What the tests of models share: dense attention callbacks and checkpoint loading."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.models import decoder
from kvjax.models.config import ModelConfig
from kvjax.models.layout import TensorSlot, tensor_slots


def dense_attention(q, k, v, query_position, key_position):
    """Plain attention: q [B, T, H r, d], k and v [B, S, H, d], positions [B, T] and [B, S]."""
    batch, length, _, d = q.shape
    kv = k.shape[2]
    grouped = q.reshape(batch, length, kv, -1, d)
    scores = jnp.einsum("bthrd,bshd->bhrts", grouped, k) * d**-0.5
    allowed = key_position[:, None, :] <= query_position[:, :, None]
    scores = jnp.where(allowed[:, None, None], scores, -jnp.inf)
    out = jnp.einsum("bhrts,bshd->bthrd", jax.nn.softmax(scores, axis=-1), v)
    return out.reshape(q.shape)


def dense_scores(config: ModelConfig, params: nnx.State, tokens, at=slice(None)) -> jax.Array:
    """Logits after each of some tokens [T], or after those `at`, without any cache."""
    position = jnp.arange(len(tokens), dtype=jnp.int32)[None]

    def attend(carry, layer, q, k, v, _):
        return carry, dense_attention(q, k, v, position, position), ()

    hidden, _, _ = decoder.forward(config, params, tokens[None], position, attend, ())
    return decoder.logits(config, params, hidden[0][at])


def empty_cache(config: ModelConfig, batch: int, size: int) -> tuple[jax.Array, jax.Array]:
    """A dense cache of ``size`` tokens: two [L, B, size, H, d] f32."""
    shape = (config.num_layers, batch, size, config.num_kv_heads, config.head_dim)
    return jnp.zeros(shape), jnp.zeros(shape)


def run(config, params, tokens, start, cache):
    """Forward of ``tokens`` [B, T] at positions start.. with a dense cache.

    Returns f32 logits [B, T, V] and the cache.
    """
    batch, length = tokens.shape
    positions = jnp.broadcast_to(start + jnp.arange(length), (batch, length))
    slots = jnp.broadcast_to(jnp.arange(cache[0].shape[2]), (batch, cache[0].shape[2]))

    def attend(carry, layer, q, k, v, _):
        keys, values = carry
        at = (layer, 0, start, 0, 0)
        keys = jax.lax.dynamic_update_slice(keys, k[None], at)
        values = jax.lax.dynamic_update_slice(values, v[None], at)
        out = dense_attention(q, keys[layer], values[layer], positions, slots)
        return (keys, values), out, None

    hidden, cache, _ = decoder.forward(config, params, tokens, positions, attend, cache)
    return decoder.logits(config, params, hidden), cache


def arranged(slot: TensorSlot, tensor: np.ndarray) -> np.ndarray:
    """A tensor of a file as it lies in the parameter that it fills."""
    assert tensor.shape == slot.file_shape
    return (tensor.T if slot.transpose else tensor).reshape(slot.shape)


def params_from(config: ModelConfig, read: Callable[[str], np.ndarray]) -> nnx.State:
    """Stacked f32 parameters from tensors that ``read`` returns by their Hugging Face names."""
    params = jax.tree.map(
        lambda leaf: np.full(leaf.shape, np.nan, leaf.dtype),
        decoder.abstract_params(config, jnp.float32),
    )
    for slot in tensor_slots(config):
        target: Any = params
        for name in slot.param:
            target = target[name]
        value = cast(np.ndarray, target[...])
        part = value if slot.layer is None else value[slot.layer]
        part[slot.index] = arranged(slot, read(slot.hf_name))
    return jax.tree.map(jnp.asarray, params)


def unstacked(params: nnx.State) -> nnx.State:
    """Stacked parameters with one array per layer and name."""
    rest = {name: value for name, value in params.items() if name != "layers"}
    stacks = cast(nnx.State, params["layers"])
    layers = [
        {name: leaf.replace(leaf[...][i]) for name, leaf in stacks.items()}
        for i in range(len(jax.tree.leaves(stacks)[0]))
    ]
    return nnx.State({**rest, "layers": dict(enumerate(layers))})
