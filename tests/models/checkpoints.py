"""Tiny checkpoints for the tests of weights: random tensors, and files of every format."""

import json
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx

from kvjax.models.config import LlamaConfig
from kvjax.models.layout import tensor_slots
from kvjax.models.llama import abstract_params
from kvjax.models.weights.orbax_save import config_to_hf

# Rows of 256 elements: the block of the K quantisations.
CONFIG = LlamaConfig(
    name="tiny",
    vocab_size=40,
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    rope_theta=10_000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
)


def random_tensors(config: LlamaConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors of a checkpoint, by Hugging Face names."""
    rng = np.random.default_rng(seed)
    return {
        slot.hf_name: rng.standard_normal(slot.file_shape).astype(np.float32)
        for slot in tensor_slots(config)
    }


def expected_params(config: LlamaConfig, tensors: dict[str, Any]) -> dict[Any, np.ndarray]:
    """The stacked parameters that `tensors` stand for."""
    flat: dict[Any, np.ndarray] = {
        path: np.full(leaf.shape, np.nan, np.float32)
        for path, leaf in nnx.to_flat_state(abstract_params(config, jnp.float32))
    }
    for slot in tensor_slots(config):
        part = flat[slot.param] if slot.layer is None else flat[slot.param][slot.layer]
        part[slot.index] = slot.arrange(tensors[slot.hf_name])
    return flat


def assert_params(params: nnx.State, expected: dict[Any, np.ndarray]) -> None:
    """Every leaf of `params` equals `expected[path]`."""
    found = dict(nnx.to_flat_state(params))
    assert found.keys() == expected.keys()
    for path, leaf in found.items():
        np.testing.assert_array_equal(np.asarray(leaf[...]), expected[path], err_msg=str(path))


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of q and k: the halves of a head, taken by turns."""
    first, second = np.split(rows.reshape(heads, -1, *rows.shape[1:]), 2, axis=1)
    return np.stack((first, second), axis=2).reshape(rows.shape)


def write_gguf(
    path: Path,
    config: LlamaConfig,
    tensors: dict[str, Any],
    architecture: str = "llama",
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """Writes `tensors` (arrays, or (type name, raw rows)) under their GGUF names."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    tokens = [f"<{i}>" for i in range(config.vocab_size - 1)]
    writer.add_array("tokenizer.ggml.tokens", [*tokens, "<0><1>"])
    for key, value in (metadata or {}).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for slot in tensor_slots(config):
        if slot.hf_name not in tensors:
            continue
        value = tensors[slot.hf_name]
        type_name = None
        if isinstance(value, tuple):
            type_name, value = value
        if architecture == "llama" and slot.rope_heads:
            value = interleave(value, slot.rope_heads)
        type_ = None if type_name is None else gguf.GGMLQuantizationType[type_name]
        writer.add_tensor(slot.gguf_name, value, raw_dtype=type_)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(
    folder: Path, config: LlamaConfig, tensors: dict[str, Any], shards: int = 1
) -> Path:
    """Writes `tensors` as a Hugging Face checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_to_hf(config)))
    if shards == 1:
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[i::shards]}
        safetensors.numpy.save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
