"""Attention matching of one head, in plain NumPy, each ridge regression as least squares."""

from __future__ import annotations

import numpy as np


def turned(q: np.ndarray, position: int, frequency: np.ndarray) -> np.ndarray:
    """One query as RoPE leaves it at a position."""
    half = len(q) // 2
    turn = (q[:half] + 1j * q[half:]) * np.exp(1j * position * frequency.astype(np.float64))
    return np.concatenate([turn.real, turn.imag])


def ridge(x: np.ndarray, y: np.ndarray, penalty: float) -> np.ndarray:
    """The least of ‖x w − y‖² + penalty ‖w‖²."""
    size = x.shape[1]
    rows = np.concatenate([x, np.sqrt(penalty) * np.eye(size)])
    right = np.concatenate([y, np.zeros((size, *y.shape[1:]))])
    return np.linalg.lstsq(rows, right, rcond=None)[0]


def matched(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    stays: np.ndarray,
    stiffness: float = 0.01,
    drawn_back: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of those that stay, so that they are read as all of them were.

    Args:
        q: [Q, d], turned queries, not scaled.
        k: [T, d], what was held.
        v: [T, d].
        stays: [T] bool.
    """
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    q = q / np.sqrt(q.shape[1])
    weight = np.exp(q @ k.T)
    lacks = np.clip(np.log(weight.sum(1) / weight[:, stays].sum(1)), 0, 4)
    moved = ridge(q, lacks, stiffness * (q**2).sum() / q.shape[1])
    own = weight[:, stays] / weight[:, stays].sum(1, keepdims=True)
    missing = weight @ v / weight.sum(1, keepdims=True) - own @ v[stays]
    penalty = drawn_back * (own**2).sum() / len(q)
    return k[stays] + moved, v[stays] + ridge(own, missing, penalty)
