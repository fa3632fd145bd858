"""Which KVs methods hold dear that look at no question, in plain NumPy, one KV at a time.

Written from the papers' and the authors' rules.
"""

from __future__ import annotations

import cmath
import functools
import math
from collections.abc import Callable

import numpy as np

from tests.oracle.scores import Prompt, Scores, avg_pool


@functools.cache
def calibrated(
    layers: int, heads: int, d: int, size: int | None = None, group: int = 2
) -> dict[str, np.ndarray]:
    """What is measured of a model, not of a prompt: RoPE's frequencies, how much heads are used,
    what a hidden state of `size` numbers (all queries of the groups) tells of later reads."""
    size = group * heads * d if size is None else size
    frequency = np.array([10_000 ** (-2 * i / d) for i in range(d // 2)], np.float32)
    used = np.random.default_rng(4).permutation(layers * heads).reshape(layers, heads)
    return {
        "rope_frequency": np.tile(frequency, (layers, 1)),
        "head_budget": (used / 10).astype(np.float32),
        "retrieval_head": np.roll(used, 1).astype(np.float32),
        **_semantic(layers, group * heads),
        "key_similarity": np.random.default_rng(37).uniform(0.5, 1, layers).astype(np.float32),
        **_reads(layers, heads, size),
        **_surrogates(layers, heads, size),
        **_centres(layers, group * heads, d),
        **_queries(layers, group * heads, d),
    }


def _semantic(layers: int, queries: int) -> dict[str, np.ndarray]:
    """What query heads read of facts, and how far layers are off."""
    rngs = [np.random.default_rng((31, layer)) for layer in range(layers)]
    found = np.stack([rng.permutation(queries) for rng in rngs])
    error = np.array([rng.uniform(0.1, 1) for rng in rngs])
    return {"semantic_head": found.astype(np.float32), "layer_error": error.astype(np.float32)}


def semantic_heads(of: dict[str, np.ndarray], layer: int) -> list[int]:
    """The query heads of a layer that count, the four highest."""
    row = of["semantic_head"][layer]
    return sorted(range(len(row)), key=lambda g: (-row[g], g))[:4]


def _queries(layers: int, queries: int, d: int) -> dict[str, np.ndarray]:
    """Queries of six tokens before RoPE."""
    rngs = [np.random.default_rng((29, layer)) for layer in range(layers)]
    found = np.stack([rng.standard_normal((6, queries, d)) for rng in rngs])
    return {"reference_query": found.astype(np.float32)}


def _centres(layers: int, queries: int, d: int) -> dict[str, np.ndarray]:
    """Mean queries before RoPE, and the mean sizes of their pairs, which are larger."""
    rngs = [np.random.default_rng((23, layer)) for layer in range(layers)]
    centre = np.stack([rng.standard_normal((queries, d)) for rng in rngs])
    more = np.stack([rng.uniform(0, 1, (queries, d // 2)) for rng in rngs])
    size = np.hypot(centre[..., : d // 2], centre[..., d // 2 :]) + more
    return {"query_centre": centre.astype(np.float32), "query_size": size.astype(np.float32)}


def _reads(layers: int, heads: int, size: int) -> dict[str, np.ndarray]:
    rngs = [np.random.default_rng((9, layer)) for layer in range(layers)]
    weight = [rng.standard_normal((size, heads)) / math.sqrt(size) for rng in rngs]
    # Positions from 50 on count as the 50th.
    extra = [np.append(rng.uniform(-1, 1, (heads, 4)), [[50]] * heads, axis=1) for rng in rngs]
    table = [np.sort(rng.uniform(-4, 3, 64))[::-1] for rng in rngs]
    named = {"reads_weight": weight, "reads_extra": extra, "reads_claim": table}
    return {name: np.stack(rows).astype(np.float32) for name, rows in named.items()}


def _surrogates(layers: int, heads: int, size: int) -> dict[str, np.ndarray]:
    found: dict[str, list[np.ndarray]] = {}
    for layer in range(layers):
        rng = np.random.default_rng((13, layer))
        shapes = {"weight": (size, heads), "bias": (heads,), "in": (size, 6), "in_bias": (6,),
                  "out": (6, heads), "out_bias": (heads,)}  # fmt: skip
        for name, shape in shapes.items():
            values = rng.standard_normal(shape) / math.sqrt(shape[0] if len(shape) > 1 else 1)
            found.setdefault(f"kvzap_{name}", []).append(values)
    return {name: np.stack(rows).astype(np.float32) for name, rows in found.items()}


def surrogate_one(
    of: dict[str, np.ndarray], kind: str, layer: int, head: int, hidden: np.ndarray
) -> float:
    """A line, or a line of bent lines: x Φ(x) is the bend."""

    def part(name: str) -> np.ndarray:
        return of[f"kvzap_{name}"][layer].astype(np.float64)

    x = hidden.astype(np.float64)
    if kind == "linear":
        return float(x @ part("weight")[:, head] + part("bias")[head])
    inner = [u * (1 + math.erf(u / math.sqrt(2))) / 2 for u in x @ part("in") + part("in_bias")]
    return float(inner @ part("out")[:, head] + part("out_bias")[head])


def surrogate(kind: str) -> Callable[[Prompt], Scores]:
    """What a published surrogate says of what enters attention (here the queries)."""

    def scores(p: Prompt) -> Scores:
        of = calibrated(p.layers, p.heads, p.k.shape[-1])
        return {
            (layer, head): np.array([
                surrogate_one(of, kind, layer, head, p.q[layer, j].reshape(-1))
                for j in range(p.length)
            ])
            for layer, head in p.names
        }  # fmt: skip

    return scores


def semantic(p: Prompt) -> Scores:
    """The mean over the heads that count of their last 8 queries' attention, of 5 keys each; what
    others of the layer's KV heads have is added there."""
    of, result = calibrated(p.layers, p.heads, p.k.shape[-1]), {}
    for layer, head in p.names:
        chosen, row = semantic_heads(of, layer), np.zeros(p.length)
        before = max(0, p.length - 8)
        for g in set(chosen) & set(p.of_group(head)):
            given = p.attention[layer][g][before:].sum(axis=0)
            row[:before] += avg_pool(given[:before], 5) * p.heads / len(chosen)
        row[before:] = np.nan
        result[layer, head] = row
    return result


def predicted(p: Prompt) -> Scores:
    """The calibrated sum of what enters attention (here the queries), of norms and position."""
    of = calibrated(p.layers, p.heads, p.k.shape[-1])
    return {
        (layer, head): np.array([
            predicted_one(of, layer, head, p.q[layer, j].reshape(-1), p.k[layer, j, head],
                          p.v[layer, j, head], j)
            for j in range(p.length)
        ])
        for layer, head in p.names
    }  # fmt: skip


def predicted_one(
    of: dict[str, np.ndarray],
    layer: int,
    head: int,
    hidden: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    position: int,
) -> float:
    """The same of one KV."""
    norms = [math.log(np.linalg.norm(x.astype(np.float64))) for x in (k, v)]
    extra = of["reads_extra"][layer, head, :4].astype(np.float64)
    weight = of["reads_weight"][layer, :, head].astype(np.float64)
    return float(hidden @ weight + extra @ [*norms, math.log(1 + min(position, 50)), 1])


def predicted_or_claimed(p: Prompt) -> Scores:
    """The prediction, or what the largest attention of the last 16 queries counts as, if more."""
    table = calibrated(p.layers, p.heads, p.k.shape[-1])["reads_claim"].astype(np.float64)
    result = {}
    for (layer, head), row in predicted(p).items():
        result[layer, head] = row = row.copy()
        for j in range(p.length):
            most = max(p.attention[layer][g][-16:, j].max() for g in p.of_group(head))
            at = -4 * math.log(max(most, 1e-12))
            low = math.floor(at)
            if low >= 63:
                claim = -30.0 if at > 63 else table[layer, 63]
            else:
                claim = (low + 1 - at) * table[layer, low] + (at - low) * table[layer, low + 1]
            row[j] = max(row[j], claim)
    return result


def rotation(position: int, d: int) -> np.ndarray:
    """RoPE's matrix [d, d] at a position: pairs (i, i + d/2) turn by position · frequency."""
    result = np.zeros((d, d))
    for i, frequency in enumerate(calibrated(1, 1, d)["rope_frequency"][0]):
        c, s = math.cos(position * float(frequency)), math.sin(position * float(frequency))
        j = i + d // 2
        result[i, i], result[i, j], result[j, i], result[j, j] = c, -s, s, c
    return result


def before_rope(x: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Rotated vectors [n, d] of some positions as they were."""
    rows = [rotation(int(at), x.shape[1]).T @ row for row, at in zip(x, position, strict=True)]
    return np.array(rows).reshape(x.shape)


def unlike_the_mean(k: np.ndarray) -> np.ndarray:
    """KeyDiff of some keys [n, d]."""
    unit = [row / math.sqrt(row @ row) for row in k.astype(np.float64)]
    mean = np.sum(unit, axis=0) / len(unit)
    return np.array([-(row @ mean) / math.sqrt(mean @ mean) for row in unit])


def keydiff(p: Prompt) -> Scores:
    return {(layer, head): unlike_the_mean(p.k[layer, :, head]) for layer, head in p.names}


def centred_row(layer: int, head: int, k: np.ndarray, at: np.ndarray, now: int) -> np.ndarray:
    """TriAttention of the keys [n, d] that a head holds, of positions `at`, at time `now`.

    Key by key and pair by pair, from the keys before RoPE and angles.
    """
    d = k.shape[1]
    of = calibrated(layer + 1, 2, d)
    known = before_rope(k.astype(np.float64), at)
    rows = []
    for g in (2 * head, 2 * head + 1):
        centre = of["query_centre"][layer, g].astype(np.float64)
        size = of["query_size"][layer, g].astype(np.float64)
        row = []
        for key, p in zip(known, at.tolist(), strict=True):
            expected = 0.0
            for i, frequency in enumerate(of["rope_frequency"][0].astype(np.float64)):
                q, own = complex(centre[i], centre[i + d // 2]), complex(key[i], key[i + d // 2])
                phase = cmath.phase(q) - cmath.phase(own)
                turns = [math.cos(frequency * (now + 2**n - p) + phase) for n in range(17)]
                expected += abs(q) * abs(own) * sum(turns) / 17 + (size[i] - abs(q)) * abs(own)
            # Keys that are equal once turned shall count the same.
            row.append(round(expected, 9))
        rows.append((np.array(row) - np.mean(row)) / max(np.std(row), 1e-6))
    return np.max(rows, axis=0)


def centred(p: Prompt) -> Scores:
    at = np.arange(p.length)
    return {
        (layer, head): centred_row(layer, head, p.k[layer, :, head], at, p.length)
        for layer, head in p.names
    }


def expected_row(
    q: np.ndarray,
    q_at: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    k_at: np.ndarray,
    end: int,
    ahead: int = 512,
) -> np.ndarray:
    """Expected Attention of keys [n, d] from the queries [r, T, d] of a group; NaN for sinks.

    The mean and covariance of the queries before RoPE from position 4 on, turned by the mean
    rotation over the positions that come next.
    """
    d = k.shape[1]
    turn = np.mean([rotation(end + i, d) for i in range(ahead)], axis=0)
    chosen = np.flatnonzero(k_at >= 4)
    total = np.zeros(len(k))
    for queries in q.astype(np.float64):
        known = before_rope(queries[q_at >= 4], q_at[q_at >= 4])
        mean, covariance = np.zeros(d), np.zeros((d, d))
        if len(known):
            mean = known.mean(axis=0)
            covariance = np.mean([np.outer(x - mean, x - mean) for x in known], axis=0)
        mean, covariance = turn @ mean, turn @ covariance @ turn.T
        keys = k[chosen].astype(np.float64)
        logits = [x @ mean / math.sqrt(d) + x @ covariance @ x / (2 * d) for x in keys]
        if logits:
            weight = np.exp(np.array(logits) - max(logits))
            total[chosen] += weight / weight.sum() / len(q)
    total *= np.linalg.norm(v.astype(np.float64), axis=-1)
    total[k_at < 4] = np.nan
    return total


def expected_attention(p: Prompt) -> Scores:
    at = np.arange(p.length)
    return {
        (layer, head): expected_row(
            np.array([p.q[layer, :, g] for g in p.of_group(head)]),
            at, p.k[layer, :, head], p.v[layer, :, head], at, p.length,
        )
        for layer, head in p.names
    }  # fmt: skip


def compactor_part(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    at: np.ndarray,
    end: int,
    *,
    blend: float = 0.9,
    chunk: int = 256,
    sketch: int = 48,
) -> np.ndarray:
    """Compactor of one layer: q [T, H·r, d], k and v [T, H, d] of tokens `at`; [H, T]."""
    heads, d = k.shape[1:]
    group = q.shape[1] // heads
    inner = np.flatnonzero((at >= 8) & (at < end - 4))
    drawn = np.random.default_rng(0).standard_normal((heads, d, sketch)) / math.sqrt(sketch)
    leverage, attention = np.zeros((2, heads, len(inner)))
    for head in range(heads):
        x = before_rope(k[inner, head].astype(np.float64), at[inner])
        x = x - x.mean(axis=0) if len(x) else x
        if d > sketch:
            x = x @ drawn[head]
        inverse = np.linalg.inv(x.T @ x + 0.01 * np.eye(x.shape[1]))
        leverage[head] = [row @ inverse @ row for row in x]
        for first in range(0, len(inner), chunk):
            some = inner[first : first + chunk]
            for g in range(head * group, (head + 1) * group):
                for i in some:
                    logits = np.array([float(q[i, g] @ k[j, head].astype(float)) for j in some])
                    weight = np.exp(logits - logits.max())
                    attention[head, first : first + chunk] += weight / weight.sum() / group
        attention[head] *= np.linalg.norm(v[inner, head].astype(float), axis=-1)
        attention[head] = avg_pool(attention[head], 3)
    result = np.zeros((heads, len(k)))
    if len(inner):

        def z(x: np.ndarray) -> np.ndarray:
            deviation = math.sqrt(((x - x.mean()) ** 2).sum() / max(1, x.size - 1))
            return (x - x.mean()) / max(deviation, 1e-6)

        result[:, inner] = blend * z(leverage) + z(attention)
    return result


def compactor(p: Prompt) -> Scores:
    at = np.arange(p.length)
    rows = [compactor_part(p.q[n], p.k[n], p.v[n], at, p.length) for n in range(p.layers)]
    return {(layer, head): rows[layer][head] for layer, head in p.names}
