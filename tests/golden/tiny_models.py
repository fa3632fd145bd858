"""Tiny random models, one per special case, that the tests and scripts/make_golden.py both build.

Needs NumPy only. Each case is a Hugging Face config.json; its weights come from the case's name,
so that the golden files store nothing but the expected logits.
"""

import zlib
from pathlib import Path
from typing import Any

import numpy as np

_BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}

CASES: dict[str, dict[str, Any]] = {
    "gqa_2_to_1": _BASE,
    "llama3_rope": {
        **_BASE,
        "head_dim": 32,
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qkv_bias": {
        **_BASE,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rms_norm_eps": 1e-6,
    },
    "untied_head": {**_BASE, "tie_word_embeddings": False},
    "head_dim_128": {**_BASE, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128},
    "mha": {**_BASE, "num_key_value_heads": 4},
    "gqa_8_to_1": {**_BASE, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 8},
    "qk_norm": {
        **_BASE,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
    },
}
BATCH, LENGTH = 2, 96


def golden_file(case: str) -> Path:
    """The file that holds the expected logits of a case under its name."""
    family = "qwen3" if CASES[case]["model_type"] == "qwen3" else "llama"
    return Path(__file__).with_name(f"tiny_{family}.npz")


def golden_logits(case: str) -> np.ndarray:
    """What transformers computes: logits [BATCH, LENGTH, vocabulary] f32."""
    return np.load(golden_file(case))[case]


def _random(case: str) -> np.random.RandomState:
    # The legacy generator's stream is frozen for good; default_rng's may change between releases.
    return np.random.RandomState(zlib.crc32(case.encode()))


def tiny_tokens(case: str) -> np.ndarray:
    """Token ids [BATCH, LENGTH] i32 of a case."""
    return _random(case).randint(0, CASES[case]["vocab_size"], (BATCH, LENGTH)).astype(np.int32)


def tiny_weights(case: str) -> dict[str, np.ndarray]:
    """All tensors of a case under their Hugging Face names, f32, matrices [out, in]."""
    hf, random = CASES[case], _random(case)
    dim, ffn, d = hf["hidden_size"], hf["intermediate_size"], hf["head_dim"]
    heads, kv = hf["num_attention_heads"] * d, hf["num_key_value_heads"] * d

    def normal(*shape: int, std: float) -> np.ndarray:
        return (std * random.standard_normal(shape)).astype(np.float32)

    def matrix(out: int, inputs: int) -> np.ndarray:
        return normal(out, inputs, std=1.5 * inputs**-0.5)

    def norm(size: int = dim) -> np.ndarray:
        return 1 + normal(size, std=0.2)

    weights = {
        "model.embed_tokens.weight": normal(hf["vocab_size"], dim, std=0.5),
        "model.norm.weight": norm(),
    }
    for i in range(hf["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        weights[layer + "input_layernorm.weight"] = norm()
        for letter, rows in (("q", heads), ("k", kv), ("v", kv)):
            weights[layer + f"self_attn.{letter}_proj.weight"] = matrix(rows, dim)
            if hf["model_type"] == "qwen2":
                weights[layer + f"self_attn.{letter}_proj.bias"] = normal(rows, std=0.5)
        if hf["model_type"] == "qwen3":
            for letter in "qk":
                weights[layer + f"self_attn.{letter}_norm.weight"] = 2 * norm(d)
        weights[layer + "self_attn.o_proj.weight"] = matrix(dim, heads)
        weights[layer + "post_attention_layernorm.weight"] = norm()
        weights[layer + "mlp.gate_proj.weight"] = matrix(ffn, dim)
        weights[layer + "mlp.up_proj.weight"] = matrix(ffn, dim)
        weights[layer + "mlp.down_proj.weight"] = matrix(dim, ffn)
    if not hf["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(hf["vocab_size"], dim, std=0.2)
    return weights
