"""Choices within a head that go by more than its scores: some that may go stay for the others."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tests.oracle.merging import pivot_of, sets_of
from tests.oracle.scores import Prompt, Scores
from tests.oracle.selection import best


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
            anchors = anchor_bits(anchor, unit, bits, evictable if openvino else candidates)
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


def anchor_bits(kind: str, unit: int, bits: list[dict[int, bool]], averaged: set[int]):
    """[unit][number of rows]; a mean is that of some tokens."""
    if kind == "random":
        return np.random.default_rng(0).integers(0, 2, (unit, len(bits))).astype(bool)
    if kind == "alternating":
        return (np.arange(unit * len(bits)) % 2).reshape(unit, len(bits)).astype(bool)
    anchors = np.full((unit, len(bits)), kind == "ones")
    for offset in range(unit if kind == "mean" else 0):
        here = [t for t in averaged if t % unit == offset]
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


def redundancy(k: np.ndarray) -> np.ndarray:
    """R-KV's: softmax of the mean cosine of keys [n, d] in the order of their tokens."""
    unit = k.astype(np.float64)
    unit = unit / (np.linalg.norm(unit, axis=-1, keepdims=True) + 1e-8)
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, 0)
    for row in cosine:
        near = np.flatnonzero(row > 0.5)
        if len(near):
            row[near[-1]] = 0
    mean = np.exp(cosine.mean(axis=0))
    return mean / mean.sum()


def without_like():
    """R-KV's choice: pooled attention × 0.07 less redundancy × 0.93, among what may go."""

    def choose(p, layer, scores, guarded, blocks, raw=None):
        result = {}
        free = np.array(sorted(set(range(p.length)) - guarded), int)
        for head in range(p.heads):
            like = redundancy(p.k[layer, :, head])
            final = np.full(p.length, np.nan)
            for t in free:
                near = free[abs(free - t) <= 3]
                final[t] = 0.07 * max(scores[layer, head][near]) - 0.93 * like[t]
            result[layer, head] = best(p, final, guarded, blocks[head])
        return result

    return choose


def pivots_last():
    """KVMerger's choice: the least read go that are in a set and not its pivot, then pivots."""

    def choose(p, layer, scores, guarded, blocks, raw=None):
        result = {}
        for head in range(p.heads):
            row = scores[layer, head]
            kept = min(p.length, blocks[head] * p.block)
            sets = sets_of(p.k[layer, :, head], row, guarded, kept)
            pivots = {pivot_of(members, row) for members in sets}
            free = set(range(p.length)) - guarded
            order = sorted(free, key=lambda t: (t in pivots, row[t], t))
            result[layer, head] = finish(p, order, p.length - kept, set())
        return result

    return choose


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
