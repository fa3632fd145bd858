"""Ada-KV (Feng et al. 2024): heads of a layer share a budget by where the layer's attention is.

In each layer the H · base largest scores over all heads are counted per head, base = C − window; a
head gets round((1 − α) · count + ⌊α · base⌋) tokens and its window. Scores are SnapKV's 32 / 7 /
max, query heads averaged first, as in the authors' runs. α is 0.2 in their scripts and 0.5 in their
README. `ada-pyramidkv` splits PyramidKV's layer budgets so, those of prompts below 2·B tokens as
well, where PyramidKV's code has none. What kvpress calls Ada-KV is another rule: ⌊α · n⌋ KVs of
each head are safe, of the rest the lowest of the layer go.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.cache.methods.pyramidkv import Pyramid
from kvjax.cache.methods.snapkv import METHODS as SNAPKV
from kvjax.cache.policy.allocate import ByLayer, CheapestBlocks, EvenHeads, EvenLayers
from kvjax.cache.policy.block_cost import least_of_each, smallest
from kvjax.cache.policy.checks import check_numbers
from kvjax.cache.policy.method import Method
from kvjax.cache.store import HeadShard

_W32, _KVPRESS = SNAPKV[1], SNAPKV[3]


@dataclasses.dataclass(frozen=True)
class Ada(EvenHeads):
    """A head's share goes by how many of the layer's largest scores it has."""

    floor: float = 0.2
    """α, the share that is split evenly."""

    def __post_init__(self):
        check_numbers(self, 0, 1, "floor")

    def shares(
        self,
        scores: Float[Array, "H T"],
        tokens: Float[Array, ""],
        protected: Int32[Array, ""],
    ) -> Float[Array, " H"]:
        base = self._base(tokens, protected)
        # Largest first; of equal ones those of the highest head and index, which are evicted last.
        claims = jnp.where(jnp.isfinite(scores), -scores, jnp.inf).reshape(-1)[::-1]
        wanted = jnp.minimum(
            (len(scores) * base).astype(jnp.int32), jnp.sum(jnp.isfinite(claims), dtype=jnp.int32)
        )
        last = jnp.sort(claims)[jnp.maximum(wanted - 1, 0)]
        top = smallest(claims, wanted, jnp.where(wanted > 0, last, -jnp.inf))[::-1]
        count = jnp.sum(top.reshape(scores.shape), axis=-1)
        return self._shares(count, base) + protected

    def shares_of_shard(
        self,
        scores: Float[Array, "H T"],
        tokens: Float[Array, ""],
        protected: Int32[Array, ""],
        shard: HeadShard,
    ) -> Float[Array, " H"]:
        base = self._base(tokens, protected)
        claims = jnp.where(jnp.isfinite(scores), -scores, jnp.inf)
        finite = shard.sum(jnp.sum(jnp.isfinite(claims), dtype=jnp.int32))
        wanted = jnp.minimum((shard.total * base).astype(jnp.int32), finite)
        count = least_of_each(claims, wanted, shard, last_first=True)
        return self._shares(count, base) + protected

    def _base(self, tokens: Float[Array, ""], protected: Int32[Array, ""]) -> Float[Array, ""]:
        return jnp.floor(jnp.maximum(tokens - protected, 0))

    def _shares(self, count: Int32[Array, " H"], base: Float[Array, ""]) -> Float[Array, " H"]:
        count = count.astype(jnp.float32)
        return jnp.round(count * (1 - self.floor) + jnp.floor(self.floor * base))


def ada_kv(base: Method, name: str, summary: str, floor: float = 0.2) -> Method:
    """`base` with the heads of a layer sharing its budget by Ada-KV's rule; α is `floor`."""
    layers = base.allocator.layers if isinstance(base.allocator, ByLayer) else EvenLayers()
    allocator = ByLayer(layers, Ada(floor))
    return dataclasses.replace(base, name=name, summary=summary, allocator=allocator)


METHODS: tuple[Method, ...] = (
    *(
        ada_kv(_W32, name, f"SnapKV's scores, heads share their layer's budget, α {floor}", floor)
        for name, floor in (("ada-snapkv", 0.2), ("ada-snapkv-a50", 0.5))
    ),
    ada_kv(
        dataclasses.replace(_W32, allocator=ByLayer(Pyramid(short=True))),
        "ada-pyramidkv",
        "PyramidKV's layer budgets, shared by the heads of a layer, α 0.2",
    ),
    dataclasses.replace(
        _KVPRESS,
        name="ada-snapkv-kvpress",
        summary="SnapKV's scores, the cheapest blocks of each layer, a fifth of each head safe",
        allocator=ByLayer(heads=CheapestBlocks(safe=0.2)),
    ),
)
