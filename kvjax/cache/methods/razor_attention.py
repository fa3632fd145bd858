"""RazorAttention (Tang et al. 2024): retrieval heads keep everything, the others a compensation
token for what they drop.

Retrieval heads are found once per model (`kvjax calibrate --heads`): random tokens, repeated; of
all heads the 1 % that read earlier copies of their token most (echo), and the 14 % that read what
followed them (induction). The others keep 4 sinks and the newest N / 5 of N tokens, and one KV in
place of those that go, the mean of their keys and values (algorithm 1).

At an equal budget: 15 % whole heads and a fifth of the others are .32 N, of which .2 N is .625; so
every head keeps the newest .625 of the cap, and with the rest heads are filled up one after the
other, in an order by which at a rate of 3 the whole ones are theirs. Their least window of 4,000
tokens is left out: it is more than the budgets here.

Assumed: the mean is of keys as they lie in the cache, after RoPE (so in the algorithm), and counts
as one KV. Equation 5 weights it by how many it stands for, which needs a bias on the logit that the
attention here does not have; Huawei's published code weights nothing. The mean lies in the slot of
the oldest KV behind the sinks, whose own token goes into it, for a cache has no KV without a
position. A head that gives up more later gives that slot up first, and the mean is then one among
those that go.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache.methods.duo_heads import WholeHeads
from kvjax.cache.methods.streaming_llm import Newest
from kvjax.cache.policy.checks import check_wholes
from kvjax.cache.policy.merge import Merger
from kvjax.cache.policy.method import Method
from kvjax.cache.policy.score import Artefacts
from kvjax.checks import INT32_MAX

RETRIEVAL_HEAD = "retrieval_head"
"""Calibrated array [L, H]: the higher, the sooner a head is kept whole."""
SINKS = 4


@dataclasses.dataclass(frozen=True)
class Compensated(Merger):
    """One KV in place of all that go: the mean of their keys and of their values."""

    sinks: int = SINKS
    """First positions, none of which gives its slot."""

    def __post_init__(self):
        check_wholes(self, 0, INT32_MAX, "sinks")

    def fold(
        self,
        k: Float[Array, "H T d"],
        v: Float[Array, "H T d"],
        position: Int32[Array, "H T"],
        score: Float[Array, "H T"],
        dropped: Bool[Array, "H T"],
        kept: Bool[Array, "H T"],
        seq_len: Int32[Array, ""],
        artefacts: Artefacts,
    ) -> tuple[Float[Array, "H T d"], Float[Array, "H T d"]]:
        free = kept & (position >= self.sinks)
        slot = jnp.argmin(jnp.where(free, position, INT32_MAX), axis=-1)
        loses = jnp.any(dropped, axis=-1) & jnp.any(free, axis=-1)
        place = (jnp.arange(k.shape[1]) == slot[:, None]) & loses[:, None]
        joined = (dropped | place)[..., None]
        number = jnp.maximum(jnp.sum(joined, axis=1, keepdims=True), 1)

        def with_mean(x):
            total = jnp.sum(jnp.where(joined, x.astype(jnp.float32), 0), axis=1, keepdims=True)
            return jnp.where(place[..., None], (total / number).astype(x.dtype), x)

        return with_mean(k), with_mean(v)


METHODS = (
    Method(
        "razor-attention",
        "retrieval heads whole, of the others the newest tokens and a mean of what goes",
        Newest(),
        allocator=WholeHeads(by=RETRIEVAL_HEAD),
        merger=Compensated(),
        sinks=SINKS,
        protected_share=0.625,
        query_aware=False,
        evidence="P",
    ),
)
