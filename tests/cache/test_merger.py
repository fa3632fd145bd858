"""A merger folds what goes into what stays, on a prompt's way in and in the pool."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as kv
from kvjax.cache.policy import Merger
from kvjax.cache.policy.method import PLAIN
from tests.cache.pair import heads_of

L, H, D, B, T = 2, 2, 4, 4, 19


@dataclasses.dataclass(frozen=True)
class MeanOfTheDropped(Merger):
    """Adds the mean of all values that go from a head to the value that counts least of its
    others."""

    def fold(self, k, v, position, score, dropped, kept, seq_len, artefacts):
        count = jnp.maximum(jnp.sum(dropped, axis=-1, keepdims=True), 1)
        mean = jnp.sum(jnp.where(dropped[..., None], v, 0), axis=-2) / count
        least = jnp.argmin(jnp.where(kept, score, jnp.inf), axis=-1)
        chosen = jnp.arange(v.shape[-2]) == least[..., None]
        return k, v + jnp.where(chosen[..., None], mean[..., None, :], 0)


METHOD = PLAIN._with(merger=MeanOfTheDropped(), protected=2)


@pytest.mark.parametrize("way", ["in", "in the pool"])
def test_what_goes_is_folded_into_what_stays(way):
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((L, T, H, D)).astype(np.float32) for _ in range(2))
    metric = rng.random((L, H, T)).astype(np.float32)
    cache = kv.init_cache(
        num_slots=1, num_layers=L, num_kv_heads=H, head_dim=D, num_blocks=40,
        max_blocks_per_head=8, block_size=B,
    )  # fmt: skip
    slot, keep = jnp.int32(0), jnp.int32(9)
    if way == "in":
        cache, _, ok = jax.jit(kv.write_survivors)(cache, slot, k, v, metric, T, keep, METHOD)
    else:
        cache, ok = jax.jit(kv.write_prompt)(cache, slot, k, v, metric, T)
        cache, _ = jax.jit(kv.compress)(cache, slot[None], keep[None], METHOD)
    assert ok
    changed = 0
    for (_, layer, h), kvs in heads_of(cache).items():
        stay = [x.position for x in kvs]
        gone = [j for j in range(T) if j not in stay]
        want = {j: v[layer, j, h] for j in stay}
        if gone:
            rank = {j: metric[layer, h, j] for j in stay if j < T - 2}
            least = min(rank, key=lambda j: rank[j])
            want[least] = want[least] + v[layer, gone, h].mean(axis=0)
            changed += 1
        for x in kvs:
            np.testing.assert_allclose(x.v, want[x.position], rtol=1e-5, atol=1e-6)
            assert np.array_equal(x.k, k[layer, x.position, h])
    assert changed
