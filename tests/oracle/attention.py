"""Softmax attention in float64 (equations 1 and 2 of the paper)."""

from __future__ import annotations

import math

import numpy as np


def softmax(logits: np.ndarray) -> np.ndarray:
    """Softmax over the last axis; -inf logits get probability 0."""
    shifted = np.exp(logits - np.max(logits, axis=-1, keepdims=True))
    return shifted / np.sum(shifted, axis=-1, keepdims=True)


def causal_attention(q: np.ndarray, k: np.ndarray, scale: float | None = None) -> np.ndarray:
    """The whole lower-triangular matrix A [query heads, T, T] for q [T, H*r, d], k [T, H, d]."""
    tokens, query_heads, d = q.shape
    group = query_heads // k.shape[1]
    scale = 1 / math.sqrt(d) if scale is None else scale
    result = np.zeros((query_heads, tokens, tokens))
    for h in range(query_heads):
        for i in range(tokens):
            keys = k[: i + 1, h // group].astype(np.float64)
            result[h, i, : i + 1] = softmax(keys @ q[i, h].astype(np.float64) * scale)
    return result


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of one KV head's query group over the KVs it holds.

    Args:
        q: queries of the group [r, d].
        k: keys held [n, d], rotated at their original positions.
        v: values held [n, d].
        scale: logit scale, 1/sqrt(d) by default.

    Returns:
        The outputs [r, d] (zero where the head holds nothing) and probabilities [r, n].
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    if len(k) == 0:
        return np.zeros_like(q), np.zeros((len(q), 0))
    p = softmax(q @ k.T * (1 / math.sqrt(q.shape[-1]) if scale is None else scale))
    return p @ v, p
