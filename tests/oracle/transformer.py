"""Decoders in NumPy, from the checkpoint's tensors and config.json, in any float dtype.

Llama, with biases of q, k and v or norms of their heads where a checkpoint has any.

In bfloat16 every weight, every matrix product and every sum of the residual stream is rounded;
norms, rotations, attention and logits are computed in float32 and rounded once, as the published
implementations do (Touvron et al. 2023; Su et al. 2021 for the rotation).
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np


def rope_frequencies(hf: dict[str, Any]) -> np.ndarray:
    """Radians per token of each pair [d / 2], with Llama 3.1's scaling where the file has it."""
    d = hf["head_dim"]
    plain = [hf["rope_theta"] ** (-2 * i / d) for i in range(d // 2)]
    scaling = hf.get("rope_scaling")
    if scaling is None:
        return np.array(plain)
    low = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
    high = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
    scaled = []
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        if wavelength < high:
            scaled.append(frequency)
        elif wavelength > low:
            scaled.append(frequency / scaling["factor"])
        else:
            smooth = (low / wavelength - 1) / (low / high - 1)
            scaled.append((1 - smooth) * frequency / scaling["factor"] + smooth * frequency)
    return np.array(scaled)


def forward(
    hf: dict[str, Any],
    weights: dict[str, np.ndarray],
    tokens: np.ndarray,
    positions: np.ndarray,
    dtype: Any = np.float32,
    entering: list[np.ndarray] | None = None,
    stream: list[np.ndarray] | None = None,
    seen: np.ndarray | None = None,
    pass_on: Callable[[int, np.ndarray], np.ndarray] | None = None,
    attend: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray] | None = None,
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """Logits [T, V] f32 of one sequence [T] with causal attention, and (q, k, v) of each layer.

    Args:
        hf: a config.json.
        weights: by Hugging Face names, matrices [out, in].
        tokens: token ids.
        positions: the position of each.
        dtype: of weights and activations.
        entering: gets what enters each layer's attention, [T, D].
        stream: gets what enters each layer, before its norm, [T, D].
        seen: which tokens each one attends to, bool [T, T]; by default all up to itself.
        pass_on: gets the number of a layer and its attention [Q, n, n], and says which of its n
            rows the next layer has, ascending; after the last one it is not asked.
        attend: gets a layer's q [n, Q, d], k and v [n, H, d], and returns what its attention gives
            [n, Q, d], in place of causal attention.
    """

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(dtype).astype(np.float32)

    w = {name: rounded(value) for name, value in weights.items()}
    d, heads, kv = hf["head_dim"], hf["num_attention_heads"], hf["num_key_value_heads"]
    angle = (positions[:, None] * rope_frequencies(hf)).astype(np.float32)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(hf["rms_norm_eps"]))
        return rounded(x * scale * weight)

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        out = rounded(x @ w[f"{name}.weight"].T)
        bias = w.get(f"{name}.bias")
        return out if bias is None else rounded(out + bias)

    def rotate(x: np.ndarray) -> np.ndarray:
        a, b = x[..., : d // 2], x[..., d // 2 :]
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        return rounded(np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1))

    x = w["model.embed_tokens.weight"][tokens]
    projected = []
    for i in range(hf["num_hidden_layers"]):
        name, count = f"model.layers.{i}.", len(x)
        mask = np.tril(np.ones((count, count), bool)) if seen is None else seen
        if stream is not None:
            stream.append(x)
        h = norm(x, w[name + "input_layernorm.weight"])
        if entering is not None:
            entering.append(h)
        q, k, v = (
            linear(h, f"{name}self_attn.{letter}_proj").reshape(count, -1, d) for letter in "qkv"
        )
        if f"{name}self_attn.q_norm.weight" in w:  # of every head by itself, before the rotation
            q = norm(q, w[f"{name}self_attn.q_norm.weight"])
            k = norm(k, w[f"{name}self_attn.k_norm.weight"])
        q, k = rotate(q), rotate(k)
        projected.append((q, k, v))
        out, attention = np.empty_like(q), np.empty((heads, count, count), np.float32)
        for head in range(heads if attend is None else 0):
            group = head * kv // heads
            scores = np.where(mask, q[:, head] @ k[:, group].T / math.sqrt(d), -np.inf)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            attention[head] = p / p.sum(-1, keepdims=True)
            out[:, head] = attention[head] @ v[:, group]
        if attend is not None:
            out = attend(q, k, v)
        x = rounded(x + linear(rounded(out).reshape(count, -1), name + "self_attn.o_proj"))
        h = norm(x, w[name + "post_attention_layernorm.weight"])
        gate, up = linear(h, name + "mlp.gate_proj"), linear(h, name + "mlp.up_proj")
        hidden = rounded(gate / (1 + np.exp(-gate)) * up)
        x = rounded(x + linear(hidden, name + "mlp.down_proj"))
        if pass_on is not None and i < hf["num_hidden_layers"] - 1:
            rows = pass_on(i, attention)
            x, angle = x[rows], angle[rows]
    head = "model.embed_tokens" if hf["tie_word_embeddings"] else "lm_head"
    return norm(x, w["model.norm.weight"]) @ w[head + ".weight"].T, projected
