"""Expected Attention (Devoto et al. 2025): what the queries to come are expected to give a KV.

The queries of the prompt, before RoPE, are taken for a Gaussian of mean μ and covariance Σ. With R
the mean of RoPE's rotations over the next 512 positions, μ̄ = Rμ and Σ̄ = RΣRᵀ, a query is expected
to give exp(μ̄·k/√d + kᵀΣ̄k/(2d)); this is divided by its sum over the keys, averaged over the query
heads of the group, and multiplied by ‖v‖. The first 4 tokens, as queries and as keys, take no part,
and stay. This is the authors' code in kvpress. A prompt that runs in parts takes the queries of its
last part. KVs written by decode steps have metric 0: the step does not
know the statistics of the prompt's queries.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache.policy.allocate import ByLayer
from kvjax.cache.policy.checks import check_wholes
from kvjax.cache.policy.method import Method
from kvjax.cache.policy.pooling import reduce_group
from kvjax.cache.policy.rotary import ROPE_FREQUENCY, turned, turned_back
from kvjax.cache.policy.score import Artefacts, LayerView, Scorer, Scores
from kvjax.checks import INT32_MAX

SINKS = 4


@dataclasses.dataclass(frozen=True)
class ExpectedAttention(Scorer):
    """Expected attention, times the norm of the value."""

    ahead: int = 512
    """Positions after the prompt over which RoPE is averaged."""

    artefacts: ClassVar[tuple[str, ...]] = (ROPE_FREQUENCY,)

    def __post_init__(self):
        check_wholes(self, 1, INT32_MAX, "ahead")

    def score(self, view: LayerView, artefacts: Artefacts) -> Scores:
        assert view.v is not None
        mean, covariance = self._expected_query(view, artefacts[ROPE_FREQUENCY])
        d = view.k.shape[-1]
        k = view.k.astype(jnp.float32)
        heads = (view.num_heads, -1, d)
        counts = view.keys_from(SINKS)

        def of_query_head(part):
            mean, covariance = part
            straight = jnp.einsum("phi,hi->hp", k, mean) / d**0.5
            spread = jnp.einsum("hpi,phi->hp", jnp.einsum("phj,hij->hpi", k, covariance), k)
            logits = jnp.where(counts, straight + spread / (2 * d), -jnp.inf)
            logits = logits - jnp.max(logits, axis=-1, keepdims=True, initial=-1e30)
            given = jnp.exp(logits)
            return given / jnp.maximum(jnp.sum(given, axis=-1, keepdims=True), 1e-30)

        # One query head of each group at a time.
        parts = mean.reshape(heads), covariance.reshape(*heads, d)
        given = jax.lax.map(of_query_head, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), parts))
        norm = jnp.linalg.norm(view.v.astype(jnp.float32), axis=-1).T
        return Scores(reduce_group(jnp.swapaxes(given, 0, 1), "mean") * norm)

    def _expected_query(
        self, view: LayerView, frequency: Float[Array, " half"]
    ) -> tuple[Float[Array, "Hr d"], Float[Array, "Hr d d"]]:
        """Mean and covariance of the queries to come, of each query head."""
        at = view.query_position
        counts = ((at >= SINKS) & (at < view.end))[:, None, None]
        number = jnp.maximum(jnp.sum(counts, dtype=jnp.float32), 1)
        q = jnp.where(counts, turned_back(view.q, at, frequency), 0)
        mean = jnp.sum(q, axis=0) / number
        centred = jnp.where(counts, q - mean, 0)
        covariance = jnp.einsum("thi,thj->hij", centred, centred) / number
        ahead = view.end + jnp.arange(self.ahead, dtype=jnp.int32)
        angle = ahead[:, None].astype(jnp.float32) * frequency
        cos, sin = jnp.mean(jnp.cos(angle), axis=0), jnp.mean(jnp.sin(angle), axis=0)
        covariance = jnp.swapaxes(turned(covariance, cos, sin), -1, -2)
        return turned(mean, cos, sin), turned(covariance, cos, sin)


METHODS = (
    Method(
        "expected-attention",
        "attention expected of the queries to come, times the value's norm",
        ExpectedAttention(),
        allocator=ByLayer(),
        sinks=SINKS,
        query_aware=False,
        evidence="C",
    ),
)
