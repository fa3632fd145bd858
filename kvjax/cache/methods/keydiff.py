"""KeyDiff (Park et al. 2025): the keys that are least like the others stay.

The metric is minus the cosine of a key, after RoPE, and the mean of the head's keys, each divided
by its norm. Looks at no query. A chunk measures all keys of a head anew, so that prompts whose
chunks are compressed in between go as in the paper. Decode steps know the newest key and not the
mean: KVs written then have metric 0, that of a key which has nothing in common with the mean, so
that most others go before them.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from kvjax.cache.policy.allocate import ByLayer
from kvjax.cache.policy.method import Method
from kvjax.cache.policy.score import Artefacts, LayerView, Scorer, Scores


@dataclasses.dataclass(frozen=True)
class KeyDiff(Scorer):
    """Minus the cosine of the key and the mean of normalised keys."""

    over_gaps: ClassVar[bool] = True

    def score(self, view: LayerView, artefacts: Artefacts) -> Scores:
        k = jnp.swapaxes(view.k.astype(jnp.float32), 0, 1)
        norm = jnp.maximum(jnp.linalg.norm(k, axis=-1, keepdims=True), 1e-12)
        there = view.keys_from(0)[..., None]
        # The length of the sum makes no difference to a cosine.
        mean = jnp.sum(jnp.where(there, k / norm, 0), axis=1, keepdims=True)
        mean = mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)
        return Scores(-jnp.sum(k / norm * mean, axis=-1))


METHODS = (
    Method(
        "keydiff",
        "the keys least like the mean key",
        KeyDiff(),
        allocator=ByLayer(),
        query_aware=False,
        evidence="R",
    ),
)
