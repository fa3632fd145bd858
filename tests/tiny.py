"""A tiny checkpoint folder for commands to run on."""

import json
from pathlib import Path

import numpy as np
import safetensors.numpy

from kvjax.models.config import ModelConfig
from kvjax.models.layout import tensor_slots
from kvjax.models.tokenizer import ByteTokenizer

TINY = ModelConfig(
    name="tiny",
    vocab_size=256,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=2048,
)


def write_tiny(folder: Path, model: ModelConfig = TINY) -> None:
    """Write a Hugging Face checkpoint with random weights and one token per byte."""
    rng = np.random.default_rng(5)
    tensors = {
        slot.hf_name: (rng.standard_normal(slot.file_shape) * 0.2).astype(np.float32)
        for slot in tensor_slots(model)
    }
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_position_embeddings,
    }
    (folder / "config.json").write_text(json.dumps(config))
    ByteTokenizer().save(folder)
