"""The model as the peer reads it: a Hugging Face checkpoint in float32."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.cli.progress import Progress
from kvjax.errors import UserError
from kvjax.models.config import LlamaConfig
from kvjax.models.layout import tensor_slots


def export(config: Any, tokenizer: Any, weights: Path, folder: Path, progress: Progress) -> None:
    """Write the model as the peer reads it, float32, unless the folder has it already."""
    import safetensors.numpy
    from flax import nnx

    from kvjax.models.weights import load_params

    if (folder / "model.safetensors").exists():
        held = json.loads((folder / "config.json").read_text())
        if held != checkpoint_config(config):
            raise UserError(f"--export {folder} holds another model: give another folder")
        return
    progress("weights for the peer")
    _, params = load_params(weights, config, "float32", stacked=True)
    arrays = {tuple(path): leaf[...] for path, leaf in nnx.to_flat_state(params)}
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    (folder / "config.json").write_text(json.dumps(checkpoint_config(config), indent=1))
    part = folder / "model.part"
    tensors = checkpoint_tensors(config, arrays)
    safetensors.numpy.save_file(tensors, part, metadata={"format": "pt"})
    os.replace(part, folder / "model.safetensors")


def checkpoint_tensors(config: LlamaConfig, stacked: Mapping[Any, Any]) -> dict[str, np.ndarray]:
    """The tensors of a Hugging Face checkpoint, float32, from parameters with stacked layers.

    Args:
        config: the model.
        stacked: parameters by path, as `kvjax.models.layout` names them.
    """
    tensors = {}
    for slot in tensor_slots(config):
        part = stacked[slot.param]
        part = np.asarray(part if slot.layer is None else part[slot.layer])[slot.index]
        rows = part.reshape(slot.file_shape[::-1] if slot.transpose else slot.file_shape)
        rows = rows.T if slot.transpose else rows
        tensors[slot.hf_name] = np.ascontiguousarray(rows, dtype=np.float32)
    return tensors


def checkpoint_config(config: LlamaConfig) -> dict[str, Any]:
    """The same model's config.json."""
    architecture = "Qwen2ForCausalLM" if config.attention_bias else "LlamaForCausalLM"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {"rope_type": "llama3", **dataclasses.asdict(config.rope_scaling)}
    return {
        "architectures": [architecture],
        "model_type": "qwen2" if config.attention_bias else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_sliding_window": False,
        "torch_dtype": "float32",
    }
