"""From scores to what is kept: budgets over layers and heads, the choice within a head.

Budgets are whole blocks: a head that loses anything keeps a whole number of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tests.oracle.question_free import calibrated
from tests.oracle.scores import Prompt, Scores

Kept = dict[tuple[int, int], list[int]]


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


def pyramid_layers(*, exact: bool, beta: int = 20, short: bool = False):
    def layers(p: Prompt, window: int) -> tuple[list[float], int]:
        base = max(0, p.cap_tokens - window)
        if (p.length < 2 * base and not short) or p.layers == 1:
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


def error_layers(p: Prompt, window: int) -> tuple[list[float], int]:
    """32 tokens, and of the rest what a layer's error is of all; at most three times the mean."""
    error = calibrated(p.layers, p.heads, p.k.shape[-1])["layer_error"].astype(np.float64)
    mean = float(p.cap_tokens)
    least = min(32.0, mean)
    tokens = [min(least + one / error.sum() * p.layers * (mean - least), 3 * mean) for one in error]
    return tokens, p.cap_blocks * p.layers * p.heads


def geometric_layers(p: Prompt, window: int, beta: int = 20) -> tuple[list[float], int]:
    """By a constant ratio, the last layer to the first as in the linear schedule, the sum kept."""
    base = max(0, p.cap_tokens - window)
    if p.length < 2 * base or p.layers == 1:
        return even_layers(p, window)
    low = base // beta
    high = 2 * base - low
    if high >= p.length - window:
        high = max(0, p.length - window)
        low = 2 * base - high
    ratio = (max(low, 1) / max(high, 1)) ** (1 / (p.layers - 1))
    weight = [ratio**layer for layer in range(p.layers)]
    tokens = [base * p.layers * w / sum(weight) + window for w in weight]
    return tokens, p.cap_blocks * p.layers * p.heads


def entropy(x: np.ndarray) -> float:
    p = x[x > 0] / x.sum() if x.sum() > 0 else np.zeros(0)
    return float(-(p * np.log(p)).sum())


def gini(x: np.ndarray) -> float:
    """Half the mean difference of any two, over the mean."""
    if not x.sum() > 0:
        return 0.0
    return float(abs(x[:, None] - x).mean() / (2 * x.mean()))


def layers_by(scores_of: Callable[[Prompt], Scores], measure: Callable[[np.ndarray], float]):
    """Layers in proportion to a measure of their heads' scores before the window, to 1/1024."""

    def layers(p: Prompt, window: int) -> tuple[list[float], int]:
        scores = scores_of(p)
        before = max(0, p.length - window)
        weight = [
            np.mean([round(measure(scores[n, h][:before]) * 1024) / 1024 for h in range(p.heads)])
            for n in range(p.layers)
        ]
        base = max(0, p.cap_tokens - window) * p.layers
        whole = sum(weight)
        tokens = [base * (w / whole if whole else 1 / p.layers) + window for w in weight]
        return tokens, p.cap_blocks * p.layers * p.heads

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


def newest_of(cap: float, protected: int, share: float, more: float = 0.0) -> int:
    """Newest tokens that stay whatever they say: a share of the cap, and of what it has above 64
    tokens another."""
    return max(protected, math.floor(cap * share + max(0, cap - 64) * more))


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
        window = newest_of(p.cap_tokens, protected, protected_share)
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
    layers_of=None,
) -> Callable[[Prompt], Kept]:
    """All heads of a layer keep the same tokens, by mean scores that are added up over pages."""

    def kept(p: Prompt) -> Kept:
        scores = scores_of(p)
        guarded = {t for t in range(p.length) if t < sinks or t >= p.length - protected}
        if p.owned <= p.cap_blocks:
            return {name: list(range(p.length)) for name in p.names}
        blocks = max(p.cap_blocks, 1, -(-len(guarded) // p.block))
        every = [blocks] * p.layers
        if layers_of is not None:
            low = max(1, -(-len(guarded) // p.block))
            tokens, total = layers_of(p, protected)
            every = webster(tokens, [low] * p.layers, [p.owned] * p.layers, total // p.heads)
        result = {}
        for layer, blocks in enumerate(every):
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


def unlike_layers(alike: np.ndarray, cap: float, power: float = 1.1) -> list[float]:
    """EpiCache's tokens per head of each layer: more where keys are less alike, a quarter of the
    mean at least."""
    alike = alike.astype(np.float64)
    if alike.max() == alike.min():
        return [cap] * len(alike)
    weight = (1 - (alike - alike.min()) / (alike.max() - alike.min())) ** power
    return [max(cap / 4, cap * len(alike) * one / weight.sum()) for one in weight]


def similar_layers(p: Prompt, window: int) -> tuple[list[float], int]:
    alike = calibrated(p.layers, p.heads, p.k.shape[-1])["key_similarity"]
    return unlike_layers(alike, float(p.cap_tokens)), p.cap_blocks * p.layers * p.heads


def keeps_cheapest_by_layer(
    scores_of: Callable[[Prompt], Scores], *, protected: int, sinks: int, layers_of=similar_layers
) -> Callable[[Prompt], Kept]:
    """Blocks over the layers by Webster's method, then the cheapest of each layer go."""

    def kept(p: Prompt) -> Kept:
        if p.owned <= p.cap_blocks:
            return {name: list(range(p.length)) for name in p.names}
        scores, (tokens, total) = scores_of(p), layers_of(p, protected)
        guarded = len({t for t in range(p.length) if t < sinks or t >= p.length - protected})
        least = max(1, -(-guarded // p.block))
        blocks = webster(
            tokens, [p.heads * least] * p.layers, [p.heads * p.owned] * p.layers, total
        )
        result: Kept = {}
        for layer in range(p.layers):
            part = slice(layer, layer + 1)
            one = Prompt(p.q[part], p.k[part], p.v[part], p.cap, p.block)
            rows: Scores = {(0, head): scores[layer, head] for head in range(p.heads)}
            keep = keeps_globally(
                lambda _, rows=rows: rows, protected=protected, sinks=sinks, total=blocks[layer]
            )
            result.update({(layer, head): kept for (_, head), kept in keep(one).items()})
        return result

    return kept


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
    protected_share: float = 0.0,
    protected_more: float = 0.0,
    sinks: int = 0,
    least: int = 1,
    total: int | None = None,
    choose=None,
) -> Callable[[Prompt], Kept]:
    """KV-Compress: the cheapest blocks of the whole sequence go, one after the other."""

    def kept(p: Prompt) -> Kept:
        scores = scores_of(p)
        window = newest_of(p.cap_tokens, protected, protected_share, protected_more)
        guarded = {t for t in range(p.length) if t < sinks or t >= p.length - window}
        blocks = dict.fromkeys(p.names, p.owned)
        orders = {
            name: sorted(set(range(p.length)) - guarded, key=lambda t, s=scores[name]: (s[t], t))
            for name in p.names
        }
        most = p.cap_blocks * p.layers * p.heads if total is None else total
        while sum(blocks.values()) > most:
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


def keeps_whole_heads(
    scores_of: Callable[[Prompt], Scores],
    worth_of: Callable[[Prompt], np.ndarray],
    *,
    protected: int = 0,
    protected_share: float = 0.0,
    sinks: int,
) -> Callable[[Prompt], Kept]:
    """Heads are filled up one after the other, the most used first, while there are blocks."""

    def kept(p: Prompt) -> Kept:
        scores, worth = scores_of(p), worth_of(p)
        # Of the cap in blocks as a prompt's own blocks fill it.
        cap = min(p.cap_blocks, p.owned) * p.block
        window = newest_of(cap, protected, protected_share)
        guarded = {t for t in range(p.length) if t < sinks or t >= p.length - window}
        least = min(p.owned, max(1, -(-len(guarded) // p.block)))
        blocks = dict.fromkeys(p.names, least)
        spare = p.cap_blocks * p.layers * p.heads - sum(blocks.values())
        for name in sorted(p.names, key=lambda name: -worth[name]):
            more = max(0, min(spare, p.owned - least))
            blocks[name] += more
            spare -= more
        return {name: best(p, scores[name], guarded, blocks[name]) for name in p.names}

    return kept


def keeps_by_need(scores_of: Callable[[Prompt], Scores], *, protected: int):
    """Blocks over all heads in proportion to the KVs that count 0 or more, and the protected."""

    def kept(p: Prompt) -> Kept:
        scores = scores_of(p)
        guarded = {t for t in range(p.length) if t >= p.length - protected}
        if p.owned <= p.cap_blocks:
            return {name: list(range(p.length)) for name in p.names}
        free = p.length - len(guarded)
        share = [float((scores[name][:free] >= 0).sum() + protected) for name in p.names]
        least = max(1, -(-len(guarded) // p.block))
        heads = len(p.names)
        blocks = webster(share, [least] * heads, [p.owned] * heads, p.cap_blocks * heads)
        return {
            name: best(p, scores[name], guarded, n) for name, n in zip(p.names, blocks, strict=True)
        }

    return kept
