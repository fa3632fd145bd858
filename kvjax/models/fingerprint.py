"""A short name for a model's weights, so that what was calibrated on one is not used on another."""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable
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
    plain: dict[str, Any] = nnx.to_pure_dict(params)  # type: ignore[assignment]
    layers, stacked = plain.pop("layers"), is_stacked(params)
    near = functools.cache(lambda name: _near(layers[name]))

    def sample(name: str, layer: int | None) -> bytes:
        if layer is None:
            return sample_of(plain[name])
        return sample_of(near(name)[layer] if stacked else layers[layer][name])

    return hash_of_samples(config, plain, layers if stacked else layers[0], sample)


def hash_of_samples(
    config: ModelConfig,
    plain: Iterable[str],
    layers: Iterable[str],
    sample: Callable[[str, int | None], bytes],
) -> str:
    """The same from what `sample_bytes` makes of each tensor.

    Args:
        config: the model.
        plain, layers: names of the parameters outside the layers and of a layer.
        sample: of the parameter of that name, in that layer.
    """
    shape = dataclasses.asdict(config)
    for told_nowhere in ("name", "weight_dtype"):
        shape.pop(told_nowhere)
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True, default=str).encode())
    for name in sorted(plain):
        digest.update(name.encode() + sample(name, None))
    for name in sorted(layers):
        for index in range(config.num_layers):
            digest.update(name.encode() + sample(name, index))
    return digest.hexdigest()[:16]


def sample_indices(shape: tuple[int, ...]) -> np.ndarray:
    """Where in a tensor, taken as flat, the weights are that are looked at [n]: evenly spaced."""
    rows = shape[0] if len(shape) > 1 else 1
    columns = math.prod(shape) // rows
    first = np.arange(rows)[:: max(1, rows // 8)][:8] * columns
    return (first[:, None] + np.arange(min(columns, SAMPLE // 8))).ravel()


def sample_bytes(weights: jax.Array | np.ndarray) -> bytes:
    """Some weights, as bfloat16."""
    return np.asarray(weights.astype(jnp.bfloat16).astype(jnp.float32)).tobytes()


def _near(leaf: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """The same for NumPy where the device is the host: no program has to be compiled."""
    if isinstance(leaf, jax.Array) and all(d.platform == "cpu" for d in leaf.devices()):
        return np.asarray(leaf)
    return leaf


def sample_of(leaf: jax.Array | np.ndarray) -> bytes:
    """Those of a tensor, at `sample_indices`."""
    leaf = _near(leaf)
    rows = leaf.reshape(leaf.shape[0], -1) if leaf.ndim > 1 else leaf[None]
    step = max(1, rows.shape[0] // 8)
    return sample_bytes(rows[::step][:8, : SAMPLE // 8])
