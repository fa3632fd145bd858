"""What becomes of KVs that go where others take them up, in plain NumPy, one KV at a time."""

from __future__ import annotations

import math

import numpy as np


def compensated(
    k: np.ndarray, v: np.ndarray, at: np.ndarray, stays: np.ndarray, sinks: int = 4
) -> tuple[np.ndarray, np.ndarray]:
    """RazorAttention: the oldest KV that stays, behind the sinks, and all that go become one.

    Args:
        k: [T, d], what was held.
        v: [T, d].
        at: [T], token positions.
        stays: [T] bool.

    Returns:
        Keys and values of those that stay, in their order.
    """
    k, v = k.astype(np.float64), v.astype(np.float64)
    behind = [i for i in range(len(at)) if stays[i] and at[i] >= sinks]
    if behind and not stays.all():
        place = min(behind, key=lambda i: at[i])
        joined = [place, *np.flatnonzero(~stays)]
        k[place], v[place] = k[joined].mean(axis=0), v[joined].mean(axis=0)
    return k[stays], v[stays]


def sets_of(
    k: np.ndarray, scores: np.ndarray, guarded: set[int], kept: int, alike: float = 0.75
) -> list[list[int]]:
    """KVMerger's sets of a head's KVs, which stand in the order of their tokens.

    From the last back, one joins the next one's where their keys are alike. Alone are the guarded
    and the best read quarter of what is kept.
    """
    k = k.astype(np.float64)
    free = [i for i in range(len(k)) if i not in guarded]
    best = sorted(free, key=lambda i: (-scores[i], i))[: math.floor(0.25 * kept)]
    single = guarded | set(best)
    sets: list[list[int]] = []
    for i in reversed(range(len(k))):
        near = (
            i + 1 < len(k)
            and not {i, i + 1} & single
            and k[i] @ k[i + 1] > alike * np.linalg.norm(k[i]) * np.linalg.norm(k[i + 1])
        )
        if near:
            sets[-1].append(i)
        else:
            sets.append([i])
    return [sorted(s) for s in sets]


def pivot_of(members: list[int], scores: np.ndarray) -> int:
    return min(members, key=lambda i: (-scores[i], i)) if len(members) > 1 else members[0]


def merged(
    k: np.ndarray,
    v: np.ndarray,
    sets: list[list[int]],
    scores: np.ndarray,
    stays: np.ndarray,
    sigma: float = 5.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of those that stay after KVMerger."""
    k, v = k.astype(np.float64), v.astype(np.float64)
    new_k, new_v = k.copy(), v.copy()
    for members in sets:
        pivot = pivot_of(members, scores)
        joined = [pivot, *(i for i in members if i != pivot and not stays[i])]
        weight = np.array([math.exp(-((k[i] - k[pivot]) ** 2).sum() / (2 * sigma**2))
                           for i in joined])  # fmt: skip
        weight /= weight.sum()
        new_k[pivot], new_v[pivot] = weight @ k[joined], weight @ v[joined]
    return new_k[stays], new_v[stays]
