"""Compactor (Chari and Van Durme 2025): keys that stand out, and keys that their chunk looks at.

The metric is λ · z(leverage) + z(attention), z over all heads and tokens of a layer. Leverage is
that of the head's keys before RoPE, centred and sketched by a Gaussian matrix [d, 48]:
xᵀ(XᵀX + 0.01)⁻¹x, with keys of up to 48 dimensions as they are; where keys repeat so much that
float32 has no such inverse, with ten times the 0.01, and so on, as in kvpress. Attention is not
causal: each chunk of 256 tokens attends to itself, logits are not divided by √d (as in the authors'
code), what a key receives is averaged over the group, multiplied by ‖v‖ and averaged over 3 tokens.
The first 8 tokens and the newest 4 take no part, and stay.

In kvpress, whose press is the authors', λ is the share removed; a scorer does not know the budget,
so here it is a setting: 0.9, the share removed at 10×. kvpress counts the last chunk's padding as
keys of logit 0 and as queries; here padding does not count. A prompt that runs in parts is scored
part by part; KVs written by decode steps have metric 0, which is the mean.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache.policy.allocate import ByLayer
from kvjax.cache.policy.checks import MOST_WINDOW, check_numbers, check_wholes
from kvjax.cache.policy.method import Method
from kvjax.cache.policy.pooling import pool_metric
from kvjax.cache.policy.rotary import ROPE_FREQUENCY, turned_back
from kvjax.cache.policy.score import Artefacts, LayerView, Scorer, Scores
from kvjax.checks import INT32_MAX
from kvjax.kernels.linear import cholesky_inverted

SINKS, NEWEST = 8, 4
RIDGE = 1e-2
TRIES = 12
"""Ridges that are tried at most, each ten times the one before."""


@dataclasses.dataclass(frozen=True)
class Compactor(Scorer):
    """Leverage of the key and attention within its chunk, both as z-scores of the layer."""

    blend: float = 0.9
    """λ, what leverage counts."""
    chunk: int = 256
    """Tokens that attend to each other."""
    sketch: int = 48
    """Dimensions that keys are sketched to."""
    seed: int = 0
    """Of the sketch."""

    artefacts: ClassVar[tuple[str, ...]] = (ROPE_FREQUENCY,)
    across_heads: ClassVar[bool] = True

    def __post_init__(self):
        check_numbers(self, 0, float("inf"), "blend")
        check_wholes(self, 1, MOST_WINDOW, "chunk", "sketch")
        check_wholes(self, 0, INT32_MAX, "seed")

    def carry(self, length: Int32[Array, ""]) -> Float[Array, ""] | None:
        return jnp.float32(1)

    def score(self, view: LayerView, artefacts: Artefacts) -> Scores:
        assert view.v is not None
        at, size = view.query_position, view.q.shape[0]
        counts = (at >= SINKS) & (at < view.end - NEWEST)
        # What is held already keeps what it has.
        held = view.k.shape[0] - size
        k, v = view.k[held:].astype(jnp.float32), view.v[held:].astype(jnp.float32)
        before = turned_back(k, at, artefacts[ROPE_FREQUENCY])
        outlying = self._leverage(before, counts)
        given = self._attention(view.q.astype(jnp.float32), k, at, counts)
        given = jnp.where(counts, given * jnp.linalg.norm(v, axis=-1).T, 0)
        given = pool_metric(given, 3, "avg")
        metric = self.blend * _z(outlying, counts) + _z(given, counts)
        return Scores(jnp.pad(jnp.where(counts, metric, 0), ((0, 0), (held, 0))))

    def _leverage(self, k: Float[Array, "T H d"], counts: Bool[Array, " T"]) -> Float[Array, "H T"]:
        """Leverage score of each key among those that count."""
        k = jnp.where(counts[:, None, None], k, 0)
        mean = jnp.sum(k, axis=0) / jnp.maximum(jnp.sum(counts), 1)
        x = jnp.swapaxes(jnp.where(counts[:, None, None], k - mean, 0), 0, 1)
        heads, _, d = x.shape
        if d > self.sketch:
            drawn = np.random.default_rng(self.seed).standard_normal((heads, d, self.sketch))
            x = x @ jnp.asarray(drawn / self.sketch**0.5, jnp.float32)
        inverse = _ridge_inverted(jnp.swapaxes(x, 1, 2) @ x)
        return jnp.sum(jnp.square(x @ jnp.swapaxes(inverse, 1, 2)), axis=-1)

    def _attention(
        self,
        q: Float[Array, "T Hr d"],
        k: Float[Array, "T H d"],
        at: Int32[Array, " T"],
        counts: Bool[Array, " T"],
    ) -> Float[Array, "H T"]:
        """What each key receives from its chunk, averaged over its query heads."""
        size, heads, d = k.shape
        group, chunks = q.shape[1] // heads, -(-size // self.chunk)
        # Chunks begin with the first token that counts.
        first = jnp.maximum(SINKS - at[0], 0)
        index = (first + jnp.arange(chunks * self.chunk)).reshape(chunks, self.chunk)

        def of_chunk(index):
            here = counts.at[index].get(mode="fill", fill_value=False)
            queries = q.at[index].get(mode="clip").reshape(self.chunk, heads, group, d)
            keys = k.at[index].get(mode="clip")
            logits = jnp.einsum("ihrd,jhd->hrij", queries, keys)
            logits = jnp.where(here, logits, -1e30)
            given = jnp.where(here[:, None], jax.nn.softmax(logits, axis=-1), 0)
            return jnp.mean(jnp.sum(given, axis=2), axis=1)

        given = jnp.swapaxes(jax.lax.map(of_chunk, index), 0, 1).reshape(heads, -1)
        return jnp.zeros((heads, size)).at[:, index.reshape(-1)].set(given, mode="drop")


def _ridge_inverted(gram: Float[Array, "H m m"]) -> Float[Array, "H m m"]:
    """`cholesky_inverted` of each head's matrix with the least ridge that makes it positive
    definite in float32."""

    def failed(inverse):
        return ~jnp.all(jnp.isfinite(inverse), axis=(1, 2))

    def again(state):
        tries, inverse = state
        found = cholesky_inverted(gram + RIDGE * 10.0**tries * jnp.eye(gram.shape[-1]))
        return tries + 1, jnp.where(failed(inverse)[:, None, None], found, inverse)

    def any_failed(state):
        return (state[0] < TRIES) & jnp.any(failed(state[1]))

    return jax.lax.while_loop(any_failed, again, (0, jnp.full_like(gram, jnp.nan)))[1]


def _z(x: Float[Array, "H T"], counts: Bool[Array, " T"]) -> Float[Array, "H T"]:
    """Distance from the mean of those that count, in standard deviations; 0 where it is unknown."""
    counts = counts & jnp.isfinite(x)
    number = jnp.sum(counts)
    mean = jnp.sum(jnp.where(counts, x, 0)) / jnp.maximum(number, 1)
    away = jnp.where(counts, x - mean, 0)
    squares = jnp.sum(away**2)
    return away / jnp.maximum(jnp.sqrt(squares / jnp.maximum(number - 1, 1)), 1e-6)


METHODS = (
    Method(
        "compactor",
        "keys that stand out, and keys that their chunk looks at",
        Compactor(),
        allocator=ByLayer(),
        protected=NEWEST,
        sinks=SINKS,
        query_aware=False,
        evidence="C",
    ),
)
