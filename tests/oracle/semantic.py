"""What heads read of a fact and what layers lose with few KVs (CompressKV), in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.oracle import transformer
from tests.oracle.attention import causal_attention, softmax
from tests.oracle.scores import avg_pool


def read_of_fact(
    hf: dict[str, Any],
    weights: dict[str, np.ndarray],
    tokens: np.ndarray,
    fact: np.ndarray,
    first: int,
    answer: np.ndarray,
) -> np.ndarray:
    """[L, Q]: each time that the model is to say a token of tokens fact[0] … fact[1] − 1, once for
    each of these that is that token, what the head reads of all of them (Lin et al. 2025).

    The answer stands from token `first` on.
    """
    _, projected = transformer.forward(hf, weights, tokens, np.arange(len(tokens)))
    found = np.zeros((len(projected), projected[0][0].shape[1]))
    for layer, (q, k, _) in enumerate(projected):
        attention = causal_attention(q, k)
        for n, token in enumerate(answer):
            for place in range(*fact):
                if tokens[place] == token:
                    found[layer] += attention[:, first - 1 + n, fact[0] : fact[1]].sum(axis=-1)
    return found


def errors_with_few(
    hf: dict[str, Any],
    weights: dict[str, np.ndarray],
    tokens: np.ndarray,
    first: int,
    count: int,
    semantic: np.ndarray,
    few: int,
) -> np.ndarray:
    """[L]: Σ ‖o(out) − o(out with few)‖ / (‖o(out)‖ + 1e-5) over `count` tokens behind the prompt.

    o is the layer's output projection. Of the prompt's first `first` tokens stay the last 8 and
    those that the 4 highest heads of `semantic` read most from there, `few` in all (Lin et al.
    2025, and the authors' code).
    """
    _, projected = transformer.forward(hf, weights, tokens, np.arange(len(tokens)))
    errors = np.zeros(len(projected))
    for layer, (q, k, v) in enumerate(projected):
        name = f"model.layers.{layer}.self_attn.o_proj.weight"
        out, group = weights[name].astype(np.float64), q.shape[1] // k.shape[1]
        chosen = np.argsort(-semantic[layer], kind="stable")[:4]
        prompt = causal_attention(q[:first], k[:first])[chosen]
        received = prompt[:, first - 8 :, : first - 8].sum(axis=1)
        metric = np.mean([avg_pool(row, 5) for row in received], axis=0)
        best = np.argsort(-metric, kind="stable")[: few - 8]
        held = sorted({*best.tolist(), *range(first - 8, first)})
        for token in range(first, first + count):
            sides = []
            for kept in (list(range(token + 1)), [*held, *range(first, token + 1)]):
                parts = []
                for head in range(q.shape[1]):
                    keys, values = (x[kept, head // group].astype(np.float64) for x in (k, v))
                    share = softmax(keys @ q[token, head] / np.sqrt(q.shape[-1]))
                    parts.append(share @ values)
                sides.append(out @ np.concatenate(parts))
            lost = np.linalg.norm(sides[0] - sides[1])
            errors[layer] += lost / (np.linalg.norm(sides[0]) + 1e-5)
    return errors
