"""Which keys a prompt's own queries attend to, where its prefill is sparse.

Source: the code of SpecKV's authors (Galim et al. 2025, arXiv 2506.08373, section 4), on the kernel
of MInference (Jiang et al. 2024, arXiv 2407.02490).
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from kvjax.cache.policy.checks import check_wholes, wanted
from kvjax.kernels import SPARSE_BLOCK


@dataclasses.dataclass(frozen=True)
class SparsePrefill:
    """Every query sees the keys next to it and, in each KV head, the keys that score most.

    Queries come in blocks of 64: those of one see the `local` keys before their block, what stands
    in it up to themselves, and the verticals.
    """

    verticals: int = 2048
    """Keys of each KV head that all queries behind them see."""
    local: int = 2048
    """Keys before its block that every query sees."""

    def __post_init__(self):
        check_wholes(self, 1, 2**20, "verticals", "local")
        if self.local % SPARSE_BLOCK:
            raise wanted("local", self.local, f"a multiple of {SPARSE_BLOCK}")

    def applies(self, length: int) -> bool:
        """Whether a prompt of so many tokens is prefilled so; shorter ones attend to all keys."""
        return length > self.verticals + self.local

    def chosen(self, metric: Float[Array, "H T"], before: Int32[Array, ""]) -> Int32[Array, "H n"]:
        """The verticals of each KV head, ascending.

        Args:
            metric: what each key counts, at least 0.
            before: keys from here on are none. Of equal ones the older are.

        Returns:
            Token positions; T stands for none, where fewer than n keys are before.
        """
        num_tokens = metric.shape[1]
        there = jnp.arange(num_tokens) < before
        value, index = lax.top_k(jnp.where(there, metric, -1.0), min(self.verticals, num_tokens))
        return jnp.sort(jnp.where(value >= 0, index, num_tokens).astype(jnp.int32), axis=1)
