"""What runs behind a prompt and what its queries read of it, in float64: drafts, probes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from tests.oracle import transformer
from tests.oracle.attention import softmax


def said_behind(
    hf: dict[str, Any],
    weights: dict[str, np.ndarray],
    prompt: np.ndarray,
    most: int,
    ends: Collection[int] = (),
) -> list[int]:
    """The likeliest tokens behind a prompt, one after the other, up to one that ends it."""
    said: list[int] = []
    while len(said) < most and (not said or said[-1] not in ends):
        tokens = np.array([*prompt, *said])
        logits, _ = transformer.forward(hf, weights, tokens, np.arange(len(tokens)))
        said.append(int(logits[-1].argmax()))
    return said


def most_read(
    hf: dict[str, Any],
    weights: dict[str, np.ndarray],
    tokens: np.ndarray,
    queries: Iterable[int],
    before: int,
) -> np.ndarray:
    """The largest share [L, H, before] that any of some queries of a text, of any query head of a
    group, has for each of its first keys."""
    _, projected = transformer.forward(hf, weights, tokens, np.arange(len(tokens)))
    heads, kv, d = hf["num_attention_heads"], hf["num_key_value_heads"], hf["head_dim"]
    most = np.zeros((len(projected), kv, before))
    for layer, (q, k, _) in enumerate(projected):
        for i in queries:
            for head in range(heads):
                g = head // (heads // kv)
                share = softmax(k[: i + 1, g].astype(np.float64) @ q[i, head] / math.sqrt(d))
                most[layer, g] = np.maximum(most[layer, g], share[:before])
    return most


def lookahead_scores(
    hf: dict[str, Any],
    weights: dict[str, np.ndarray],
    prompt: np.ndarray,
    said: list[int],
    window: int = 33,
    width: int = 7,
) -> np.ndarray:
    """SpecKV's scores [L, H, T]: the queries of the prompt's end and of what was said behind it,
    the largest over neighbouring keys before these; NaN for the prompt's end, which stays."""
    start = max(len(prompt) - window, 0)
    tokens = np.array([*prompt, *said])
    most = most_read(hf, weights, tokens, range(start, len(tokens)), start)
    result = np.full((*most.shape[:2], len(prompt)), np.nan)
    for t in range(start):
        near = most[..., max(0, t - width // 2) : t + width // 2 + 1]
        result[..., t] = near.max(axis=-1)
    return result
