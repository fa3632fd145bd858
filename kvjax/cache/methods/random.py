"""A random choice of KVs in each head, the same in every run: what a method has to beat."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.cache.policy.allocate import ByLayer
from kvjax.cache.policy.checks import check_wholes
from kvjax.cache.policy.decode import Intrinsic
from kvjax.cache.policy.method import Method
from kvjax.checks import INT32_MAX


@dataclasses.dataclass(frozen=True)
class Random(Intrinsic):
    """A hash of seed, layer, head and token position."""

    seed: int = 0

    across_heads: ClassVar[bool] = True

    def __post_init__(self):
        check_wholes(self, 0, INT32_MAX, "seed")

    def of(
        self,
        layer: Int32[Array, ""] | int,
        k: Float[Array, "*rows H d"],
        position: Int32[Array, "*rows H"],
    ) -> Float[Array, "*rows H"]:
        head = jnp.arange(position.shape[-1], dtype=jnp.uint32)

        def mixed(x):  # the finaliser of MurmurHash3, so that nearby positions share nothing
            x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
            x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
            return x ^ (x >> 16)

        x = mixed(jnp.uint32(self.seed) + jnp.uint32(0x9E3779B9))
        for part in (jnp.asarray(layer, jnp.uint32), head, position.astype(jnp.uint32)):
            x = mixed(x ^ mixed(part + jnp.uint32(0x9E3779B9)))
        # 24 bits: exact in float32.
        return (x >> 8).astype(jnp.float32) / (1 << 24)


METHODS = (
    Method(
        "random",
        "a seeded random choice in each head",
        Random(),
        allocator=ByLayer(),
        query_aware=False,
    ),
)
