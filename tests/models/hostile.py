"""A checkpoint that loads, into which the tests of hostile files put one thing that is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy

from kvjax.errors import UserError
from kvjax.models import load_model
from kvjax.models.config import ModelConfig
from tests.models.checkpoints import random_tensors
from tests.models.tokenizer_builders import tiny_tokenizer

CONFIG_JSON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
TINY = ModelConfig(
    name="tiny",
    vocab_size=97,
    hidden_size=16,
    intermediate_size=24,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DEEP = "[" * 200_000 + "]" * 200_000
LONG = "9" * 100_000
SURROGATE = '"\\ud800"'


def write_tiny(folder: Path) -> Path:
    """The whole checkpoint: tokenizer with a template, configuration, weights."""
    tiny_tokenizer(chat_template="{{ messages[0].content }}").save(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG_JSON))
    safetensors.numpy.save_file(random_tensors(TINY), folder / "model.safetensors")
    return folder


def without_whole(folder: Path, name: str) -> None:
    """Where an index is what is looked at: it counts where no file has all tensors."""
    if name.endswith(".index.json"):
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")


def refusal(path: Any) -> str:
    """The one line that loading the checkpoint gives."""
    with pytest.raises(UserError) as caught:
        load_model(weights=path)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 1000
    return message


def field(name: str, value: str, text: str) -> str:
    """The JSON object `text` with one more field, as raw text."""
    return text.rstrip()[:-1] + f', "{name}": {value}}}'
