"""TriAttention (Mao et al. 2026): what queries to come will give a key, by their usual directions.

Before RoPE the queries of a head lie close to a centre that hardly depends on the text. Pair f of a
query is a complex number q_f, that of a key k_f; RoPE turns them by ω_f per token; q̄_f and E|q_f|
are means over plain texts. At time t, of a key at position p, δ tokens later a query head expects

    Σ_f |q̄_f| |k_f| cos(ω_f (t + δ − p) + arg q̄_f − arg k_f) + Σ_f (E|q_f| − |q̄_f|) |k_f|:

what the centre gives at that distance, and by the key's size what the queries' spread may give. The
mean over δ = 1, 2, 4 … 65,536, less its mean over the head's keys, over their standard deviation,
and of these the largest of the query heads of a group, is the metric. Keys as they are stored have
been turned by ω_f p: the first sum is their product with the centre turned by ω_f (t + δ).

As t moves on, metrics change: they are computed when something is evicted. This is the authors'
code where each KV head of each layer keeps its own; it is meant for `compress_every=128`.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache.policy.allocate import ByLayer
from kvjax.cache.policy.checks import check_wholes
from kvjax.cache.policy.method import Method
from kvjax.cache.policy.rotary import ROPE_FREQUENCY, sizes, turned
from kvjax.cache.policy.score import Artefacts, HeadAxis, LayerView, Scorer, Scores
from kvjax.checks import INT32_MAX

QUERY_CENTRE, QUERY_SIZE = "query_centre", "query_size"
"""Calibrated arrays of the queries before RoPE: their mean [L, Hr, d], and the mean absolute value
of each pair [L, Hr, d / 2]."""


@dataclasses.dataclass(frozen=True)
class ExpectedOfCentre(Scorer):
    """See above."""

    ahead: int = 65_536
    """The farthest δ, rounded down to a power of two."""

    artefacts: ClassVar[tuple[str, ...]] = (ROPE_FREQUENCY, QUERY_CENTRE, QUERY_SIZE)
    head_axes: ClassVar[Mapping[str, HeadAxis]] = {
        name: HeadAxis(1, grouped=True) for name in (QUERY_CENTRE, QUERY_SIZE)
    }
    rescored: ClassVar[bool] = True

    def __post_init__(self):
        check_wholes(self, 1, INT32_MAX, "ahead")

    def score(self, view: LayerView, artefacts: Artefacts) -> Scores:
        heads, d = view.num_heads, view.k.shape[-1]
        k = jnp.swapaxes(view.k.astype(jnp.float32), 0, 1)
        size, there = sizes(k), view.keys_from(0)
        number = jnp.maximum(jnp.sum(there, axis=-1, keepdims=True), 1)
        centre = artefacts[QUERY_CENTRE].astype(jnp.float32)
        spread = artefacts[QUERY_SIZE].astype(jnp.float32) - sizes(centre)
        query = self._to_come(centre, view, artefacts[ROPE_FREQUENCY])

        def of_query_head(part):
            query, spread = part
            # Sums, not products of matrices: keys that are equal count the same to the last bit.
            found = jnp.sum(k * query[:, None], axis=-1) + jnp.sum(size * spread[:, None], axis=-1)
            mean = jnp.sum(jnp.where(there, found, 0), axis=-1, keepdims=True) / number
            away = jnp.where(there, found - mean, 0)
            deviation = jnp.sqrt(jnp.sum(away * away, axis=-1, keepdims=True) / number)
            return away / jnp.maximum(deviation, 1e-6)

        # One query head of each group at a time.
        parts = query.reshape(heads, -1, d), spread.reshape(heads, -1, d // 2)
        parts = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), parts)
        return Scores(jnp.max(jax.lax.map(of_query_head, parts), axis=0))

    def _to_come(
        self, centre: Float[Array, "Hr d"], view: LayerView, frequency: Float[Array, " half"]
    ) -> Float[Array, "Hr d"]:
        """The centres as RoPE turns them, the mean over the queries to come."""
        later = 2.0 ** jnp.arange(self.ahead.bit_length(), dtype=jnp.float32)
        angle, now = later[:, None] * frequency, view.end.astype(jnp.float32) * frequency
        mean = turned(centre, jnp.mean(jnp.cos(angle), axis=0), jnp.mean(jnp.sin(angle), axis=0))
        return turned(mean, jnp.cos(now), jnp.sin(now))


METHODS = (
    Method(
        "triattention",
        "what the calibrated centres of queries give keys at their distance; anew at each eviction",
        ExpectedOfCentre(),
        allocator=ByLayer(),
        query_aware=False,
        evidence="C",
    ),
)
