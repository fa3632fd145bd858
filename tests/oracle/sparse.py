"""SpecKV's sparse prefill in NumPy, written from the authors' code and configurations.

In each layer the prompt's last 33 queries and those of what was drafted attend to all keys before
themselves; the largest share over these queries and the query heads of a group, and over 7 keys
around, ranks the keys before them. The best of each KV head are what all queries see of the text,
beside what begins a window before their block of 64 queries.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.oracle import transformer
from tests.oracle.attention import softmax

BLOCK = 64


def seen_from(query: int, verticals: set[int], local: int, block: int = BLOCK) -> list[int]:
    """The keys that a query sees."""
    begins = query // block * block - local
    return [key for key in range(query + 1) if key >= begins or key in verticals]


def ranked(share: np.ndarray, before: int, width: int = 7) -> tuple[np.ndarray, list[int]]:
    """What each key before `before` counts, and these keys: the best first, then the older.

    Args:
        share: [queries, heads, keys], of the queries that count and the heads of one group.
        before: where these queries begin.
        width: keys whose maximum counts.
    """
    most = share.max(axis=(0, 1))[:before]
    reach = width // 2
    value = np.array([most[max(0, t - reach) : t + reach + 1].max() for t in range(before)])
    return value, sorted(range(before), key=lambda t: (-value[t], t))


class SparsePrefill:
    """`attend` of the reference transformer; remembers each layer's scores and verticals."""

    def __init__(self, length: int, verticals: int, local: int, window: int = 33):
        self.start, self.count, self.local = max(length - window, 0), verticals, local
        self.scores: list[np.ndarray] = []
        self.verticals: list[list[set[int]]] = []

    def __call__(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """The output [n, Q, d] of a layer's attention to its n tokens."""
        count, heads, d = q.shape
        group = heads // k.shape[1]
        q, k, v = (x.astype(np.float64) for x in (q, k, v))
        out = np.zeros((count, heads, d))
        scores, chosen = [], []
        for head in range(k.shape[1]):
            own = range(head * group, (head + 1) * group)
            share = np.zeros((count - self.start, group, count))
            for i in range(self.start, count):
                for r, of in enumerate(own):
                    share[i - self.start, r, : i + 1] = softmax(
                        k[: i + 1, head] @ q[i, of] / math.sqrt(d)
                    )
            value, order = ranked(share, self.start)
            scores.append(value)
            chosen.append(set(order[: self.count]))
            for i in range(count):
                seen = seen_from(i, chosen[-1], self.local)
                for of in own:
                    p = softmax(k[seen, head] @ q[i, of] / math.sqrt(d))
                    out[i, of] = p @ v[seen, head]
        self.scores.append(np.array(scores))
        self.verticals.append(chosen)
        return out.astype(np.float32)


def prefilled(
    hf: dict[str, Any],
    weights: dict[str, np.ndarray],
    prompt: np.ndarray,
    said: list[int],
    verticals: int,
    local: int,
) -> tuple[np.ndarray, list[tuple[np.ndarray, ...]], SparsePrefill]:
    """Logits behind a prompt that runs with what was drafted behind it, each layer's queries, keys
    and values of the prompt, and what chose."""
    tokens = np.array([*prompt, *said])
    chosen = SparsePrefill(len(prompt), verticals, local)
    logits, projected = transformer.forward(
        hf, weights, tokens, np.arange(len(tokens)), attend=chosen
    )
    size = len(prompt)
    return logits[size - 1], [tuple(x[:size] for x in layer) for layer in projected], chosen


def kept_scores(chosen: SparsePrefill, length: int) -> np.ndarray:
    """What each KV [L, H, T] of a prompt counts; NaN for its end, which stays."""
    found = np.full((len(chosen.scores), len(chosen.scores[0]), length), np.nan)
    found[..., : chosen.start] = np.array(chosen.scores)
    return found
