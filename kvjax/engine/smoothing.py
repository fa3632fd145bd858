"""How keys are smoothed before they become codes: measured once on a model's own keys."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.cache.store import KeySmoothing
from kvjax.cache.store.codec import Codec, Plain
from kvjax.kernels import prefill_attention
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import forward
from kvjax.models.parallel import own_share

TOKENS = 512
"""Random ones, whose keys are measured."""
STRIDE = 16
"""Positions from one to the next, at most: keys of long prompts are turned as far."""
FIRST = 4
"""Tokens that are left out: attention sinks, whose keys are unlike all others."""


def smooths(config: ModelConfig, codec: Codec) -> bool:
    """Whether keys are smoothed: where they have biases and are stored as codes."""
    return config.attention_bias and not isinstance(codec.of_keys, Plain)


def smoothing_for(
    config: ModelConfig, params: nnx.State, codec: Codec, parallel: Any = None
) -> KeySmoothing | None:
    """That of a cache's keys; None where they are stored as they are.

    Args:
        config: the model, whole.
        params: its parameters, as they lie.
        codec: what stores keys.
        parallel: how they are spread over devices (`kvjax.engine.parallel.Parallel`); None on one.
    """
    return measured_smoothing(config, params, parallel) if smooths(config, codec) else None


def measured_smoothing(config: ModelConfig, params: nnx.State, parallel: Any) -> KeySmoothing:
    """That of any codes of a model's keys; arguments as of `smoothing_for`."""
    if parallel is None:
        return _on_one_device(config, params)
    return parallel.key_smoothing(params)


def key_smoothing(config: ModelConfig, params: nnx.State) -> KeySmoothing:
    """That of a model, from one pass over random tokens.

    On several devices a pass of its own: each has that of its heads.
    """
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, TOKENS), dtype=np.int32)
    stride = min(STRIDE, max(1, config.max_position_embeddings // TOKENS))
    positions = stride * jnp.arange(TOKENS, dtype=jnp.int32)[None]
    heads, d = config.num_kv_heads, config.head_dim

    def attend(carry, layer, q, k, v, hidden):
        out = prefill_attention(own_share(config, q[0]), k[0], v[0])
        keys, queries = k[0, FIRST:].astype(jnp.float32), q[0, FIRST:].astype(jnp.float32)
        square = jnp.mean(queries.reshape(TOKENS - FIRST, heads, -1, d) ** 2, axis=(0, 2))
        return carry, out[None], (jnp.mean(keys, axis=0), jnp.var(keys, axis=0), square)

    _, _, found = forward(config, params, jnp.asarray(tokens), positions, attend, ())
    return KeySmoothing.of(*found)


_on_one_device = jax.jit(key_smoothing, static_argnums=0)
