"""Tiny checkpoints for the tests of weights: random tensors, and files of every format.

Names, shapes and places of tensors are written down here once more, from published checkpoints
and the tables in the docstrings of kvjax/models/families, so that a loader's own table is not
compared with itself.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy
from flax import nnx

from kvjax.models.architectures import config_to_hf
from kvjax.models.config import ModelConfig

# Rows of 256 elements: the block of the K quantisations. No value is one that a file's reader
# would take where the file says nothing.
CONFIG = ModelConfig(
    name="tiny",
    vocab_size=40,
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    rope_theta=20_000.0,
    rms_norm_eps=3e-5,
    max_position_embeddings=64,
)
# Whose head dimension is not hidden over heads.
QWEN3 = dataclasses.replace(CONFIG, num_heads=4, head_dim=128, family="qwen3")


# A layer's tensors in a Hugging Face checkpoint -> what llama.cpp calls them.
LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
OTHER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    """What llama.cpp calls a tensor of a Hugging Face checkpoint."""
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    layer, _, short = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{LAYER_NAMES[short]}"


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a checkpoint's tensors, matrices [out, in], by Hugging Face names."""
    dim, ffn = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, dim)}
    for i in range(config.num_layers):
        layer = f"model.layers.{i}."
        shapes[layer + "input_layernorm.weight"] = (dim,)
        for letter, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{layer}self_attn.{letter}_proj.weight"] = (rows, dim)
            if config.attention_bias:
                shapes[f"{layer}self_attn.{letter}_proj.bias"] = (rows,)
        if config.family == "qwen3":
            shapes[layer + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[layer + "self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[layer + "self_attn.o_proj.weight"] = (dim, q)
        shapes[layer + "post_attention_layernorm.weight"] = (dim,)
        shapes[layer + "mlp.gate_proj.weight"] = (ffn, dim)
        shapes[layer + "mlp.up_proj.weight"] = (ffn, dim)
        shapes[layer + "mlp.down_proj.weight"] = (dim, ffn)
    shapes["model.norm.weight"] = (dim,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, dim)
    return shapes


def num_params(config: ModelConfig) -> int:
    """Weights in total, a tied embedding counted once."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors of a checkpoint, by Hugging Face names."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in tensor_shapes(config).items()
    }


def config_json(config: ModelConfig) -> dict[str, Any]:
    """A config.json without a name; tests/models/test_config.py has published ones."""
    values = config_to_hf(config)
    del values["_name_or_path"]
    return values


def expected_params(config: ModelConfig, tensors: dict[str, Any]) -> dict[Any, np.ndarray]:
    """The stacked parameters that `tensors` stand for, as those tables describe them."""
    dim, d, kv = config.hidden_size, config.head_dim, config.num_kv_heads
    r = config.num_heads // kv

    def grouped(layer: str, part: str) -> np.ndarray:
        """q, k and v beside each other in each KV head: [H, r + 2, d, ...]."""
        q, k, v = (tensors[f"{layer}self_attn.{letter}_proj.{part}"] for letter in "qkv")
        inner = q.shape[1:]
        heads = [x.reshape(kv, -1, d, *inner) for x in (q, k, v)]
        assert [x.shape[1] for x in heads] == [r, 1, 1]
        return np.concatenate(heads, axis=1)

    layers: dict[str, list[np.ndarray]] = {}
    for i in range(config.num_layers):
        layer = f"model.layers.{i}."
        parts = {
            "attn_norm": tensors[layer + "input_layernorm.weight"],
            "qkv": np.moveaxis(grouped(layer, "weight"), -1, 0),
            "out": tensors[layer + "self_attn.o_proj.weight"].T.reshape(kv, r, d, dim),
            "mlp_norm": tensors[layer + "post_attention_layernorm.weight"],
            "gate_up": np.stack(
                [tensors[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up")], axis=1
            ),
            "down": tensors[layer + "mlp.down_proj.weight"].T,
        }
        if config.attention_bias:
            parts["qkv_bias"] = grouped(layer, "bias")
        if config.family == "qwen3":
            parts["q_norm"] = tensors[layer + "self_attn.q_norm.weight"]
            parts["k_norm"] = tensors[layer + "self_attn.k_norm.weight"]
        for name, value in parts.items():
            layers.setdefault(name, []).append(value)
    flat: dict[Any, np.ndarray] = {("layers", name): np.stack(x) for name, x in layers.items()}
    flat[("embed",)] = tensors["model.embed_tokens.weight"]
    flat[("final_norm",)] = tensors["model.norm.weight"]
    if not config.tie_word_embeddings:
        flat[("lm_head",)] = tensors["lm_head.weight"].T
    return {path: np.asarray(value, np.float32) for path, value in flat.items()}


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
    config: ModelConfig,
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
    if config.head_dim * config.num_heads != config.hidden_size:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
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
    rotated = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    for name in tensor_shapes(config):
        if name not in tensors:
            continue
        value = tensors[name]
        type_name = None
        if isinstance(value, tuple):
            type_name, value = value
        heads = rotated.get(name.split(".")[-2])
        if architecture == "llama" and heads:
            value = interleave(value, heads)
        type_ = None if type_name is None else gguf.GGMLQuantizationType[type_name]
        writer.add_tensor(gguf_name(name), value, raw_dtype=type_)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(
    folder: Path, config: ModelConfig, tensors: dict[str, Any], shards: int = 1
) -> Path:
    """Writes `tensors` as a Hugging Face checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(config)))
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
