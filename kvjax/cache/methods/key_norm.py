"""Key norm (Devoto et al. 2024): the KVs whose keys have the lowest L2 norm stay.

Needs no attention: the metric is minus the norm, given to each KV when it is written. The paper's
exemption of the first two layers is not applied.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.cache.policy.allocate import ByLayer
from kvjax.cache.policy.decode import Intrinsic
from kvjax.cache.policy.method import Method


@dataclasses.dataclass(frozen=True)
class KeyNorm(Intrinsic):
    """Minus the L2 norm of the key, which rotation leaves as it is."""

    def of(
        self,
        layer: Int32[Array, ""] | int,
        k: Float[Array, "*rows H d"],
        position: Int32[Array, "*rows H"],
    ) -> Float[Array, "*rows H"]:
        return -jnp.linalg.norm(k.astype(jnp.float32), axis=-1)


METHODS = (
    Method(
        "key-norm",
        "the keys of lowest L2 norm",
        KeyNorm(),
        allocator=ByLayer(),
        query_aware=False,
        evidence="U",
    ),
)
