"""Rotary position embedding (RoPE), with the frequency scaling of Llama 3.1."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.policy.rotary import ROPE_FREQUENCY
from kvjax.models.config import ModelConfig


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Angular frequency of each rotated pair, radians per token: [d / 2] f32.

    Plain RoPE is ``theta ** (-2 i / d)``. Llama 3.1 divides the slow ones by ``factor`` and
    blends linearly, in the number of turns over the original context, towards the fast ones.
    """
    d = config.head_dim
    frequency = config.rope_theta ** (-np.arange(0, d, 2, dtype=np.float64) / d)
    scaling = config.rope_scaling
    if scaling is not None:
        turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
        span = scaling.high_freq_factor - scaling.low_freq_factor
        keep = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
        frequency = keep * frequency + (1.0 - keep) * frequency / scaling.factor
    return frequency.astype(np.float32)


def rope_artefacts(config: ModelConfig) -> dict[str, Array]:
    """The frequencies of every layer, for methods that look at queries or keys before RoPE."""
    frequency = jnp.asarray(rope_frequencies(config))
    return {ROPE_FREQUENCY: jnp.broadcast_to(frequency, (config.num_layers, *frequency.shape))}


def rope_angles(
    config: ModelConfig, positions: Int[Array, "..."]
) -> tuple[Float[Array, "... half"], Float[Array, "... half"]]:
    """Cosine and sine of every pair's angle at ``positions``: two [*B, d / 2] f32."""
    angle = positions[..., None].astype(jnp.float32) * rope_frequencies(config)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "... heads d"],
    cos: Float[Array, "... half"],
    sin: Float[Array, "... half"],
) -> Float[Array, "... heads d"]:
    """Rotates the pairs (i, i + d/2) of every head, in f32, and returns x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    rotated = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return rotated.astype(x.dtype)
