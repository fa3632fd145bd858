"""Metrics of what heads hold after a further chunk of a prompt, in plain NumPy, key by key.

A head may hold any tokens in any order. Windowed methods measure all KVs anew, from the chunk's
last queries; those that sum over all queries add to what was measured; written from the papers'
rules, by the methods' names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tests.oracle.attention import softmax
from tests.oracle.narrowing import looked_at, recent
from tests.oracle.question_free import (
    calibrated,
    centred_row,
    compactor_part,
    expected_row,
    predicted_one,
    semantic_heads,
    surrogate_one,
    unlike_the_mean,
)
from tests.oracle.scores import (
    again,
    global_local_row,
    local_window,
    policy_row,
    random_number,
    window_values,
)

Name = tuple[int, int]
Metrics = dict[Name, np.ndarray]


@dataclass
class Held:
    """What a head held before the chunk, and then the chunk's tokens, in that order."""

    at: np.ndarray
    """Token positions [n]."""
    q: np.ndarray
    """The chunk's queries [r, C, d]."""
    hidden: np.ndarray
    """What enters attention, here the chunk's queries of all heads [C, H·r·d]."""
    k: np.ndarray
    v: np.ndarray
    before: np.ndarray
    """Metrics so far; 0 for the chunk's own."""
    p: np.ndarray
    """Attention of the chunk's queries [r, C, n], 0 where a query does not see a key."""
    out: np.ndarray
    """What the queries get [r, C, d]."""

    @property
    def seen(self) -> np.ndarray:
        """How many keys each query sees [C]."""
        return (self.p[0] > 0).sum(axis=-1)


@dataclass
class Chunk:
    """A chunk of C tokens from position `start` on, and the heads that it meets."""

    start: int
    length: int
    heads: dict[Name, Held]

    @property
    def end(self) -> int:
        return self.start + self.length

    @classmethod
    def of(
        cls,
        start: int,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        held: Mapping[Name, tuple[np.ndarray, ...]],
    ) -> Chunk:
        """From q [L, C, H·r, d], k and v [L, C, H, d], and each head's positions, keys, values and
        metrics."""
        layers, length, num_heads, d = k.shape
        group = q.shape[2] // num_heads
        heads = {}
        for layer in range(layers):
            for h in range(num_heads):
                at, keys, values, before = held[layer, h]
                at = np.concatenate([at, start + np.arange(length)])
                keys = np.concatenate([keys, k[layer, :, h]]).astype(np.float64)
                values = np.concatenate([values, v[layer, :, h]]).astype(np.float64)
                before = np.concatenate([before, np.zeros(length)])
                p = np.zeros((group, length, len(at)))
                for r in range(group):
                    for i in range(length):
                        query = q[layer, i, h * group + r].astype(np.float64)
                        logits = keys @ query / math.sqrt(d)
                        p[r, i] = softmax(np.where(at <= start + i, logits, -np.inf))
                mine = np.swapaxes(q[layer, :, h * group : (h + 1) * group], 0, 1)
                hidden = q[layer].reshape(length, -1)
                heads[layer, h] = Held(at, mine, hidden, keys, values, before, p, p @ values)
        return cls(start, length, heads)


def last_queries(x: Held, window: int, power: int, decay: float = 1.0) -> np.ndarray:
    """Per query head [r, n]: the chunk's last queries, one n tokens before the end times decayⁿ."""
    newest_first = x.p[:, ::-1][:, :window] ** power
    weight = decay ** np.arange(newest_first.shape[1])
    return (newest_first * weight[:, None]).sum(axis=1)


def pooled(at: np.ndarray, row: np.ndarray, width: int, kind: str) -> np.ndarray:
    """Maximum over the keys at most width // 2 positions away, or their sum over the width."""
    near = [row[abs(at - here) <= width // 2] for here in at]
    return np.array([x.max() if kind == "max" else x.sum() / width for x in near])


def every(score: Callable[[Chunk, Name, Held], np.ndarray]) -> Callable[[Chunk], Metrics]:
    return lambda c: {name: score(c, name, x) for name, x in c.heads.items()}


def kv_compress(window: int, power: int):
    """Pooled over 7 keys per query head, then added over the group."""
    return every(
        lambda c, name, x: np.sum(
            [pooled(x.at, row, 7, "max") for row in last_queries(x, window, power)], axis=0
        )
    )


def snapkv(window: int, width: int, kind: str, *, group_first: bool):
    """The keys before the window are pooled among themselves; those of the window stay."""

    def score(c: Chunk, name: Name, x: Held) -> np.ndarray:
        rows = last_queries(x, window, 1)
        if group_first:
            rows = rows.mean(axis=0, keepdims=True)
        rows = rows.copy()
        earlier = x.at < c.end - min(window, c.length)
        for row in rows:
            row[earlier] = pooled(x.at[earlier], row[earlier], width, kind)
            row[~earlier] = np.nan
        return rows.mean(axis=0)

    return every(score)


def predicted(c: Chunk, name: Name, x: Held) -> np.ndarray:
    """What was predicted of a KV stays; the chunk's own are predicted from what they enter with."""
    of = calibrated(name[0] + 1, 2, x.k.shape[1])
    row = x.before.copy()
    for i in range(c.length):
        j = len(row) - c.length + i
        row[j] = predicted_one(of, *name, x.hidden[i], x.k[j], x.v[j], c.start + i)
    return row


def surrogate(kind: str):
    """What a surrogate said of a KV stays; the chunk's own are scored by what they enter with."""

    def score(c: Chunk, name: Name, x: Held) -> np.ndarray:
        of = calibrated(name[0] + 1, 2, x.k.shape[1])
        row = x.before.copy()
        for i in range(c.length):
            row[len(row) - c.length + i] = surrogate_one(of, kind, *name, x.hidden[i])
        return row

    return score


def all_queries(power: int = 1, decay: float = 1.0, distance: int = 0):
    """What was there fades by the chunk's length; every query of the chunk adds."""

    def score(c: Chunk, name: Name, x: Held) -> np.ndarray:
        total = x.before.copy()
        for i in range(c.length):
            far_enough = c.start + i - x.at >= distance
            total = decay * total + far_enough * (x.p[:, i] ** power).sum(axis=0)
        return total

    return every(score)


def often_important(c: Chunk, name: Name, x: Held) -> np.ndarray:
    """Scissorhands: to how many queries that see a key it is less than an even share."""
    sees = x.at <= c.start + np.arange(c.length)[:, None]
    return -(sees & (x.p * x.seen[:, None] < 1 - 1e-9)).sum(axis=1).mean(axis=0)


def by_policy(c: Chunk, name: Name, x: Held) -> np.ndarray:
    """FastGen, from the chunk's queries alone."""
    inside = c.start + np.arange(c.length)[:, None] - x.at < local_window(c.end)
    rows = x.p.mean(axis=(0, 1)), (inside * x.p).mean(axis=(0, 1))
    return policy_row(*rows, x.at, c.end)


def hit_again(c: Chunk, name: Name, x: Held) -> np.ndarray:
    """LazyEviction, from the chunk's queries alone."""
    result = []
    for j, at in enumerate(x.at):
        ts, mri = int(at) - 1, 0
        for i in range(c.length):
            if x.p[:, i, j].max() > 1e-4:
                ts, mri = c.start + i, max(mri, c.start + i - ts)
        result.append(again(c.end - 1 - ts, mri))
    return np.array(result)


def global_local(c: Chunk, name: Name, x: Held) -> np.ndarray:
    """EMS, from the chunk's queries and the last 32 of them."""
    everywhere, local = (rows.sum(axis=(0, 1)) for rows in (x.p, x.p[:, -32:]))
    return global_local_row(everywhere, local) / len(x.at)


def windowkv(suffix: int, best: int):
    """By the chunk's suffix, in the first layer; what that does not hold counts 0 elsewhere."""

    def score(c: Chunk) -> Metrics:
        end = c.end - min(suffix, c.length)
        first: dict[int, dict[int, float]] = {}
        for (layer, head), x in c.heads.items():
            if layer == 0:
                rows = last_queries(x, suffix, 1)
                values = np.mean([window_values(r, x.at, end, 8, best) for r in rows], axis=0)
                first[head] = dict(zip(x.at.tolist(), values.tolist(), strict=True))
        return {
            (layer, head): np.array([first[head].get(int(at), 0.0) for at in x.at])
            for (layer, head), x in c.heads.items()
        }

    return score


def shared_reads(c: Chunk) -> Metrics:
    """The last 8 queries decayed by 0.8, 60 times a sampled background, and what any head reads."""
    sample = [(n + 1) * c.length // 128 - 1 for n in range(128)]
    sample += list(range(c.length - 128, c.length))
    sample = [i for i in sample if i >= 0]
    result = {}
    for name, x in c.heads.items():
        own = last_queries(x, 8, 2, 0.8).sum(axis=0)
        mean = np.zeros(len(x.at))
        for j, at in enumerate(x.at):
            later = [i for i in sample if c.start + i - at >= 10]
            total = sum((x.p[:, i, j] ** 2).sum() for i in later)
            mean[j] = total / max(len(later), 256 / 20)
        result[name] = own + 60 * mean
    read = np.zeros(c.end)
    for age, i in enumerate(reversed(range(max(0, c.length - 4), c.length))):
        most = np.zeros(c.end)
        for x in c.heads.values():
            for j, at in enumerate(x.at):
                if 4 <= at < c.end - 32:
                    most[at] = max(most[at], (x.p[:, i, j] ** 2).max())
        for at in np.flatnonzero(most):
            if at + age < c.end:
                read[at + age] += 0.8**age * most[at]
    spread = [max(0.98**d * read[j - d] for d in range(11) if d <= j) for j in range(c.end)]
    least = np.array([value if value >= 0.3 else 0.1 * value for value in spread])
    best = sorted(range(c.end), key=lambda j: (-spread[j], j))[:10]
    for rank, j in enumerate(best):
        if spread[j] >= 0.3:
            least[j] = 10_000 + 10 - rank
    return {name: np.maximum(result[name], least[x.at]) for name, x in c.heads.items()}


def expected_attention(c: Chunk, name: Name, x: Held) -> np.ndarray:
    """By the chunk's own queries."""
    at = c.start + np.arange(c.length)
    return expected_row(x.q, at, x.k, x.v, x.at, c.end)


def compactor(c: Chunk) -> Metrics:
    """The chunk by itself; what is held keeps what it has."""
    result = {}
    at = c.start + np.arange(c.length)
    for layer in sorted({layer for layer, _ in c.heads}):
        own = [x for (n, _), x in sorted(c.heads.items()) if n == layer]
        q = np.swapaxes(np.concatenate([x.q for x in own]), 0, 1)
        k, v = (np.stack([part[-c.length :] for part in parts], axis=1)
                for parts in ([x.k for x in own], [x.v for x in own]))  # fmt: skip
        rows = compactor_part(q, k, v, at, c.end)
        for h, x in enumerate(own):
            result[layer, h] = np.concatenate([x.before[: -c.length], rows[h]])
    return result


def semantic(c: Chunk, name: Name, x: Held) -> np.ndarray:
    """What a head has of the layer's four query heads; the chunk's last 8 stay."""
    layer, head = name
    chosen = semantic_heads(calibrated(layer + 1, 2, x.k.shape[1]), layer)
    row, group = np.zeros(len(x.at)), x.p.shape[0]
    earlier = x.at < c.end - min(8, c.length)
    for r, given in enumerate(last_queries(x, 8, 1)):
        if head * group + r in chosen:
            row[earlier] += pooled(x.at[earlier], given[earlier], 5, "avg") * 2 / len(chosen)
    row[~earlier] = np.nan
    return row


METRICS: dict[str, Callable[[Chunk], Metrics]] = {
    "shared-reads": shared_reads,
    "wide-pool": every(
        lambda c, name, x: np.max([pooled(x.at, r, 17, "max") for r in last_queries(x, 4, 2)], 0)
    ),
    "kv-compress": kv_compress(8, 2),
    "kv-compress-w32-l2": kv_compress(32, 2),
    "kv-compress-full-l2": all_queries(2, distance=10),
    "snapkv": snapkv(8, 7, "max", group_first=True),
    "snapkv-w32-avg5": snapkv(32, 5, "avg", group_first=False),
    "windowkv": windowkv(32, 4),
    "h2o": all_queries(),
    "a2sf": all_queries(decay=0.95),
    "a2sf-f20": all_queries(decay=0.2),
    "compresskv": every(semantic),
    "tova": every(lambda c, name, x: x.p[:, -1].mean(axis=0)),
    "pyramidinfer": every(
        lambda c, name, x: looked_at(x.p, min(recent(c.end), x.p.shape[1])) * len(x.p)
    ),
    "scissorhands": every(often_important),
    "lazyeviction": every(hit_again),
    "streaming-llm": every(lambda c, name, x: x.at.astype(float)),
    "random": every(lambda c, name, x: np.array([random_number(*name, int(at)) for at in x.at])),
    "kvzip": every(lambda c, name, x: x.before),
    "speckv": every(lambda c, name, x: x.before),
    "speckv-sparse": every(lambda c, name, x: x.before),
    "speckv-sparse-256": every(lambda c, name, x: x.before),
    "epicache": every(lambda c, name, x: x.before),
    "fastgen": every(by_policy),
    "ems": every(global_local),
    "r-kv": every(lambda c, name, x: x.p[:, -8:].mean(axis=0).sum(axis=0) / 8),
    "predicted-reads": every(predicted),
    "predicted-reads-blind": every(predicted),
    "kvzap-linear": every(surrogate("linear")),
    "kvzap-mlp": every(surrogate("mlp")),
    "keydiff": every(lambda c, name, x: unlike_the_mean(x.k)),
    "triattention": every(lambda c, name, x: centred_row(*name, x.k, x.at, c.end)),
    "expected-attention": every(expected_attention),
    "compactor": compactor,
    "key-norm": every(lambda c, name, x: -np.linalg.norm(x.k, axis=-1)),
}
"""By a method's name; one of each rule that methods share. NaN: never evicted, whatever it is."""
