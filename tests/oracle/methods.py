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


def h2o_rows(p: Prompt) -> Scores:
    """Column sums of the whole causal matrix, of each query head."""
    return {(layer, head): column_sums(p, layer, head, range(p.length)) for layer, head in p.names}


def h2o_scores(p: Prompt) -> Scores:
    return {name: rows.sum(axis=0) for name, rows in h2o_rows(p).items()}


def newest_query(p: Prompt) -> Scores:
    return {
        (layer, head): column_sums(p, layer, head, last(p, 1)).mean(axis=0)
        for layer, head in p.names
    }


def often_important(p: Prompt) -> Scores:
    """How many of the last 400 queries give a key 1/n or more, n the keys they see."""
    result = {}
    for layer, head in p.names:
        counts = np.zeros((p.group, p.length))
        for row, g in zip(counts, p.of_group(head), strict=True):
            for i in last(p, 400):
                row[: i + 1] += p.attention[layer][g][i, : i + 1] * (i + 1) >= 1 - 1e-6
        result[layer, head] = counts.mean(axis=0)
    return result


def hit_again(p: Prompt) -> Scores:
    """LazyEviction's two terms from the hits of any query head of the group, key by key."""
    result = {}
    for layer, head in p.names:
        row = np.zeros(p.length)
        for j in range(p.length):
            ts, mri = j, 0
            for i in range(j, p.length):
                if max(p.attention[layer][g][i, j] for g in p.of_group(head)) > 1e-4:
                    ts, mri = i, max(mri, i - ts)
            mri = max(mri, 1)
            row[j] = 2 / (1 + math.exp((p.length - 1 - ts) / mri)) + 2 / (1 + math.exp(1 / mri))
        result[layer, head] = row
    return result


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


def sharp(background: float, *, value_norm: bool = False) -> Callable[[Prompt], Scores]:
    """w4-L2, max-pooled over 17, the best query head; and a share of all queries 10 tokens on.

    Times the norm of the value, where asked.
    """

    def scores(p: Prompt) -> Scores:
        everything = kvc_scores(None, 2, 1, distance=10)(p)
        result = {}
        for layer, head in p.names:
            rows = [max_pool(row, 17) for row in column_sums(p, layer, head, last(p, 4), 2)]
            # In float32: on a plateau of the pool, less than its last bit decides nothing.
            rest = np.float32(background) * everything[layer, head].astype(np.float32)
            row = np.max(rows, axis=0).astype(np.float32) + rest
            norm = np.linalg.norm(p.v[layer, :, head], axis=-1).astype(np.float32)
            result[layer, head] = row * norm if value_norm else row
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


def ada_heads(alpha: float, window: int):
    """Ada-KV: how many of the layer's best H · base scores each head has, floored by α."""

    def heads(p: Prompt, layer: int, scores: Scores, guarded: set[int], tokens: float):
        base = math.floor(max(0.0, tokens - window))
        ranked = sorted(
            (scores[layer, head][t], head, t)
            for head in range(p.heads)
            for t in set(range(p.length)) - guarded
        )
        top = ranked[max(0, len(ranked) - p.heads * base) :]
        counts = [sum(head == h for _, h, _ in top) for head in range(p.heads)]
        return [round(n * (1 - alpha) + math.floor(alpha * base)) + window for n in counts]

    return heads


# --- putting it together ------------------------------------------------------------------------


def keeps(
    scores_of: Callable[[Prompt], Scores],
    *,
    protected: int = 0,
    protected_share: float = 0.0,
    sinks: int = 0,
    layers_of=even_layers,
    heads_of=even_heads,
    choose=None,
) -> Callable[[Prompt], Kept]:
    """A method that splits its budget over layers, then heads, and ranks KVs within a head.

    `choose` picks what stays of a layer from the scores and the blocks of each head.
    """

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
            if choose is not None:
                result.update(choose(p, layer, scores, guarded, blocks))
                continue
            for head in range(p.heads):
                result[layer, head] = best(p, scores[layer, head], guarded, blocks[head])
        return result

    return kept


def keeps_shared(
    scores_of: Callable[[Prompt], Scores],
    *,
    protected: int,
    sinks: int = 0,
    page: int = 1,
    choose=None,
) -> Callable[[Prompt], Kept]:
    """All heads of a layer keep the same tokens, by mean scores that are added up over pages."""

    def kept(p: Prompt) -> Kept:
        scores = scores_of(p)
        guarded = {t for t in range(p.length) if t < sinks or t >= p.length - protected}
        if p.owned <= p.cap_blocks:
            return {name: list(range(p.length)) for name in p.names}
        blocks = max(p.cap_blocks, 1, -(-len(guarded) // p.block))
        result = {}
        for layer in range(p.layers):
            mean = np.mean([scores[layer, head] for head in range(p.heads)], axis=0)
            pages: dict[int, float] = {}
            for t in set(range(p.length)) - guarded:
                pages[t // page] = pages.get(t // page, 0.0) + mean[t]
            joined = np.array([pages.get(t // page, np.nan) for t in range(p.length)])
            if choose is None:
                tokens = best(p, joined, guarded, blocks)
                result.update({(layer, head): tokens for head in range(p.heads)})
            else:
                same = {(layer, head): joined for head in range(p.heads)}
                raw = {(layer, head): mean for head in range(p.heads)}
                result.update(choose(p, layer, same, guarded, [blocks] * p.heads, raw))
        return result

    return kept


def best(p: Prompt, scores: np.ndarray, guarded: set[int], blocks: int) -> list[int]:
    """The guarded positions and the highest scores, `blocks` whole blocks of them."""
    if blocks >= p.owned:
        return list(range(p.length))
    order = sorted(set(range(p.length)) - guarded, key=lambda t: (scores[t], t))
    gone = set(order[: p.length - blocks * p.block])
    return [t for t in range(p.length) if t not in gone]


def keeps_cheapest_of_layer(
    scores_of: Callable[[Prompt], Scores], *, protected: int, safe: float
) -> Callable[[Prompt], Kept]:
    """kvpress's Ada-KV in blocks: of each layer the cheapest go, a share of each head is safe."""

    def kept(p: Prompt) -> Kept:
        scores = scores_of(p)
        result: Kept = {}
        for layer in range(p.layers):
            part = slice(layer, layer + 1)
            one = Prompt(p.q[part], p.k[part], p.v[part], p.cap, p.block)
            rows: Scores = {(0, head): scores[layer, head] for head in range(p.heads)}
            floor = math.floor(safe * p.cap_tokens / p.block)
            keep = keeps_globally(lambda _, rows=rows: rows, protected=protected, least=floor)
            result.update({(layer, head): kept for (_, head), kept in keep(one).items()})
        return result

    return kept


def keeps_globally(
    scores_of: Callable[[Prompt], Scores],
    *,
    protected: int = 0,
    sinks: int = 0,
    least: int = 1,
    choose=None,
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
                if blocks[name] > max(1, least) and lost <= len(orders[name]):
                    bids.append((scores[name][orders[name][lost - 1]], name))
            if not bids:
                break
            blocks[min(bids)[1]] -= 1
        if choose is None:
            return {name: best(p, scores[name], guarded, blocks[name]) for name in p.names}
        result: Kept = {}
        for layer in range(p.layers):
            in_layer = [blocks[layer, head] for head in range(p.heads)]
            result.update(choose(p, layer, scores, guarded, in_layer))
        return result

    return kept


# --- representatives ----------------------------------------------------------------------------


def split(p: Prompt, scores: np.ndarray, guarded: set[int], blocks: int, share: float, unit: int):
    """Evictable tokens from the worst on, how many go, and how many stay to represent."""
    order = sorted(set(range(p.length)) - guarded, key=lambda t: (scores[t], t))
    gone = max(0, p.length - blocks * p.block) if blocks < p.owned else 0
    spare = min(math.floor(share * (p.length - gone)), len(order) - gone) if gone else 0
    return order, gone, spare // unit * unit


def finish(p: Prompt, order: list[int], gone: int, chosen: set[int]) -> list[int]:
    dropped = set([t for t in order if t not in chosen][:gone])
    return [t for t in range(p.length) if t not in dropped]


def crush(
    rows_of: Callable[[Prompt], Scores] | None,
    *,
    share: float = 0.25,
    anchor: str = "random",
    unit: int = 1,
    openvino: bool = False,
):
    """KVCrush as `choose`. `rows_of` gives the scores behind each bit; None for the KV heads'."""

    def choose(p, layer, scores, guarded, blocks, raw=None):
        raw = scores if raw is None else raw
        parts = [
            split(p, scores[layer, head], guarded, blocks[head], share, unit)
            for head in range(p.heads)
        ]
        bits = []  # one dict token -> bit for each row
        evictable = set(range(p.length)) - guarded
        if openvino:
            order = sorted(evictable, key=lambda t: (raw[layer, 0][t], t))
            zeros = set(order[: len(order) // 2])
            bits.append({t: t not in zeros for t in evictable})
        else:
            rows = None if rows_of is None else rows_of(p)
            for head, (_, gone, spare) in enumerate(parts):
                for row in [raw[layer, head]] if rows is None else rows[layer, head]:
                    order = sorted(evictable, key=lambda t: (row[t], t))
                    zeros = set(order[: gone + spare])
                    bits.append({t: t not in zeros for t in evictable})
        result = {}
        for head, (order, gone, spare) in enumerate(parts):
            candidates = set(order[: gone + spare])
            anchors = anchor_bits(anchor, unit, bits, candidates)
            pages: dict[int, list[int]] = {}
            for t in sorted(candidates):
                pages.setdefault(t // unit, []).append(t)
            far = {
                page: sum(b[t] != anchors[t % unit][g] for t in members for g, b in enumerate(bits))
                for page, members in pages.items()
            }
            ranked = sorted(pages, key=lambda page: (far[page], page))
            chosen: set[int] = set()
            for page in one_per_bin(ranked, spare // unit, openvino):
                chosen.update(pages[page])
            result[layer, head] = finish(p, order, gone, chosen)
        return result

    return choose


def anchor_bits(kind: str, unit: int, bits: list[dict[int, bool]], candidates: set[int]):
    """[unit][number of rows]."""
    if kind == "random":
        return np.random.default_rng(0).integers(0, 2, (unit, len(bits))).astype(bool)
    if kind == "alternating":
        return (np.arange(unit * len(bits)) % 2).reshape(unit, len(bits)).astype(bool)
    anchors = np.zeros((unit, len(bits)), bool)
    for offset in range(unit):
        here = [t for t in candidates if t % unit == offset]
        for g, row in enumerate(bits):
            anchors[offset, g] = 2 * sum(row[t] for t in here) > len(here)
    return anchors


def one_per_bin(ranked: list[int], bins: int, openvino: bool) -> list[int]:
    """A drawn member of each of equal bins; OpenVINO takes every so many-th from the nearest."""
    bins = min(bins, len(ranked))
    if bins == 0:
        return []
    if openvino:
        return ranked[:: len(ranked) // bins][:bins]
    drawn = np.random.default_rng(0).integers(0, 2**16, len(ranked) + 1)
    chosen = []
    for i in range(bins):
        start, end = i * len(ranked) // bins, (i + 1) * len(ranked) // bins
        chosen.append(ranked[start + drawn[i] % (end - start)])
    return chosen


def k_means(share: float = 0.25, iterations: int = 10):
    """Lloyd's algorithm over the keys of the candidates as `choose`."""

    def choose(p, layer, scores, guarded, blocks, raw=None):
        result = {}
        for head in range(p.heads):
            order, gone, spare = split(p, scores[layer, head], guarded, blocks[head], share, 1)
            candidates = sorted(order[: gone + spare])
            chosen: set[int] = set()
            if spare:
                x = p.k[layer, candidates, head].astype(np.float64)
                centres = np.array([x[i * len(x) // spare] for i in range(spare)])
                for _ in range(iterations):
                    own = ((x[:, None] - centres) ** 2).sum(-1).argmin(1)
                    for c in range(spare):
                        if (own == c).any():
                            centres[c] = x[own == c].mean(axis=0)
                far = ((x[:, None] - centres) ** 2).sum(-1)
                own = far.argmin(1)
                for c in range(spare):
                    members = np.flatnonzero(own == c)
                    if len(members):
                        close = far[members, c] <= 1.001 * far[members, c].min() + 1e-9
                        chosen.add(candidates[members[close][0]])
            result[layer, head] = finish(p, order, gone, chosen)
        return result

    return choose


SNAPKV = snapkv_scores(8, 7, "max", group_first=True)
SNAPKV_W32 = snapkv_scores(32, 7, "max", group_first=True)

KEEPS: dict[str, Callable[[Prompt], Kept]] = {
    "full": lambda p: {name: list(range(p.length)) for name in p.names},
    "random": keeps(random_scores),
    "streaming-llm": keeps(recency, sinks=4),
    "key-norm": keeps(low_key_norm),
    "h2o": keeps(h2o_scores, protected=8),
    "h2o-decode": keeps(h2o_scores, protected_share=0.5),
    "snapkv": keeps(SNAPKV, protected=8),
    "snapkv-w32": keeps(SNAPKV_W32, protected=32),
    "snapkv-w32-avg5": keeps(snapkv_scores(32, 5, "avg", group_first=False), protected=32),
    "snapkv-w64-avg5": keeps(snapkv_scores(64, 5, "avg", group_first=False), protected=64),
    "pyramidkv-exact": keeps(SNAPKV, protected=8, layers_of=pyramid_layers(exact=True)),
    "pyramidkv-faithful": keeps(SNAPKV, protected=8, layers_of=pyramid_layers(exact=False)),
    "ada-snapkv": keeps(SNAPKV_W32, protected=32, heads_of=ada_heads(0.2, 32)),
    "ada-snapkv-a50": keeps(SNAPKV_W32, protected=32, heads_of=ada_heads(0.5, 32)),
    "ada-pyramidkv": keeps(
        SNAPKV_W32,
        protected=32,
        layers_of=pyramid_layers(exact=True),
        heads_of=ada_heads(0.2, 32),
    ),
    "ada-snapkv-kvpress": keeps_cheapest_of_layer(
        snapkv_scores(64, 5, "avg", group_first=False), protected=64, safe=0.2
    ),
    "paged-h2o": keeps_shared(h2o_scores, protected=32, sinks=32, page=32),
    "paged-h2o-openvino": keeps_shared(per_query(h2o_scores), protected=128, sinks=32, page=32),
    "scissorhands": keeps(often_important, protected=10),
    "lazyeviction": keeps(hit_again, protected=175),
    "tova": keeps_shared(newest_query, protected=1),
    "a2sf": keeps(forgetting(0.95), protected=16),
    "a2sf-f20": keeps(forgetting(0.2), protected=16),
    "kmeans:snapkv": keeps(SNAPKV, protected=8, choose=k_means()),
    "wide-pool": keeps_globally(sharp(0.0), protected=4),
    "wide-pool-background": keeps_globally(sharp(0.03, value_norm=True), protected=8),
    "kv-compress": keeps_globally(kvc_scores(8, 2, 7), protected=8),
    "kv-compress-w8-l1": keeps_globally(kvc_scores(8, 1, 7), protected=8),
    "kv-compress-w32-l2": keeps_globally(kvc_scores(32, 2, 7), protected=32),
    "kv-compress-w32-l1": keeps_globally(kvc_scores(32, 1, 7), protected=32),
    "kv-compress-full-l2": keeps_globally(kvc_scores(None, 2, 1, distance=10), protected=32),
    "kv-compress-continual": keeps_globally(kvc_scores(32, 2, 7), protected=32),
}


def _crushed(*, query_heads: bool) -> dict[str, Callable[[Prompt], Kept]]:
    """The KVCrush methods, with a bit for each query head or for each KV head."""

    def rows(of):
        return of if query_heads else None

    paged = {"protected": 32, "sinks": 32, "page": 32}
    return {
        "kvcrush:h2o": keeps(h2o_scores, protected=8, choose=crush(rows(h2o_rows))),
        "kvcrush-mean:h2o": keeps(
            h2o_scores, protected=8, choose=crush(rows(h2o_rows), anchor="mean")
        ),
        "kvcrush-alternating:h2o": keeps(
            h2o_scores, protected=8, choose=crush(rows(h2o_rows), anchor="alternating")
        ),
        "kvcrush:snapkv": keeps(SNAPKV, protected=8, choose=crush(rows(snapkv_rows))),
        "kvcrush-chunk8:snapkv": keeps(
            SNAPKV, protected=8, choose=crush(rows(snapkv_rows), unit=8)
        ),
        "kvcrush:pyramidkv-exact": keeps(
            SNAPKV,
            protected=8,
            layers_of=pyramid_layers(exact=True),
            choose=crush(rows(snapkv_rows)),
        ),
        "kvcrush-page32:paged-h2o": keeps_shared(
            h2o_scores, **paged, choose=crush(rows(h2o_rows), unit=32)
        ),
        "kvcrush-openvino-page32:paged-h2o": keeps_shared(
            h2o_scores, **paged, choose=crush(None, unit=32, openvino=True)
        ),
        "kvcrush-mean:kv-compress": keeps_globally(
            kvc_scores(8, 2, 7), protected=8, choose=crush(rows(kvc_rows), anchor="mean")
        ),
        "kvcrush-alternating-75:key-norm": keeps(
            low_key_norm, choose=crush(None, anchor="alternating", share=0.75)
        ),
    }


KEEPS |= _crushed(query_heads=True)
KEEPS_IN_POOL = KEEPS | _crushed(query_heads=False)
"""What a method keeps of a prompt that lies in the pool, where KV heads have one metric each."""
