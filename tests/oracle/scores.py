"""Which KVs of a prompt each method holds dear, in plain NumPy, one KV at a time.

Written from the papers' and the authors' rules.
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


@dataclass
class Prompt:
    """q [L, T, H·r, d], k and v [L, T, H, d] of a whole prompt; a cap in tokens; the block size."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
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


def random_number(layer: int, head: int, position: int) -> float:
    """Uniform, from a counter hashed with MurmurHash3's finaliser."""

    def mixed(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B % 2**32
        x ^= x >> 13
        x = x * 0xC2B2AE35 % 2**32
        return x ^ x >> 16

    golden = 0x9E3779B9
    x = mixed(golden)
    for part in (layer, head, int(position)):
        x = mixed(x ^ mixed((part + golden) % 2**32))
    return (x >> 8) / 2**24


def random_scores(p: Prompt) -> Scores:
    return {
        name: np.array([random_number(*name, position) for position in range(p.length)])
        for name in p.names
    }


def recency(p: Prompt) -> Scores:
    return {name: np.arange(p.length, dtype=float) for name in p.names}


def low_key_norm(p: Prompt) -> Scores:
    return {
        (layer, head): -np.linalg.norm(p.k[layer, :, head].astype(np.float64), axis=-1)
        for layer, head in p.names
    }


def unread(p: Prompt) -> Scores:
    """What a method knows that has not had the prompt repeated."""
    return {name: np.zeros(p.length) for name in p.names}


def mean_of_last(p: Prompt) -> Scores:
    """R-KV's attention, before it is pooled: the last 8 queries, the mean over them and a group."""
    return {
        (layer, head): column_sums(p, layer, head, last(p, 8)).mean(axis=0) / 8
        for layer, head in p.names
    }


def h2o_rows(p: Prompt) -> Scores:
    """Column sums of the whole causal matrix, of each query head."""
    return {(layer, head): column_sums(p, layer, head, range(p.length)) for layer, head in p.names}


def h2o_scores(p: Prompt) -> Scores:
    return {name: rows.sum(axis=0) for name, rows in h2o_rows(p).items()}


def global_local_row(everywhere: np.ndarray, local: np.ndarray) -> np.ndarray:
    """EMS of a head's keys: the larger of two rows of sums, scaled so that their means are 1."""
    return np.maximum(everywhere / everywhere.mean(), local / local.mean())


def global_local(p: Prompt) -> Scores:
    """EMS with a window of 32, where all keys together receive 1 of a query."""
    result = {}
    for layer, head in p.names:
        rows = [column_sums(p, layer, head, queries).sum(axis=0)
                for queries in (range(p.length), last(p, 32))]  # fmt: skip
        result[layer, head] = global_local_row(*rows) / p.length
    return result


def local_window(end: int) -> int:
    """Newest positions that FastGen's local policy keeps."""
    return math.floor(np.float32(0.3) * end)


def policy_row(mass: np.ndarray, near: np.ndarray, at: np.ndarray, end: int) -> np.ndarray:
    """FastGen of a head's keys by mean attention: that of what its policy keeps, −1/a of the rest.

    The first of: the first 4 positions; and 30 % of the keys, the most read; and the newest 30 % of
    `end` positions; all; that has 0.9 of the attention, of which `near` is what queries pay keys
    inside a window of that size.
    """
    special = {j for j in range(len(at)) if at[j] < 4}
    others = sorted(set(range(len(at))) - special, key=lambda j: (-mass[j], j))
    frequent = special | set(others[: math.floor(np.float32(0.3) * len(at))])
    local = frequent | {j for j in range(len(at)) if at[j] >= end - local_window(end)}
    chosen = set(range(len(at)))
    whole = {j: mass[j] for j in frequent}
    for policy, read in (
        (special, sum(mass[j] for j in special)),
        (frequent, sum(whole.values())),
        (local, sum(whole.get(j, near[j]) for j in range(len(at)))),
    ):
        if read >= 0.9:
            chosen = policy
            break
    return np.array([m if j in chosen else -1 / max(m, 1e-30) for j, m in enumerate(mass)])


def by_policy(p: Prompt) -> Scores:
    at, result = np.arange(p.length), {}
    inside = at[:, None] - at < local_window(p.length)
    for layer, head in p.names:
        paid = np.mean([p.attention[layer][g] for g in p.of_group(head)], axis=0)
        rows = paid.mean(axis=0), (inside * paid).mean(axis=0)
        result[layer, head] = policy_row(*rows, at, p.length)
    return result


def newest_query(p: Prompt) -> Scores:
    return {
        (layer, head): column_sums(p, layer, head, last(p, 1)).mean(axis=0)
        for layer, head in p.names
    }


def often_important(p: Prompt) -> Scores:
    """Less than nothing: of how many of the last 400 queries a key that they see gets less than
    1/n, n the keys they see."""
    result = {}
    for layer, head in p.names:
        counts = np.zeros((p.group, p.length))
        for row, g in zip(counts, p.of_group(head), strict=True):
            for i in last(p, 400):
                row[: i + 1] -= p.attention[layer][g][i, : i + 1] * (i + 1) < 1 - 1e-6
        result[layer, head] = counts.mean(axis=0)
    return result


def hit_again(p: Prompt) -> Scores:
    """LazyEviction's two terms from the hits of any query head of the group, key by key."""
    result = {}
    for layer, head in p.names:
        row = np.zeros(p.length)
        for j in range(p.length):
            ts, mri = j - 1, 0
            for i in range(j, p.length):
                if max(p.attention[layer][g][i, j] for g in p.of_group(head)) > 1e-4:
                    ts, mri = i, max(mri, i - ts)
            row[j] = again(p.length - 1 - ts, mri)
        result[layer, head] = row
    return result


def again(since: int, mri: int) -> float:
    """log(σ(−1 − since / MRI) + σ(1 − MRI)), the second 0 without an interval, from e^−x alone."""
    lately = 1 + since / (mri + 1e-5)
    terms = [-lately - math.log1p(math.exp(-lately))]
    if mri:
        terms.append(1 - mri - math.log1p(math.exp(1 - mri)))
    return max(terms) + math.log(sum(math.exp(x - max(terms)) for x in terms))


def forgetting(alpha: float) -> Callable[[Prompt], Scores]:
    """Step by step: everything so far times α, plus what the step's query gives."""

    def scores(p: Prompt) -> Scores:
        result = {}
        for layer, head in p.names:
            total = np.zeros(p.length)
            for i in range(p.length):
                total = alpha * total + sum(p.attention[layer][g][i] for g in p.of_group(head))
            result[layer, head] = total
        return result

    return scores


def per_query(scores_of: Callable[[Prompt], Scores]) -> Callable[[Prompt], Scores]:
    """Scores divided by the number of queries that could see the token."""

    def scores(p: Prompt) -> Scores:
        lifetime = p.length - np.arange(p.length)
        return {name: row / lifetime for name, row in scores_of(p).items()}

    return scores


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


def window_values(row: np.ndarray, at: np.ndarray, end: int, width: int, best: int) -> np.ndarray:
    """The mean of the largest values of each window of positions before `end`; NaN behind it."""
    result = np.full(len(row), np.nan)
    for window in {int(t) // width for t in at if t < end}:
        here = [j for j, t in enumerate(at) if t < end and t // width == window]
        result[here] = np.mean(sorted(row[here])[-best:])
    return result


def window_scores(
    suffix: int, width: int = 8, best: int = 4, layers: int = 8
) -> Callable[[Prompt], Scores]:
    """WindowKV before heads are averaged: windows by their best keys, in every so many layers."""

    def scores(p: Prompt) -> Scores:
        at, end = np.arange(p.length), p.length - min(suffix, p.length)
        result = {}
        for layer, head in p.names:
            rows = column_sums(p, layer // layers * layers, head, last(p, suffix))
            of_heads = [window_values(row, at, end, width, best) for row in rows]
            result[layer, head] = np.mean(of_heads, axis=0)
        return result

    return scores


def snapkv_rows(p: Prompt) -> Scores:
    """SnapKV 8 / 7 / max of each query head by itself."""
    result = {}
    for layer, head in p.names:
        before = column_sums(p, layer, head, last(p, 8))[:, : max(0, p.length - 8)]
        rows = np.full((p.group, p.length), np.nan)
        if before.size:
            rows[:, : before.shape[1]] = [max_pool(row, 7) for row in before]
        result[layer, head] = rows
    return result


def kvc_rows(p: Prompt) -> Scores:
    """KV-Compress w8-L2 of each query head by itself."""
    return {
        (layer, head): np.array(
            [max_pool(row, 7) for row in column_sums(p, layer, head, last(p, 8), 2)]
        )
        for layer, head in p.names
    }


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


def wide_pool(p: Prompt) -> Scores:
    """w4-L2, max-pooled over 17, the best query head."""
    result = {}
    for layer, head in p.names:
        rows = [max_pool(row, 17) for row in column_sums(p, layer, head, last(p, 4), 2)]
        result[layer, head] = np.max(rows, axis=0)
    return result


def shared_reads(p: Prompt) -> Scores:
    """w8-L2 decayed by 0.8, 60 times a sampled background, and the 10 tokens read by any head."""
    result = {}
    for layer, head in p.names:
        rows = np.zeros((p.group, p.length))
        for age, i in enumerate(reversed(last(p, 8))):
            for row, g in zip(rows, p.of_group(head), strict=True):
                row += 0.8**age * p.attention[layer][g][i] ** 2
        # In float32: less than its last bit decides nothing.
        rest = np.float32(60) * sampled_mean(p, layer, head).astype(np.float32)
        result[layer, head] = rows.sum(axis=0).astype(np.float32) + rest
    read = read_by_any(p)
    for rank, token in enumerate(sorted(read, key=lambda j: (-read[j], j))):
        value = read[token] * (1 if read[token] >= 0.3 else 0.1)
        if rank < 10 and read[token] >= 0.3:
            value = 10_000 + 10 - rank
        for name in p.names:
            result[name][token] = max(result[name][token], np.float32(value))
    return result


def sampled_mean(p: Prompt, layer: int, head: int) -> np.ndarray:
    """Mean squared attention from 128 spaced and the last 128 queries at least 10 tokens later."""
    queries = [(n + 1) * p.length // 128 - 1 for n in range(128)] + list(
        range(p.length - 128, p.length)
    )
    queries = [i for i in queries if i >= 0]
    mean = np.zeros(p.length)
    for j in range(p.length):
        later = [i for i in queries if i >= j + 10]
        total = sum(p.attention[layer][g][i, j] ** 2 for g in p.of_group(head) for i in later)
        mean[j] = total / max(len(later), 256 / 20)
    return mean


def read_by_any(p: Prompt) -> dict[int, float]:
    """How much the last 4 queries read each token in the head that reads it most.

    The first 4 and the last 32 tokens are not read. A query n tokens before the end stands for one
    that would read n tokens further on; 10 tokens after each share in it, 0.98 for every one.
    """
    read = dict.fromkeys(range(p.length), 0.0)
    for age, i in enumerate(reversed(last(p, 4))):
        for j in range(4, p.length - 32):
            most = max(rows[g][i, j] for rows in p.attention for g in range(len(rows)))
            read[j + age] += 0.8**age * most**2
    return {j: max(0.98**d * read[j - d] for d in range(11) if d <= j) for j in read}
