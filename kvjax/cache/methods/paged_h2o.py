"""Paged H2O: whole pages of tokens, the same in all heads of a layer, by accumulated attention.

The base method of KVCrush's serving experiments and of OpenVINO GenAI: the scores of a page of 32
tokens are added, and the lowest pages between a start and a recent area go. `paged-h2o` protects
one page at either end; `paged-h2o-openvino` has OpenVINO's areas, 32 and 128 tokens, and its
default score, the sum divided by how many queries could see the token. Here cached tokens are
compared by their metrics of the prompt (one choice) or of all steps so far (each compression).
"""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Num

from kvjax.cache.methods.h2o import Accumulated
from kvjax.cache.policy.allocate import ByLayer
from kvjax.cache.policy.method import Method
from kvjax.cache.policy.select import Selector


@dataclasses.dataclass(frozen=True)
class PerQuery(Accumulated):
    """The same over the number of queries that could see the KV."""

    def rank(
        self,
        metric: Float[Array, "*rows T"],
        state: Mapping[str, Num[Array, "*rows T w"]],
        position: Int32[Array, "*rows T"],
        seq_len: Int32[Array, "*rows"],
    ) -> Float[Array, "*rows T"]:
        return metric / jnp.maximum(seq_len[..., None] - position, 1).astype(jnp.float32)


def _paged(name: str, recent: int, scorer: Accumulated) -> Method:
    of = " per query" if isinstance(scorer, PerQuery) else ""
    return Method(
        name,
        f"pages of 32 tokens by accumulated attention{of}",
        scorer,
        allocator=ByLayer(),
        selector=Selector(unit=32, scope="layer"),
        protected=recent,
        sinks=32,
        query_aware=False,
        evidence="C",
    )


METHODS = (
    _paged("paged-h2o", 32, Accumulated(continual=True)),
    _paged("paged-h2o-openvino", 128, PerQuery(continual=True)),
)
