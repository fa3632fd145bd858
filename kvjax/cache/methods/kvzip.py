"""KVzip (Kim et al. 2025): what a model reads of a prompt when it has to repeat it.

Section 3.2 and the authors' code: behind the prompt stands a request to repeat it and the prompt
once more; a KV counts the largest attention that a query of the two pays to it, over the query
heads of its group. The "+" is KVzap's (NVIDIA 2026, equation 3): attention times the norm of what
the value adds to the residual stream, over that of what enters the attention block at the query;
there the queries of the copy alone count.

The queries are those of a probe that runs behind the prompt, at the positions that follow it; see
`kvjax.cache.policy.probe`. Long prompts are repeated in parts of 2,048 tokens, each behind the
whole prompt and the same request, where theirs names the last 8 tokens of the part before; a KV
counts the largest of all parts. The budget is one over all layers and heads, the first 4 tokens and
the newest one stay. KVs written by decode steps are not repeated and have metric 0.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.cache.policy.method import Method
from kvjax.cache.policy.probe import AtHand, Probe, Probed
from kvjax.cache.policy.score import Artefacts, HeadAxis, LayerView
from kvjax.checks import check_flag

OUTPUT_GRAM = "output_gram"
"""[L, H r, d, d]: of each query head, its slice W [d, D] of the output projection as W Wᵀ."""
CHUNK = 2048
"""Tokens that are repeated at a time (section 3.3)."""


@dataclasses.dataclass(frozen=True)
class Repeated(Probed):
    """The largest attention of a repetition of the prompt."""

    plus: bool = False
    """Whether attention is weighted by what it changes in the residual stream."""

    def __post_init__(self):
        super().__post_init__()
        check_flag("plus", self.plus)

    head_axes: ClassVar[Mapping[str, HeadAxis]] = {OUTPUT_GRAM: HeadAxis(1, grouped=True)}

    def probes(self, prompt: np.ndarray, at_hand: AtHand) -> list[Probe]:
        request, size = at_hand.request, min(CHUNK, at_hand.size)
        first = len(request) if self.plus else 0
        return [Probe(part, first) for part in repetitions(request, prompt, size)]

    @property
    def artefacts(self) -> tuple[str, ...]:  # type: ignore[override]
        return (OUTPUT_GRAM,) if self.plus else ()

    def query_factor(self, view: LayerView) -> Float[Array, " T"] | None:
        if not self.plus:
            return None
        assert view.hidden is not None
        return jnp.linalg.norm(view.hidden.astype(jnp.float32), axis=-1)

    def key_factor(self, view: LayerView, artefacts: Artefacts) -> Float[Array, "H r P"] | None:
        if not self.plus:
            return None
        assert view.v is not None
        return _changed(view.v[: view.k.shape[0] - view.q.shape[0]], artefacts[OUTPUT_GRAM])


def repetitions(request: Sequence[int], prompt: np.ndarray, size: int = CHUNK) -> list[np.ndarray]:
    """What repeats a prompt, one after the other: the request and a part of the prompt."""
    parts = max(1, -(-len(prompt) // size))
    return [np.asarray([*request, *part], np.int32) for part in np.array_split(prompt, parts)]


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
