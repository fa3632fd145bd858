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
    *,
    itself: bool = True,
) -> np.ndarray:
    """The largest share [L, H, before] that any of some queries of a text, of any query head of a
    group, has for each of its first keys: of all keys before it, or of these first ones."""
    _, projected = transformer.forward(hf, weights, tokens, np.arange(len(tokens)))
    heads, kv, d = hf["num_attention_heads"], hf["num_key_value_heads"], hf["head_dim"]
    most = np.zeros((len(projected), kv, before))
    for layer, (q, k, _) in enumerate(projected):
        for i in queries:
            for head in range(heads):
                g = head // (heads // kv)
                keys = k[: i + 1 if itself else before, g].astype(np.float64)
                share = softmax(keys @ q[i, head] / math.sqrt(d))
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


def episodes(points: np.ndarray, clusters: int) -> list[int]:
    """The cluster of each point: k-means from the last point and those farthest from all before."""
    rows = [[float(x) for x in point] for point in points]

    def far(a: list[float], b: list[float]) -> float:
        return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))

    centres = [rows[-1]]
    for _ in range(clusters - 1):
        nearest = [min(far(row, centre) for centre in centres) for row in rows]
        if max(nearest) == 0:
            break
        centres.append(rows[nearest.index(max(nearest))])
    labels: list[int] = []
    while True:
        away = [[far(row, centre) for centre in centres] for row in rows]
        found = [one.index(min(one)) for one in away]
        if found == labels:
            return labels
        labels = found
        for c in range(len(centres)):
            own = [row for row, label in zip(rows, labels, strict=True) if label == c]
            if own:
                centres[c] = [sum(x) / len(own) for x in zip(*own, strict=True)]


def medoid_segment(
    table: np.ndarray, prompt: np.ndarray, size: int, clusters: int = 4
) -> np.ndarray:
    """EpiCache's probe: of the segments of the episode that a prompt ends in, that next to its
    centroid. `table` [V, D] are the tokens' embeddings."""
    found, last = medoids(table, prompt, size, clusters)
    return found[last][0]


def medoids(
    table: np.ndarray, prompt: np.ndarray, size: int, clusters: int = 4
) -> tuple[dict[int, tuple[np.ndarray, np.ndarray]], int]:
    """Of each of a prompt's episodes, by its number, the segment next to the centroid, and the
    centroid, a mean [D]; and the number of that which the prompt ends in."""
    size = min(size, len(prompt))
    begins = sorted(range(len(prompt) - size, -1, -size))
    points = []
    for begin in begins:
        mean = table[prompt[begin : begin + size]].astype(np.float64).mean(axis=0)
        points.append(mean / np.linalg.norm(mean))
    labels = episodes(np.array(points), clusters)
    found = {}
    for label in sorted(set(labels)):
        own = [i for i, other in enumerate(labels) if other == label]
        centre = np.mean([points[i] for i in own], axis=0)
        best = max(own, key=lambda i: points[i] @ centre / np.linalg.norm(centre))
        found[label] = prompt[begins[best] : begins[best] + size], centre
    return found, labels[-1]


def chosen_episode(table: np.ndarray, centroids: list[np.ndarray], question: np.ndarray) -> int:
    """The place of the centroid at the smallest angle to the mean of a question's embeddings."""
    mean = [float(np.mean([table[t, d] for t in question])) for d in range(table.shape[1])]
    cosines = []
    for centre in centroids:
        dot = sum(x * float(y) for x, y in zip(mean, centre, strict=True))
        sizes = [math.sqrt(sum(float(x) ** 2 for x in one)) for one in (mean, centre)]
        cosines.append(dot / (sizes[0] * sizes[1]))
    return cosines.index(max(cosines))


def key_similarities(
    hf: dict[str, Any],
    weights: dict[str, np.ndarray],
    tokens: np.ndarray,
    size: int,
    first: int,
    before: int,
    window: int,
) -> np.ndarray:
    """The mean cosine [L] of windows of each head's keys, with attention to everything before and
    with attention to the first tokens, the own block and the end of the one before it."""
    count = len(tokens)
    seen = np.zeros((count, count), bool)
    for i in range(count):
        for j in range(i + 1):
            block = i // size
            seen[i, j] = j < first or j // size == block or block * size - before <= j
    whole, alone = (
        transformer.forward(hf, weights, tokens, np.arange(count), seen=which)[1]
        for which in (None, seen)
    )
    result = []
    for (_, a, _), (_, b, _) in zip(whole, alone, strict=True):
        cosines = []
        for start in range(0, count, window):
            for head in range(a.shape[1]):
                x, y = (k[start : start + window, head].astype(np.float64).ravel() for k in (a, b))
                cosines.append(x @ y / math.sqrt((x @ x) * (y @ y)))
        result.append(np.mean(cosines))
    return np.array(result)
