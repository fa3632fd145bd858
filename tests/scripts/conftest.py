"""Scripts as functions, and a tiny checkpoint folder for them to run on."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from kvjax.models.config import LlamaConfig
from kvjax.models.layout import tensor_slots
from kvjax.models.tokenizer import ByteTokenizer

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

TINY = LlamaConfig(
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


def load_script(name: str):
    """A script of scripts/ as a module; it has a `main(arguments)`."""
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A Hugging Face folder with random weights and one token per byte."""
    folder = tmp_path_factory.mktemp("tiny")
    rng = np.random.default_rng(5)
    tensors = {
        slot.hf_name: (rng.standard_normal(slot.file_shape) * 0.2).astype(np.float32)
        for slot in tensor_slots(TINY)
    }
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": TINY.vocab_size,
        "hidden_size": TINY.hidden_size,
        "intermediate_size": TINY.intermediate_size,
        "num_hidden_layers": TINY.num_layers,
        "num_attention_heads": TINY.num_heads,
        "num_key_value_heads": TINY.num_kv_heads,
        "head_dim": TINY.head_dim,
        "max_position_embeddings": TINY.max_position_embeddings,
    }
    (folder / "config.json").write_text(json.dumps(config))
    ByteTokenizer().save(folder)
    return folder
