"""What decode steps do to the metrics of what a head holds, in plain NumPy, one step at a time.

Written from the papers' and the authors' rules, by the methods' names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tests.oracle.attention import attend
from tests.oracle.kv import KV
from tests.oracle.question_free import calibrated, predicted_one, surrogate_one
from tests.oracle.scores import random_number

Added = Callable[[np.ndarray, np.ndarray], np.ndarray]
Given = Callable[[int, int, KV, np.ndarray], float]


def adding(power: int, keep: float = 1.0) -> Added:
    """`keep` times what was there, and the step's attention of all heads of the group."""
    return lambda before, p: keep * before + (p**power).sum(axis=0)


ADDED: dict[str, Added] = {
    "h2o-decode": adding(1),
    "paged-h2o": adding(1),
    "paged-h2o-openvino": adding(1),
    "kv-compress-continual": adding(2),
    "a2sf": adding(1, keep=0.95),
    "a2sf-f20": adding(1, keep=0.2),
    "tova": adding(1, keep=0.0),
}
"""Methods whose metrics change with every step, for all KVs of a head: old metrics [n] and the
step's attention [r, n] to the new ones."""


def predicted_newest(layer: int, head: int, kv: KV, hidden: np.ndarray) -> float:
    """What is predicted of the KV of a token that was generated."""
    of = calibrated(layer + 1, 2, len(kv.k))
    return predicted_one(of, layer, head, hidden, kv.k, kv.v, kv.position)


def surrogate_newest(kind: str) -> Given:
    """What a published surrogate says of the KV of a token that was generated."""

    def given(layer: int, head: int, kv: KV, hidden: np.ndarray) -> float:
        return surrogate_one(calibrated(layer + 1, 2, len(kv.k)), kind, layer, head, hidden)

    return given


GIVEN: dict[str, Given] = {
    "streaming-llm": lambda layer, head, kv, hidden: float(kv.position),
    "duo-heads": lambda layer, head, kv, hidden: float(kv.position),
    "razor-attention": lambda layer, head, kv, hidden: float(kv.position),
    "random": lambda layer, head, kv, hidden: random_number(layer, head, kv.position),
    "key-norm": lambda layer, head, kv, hidden: -float(np.linalg.norm(kv.k.astype(np.float64))),
    "predicted-reads-blind": predicted_newest,
    "kvzap-linear": surrogate_newest("linear"),
    "kvzap-mlp": surrogate_newest("mlp"),
}
"""Methods that give each KV its metric when it is written."""
GIVEN_BESIDE_PLANES: dict[str, Given] = {"predicted-reads": predicted_newest}
"""Those of them that keep further numbers."""


def decode_step(
    name: str,
    kvs: list[KV],
    new: KV,
    q: np.ndarray,
    layer: int,
    head: int,
    hidden: np.ndarray,
) -> tuple[list[KV], np.ndarray]:
    """A head's KVs after a step of an observed sequence, and the attention output [r, d].

    Args:
        name: the method.
        kvs: what the head holds, in any order.
        new: the KV of the step's token, metric 0.
        q: the queries of the head's group [r, d].
        layer: index of the layer.
        head: index of the KV head.
        hidden: what enters the layer's attention.
    """
    base = name.split(":")[-1]
    given = {**GIVEN, **GIVEN_BESIDE_PLANES}.get(base)
    if given is not None:
        new = replace(new, metric=given(layer, head, new, hidden))
    kvs = [*kvs, new]
    out, p = attend(q, np.array([x.k for x in kvs]), np.array([x.v for x in kvs]))
    if base in ADDED:
        metric = ADDED[base](np.array([x.metric for x in kvs]), p)
        kvs = [replace(x, metric=float(m)) for x, m in zip(kvs, metric, strict=True)]
    return kvs, out
