"""Eviction metrics: what each key received from the queries observed (equations 6-11, 19, 20)."""

from __future__ import annotations

import math

import numpy as np

from tests.oracle.attention import causal_attention, softmax


def max_pool(row: np.ndarray, width: int) -> np.ndarray:
    """Equation 8: each entry becomes the largest within width // 2 on either side of it."""
    half = width // 2
    return np.array([row[max(0, j - half) : j + half + 1].max() for j in range(len(row))])


def group_sum(per_query_head: np.ndarray, num_kv_heads: int) -> np.ndarray:
    """Equation 11: query heads r*h … r*(h+1)-1 belong to KV head h. [H*r, T] -> [H, T]."""
    group = len(per_query_head) // num_kv_heads
    return np.stack(
        [per_query_head[h * group : (h + 1) * group].sum(axis=0) for h in range(num_kv_heads)]
    )


def _observed(attention: np.ndarray, queries: range, power: int, excluded: int) -> np.ndarray:
    """Sum over the queries of A^power, pairs closer than `excluded` left out. -> [H*r, T]."""
    heads, _, tokens = attention.shape
    total = np.zeros((heads, tokens))
    for h in range(heads):
        for i in queries:
            for j in range(i + 1):
                if i - j >= excluded:
                    total[h, j] += attention[h, i, j] ** power
    return total


def prefill_metric(
    q: np.ndarray,
    k: np.ndarray,
    *,
    window: int,
    power: int = 2,
    pool: int | None = 7,
    excluded: int = 0,
    scale: float | None = None,
) -> np.ndarray:
    """KVC-w: metrics [H, T] of a prompt from its last `window` queries.

    q [T, H*r, d], k [T, H, d], both rotated. The softmax runs over the whole causal row; each
    query head is pooled by itself (window keys included) before its group is summed.
    """
    tokens = len(q)
    queries = range(tokens - min(window, tokens), tokens)
    received = _observed(causal_attention(q, k, scale), queries, power, excluded)
    if pool is not None:
        received = np.stack([max_pool(row, pool) for row in received])
    return group_sum(received, k.shape[1])


def full_metric(
    q: np.ndarray, k: np.ndarray, *, power: int = 2, excluded: int = 10, scale: float | None = None
) -> np.ndarray:
    """KVC-full (equation 19): every query from `excluded` tokens on observes, no pooling."""
    return prefill_metric(
        q, k, window=len(q), power=power, pool=None, excluded=excluded, scale=scale
    )


def window_metric(
    q: np.ndarray,
    k: np.ndarray,
    query_position: np.ndarray,
    key_position: np.ndarray,
    *,
    power: int,
    excluded: int = 0,
    scale: float | None = None,
) -> np.ndarray:
    """What [H*r, T] each key receives per query head, for queries and keys at any positions.

    q [w, H*r, d], k [T, H, d], query_position [w], key_position [T, H]. A query sees the keys at
    or before its position. Position -1 stands for a query or key that does not exist.
    """
    query_heads, d = q.shape[1:]
    group = query_heads // k.shape[1]
    scale = 1 / math.sqrt(d) if scale is None else scale
    total = np.zeros((query_heads, len(k)))
    for i, at in enumerate(query_position):
        for h in range(query_heads):
            key_at = key_position[:, h // group]
            seen = [j for j in range(len(k)) if 0 <= key_at[j] <= at]
            if not seen:
                continue
            logits = k[seen, h // group].astype(np.float64) @ q[i, h].astype(np.float64) * scale
            for j, p in zip(seen, softmax(logits), strict=True):
                if at - key_at[j] >= excluded:
                    total[h, j] += p**power
    return total


def decode_metric(probabilities: np.ndarray) -> np.ndarray:
    """Equation 20: one decode step adds to every KV the squared attention of its query group.

    probabilities [r, n] over the n KVs the head holds -> [n].
    """
    return (probabilities.astype(np.float64) ** 2).sum(axis=0)
