"""KVzip's and KVzap's scores of a text that a model repeats, in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.oracle import transformer
from tests.oracle.attention import softmax


def repetition_scores(
    hf: dict[str, Any],
    weights: dict[str, np.ndarray],
    text: np.ndarray,
    request: np.ndarray,
    part: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """S and Z [L, H, T] of the KVs of `text`; behind it `request` and the text or a part of it.

    S is the largest attention of the queries behind `text`, those of the request among them, over
    the query heads of a group (Kim et al. 2025, section 3.2, and the authors' code); Z is of the
    second copy's queries alone and has each attention times the norm of the value in the output
    projection, over the norm of what enters the attention at the query (KVzap, equation 3).
    """
    tokens = np.concatenate([text, request, text if part is None else part])
    entering: list[np.ndarray] = []
    _, projected = transformer.forward(
        hf, weights, tokens, np.arange(len(tokens)), entering=entering
    )
    heads, kv, d = hf["num_attention_heads"], hf["num_key_value_heads"], hf["head_dim"]
    plain = np.zeros((len(projected), kv, len(text)))
    plus = np.zeros_like(plain)
    for layer, (q, k, v) in enumerate(projected):
        out = weights[f"model.layers.{layer}.self_attn.o_proj.weight"].astype(np.float64)
        for head in range(heads):
            g = head // (heads // kv)
            changed = np.linalg.norm(
                out[:, head * d : (head + 1) * d] @ v[: len(text), g].T, axis=0
            )
            for i in range(len(text), len(tokens)):
                logits = k[: i + 1, g].astype(np.float64) @ q[i, head] / math.sqrt(d)
                share = softmax(logits)[: len(text)]
                plain[layer, g] = np.maximum(plain[layer, g], share)
                if i < len(text) + len(request):
                    continue
                weighted = share * changed / np.linalg.norm(entering[layer][i].astype(np.float64))
                plus[layer, g] = np.maximum(plus[layer, g], weighted)
    return plain, plus
