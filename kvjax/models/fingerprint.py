"""A short name for a model's weights, so that what was calibrated on one is not used on another."""

import dataclasses
import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.models.config import ModelConfig
from kvjax.models.decoder import is_stacked

SAMPLE = 64
"""Weights of every tensor that are looked at."""


def model_hash(config: ModelConfig, params: nnx.State) -> str:
    """16 hexadecimal digits of a model's shape and a sample of all its weights.

    The same for every layout (layers stacked or not) and dtype of the same checkpoint: weights
    count as rounded to bfloat16.
    """
    shape = dataclasses.asdict(config)
    shape.pop("name")
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True, default=str).encode())
    plain: dict[str, Any] = nnx.to_pure_dict(params)  # type: ignore[assignment]
    layers, stacked = plain.pop("layers"), is_stacked(params)
    for name in sorted(plain):
        digest.update(name.encode() + _sample(plain[name]))
    names = sorted(layers if stacked else layers[0])
    for name in names:
        whole = _near(layers[name]) if stacked else None
        for index in range(config.num_layers):
            leaf = layers[index][name] if whole is None else whole[index]
            digest.update(name.encode() + _sample(leaf))
    return digest.hexdigest()[:16]


def _near(leaf: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """The same for NumPy where the device is the host: no program has to be compiled."""
    if isinstance(leaf, jax.Array) and all(d.platform == "cpu" for d in leaf.devices()):
        return np.asarray(leaf)
    return leaf


def _sample(leaf: jax.Array | np.ndarray) -> bytes:
    """Evenly spaced weights of a tensor, as bfloat16."""
    leaf = _near(leaf)
    rows = leaf.reshape(leaf.shape[0], -1) if leaf.ndim > 1 else leaf[None]
    step = max(1, rows.shape[0] // 8)
    part = rows[::step][:8, : SAMPLE // 8]
    return np.asarray(part.astype(jnp.bfloat16).astype(jnp.float32)).tobytes()
