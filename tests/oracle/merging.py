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


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-24))


def classes_of(
    k: np.ndarray,
    v: np.ndarray,
    scores: np.ndarray,
    guarded: set[int],
    stays: np.ndarray,
    irrelevant: float = 0.05,
    alike: float = 0.5,
) -> dict[int, list[int]]:
    """EMS's classes of a head: which KVs are merged into each centre.

    The lowest scores that have no more than a twentieth of all together go; of the others that go,
    each joins the centre that it is most like in key and value, if that is enough.
    """
    k, v = k.astype(np.float64), v.astype(np.float64)
    centres = [i for i in range(len(k)) if stays[i] and i not in guarded]
    goes = sorted(np.flatnonzero(~stays).tolist(), key=lambda i: scores[i])
    room = irrelevant * sum(scores[i] for i in centres + goes)
    classes: dict[int, list[int]] = {centre: [] for centre in centres}
    for i in goes:
        room -= scores[i]
        if room < 0 and centres:
            like = [max(0.0, cosine(k[i], k[c])) * max(0.0, cosine(v[i], v[c])) for c in centres]
            if max(like) > alike:
                classes[centres[int(np.argmax(like))]].append(i)
    return classes


def with_centres(
    k: np.ndarray,
    v: np.ndarray,
    scores: np.ndarray,
    classes: dict[int, list[int]],
    stays: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of those that stay after EMS."""
    k, v = k.astype(np.float64), v.astype(np.float64)
    new_k, new_v = k.copy(), v.copy()
    for centre, members in classes.items():
        if members:
            joined = [centre, *members]
            weight = scores[joined].astype(np.float64)
            weight /= weight.sum()
            norms = [np.linalg.norm(k[i]) for i in joined]
            direction = sum(w * k[i] / n for w, i, n in zip(weight, joined, norms, strict=True))
            new_k[centre] = direction / np.linalg.norm(direction) * (weight @ norms)
            new_v[centre] = weight @ v[joined]
    return new_k[stays], new_v[stays]
