"""KVzip (Kim et al. 2025): what a model reads of a prompt when it has to repeat it.

Section 3.2: behind the prompt stands a request to repeat it and the prompt once more; a KV counts
the largest attention that a query of the copy pays to it, over the query heads of its group. The
"+" is KVzap's (NVIDIA 2026, equation 3): attention times the norm of what the value adds to the
residual stream, over that of what enters the attention block at the query.

The queries are those of a chunk that runs behind the prompt, at the positions that follow it; see
`kvjax.engine.repeat`. Long prompts are repeated in parts of 2,048 tokens, each behind the whole
prompt; a KV counts the largest of all parts. The budget is one over all layers and heads, the first
4 tokens and the newest 8 stay. KVs written by decode steps are not repeated and have metric 0.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kvjax.cache.policy.checks import check_wholes
from kvjax.cache.policy.method import Method
from kvjax.cache.policy.score import Artefacts, HeadAxis, LayerView, Scorer, Scores
from kvjax.checks import INT32_MAX, check_flag

OUTPUT_GRAM = "output_gram"
"""[L, H r, d, d]: of each query head, its slice W [d, D] of the output projection as W Wᵀ."""
AT_ONCE = 256
"""Queries whose attention to all keys stands in memory."""


@dataclasses.dataclass(frozen=True)
class Repeated(Scorer):
    """The largest attention that a chunk's queries from `first` on pay to each key before it."""

    first: int = 0
    """Queries of the chunk that do not count: those of the request."""
    plus: bool = False
    """Whether attention is weighted by what it changes in the residual stream."""

    def __post_init__(self):
        check_wholes(self, 0, INT32_MAX, "first")
        check_flag("plus", self.plus)

    head_axes: ClassVar[Mapping[str, HeadAxis]] = {OUTPUT_GRAM: HeadAxis(1, grouped=True)}
    repeats: ClassVar[bool] = True

    @property
    def needs_log_sum(self) -> bool:
        return True

    @property
    def artefacts(self) -> tuple[str, ...]:  # type: ignore[override]
        return (OUTPUT_GRAM,) if self.plus else ()

    def score(self, view: LayerView, artefacts: Artefacts) -> Scores:
        assert view.log_sum is not None
        num_tokens, d = view.q.shape[0], view.q.shape[2]
        # Padded so that parts of one size cover all queries.
        short = -num_tokens % AT_ONCE
        token = jnp.arange(num_tokens + short, dtype=jnp.int32)
        counts = (token >= self.first) & (token < view.length)
        q = jnp.pad(view.q, ((0, short), (0, 0), (0, 0))).astype(jnp.float32)
        q = q.reshape(-1, AT_ONCE, view.num_heads, q.shape[1] // view.num_heads, d)
        log_sum = jnp.pad(view.log_sum, ((0, 0), (0, short)))
        log_sum = log_sum.reshape(view.num_heads, -1, q.shape[0], AT_ONCE)
        bias = jnp.where(counts, 0.0, -jnp.inf)
        if self.plus:
            assert view.hidden is not None
            norm = jnp.linalg.norm(view.hidden.astype(jnp.float32), axis=-1)
            bias = bias - jnp.log(jnp.pad(norm, (0, short), constant_values=1.0))
        bias = bias.reshape(q.shape[0], AT_ONCE)
        # Keys of the chunk itself are not what is scored.
        held = view.k.shape[0] - num_tokens
        keys = view.k[:held].astype(jnp.float32)

        def largest(i, most):
            logits = jnp.einsum("qhrd,phd->hrqp", q[i], keys) * d**-0.5
            share = logits - log_sum[:, :, i, :, None] + bias[i][:, None]
            return jnp.maximum(most, jnp.max(share, axis=2))

        none = jnp.full((*log_sum.shape[:2], held), -jnp.inf)
        most = lax.fori_loop(0, q.shape[0], largest, none)
        if self.plus:
            assert view.v is not None
            most = most + jnp.log(_changed(view.v[:held], artefacts[OUTPUT_GRAM]))
        metric = jnp.exp(jnp.max(most, axis=1))
        at = view.key_position[:, :held]
        metric = jnp.where((at >= 0) & (at < view.start), metric, 0.0)
        return Scores(jnp.pad(metric, ((0, 0), (0, num_tokens))))


def _changed(v: Float[Array, "P H d"], gram: Float[Array, "Hr d d"]) -> Float[Array, "H r P"]:
    """‖W v‖ of each value in the output projection of each query head."""
    gram = gram.reshape(v.shape[1], -1, *gram.shape[1:]).astype(jnp.float32)
    v = v.astype(jnp.float32)
    squares = jnp.einsum("phd,hrde,phe->hrp", v, gram, v)
    return jnp.sqrt(jnp.maximum(squares, jnp.finfo(jnp.float32).tiny))


def output_grams(out: Float[Array, "L H r d D"]) -> Float[Array, "L Hr d d"]:
    """The artefact `OUTPUT_GRAM` of a model's output projections."""
    wide = jnp.asarray(out, jnp.float32).reshape(len(out), -1, *out.shape[3:])
    return jax.lax.map(lambda w: jnp.einsum("hdi,hei->hde", w, w), wide)


METHODS = (
    Method(
        "kvzip",
        "what the model attends to when it repeats the prompt: a second pass over it",
        Repeated(),
        protected=1,
        sinks=4,
        query_aware=False,
        evidence="P",
    ),
    Method(
        "kvzip-plus",
        "the same, by what it changes in the residual stream",
        Repeated(plus=True),
        protected=1,
        sinks=4,
        query_aware=False,
        evidence="P",
    ),
)
