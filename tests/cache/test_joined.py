"""Keys and values in one row each, as TPUs have them, beside those in two arrays."""

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as kv
from kvjax.cache.store import CacheSpec, KVPool
from kvjax.cache.store.codec import Codec, Plain
from kvjax.cache.store.joined import SUBLANES
from kvjax.cache.store.saved import restored, saved, typed
from kvjax.kernels import explain, paged_attention
from kvjax.kernels.encoded import fold_of
from tests.kernels.devices import H200, TPU_V5E

S, L, H, B, M = 2, 2, 2, 4, 8


def empty(
    codec: Codec, head_dim: int, joined: bool, sharing: bool = False, b: int = B
) -> kv.PagedCache:
    sizes: dict[str, Any] = {"num_slots": S, "num_layers": L, "num_kv_heads": H}
    cache = kv.init_cache(
        **sizes,
        max_blocks_per_head=M,
        num_blocks=64,
        block_size=b,
        head_dim=head_dim,
        codec=codec,
        sharing=sharing,
    )
    pool = KVPool.empty(codec, 64, b, head_dim, joined=joined)
    return dataclasses.replace(cache, kv=pool)


def run(codec: Codec, head_dim: int, joined: bool, b: int):
    """A compressed prompt, three tokens, another compression, a slot saved and restored, its
    blocks shared, and one more token."""
    rng = np.random.default_rng(7)

    def rows(*shape):
        return (jnp.asarray(rng.standard_normal((*shape, head_dim)), jnp.float32) for _ in "kv")

    cache = empty(codec, head_dim, joined, b=b)
    tokens = 6 * b
    metric = jnp.asarray(rng.random((L, H, tokens)).astype(np.float32))
    given = (*rows(L, tokens, H), metric, tokens, 7 * b // 2)
    cache, _, ok = jax.jit(kv.write_survivors)(cache, 0, *given)
    yield cache, ok
    for _ in range(3):
        cache, ok = jax.jit(kv.append)(cache, *rows(L, S, H), jnp.arange(S) == 0)
        yield cache, ok
    slots, keep = jnp.arange(1, dtype=jnp.int32), jnp.asarray([9 * b // 4], jnp.int32)
    cache, _ = jax.jit(kv.compress)(cache, slots, keep)
    yield cache, True
    held = typed(cache, saved(cache, 0))
    cache, ok = jax.jit(restored)(empty(codec, head_dim, joined, True, b), jnp.int32(1), held)
    yield cache, ok
    cache, ok = jax.jit(kv.share)(cache, 1, 0)
    yield cache, ok
    cache, ok = jax.jit(kv.append)(cache, *rows(L, S, H), jnp.arange(S) == 0)
    yield cache, ok


@pytest.mark.parametrize(
    ("name", "head_dim", "arrays"),
    [
        pytest.param("float32", 64, 1, marks=pytest.mark.slow),
        pytest.param("int8", 128, 3, marks=pytest.mark.slow),
        pytest.param("float32", 80, 1, marks=pytest.mark.slow),
        pytest.param("bfloat16", 96, 1, marks=pytest.mark.slow),
        pytest.param("int8", 64, 2, marks=pytest.mark.slow),
        pytest.param("int4", 128, 2, marks=pytest.mark.slow),
        ("int4", 64, 2),
        pytest.param("int4", 96, 2, marks=pytest.mark.slow),
        pytest.param("int2", 128, 2, marks=pytest.mark.slow),
        pytest.param("int2", 96, 2, marks=pytest.mark.slow),
        pytest.param("int4+", 64, 4, marks=pytest.mark.slow),
        pytest.param("int2+", 64, 4, marks=pytest.mark.slow),
        pytest.param("affine4", 64, 3, marks=pytest.mark.slow),
        pytest.param("k8v4", 64, 3, marks=pytest.mark.slow),
        pytest.param("e5m2", 96, 2, marks=pytest.mark.slow),
    ],
)
def test_a_cache_of_joined_rows_is_that_of_rows_apart(name: str, head_dim: int, arrays: int):
    """Bit by bit: written, appended to, moved, in files and shared; and attended to."""
    codec = kv.as_codec(name, jnp.float32)
    # As many rows as TPUs want, where each has several KVs.
    b = B
    if arrays > 1:
        b = SUBLANES * fold_of(codec.of_keys.stored_shapes(1, head_dim)["codes"].shape[1])
    q = jnp.asarray(np.random.default_rng(8).standard_normal((S, 2 * H, head_dim)), jnp.float32)
    blocks = jnp.arange(64, dtype=jnp.int32)
    for (ours, ok), (apart, _) in zip(
        run(codec, head_dim, True, b), run(codec, head_dim, False, b), strict=True
    ):
        assert ok
        assert ours.kv.joins
        assert not apart.kv.joins
        assert len(jax.tree.leaves(ours.kv)) == arrays
        assert ours.kv.shape == apart.kv.shape
        assert dataclasses.replace(ours.spec, joined=False) == apart.spec
        for got, want in zip(ours.kv.read(blocks), apart.kv.read(blocks), strict=True):
            np.testing.assert_array_equal(got, want)
        table, lengths = ours.block_table[:, 1], ours.context_len[:, 1]
        # Others than this one read them in other orders.
        call = jax.jit(partial(paged_attention, implementation="xla"))
        got, want = (call(q, *x.kv.operands, table, lengths) for x in (ours, apart))
        np.testing.assert_array_equal(got, want)
    k, v = apart.kv.read(blocks)
    assert np.abs(np.asarray(k) - np.asarray(v)).max() > 1


@pytest.mark.parametrize(
    ("name", "head_dim", "b"),
    [("float32", 64, B), ("float32", 80, B), ("int8", 64, B), ("int2", 64, 16)],
)
def test_what_is_kept_is_not_encoded_again(name: str, head_dim: int, b: int):
    """Rows that `read` gave stay as they are stored; one that is new changes, and its value does
    not."""
    rng = np.random.default_rng(3)
    pool = KVPool.empty(kv.as_codec(name, jnp.float32), 6, b, head_dim, joined=True)
    assert pool.joined
    blocks = jnp.arange(6, dtype=jnp.int32)
    rows = [jnp.asarray(rng.standard_normal((6, b, head_dim)), jnp.float32) for _ in "kv"]
    pool = pool.write((blocks,), *rows)
    k, v = pool.read(blocks)
    changed = pool.rewrite(blocks, (k, v), (k.at[2, 1].set(rows[1][0, 0]), v))
    got = changed.read(blocks)
    np.testing.assert_array_equal(got[1], v)
    different = np.asarray(got[0] != k).any(-1)
    assert np.argwhere(different).tolist() == [[2, 1]]


def test_newest_rows_are_appended_and_attended_to():
    """As where they lie apart, whichever implementation writes there."""
    rng = np.random.default_rng(5)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    pools = [KVPool.empty(Plain("float32"), 16, B, 64, joined=x) for x in (True, False)]
    q, k, v = normal(S, 2 * H, 64), normal(S, H, 64), normal(S, H, 64)
    table = jnp.arange(S * H * 2, dtype=jnp.int32).reshape(S, H, 2)
    lengths = jnp.asarray([[3, 8], [0, 1]], jnp.int32)
    (ours, got), (apart, want) = (x.append_and_attend(q, k, v, table, lengths) for x in pools)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
    blocks = jnp.arange(16, dtype=jnp.int32)
    for one, other in zip(ours.read(blocks), apart.read(blocks), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("name", "head_dim", "joined"),
    [
        ("bfloat16", 64, 128),
        ("bfloat16", 80, 256),
        ("bfloat16", 96, 256),
        ("bfloat16", 128, None),
        ("int8", 64, 128),
        ("e4m3", 96, 256),
        ("int4", 128, 128),
        ("int4", 64, 128),
        ("int4", 80, None),
        ("int2+", 96, 128),
        ("k8v4", 64, None),
        ("int8w16", 64, 128),
    ],
)
def test_short_rows_are_joined_on_tpus(name: str, head_dim: int, joined: int | None):
    """And what pads them to multiples of 128 numbers is planned."""
    codec = kv.as_codec(name, jnp.bfloat16)

    def cache_on(device):
        with jax.sharding.use_abstract_mesh(device):
            return jax.eval_shape(
                lambda: kv.init_cache(
                    num_slots=S, num_layers=L, num_kv_heads=H, max_blocks_per_head=M,
                    num_blocks=B, block_size=64, head_dim=head_dim, codec=codec,
                )
            )  # fmt: skip

    assert not cache_on(H200).kv.joins
    cache = cache_on(TPU_V5E)
    assert (cache.kv.joined is not None) == (joined is not None)
    fold = 1
    if joined is not None:
        first, fold = jax.tree.leaves(cache.kv)[0], fold_of(cache.kv.joined)
        assert first.shape == (B, 64 // fold, joined)
    stored = jax.tree.leaves(dataclasses.replace(cache.kv, fine=None))
    size = sum(x.size * x.dtype.itemsize for x in stored)
    assert size == B * 64 * cache.spec.kv_bytes
    apart = cache_on(H200).spec.kv_bytes
    padding = 0 if joined is None else joined // fold - 2 * cache.kv.joined
    if name == "bfloat16":
        assert cache.spec.kv_bytes == apart + 2 * padding
    else:
        # Two rows of 128 scales for 64 KVs.
        assert cache.kv.paired == 64
        assert cache.spec.kv_bytes == apart + padding + (2 * 2 * 128 - 2 * 2 * 64) // 64
    with jax.sharding.use_abstract_mesh(TPU_V5E):
        model: Any = SimpleNamespace(num_layers=L, num_kv_heads=H, head_dim=head_dim)
        assert CacheSpec.of(model, codec, 64) == cache.spec
    q = jax.ShapeDtypeStruct((S, 2 * H, head_dim), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((S, H, M), jnp.int32)
    lengths = jax.ShapeDtypeStruct((S, H), jnp.int32)
    with jax.sharding.use_abstract_mesh(TPU_V5E):
        said = explain(paged_attention, q, *cache.kv.operands, table, lengths)
    assert said.startswith("tpu: ") == (joined is not None or name == "bfloat16")
