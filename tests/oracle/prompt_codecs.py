"""What methods that store a whole prompt give back of it, worked out vector by vector in float64.

Written from the papers, not from kvjax. Arrays are those of the prompt alone: keys (rotated) and
values [L, T, H, d], queries [L, T, Hr, d], what enters attention [L, T, D].
"""

import math

import ml_dtypes
import numpy as np

from tests.oracle.attention import softmax
from tests.oracle.codecs import rotation, scale_for


def short(x: np.ndarray | float) -> np.ndarray:
    """What 16 bits keep."""
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def coded(vector: np.ndarray, bits: int, clip: float = 1.0) -> np.ndarray:
    """Numbers that share a scale and a least one."""
    if not len(vector):
        return vector
    steps = 2**bits - 1
    zero = float(short(vector.min() * clip))
    scale = scale_for(max(vector.max() * clip - zero, 0) / steps) or 1.0
    return np.clip(np.round((vector - zero) / scale), 0, steps) * scale + zero


def in_parts(vector: np.ndarray, bits: int, most: int, clip: float = 1.0) -> np.ndarray:
    """The same of a row in equal parts of at most so many numbers."""
    parts = next(
        n for n in range(1, len(vector) + 1) if len(vector) % n == 0 and len(vector) // n <= most
    )
    return np.concatenate([coded(part, bits, clip) for part in np.split(vector, parts)])


def by_channel(k: np.ndarray, bits: int, group: int | None = None) -> np.ndarray:
    """Keys of a layer [T, H, d], each channel of so many tokens by itself."""
    out = np.zeros_like(k)
    for first in range(0, len(k), group or len(k)):
        part = slice(first, first + (group or len(k)))
        for at in np.ndindex(*k.shape[1:]):
            out[(part, *at)] = coded(k[(part, *at)], bits)
    return out


def by_token(v: np.ndarray, bits: int, most: int | None = None) -> np.ndarray:
    """Values of a layer, each token of all heads by itself."""
    rows = v.reshape(len(v), -1)
    return np.stack([in_parts(row, bits, most or len(row)) for row in rows]).reshape(v.shape)


def kivi(k: np.ndarray, v: np.ndarray, bits: int, group: int | None):
    keys = np.stack([by_channel(x, bits, group) for x in k])
    return keys, np.stack([by_token(x, bits, group) for x in v])


def without_ends(vectors: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Which of each row's numbers are its least or largest ones, and rows with their mean there."""
    out, filled = np.zeros(vectors.shape, bool), vectors.copy()
    for i, row in enumerate(vectors):
        order = np.argsort(row, kind="stable")
        out[i, order[:count]] = True
        out[i, order[len(row) - count :]] = True
        filled[i, out[i]] = row.mean()
    return out, filled


def gear(k, v, bits: int, group: int | None, permille: int, rank: int, start: np.ndarray):
    """Codes of what is no outlier, outliers, and a low rank of what is lost of each head."""
    found = ([], [])
    for layer in range(len(k)):
        tokens, heads, d = k[layer].shape
        columns = k[layer].reshape(tokens, -1).T
        out, filled = without_ends(columns, tokens * permille // 1000)
        keys = by_channel(filled.T.reshape(k[layer].shape), bits, group)
        keys = np.where(out.T.reshape(keys.shape), short(k[layer]), keys)
        rows = v[layer].reshape(tokens, -1)
        out, filled = without_ends(rows, rows.shape[1] * permille // 1000)
        values = by_token(filled.reshape(v[layer].shape), bits, group)
        values = np.where(out.reshape(values.shape), short(v[layer]), values)
        for exact, stored, into in ((k[layer], keys, found[0]), (v[layer], values, found[1])):
            given = stored.copy()
            for head in range(heads):
                lost = exact[:, head] - stored[:, head]
                basis = start
                for _ in range(2):
                    basis = lost.T @ (lost @ basis)
                left = np.linalg.qr(lost @ np.linalg.qr(basis)[0])[0]
                given[:, head] += short(left) @ short(lost.T @ left).T
            into.append(given)
    return np.stack(found[0]), np.stack(found[1])


def attention(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """[H, r, query, key] of a layer, causal."""
    tokens, heads, d = k.shape
    out = np.zeros((heads, q.shape[1] // heads, tokens, tokens))
    for h, r, t in np.ndindex(*out.shape[:3]):
        logits = k[: t + 1, h] @ q[t, h * out.shape[1] + r] / math.sqrt(d)
        out[h, r, t, : t + 1] = softmax(logits)
    return out


def mikv(q, k, v, high: int, low: int, permille: int):
    """The newest and the most read tokens in more bits; keys balanced by queries."""
    keys, values = np.zeros_like(k), np.zeros_like(v)
    num_layers, tokens, heads, d = k.shape
    count = tokens * permille // 1000
    for layer in range(num_layers):
        mass = attention(q[layer], k[layer]).sum(axis=(1, 2))
        group = q.shape[2] // heads
        for h in range(heads):
            recent = list(range(tokens - count // 2, tokens))
            others = sorted(set(range(tokens)) - set(recent), key=lambda t: -mass[h, t])
            important = {*recent, *others[: count - len(recent)]}
            asked = np.abs(q[layer, :, h * group : (h + 1) * group]).max(axis=(0, 1))
            balance = short(np.sqrt(asked / np.abs(k[layer, :, h]).max(axis=0)))
            for t in range(tokens):
                bits = high if t in important else low
                keys[layer, t, h] = in_parts(k[layer, t, h] * balance, bits, d // 2) / balance
                values[layer, t, h] = in_parts(v[layer, t, h], bits, d // 2)
    return keys, values


def zipcache(q, k, v, high: int, low: int, permille: int, probes: int, drawn: np.ndarray):
    """Tokens that probes read much for the time they could, in more bits.

    Args:
        q, k, v: as above.
        high, low: bits.
        permille: of the tokens that have more of them.
        probes: thousandths of the queries, from the end and of the rest.
        drawn: [T]: the least of the rest's are probes.
    """
    keys, values = np.zeros_like(k), np.zeros_like(v)
    num_layers, tokens, heads, _ = k.shape
    few = tokens * probes // 1000
    early = sorted(range(tokens - few), key=lambda t: drawn[t])[:few]
    asking = sorted(early + list(range(tokens - few, tokens)))
    for layer in range(num_layers):
        seen = attention(q[layer], k[layer])[:, :, asking].sum(axis=(1, 2))
        saliency = seen / (tokens - np.arange(tokens))
        for h in range(heads):
            order = sorted(range(tokens), key=lambda t: (-saliency[h, t], t))
            salient = order[: tokens - tokens * (1000 - permille) // 1000]
            for tier, bits in ((sorted(salient), high), (sorted(order[len(salient) :]), low)):
                divided = short(np.sqrt(np.abs(v[layer, :, h]).max(axis=0)))
                for c in range(k.shape[-1]):
                    keys[layer, tier, h, c] = coded(k[layer, tier, h, c], bits)
                for t in tier:
                    values[layer, t, h] = coded(v[layer, t, h] / divided, bits) * divided
    return keys, values


def turned(k: np.ndarray, frequency: np.ndarray, back: bool = False) -> np.ndarray:
    """Keys [..., T, H, d] turned by their positions, pair (i, i + d/2) by pair."""
    angle = np.arange(k.shape[-3])[:, None] * frequency.astype(np.float64)
    turn = np.exp((-1j if back else 1j) * angle)[:, None]
    half = k.shape[-1] // 2
    pairs = (k[..., :half] + 1j * k[..., half:]) * turn
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def nearest(x: np.ndarray, levels: np.ndarray) -> np.ndarray:
    return levels[np.argmin(np.abs(x[..., None] - levels), axis=-1)]


def means(x: np.ndarray, count: int) -> np.ndarray:
    """Levels of k-means, from the middles of equal shares of the ordered numbers on."""
    x = np.sort(x)
    levels = np.array([x[(2 * i + 1) * len(x) // (2 * count)] for i in range(count)])
    for _ in range(50):
        own = np.argmin(np.abs(x[:, None] - levels), axis=1)
        levels = np.array(
            [x[own == i].mean() if (own == i).any() else levels[i] for i in range(count)]
        )
    return levels


def on_levels(vectors: np.ndarray, bits: int, permille: int) -> np.ndarray:
    """KVQuant: every row by its own range, on levels that all rows share."""
    out = short(vectors)
    ends = -(-vectors.shape[1] * permille // 1000)
    inner, scaled, ranges = [], [], []
    for row in vectors:
        inner.append(np.sort(np.argsort(row, kind="stable")[ends : len(row) - ends]))
        low, high = row[inner[-1]].min(), row[inner[-1]].max()
        ranges.append((float(short((low + high) / 2)), float(short((high - low) / 2)) or 1.0))
        scaled.append((row[inner[-1]] - ranges[-1][0]) / ranges[-1][1])
    levels = short(means(np.concatenate(scaled), 2**bits))
    for i, (middle, half) in enumerate(ranges):
        out[i, inner[i]] = nearest(scaled[i], levels) * half + middle
    return out


def kvquant(k, v, frequency: np.ndarray, bits: int, permille: int):
    """Keys before RoPE by channel, values by token; the first token exact."""
    keys, values = turned(k, frequency, back=True), v.copy()
    for layer in range(len(k)):
        rest = keys[layer, 1:].reshape(len(k[layer]) - 1, -1)
        keys[layer, 1:] = on_levels(rest.T, bits, permille).T.reshape(keys[layer, 1:].shape)
        rest = v[layer, 1:].reshape(len(v[layer]) - 1, -1)
        values[layer, 1:] = on_levels(rest, bits, permille).reshape(values[layer, 1:].shape)
        keys[layer, 0], values[layer, 0] = short(keys[layer, 0]), short(v[layer, 0])
    return turned(keys, frequency), values


def rotatekv(k, v, peak, frequency: np.ndarray, bits: int, group: int, sinks: int):
    """Keys before RoPE turned over as many as four heads, channels in the order of their sums;
    tokens of the highest peaks as they are."""
    before = turned(k, frequency, back=True)
    keys, values = np.zeros_like(k), np.zeros_like(v)
    num_layers, tokens, heads, d = k.shape
    together = next(n for n in (4, 3, 2, 1) if heads % n == 0)
    over, one = rotation(together * d), rotation(d)
    clip = 0.8 if bits == 2 else 1.0
    for layer in range(num_layers):
        rows = before[layer].reshape(tokens, heads // together, -1) @ over
        rows = rows.reshape(tokens, -1)
        order = np.argsort(rows.sum(axis=0))
        for row in rows:
            row[order] = in_parts(row[order], bits, group, clip)
        rows = rows.reshape(tokens, heads // together, -1) @ over
        keys[layer] = rows.reshape(k[layer].shape)
        for t in range(tokens):
            row = in_parts((v[layer, t] @ one).reshape(-1), bits, group, clip)
            values[layer, t] = row.reshape(heads, d) @ one
        exact = np.argsort(-peak[layer], kind="stable")[:sinks]
        keys[layer, exact] = short(before[layer, exact])
        values[layer, exact] = short(v[layer, exact])
    return turned(keys, frequency), values


def minicache(x: np.ndarray, weight: float, permille: int) -> np.ndarray:
    """Keys or values of all layers, from the middle on in pairs."""
    out = short(x)
    tokens = x.shape[1]
    for lower in range(len(x) // 2, len(x) - 1, 2):
        for h in range(x.shape[2]):
            one, other = x[lower, :, h], x[lower + 1, :, h]
            norms = np.linalg.norm(one, axis=1), np.linalg.norm(other, axis=1)
            cosine = np.sum(one * other, axis=1) / norms[0] / norms[1]
            angle = np.arccos(np.clip(cosine, -1, 1))
            apart = set(np.argsort(-angle, kind="stable")[: tokens * permille // 1000].tolist())
            for t in set(range(tokens)) - apart:
                way = np.sin((1 - weight) * angle[t]) * one[t] / norms[0][t]
                way = way + np.sin(weight * angle[t]) * other[t] / norms[1][t]
                way = short(way / np.sin(angle[t]))
                out[lower, t, h] = way * short(norms[0][t])
                out[lower + 1, t, h] = way * short(norms[1][t])
    return out


def low_rank(x: np.ndarray, layers: int, sixteenths: int) -> np.ndarray:
    """Each few layers side by side, and of that the best of so low a rank."""
    out = []
    for first in range(0, len(x), layers):
        part = x[first : first + layers]
        rows = np.concatenate(list(part), axis=1).reshape(x.shape[1], -1)
        left, size, right = np.linalg.svd(rows, full_matrices=False)
        rank = max(1, rows.shape[1] * sixteenths // 16)
        rows = short(left[:, :rank] * size[:rank]) @ short(right[:rank])
        out += np.split(rows.reshape(x.shape[1], -1, x.shape[-1]), len(part), axis=1)
    return np.stack(out)


def xkv(k, v, frequency: np.ndarray):
    keys = turned(low_rank(turned(k, frequency, back=True), 4, 2), frequency)
    return keys, low_rank(v, 4, 3)


def xquant(hidden, weights, frequency: np.ndarray, bits: int, group: int, first: int, shape):
    """Keys and values from codes of what enters attention.

    Args:
        hidden: [L, T, D].
        weights: U [L, D, r] and S V [L, r, H · d] of the keys' matrices, then of the values'.
        frequency: of RoPE.
        bits: of layers from `first` on; 4 before.
        group: tokens of a key's channel, and most channels of a value, with ends of their own.
        shape: of a layer's keys.
    """
    found = ([], [])
    for layer, x in enumerate(hidden):
        width = 4 if layer < first else bits
        (key_in, key_out), (value_in, value_out) = ([w[layer] for w in pair] for pair in weights)
        part = by_channel((x @ key_in)[:, None], width, group)[:, 0]
        found[0].append(turned((part @ key_out).reshape(shape), frequency))
        part = by_token((x @ value_in)[:, None], width, group)[:, 0]
        found[1].append((part @ value_out).reshape(shape))
    return np.stack(found[0]), np.stack(found[1])


def xquant_cl(
    hidden, inner, weight, frequency: np.ndarray, bits: int, group: int, first: int, shape
):
    """Keys and values from sums of coded differences between layers of what enters attention.

    Args:
        hidden: [L, T, D].
        inner: [L, D, r]: what differences are multiplied with, and back.
        weight: [L, D, 2 · H · d], of keys and then of values.
        frequency, bits, group, first, shape: as of `xquant`.
    """
    found, held = ([], []), np.zeros(hidden.shape[1:])
    for layer, x in enumerate(hidden):
        width = 4 if layer < first else bits
        part = ((x - held) @ inner[layer])[:, None]
        held = held + by_token(part, width, group)[:, 0] @ inner[layer].T
        key, value = np.split(held @ weight[layer], 2, axis=1)
        found[0].append(turned(key.reshape(shape), frequency))
        found[1].append(value.reshape(shape))
    return np.stack(found[0]), np.stack(found[1])


def weighed_means(x: np.ndarray, weight: np.ndarray, count: int) -> np.ndarray:
    """Levels of k-means by weight, from the numbers in the middles of equal shares of it on."""
    x, weight = x[np.argsort(x)], weight[np.argsort(x)]
    shares = [(2 * i + 1) / (2 * count) * np.cumsum(weight)[-1] for i in range(count)]
    levels = np.array([next(x[j] for j in range(len(x)) if weight[: j + 1].sum() >= share - 1e-12)
                       for share in shares])  # fmt: skip
    for _ in range(50):
        # Of equal levels the last one has what lies above it.
        own = np.sum(x[:, None] > (levels[1:] + levels[:-1]) / 2, axis=1)
        levels = np.array([
            np.average(x[own == i], weights=weight[own == i]) if weight[own == i].sum() else
            levels[i] for i in range(count)
        ])  # fmt: skip
    return levels


def kvquant_levels(k, v, k_weight, v_weight, permille: int) -> dict:
    """KVQuant's calibration: ranges of keys' channels, levels by bits, and Q-Norm's for 2.

    Args:
        k, v: [L, N, c] keys before RoPE and values of texts.
        k_weight, v_weight: of each of their numbers.
        permille: of a vector at either end, beyond its range.
    """
    found = {"range": [], "norm": [], 4: [], 3: [], 2: []}
    for layer in range(len(k)):
        low, high = (
            np.array([np.percentile(channel, at) for channel in k[layer].T])
            for at in (permille / 10, 100 - permille / 10)
        )
        found["range"].append([(low + high) / 2, (high - low) / 2])
        scaled = (k[layer] - (low + high) / 2) / ((high - low) / 2)
        keys = [(x, w) for x, w in zip(scaled.flat, k_weight[layer].flat) if -1 <= x <= 1]
        values = []
        for row, weights in zip(v[layer], v_weight[layer]):
            ends = -(-len(row) * permille // 1000)
            rest = np.argsort(row)[ends : len(row) - ends]
            low, high = row[rest].min(), row[rest].max()
            values += [((row[i] - (low + high) / 2) / ((high - low) / 2), weights[i]) for i in rest]
        kinds = [np.array(kind).T for kind in (keys, values)]
        for bits in (4, 3, 2):
            found[bits].append([weighed_means(x, weight, 2**bits) for x, weight in kinds])
        norms = []
        for (x, _), levels in zip(kinds, found[2][-1]):
            coded = nearest(x, levels)
            scale = x.std() / coded.std()
            norms.append([scale, x.mean() - scale * coded.mean()])
        found["norm"].append(norms)
    return {name: np.array(value) for name, value in found.items()}


def kvquant_calibrated(k, v, frequency: np.ndarray, ranges, levels, norm, permille: int):
    """KVQuant with what was calibrated: the first token exact, few outliers of every other one.

    Args:
        k, v, frequency: as above.
        ranges: [L, 2, H · d], middle and half width of keys' channels before RoPE.
        levels: [L, 2, 2^bits] of keys and of values.
        norm: [L, 2, 2], scale and offset of what levels are read as; None without Q-Norm.
        permille: of a token at either end that may be outliers.
    """
    before = turned(k, frequency, back=True)
    keys, values = short(before), short(v)
    for layer, t in np.ndindex(len(k), k.shape[1]):
        if t == 0:
            continue
        scales, offsets = (1, 1), (0, 0)
        if norm is not None:
            scales, offsets = np.asarray(norm[layer]).T
        row = before[layer, t].reshape(-1)
        few = -(-len(row) * permille // 1000)
        scaled = (row - ranges[layer, 0]) / ranges[layer, 1]
        order = np.argsort(scaled)
        kept = {i for i in order[:few] if scaled[i] < -1} | {
            i for i in order[len(row) - few :] if scaled[i] > 1
        }
        read = nearest(scaled, levels[layer, 0]) * scales[0] + offsets[0]
        read = read * ranges[layer, 1] + ranges[layer, 0]
        for i in set(range(len(row))) - kept:
            keys[layer, t].reshape(-1)[i] = read[i]
        row = v[layer, t].reshape(-1)
        rest = np.argsort(row)[few : len(row) - few]
        low, high = row[rest].min(), row[rest].max()
        middle, half = float(short((low + high) / 2)), float(short((high - low) / 2))
        read = nearest((row[rest] - middle) / half, levels[layer, 1]) * scales[1] + offsets[1]
        values[layer, t].reshape(-1)[rest] = read * half + middle
    return turned(keys, frequency), values
