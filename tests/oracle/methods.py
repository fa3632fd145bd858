"""What each method keeps of a prompt, in plain NumPy, one KV at a time.

Written from the papers' and the authors' rules. `KEEPS[name]` takes a `Prompt` and gives the token
positions that each (layer, KV head) keeps. Budgets are whole blocks: a head that loses anything
keeps a whole number of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tests.oracle.attention import causal_attention
from tests.oracle.metrics import max_pool

Scores = dict[tuple[int, int], np.ndarray]
Shares = dict[tuple[int, int], float]
Kept = dict[tuple[int, int], list[int]]


@dataclass
class Prompt:
    """q [L, T, H·r, d], k [L, T, H, d] of a whole prompt; a cap in tokens; the block size."""

    q: np.ndarray
    k: np.ndarray
    cap: int
    block: int

    @property
    def layers(self) -> int:
        return self.k.shape[0]

    @property
    def length(self) -> int:
        return self.k.shape[1]

    @property
    def heads(self) -> int:
        return self.k.shape[2]

    @property
    def group(self) -> int:
        return self.q.shape[2] // self.heads

    @property
    def names(self) -> list[tuple[int, int]]:
        return [(layer, head) for layer in range(self.layers) for head in range(self.heads)]

    @property
    def cap_blocks(self) -> int:
        """Blocks per head: the cap rounded up."""
        return -(-self.cap // self.block)

    @property
    def cap_tokens(self) -> int:
        return self.cap_blocks * self.block

    @property
    def owned(self) -> int:
        """Blocks per head before anything goes."""
        return -(-self.length // self.block)

    @cached_property
    def attention(self) -> list[np.ndarray]:
        """Per layer [H·r, T, T]."""
        return [causal_attention(q, k) for q, k in zip(self.q, self.k, strict=True)]

    def of_group(self, head: int) -> range:
        return range(head * self.group, (head + 1) * self.group)


# --- which KVs go first -------------------------------------------------------------------------


def avg_pool(row: np.ndarray, width: int) -> np.ndarray:
    """Mean over `width` neighbours, zeros past the ends counted."""
    half, padded = width // 2, np.pad(row, width // 2)
    return np.array([padded[j : j + 2 * half + 1].sum() / width for j in range(len(row))])


def column_sums(p: Prompt, layer: int, head: int, queries: range, power: int = 1) -> np.ndarray:
    """Attention that each key receives from some queries; one row per query head of the group."""
    rows = [p.attention[layer][g][queries.start : queries.stop] for g in p.of_group(head)]
    return np.array([(row**power).sum(axis=0) for row in rows])


def last(p: Prompt, window: int) -> range:
    return range(max(0, p.length - window), p.length)


def random_scores(p: Prompt) -> Scores:
    """Uniform numbers from a counter hashed with MurmurHash3's finaliser."""

    def mixed(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B % 2**32
        x ^= x >> 13
        x = x * 0xC2B2AE35 % 2**32
        return x ^ x >> 16

    golden, scores = 0x9E3779B9, {}
    for layer, head in p.names:
        row = []
        for position in range(p.length):
            x = mixed(golden)
            for part in (layer, head, position):
                x = mixed(x ^ mixed((part + golden) % 2**32))
            row.append((x >> 8) / 2**24)
        scores[layer, head] = np.array(row)
    return scores


def recency(p: Prompt) -> Scores:
    return {name: np.arange(p.length, dtype=float) for name in p.names}


def low_key_norm(p: Prompt) -> Scores:
    return {
        (layer, head): -np.linalg.norm(p.k[layer, :, head].astype(np.float64), axis=-1)
        for layer, head in p.names
    }


def h2o_scores(p: Prompt) -> Scores:
    """Column sums of the whole causal matrix."""
    return {
        (layer, head): column_sums(p, layer, head, range(p.length)).sum(axis=0)
        for layer, head in p.names
    }


def snapkv_scores(
    window: int, width: int, kind: str, *, group_first: bool
) -> Callable[[Prompt], Scores]:
    """The last `window` queries' attention to the keys before them, pooled among these."""
    pool = {"max": max_pool, "avg": avg_pool}[kind]

    def scores(p: Prompt) -> Scores:
        result = {}
        for layer, head in p.names:
            rows = column_sums(p, layer, head, last(p, window))
            before = rows[:, : max(0, p.length - window)]
            if group_first:
                before = before.mean(axis=0, keepdims=True)
            pooled = np.array([pool(row, width) if len(row) else row for row in before])
            tail = np.full(p.length - before.shape[1], np.nan)  # the window is never evicted
            result[layer, head] = np.concatenate([pooled.mean(axis=0), tail])
        return result

    return scores


def kvc_scores(window: int | None, power: int, width: int, distance: int = 0):
    """KV-Compress: pooled per query head, window included, then added over the group."""

    def scores(p: Prompt) -> Scores:
        result = {}
        for layer, head in p.names:
            queries = range(p.length) if window is None else last(p, window)
            rows = np.zeros((p.group, p.length))
            for row, g in zip(rows, p.of_group(head), strict=True):
                for i in queries:
                    for j in range(i - distance + 1):
                        row[j] += p.attention[layer][g][i, j] ** power
            result[layer, head] = np.array([max_pool(row, width) for row in rows]).sum(axis=0)
        return result

    return scores


# --- how many blocks stay -----------------------------------------------------------------------


def webster(share: list[float], low: list[int], high: list[int], total: int) -> list[int]:
    """One block after the other to the largest share / (blocks so far + ½), lowest index first."""
    given = list(low)
    for _ in range(min(total, sum(high)) - sum(low)):
        claims = [
            np.float32(s) / np.float32(n + 0.5) if n < most else -1.0
            for s, n, most in zip(share, given, high, strict=True)
        ]
        given[int(np.argmax(claims))] += 1
    return given


def even_layers(p: Prompt, window: int) -> tuple[list[float], int]:
    """Tokens per head of each layer, and blocks in all."""
    return [float(p.cap_tokens)] * p.layers, p.cap_blocks * p.layers * p.heads


def pyramid_layers(*, exact: bool, beta: int = 20):
    def layers(p: Prompt, window: int) -> tuple[list[float], int]:
        base = max(0, p.cap_tokens - window)
        if p.length < 2 * base or p.layers == 1:
            return even_layers(p, window)
        low = base // beta
        high = 2 * base - low
        if high >= p.length - window:
            high = max(0, p.length - window)
            low = 2 * base - high
        if exact:
            tokens = [
                high - layer * (high - low) / (p.layers - 1) + window for layer in range(p.layers)
            ]
            return tokens, p.cap_blocks * p.layers * p.heads
        step = (high - low) // (p.layers - 1)
        tokens = [float(high - layer * step + window) for layer in range(p.layers)]
        blocks = round(p.heads * sum(tokens) / p.block)
        return tokens, max(blocks, p.cap_blocks * p.layers * p.heads)

    return layers


def even_heads(p: Prompt, layer: int, scores: Scores, guarded: set[int], tokens: float):
    return [1.0] * p.heads


# --- putting it together ------------------------------------------------------------------------


def keeps(
    scores_of: Callable[[Prompt], Scores],
    *,
    protected: int = 0,
    protected_share: float = 0.0,
    sinks: int = 0,
    layers_of=even_layers,
    heads_of=even_heads,
) -> Callable[[Prompt], Kept]:
    """A method that splits its budget over layers, then heads, and ranks KVs within a head."""

    def kept(p: Prompt) -> Kept:
        scores = scores_of(p)
        window = max(protected, math.floor(p.cap_tokens * protected_share))
        guarded = {t for t in range(p.length) if t < sinks or t >= p.length - window}
        if p.owned <= p.cap_blocks:
            return {name: list(range(p.length)) for name in p.names}
        least = max(1, -(-len(guarded) // p.block))
        tokens, total = layers_of(p, window)
        in_layer = webster(
            tokens, [p.heads * least] * p.layers, [p.heads * p.owned] * p.layers, total
        )
        result = {}
        for layer in range(p.layers):
            shares = heads_of(p, layer, scores, guarded, tokens[layer])
            blocks = webster(shares, [least] * p.heads, [p.owned] * p.heads, in_layer[layer])
            for head in range(p.heads):
                result[layer, head] = best(p, scores[layer, head], guarded, blocks[head])
        return result

    return kept


def best(p: Prompt, scores: np.ndarray, guarded: set[int], blocks: int) -> list[int]:
    """The guarded positions and the highest scores, `blocks` whole blocks of them."""
    if blocks >= p.owned:
        return list(range(p.length))
    order = sorted(set(range(p.length)) - guarded, key=lambda t: (scores[t], t))
    gone = set(order[: p.length - blocks * p.block])
    return [t for t in range(p.length) if t not in gone]


def keeps_globally(
    scores_of: Callable[[Prompt], Scores], *, protected: int = 0, sinks: int = 0
) -> Callable[[Prompt], Kept]:
    """KV-Compress: the cheapest blocks of the whole sequence go, one after the other."""

    def kept(p: Prompt) -> Kept:
        scores = scores_of(p)
        guarded = {t for t in range(p.length) if t < sinks or t >= p.length - protected}
        blocks = dict.fromkeys(p.names, p.owned)
        orders = {
            name: sorted(set(range(p.length)) - guarded, key=lambda t, s=scores[name]: (s[t], t))
            for name in p.names
        }
        while sum(blocks.values()) > p.cap_blocks * p.layers * p.heads:
            bids = []
            for name in p.names:
                lost = p.length - (blocks[name] - 1) * p.block
                if blocks[name] > 1 and lost <= len(orders[name]):
                    bids.append((scores[name][orders[name][lost - 1]], name))
            if not bids:
                break
            blocks[min(bids)[1]] -= 1
        return {name: best(p, scores[name], guarded, blocks[name]) for name in p.names}

    return kept


SNAPKV = snapkv_scores(8, 7, "max", group_first=True)

KEEPS: dict[str, Callable[[Prompt], Kept]] = {
    "full": lambda p: {name: list(range(p.length)) for name in p.names},
    "random": keeps(random_scores),
    "streaming-llm": keeps(recency, sinks=4),
    "key-norm": keeps(low_key_norm),
    "h2o": keeps(h2o_scores, protected=8),
    "h2o-decode": keeps(h2o_scores, protected_share=0.5),
    "snapkv": keeps(SNAPKV, protected=8),
    "snapkv-w32": keeps(snapkv_scores(32, 7, "max", group_first=True), protected=32),
    "snapkv-w32-avg5": keeps(snapkv_scores(32, 5, "avg", group_first=False), protected=32),
    "snapkv-w64-avg5": keeps(snapkv_scores(64, 5, "avg", group_first=False), protected=64),
    "pyramidkv-exact": keeps(SNAPKV, protected=8, layers_of=pyramid_layers(exact=True)),
    "pyramidkv-faithful": keeps(SNAPKV, protected=8, layers_of=pyramid_layers(exact=False)),
    "kv-compress": keeps_globally(kvc_scores(8, 2, 7), protected=8),
    "kv-compress-w8-l1": keeps_globally(kvc_scores(8, 1, 7), protected=8),
    "kv-compress-w32-l2": keeps_globally(kvc_scores(32, 2, 7), protected=32),
    "kv-compress-w32-l1": keeps_globally(kvc_scores(32, 1, 7), protected=32),
    "kv-compress-full-l2": keeps_globally(kvc_scores(None, 2, 1, distance=10), protected=32),
    "kv-compress-continual": keeps_globally(kvc_scores(32, 2, 7), protected=32),
}
