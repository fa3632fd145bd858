"""Keys without what all of a head share, each channel to its scale."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as kv
from kvjax.cache.store import KeySmoothing
from kvjax.kernels import paged_attention
from tests.oracle import attend

S, L, H, D, B, M, T, GROUP = 2, 2, 2, 8, 4, 6, 18, 3


def smoothing_of(rng) -> KeySmoothing:
    shift = rng.standard_normal((L, H, D)) * 30
    scale = 2.0 ** rng.integers(-2, 3, (L, H, D))
    return KeySmoothing(jnp.asarray(shift, jnp.float32), jnp.asarray(scale, jnp.float32))


def cache_of(codec: str, smoothing: KeySmoothing | None) -> kv.PagedCache:
    return kv.init_cache(
        num_slots=S, num_layers=L, num_kv_heads=H, head_dim=D, num_blocks=64, block_size=B,
        max_blocks_per_head=M, codec=kv.as_codec(codec, "float32"), smoothing=smoothing,
    )  # fmt: skip


def test_what_it_is_of_some_keys():
    """(Σ k² / Σ q²)^¼ over both channels of a pair, to the nearest power of two."""
    rng = np.random.default_rng(0)
    mean = rng.standard_normal((L, H, D))
    variance, asked = (rng.gamma(0.1, 20, (L, H, D)) for _ in range(2))
    variance[1, 1] = asked[1, 1] = 0
    found = KeySmoothing.of(*(jnp.asarray(x, jnp.float32) for x in (mean, variance, asked)))
    np.testing.assert_allclose(found.shift, mean, rtol=1e-6)
    for layer, head, i in np.ndindex(L, H, D):
        pair = [i % (D // 2), i % (D // 2) + D // 2]
        keys, queries = variance[layer, head, pair].sum(), asked[layer, head, pair].sum()
        wanted = 1 if keys == 0 else 2 ** round(np.log2(keys / queries) / 4)
        assert found.scale[layer, head, i] == wanted
    assert len(np.unique(found.scale)) > 3, "too little differs"


def written(codec: str, smoothing: KeySmoothing | None):
    """A cache with a prompt and one more KV of each head, and its keys and values."""
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((L, T + 1, H, D)).astype(np.float32) for _ in range(2))
    if smoothing is not None:
        k = k * np.asarray(smoothing.scale)[:, None] + np.asarray(smoothing.shift)[:, None]
    cache, metric = cache_of(codec, smoothing), jnp.zeros((L, H, T))
    cache, ok = jax.jit(kv.write_prompt)(cache, 1, k[:, :T], v[:, :T], metric, T)
    assert ok
    newest_k, newest_v = (np.zeros((L, S, H, D), np.float32) for _ in range(2))
    newest_k[:, 1], newest_v[:, 1] = k[:, T], v[:, T]
    cache, ok = jax.jit(kv.append)(cache, newest_k, newest_v, jnp.array([False, True]))
    assert ok
    return cache, k, v


@pytest.mark.parametrize(
    ("codec", "atol"),
    [pytest.param("int8", 0.05, marks=pytest.mark.slow), ("int4", 0.5), ("int2w99", 1e-4)],
)
def test_attention_of_it_is_that_of_the_keys(codec, atol):
    """Whatever is taken from all keys of a head, and whichever channel has another scale."""
    rng = np.random.default_rng(2)
    smoothing = smoothing_of(rng)
    cache, k, v = written(codec, smoothing)
    for layer in range(L):
        # A query that asks as much of each channel, of keys as they are.
        q = rng.standard_normal((S, H * GROUP, D)).astype(np.float32)
        q /= np.repeat(np.asarray(smoothing.scale[layer]), GROUP, axis=0)
        exact = None if cache.window is None else cache.window.of_layer(jnp.int32(layer))
        out: Any = paged_attention(
            cache.asked(jnp.int32(layer), jnp.asarray(q)), cache.k, cache.v,
            cache.block_table[:, layer], cache.context_len[:, layer], exact=exact,
        )  # fmt: skip
        for head in range(H * GROUP):
            one = head // GROUP
            wanted, _ = attend(q[1, head], k[layer, :, one], v[layer, :, one])
            np.testing.assert_allclose(out[1, head], wanted, atol=atol)


def test_keys_are_read_as_they_were_and_stay_where_nothing_changed():
    smoothing = smoothing_of(np.random.default_rng(3))
    cache, k, _ = written("int8", smoothing)
    layers = jnp.arange(L)
    rows, _ = cache.kv.read(cache.block_table[1])
    stored = rows.reshape(L, H, M * B, D)
    found = cache.read_keys(layers, stored)
    wanted = np.swapaxes(k, 1, 2)
    step = np.asarray(smoothing.scale)[:, :, None] * 4 / 127
    assert (np.abs(found[:, :, : T + 1] - wanted) < step).all()
    other = found.at[:, :, 3].add(1.0)
    changed = cache.changed_keys(layers, stored, found, other)
    np.testing.assert_array_equal(changed.at[:, :, 3].set(0), stored.at[:, :, 3].set(0))
    np.testing.assert_allclose(
        cache.read_keys(layers, changed)[:, :, 3], other[:, :, 3], rtol=1e-5, atol=1e-4
    )


def test_a_cache_has_a_copy_of_its_own():
    """So that one that is donated takes nothing from the next."""
    smoothing = smoothing_of(np.random.default_rng(4))
    for _ in range(2):
        cache = cache_of("int8", smoothing)
        jax.block_until_ready(jax.jit(lambda x: x, donate_argnums=0)(cache))
        assert not smoothing.shift.is_deleted()
    assert cache_of("int8", None).smoothing is None
