"""Weights of a model from a checkpoint of any supported format, and to an Orbax one.

One file per format; `fill.py` puts what they read in its place. What is not here: which tensor
belongs where (`kvjax.models.layout`), and where checkpoints come from (`kvjax.models.hub`).
"""

import dataclasses
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from kvjax.errors import UserError
from kvjax.models.config import ModelConfig
from kvjax.models.files import find, shown_path
from kvjax.models.hub import Progress
from kvjax.models.weights.fill import fill_params
from kvjax.models.weights.gguf import GGUFSource, config_from_gguf
from kvjax.models.weights.hashed import source_hash
from kvjax.models.weights.orbax import is_orbax, load_orbax, orbax_hash, read_config
from kvjax.models.weights.orbax_save import save_orbax
from kvjax.models.weights.placement import Lying
from kvjax.models.weights.safetensors import SafetensorsSource
from kvjax.models.weights.source import TensorSource

__all__ = [
    "load_params",
    "checkpoint_config",
    "checkpoint_hash",
    "save_orbax",
    "config_from_gguf",
    "Progress",
]

_DTYPES = ("float32", "bfloat16", "float16")
# Fields that have to agree when a model is asked for by name and its weights are given.
_SHAPE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "attention_bias",
    "family",
)


def load_params(
    path: str | os.PathLike[str],
    config: ModelConfig | None = None,
    dtype: DTypeLike = jnp.float32,
    progress: Progress | None = None,
    *,
    weight_dtype: str | None = None,
    stacked: bool = True,
    shardings: Lying = None,
) -> tuple[ModelConfig, nnx.State]:
    """Loads a checkpoint, streaming: host memory stays at the weights in `dtype` plus 1 GB.

    Args:
        path: a folder with safetensors and config.json, a GGUF file, or an Orbax checkpoint.
        config: what the checkpoint has to be. Its shapes must agree; its name is kept; the rest
            (rotary base and scaling, epsilon, context) is the checkpoint's. It stands in for a
            missing config.json. None takes the checkpoint as it is.
        dtype: float32, bfloat16 or float16.
        weight_dtype: of matrices and embeddings, see `kvjax.models.narrow`; None for `dtype`.
        progress: called as progress("load", bytes done, bytes in all).
        stacked: layers stacked along a leading axis, or one array per layer.
        shardings: sharding per parameter path (see `kvjax.models.decoder.logical_axes`), or how
            they are dealt to several devices: nothing but a parameter of one layer is held twice.

    Returns:
        The configuration and the parameters, as `abstract_params(config, dtype, stacked)`.

    Raises:
        UserError: the checkpoint is missing, truncated, damaged, of another architecture or
            format, holds NaN, or disagrees with its configuration or with `config`; there is no
            such `weight_dtype`.
        ValueError: another dtype.
    """
    wanted = np.dtype(dtype)
    if wanted.name not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {wanted.name}")
    if find(path) is None:
        raise UserError(f"{shown_path(path)}: no such file or folder")
    folder = Path(path)
    if is_orbax(folder):
        found = _agreed(read_config(folder), config, folder, weight_dtype)
        return found, load_orbax(
            folder, found, wanted, progress, stacked=stacked, shardings=shardings
        )
    source = _open_source(folder, config)
    try:
        found = _agreed(source.config, config, source.path, weight_dtype)
        return found, fill_params(
            source, found, wanted, progress, stacked=stacked, shardings=shardings
        )
    finally:
        source.close()


def checkpoint_config(
    path: str | os.PathLike[str], config: ModelConfig | None, weight_dtype: str | None
) -> ModelConfig:
    """The configuration that `load_params` returns; no weights are read.

    Raises:
        UserError: as `load_params`.
    """
    folder = Path(path)
    if is_orbax(folder):
        return _agreed(read_config(folder), config, folder, weight_dtype)
    source = _open_source(folder, config)
    try:
        return _agreed(source.config, config, source.path, weight_dtype)
    finally:
        source.close()


def checkpoint_hash(path: str | os.PathLike[str], config: ModelConfig, dtype: DTypeLike) -> str:
    """The `model_hash` of the checkpoint `path`, a model of which was loaded in `dtype`.

    Little is read of safetensors and GGUF files; of Orbax checkpoints all, some arrays at a time.

    Raises:
        UserError: as `load_params`.
    """
    folder, config = Path(path), dataclasses.replace(config, weight_dtype=None)
    if is_orbax(folder):
        return orbax_hash(folder, config, np.dtype(dtype))
    source = _open_source(folder, config)
    try:
        return source_hash(source, config)
    finally:
        source.close()


def _agreed(
    found: ModelConfig, wanted: ModelConfig | None, path: Path, weight_dtype: str | None
) -> ModelConfig:
    """What the checkpoint says, under the name that was asked for; their shapes are equal."""
    found = dataclasses.replace(found, weight_dtype=weight_dtype)
    if wanted is None:
        return found
    for field in _SHAPE_FIELDS:
        have, want = getattr(found, field), getattr(wanted, field)
        if have != want:
            raise UserError(
                f"{path} is not {wanted.name}: its {field} is {have}, and {wanted.name} has {want}"
            )
    return dataclasses.replace(found, name=wanted.name)


def _open_source(path: Path, config: ModelConfig | None) -> TensorSource:
    if path.is_dir():
        if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
            return SafetensorsSource(path, config)
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return GGUFSource(ggufs[0])
        if ggufs:
            raise UserError(f"{path} has {len(ggufs)} GGUF files: give one of them")
        raise UserError(
            f"{path} holds no checkpoint: neither safetensors nor a GGUF file nor Orbax"
        )
    if path.suffix == ".safetensors":
        raise UserError(f"{path}: give the folder that holds it and its config.json")
    if path.suffix in (".bin", ".pt", ".pth"):
        raise UserError(f"{path}: PyTorch files are not read; convert it to safetensors or GGUF")
    return GGUFSource(path)
