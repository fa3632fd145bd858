"""StreamingLLM (Xiao et al. 2023): the first 4 tokens and the most recent ones.

The rule of the authors' `kv_cache.py`. Keys keep their original positions here, as in the papers'
runs; the authors' own system numbers them anew inside the cache.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.cache.policy.allocate import ByLayer
from kvjax.cache.policy.decode import Intrinsic
from kvjax.cache.policy.method import Method


@dataclasses.dataclass(frozen=True)
class Newest(Intrinsic):
    """The token position: the oldest go first."""

    def of(
        self,
        layer: Int32[Array, ""] | int,
        k: Float[Array, "*rows H d"],
        position: Int32[Array, "*rows H"],
    ) -> Float[Array, "*rows H"]:
        return position.astype(jnp.float32)


METHODS = (
    Method(
        "streaming-llm",
        "the first 4 tokens and the newest ones",
        Newest(),
        allocator=ByLayer(),
        sinks=4,
        query_aware=False,
        evidence="C",
    ),
)
