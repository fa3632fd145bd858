"""The cache is changed in place: no operation copies the pool, at any size."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as kv
from kvjax.kernels.paged_attention import reference
from tests.cache.free import free_of
from tests.cache.pair import (
    Geometry,
    adopt_order,
    assert_same,
    assert_well_formed,
    heads_of,
    jitted,
    protecting,
)
from tests.cache.programs import Shapes, pool_bytes, programs, unchecked
from tests.oracle import OracleCache, attend

MIDDLE = Shapes()
HUGE = Shapes(S=2, L=1, H=2, M=8, N=2**21 + 4096, T=64, dtype=jnp.int8)
"""2^31 elements and 2^22 more, for keys and values each."""


@pytest.mark.parametrize("name", programs(MIDDLE))
def test_temporaries_are_small_and_the_pool_is_aliased(name):
    program = programs(MIDDLE)[name]
    analysis = program.compile().memory_analysis()
    pool = pool_bytes(program.args[0])
    assert analysis is not None
    assert analysis.temp_size_in_bytes < pool / 10
    if program.gives_cache:
        assert analysis.alias_size_in_bytes >= pool
        assert analysis.output_size_in_bytes < 1.01 * pool


def test_donated_operations_give_the_same():
    """Changing the cache in place changes nothing else: a short history with and without."""

    def history(donate: bool) -> list[bytes]:
        def run(name):
            plain = jitted(name)
            return jax.jit(lambda *args: plain(*args), donate_argnums=0) if donate else plain

        rng = np.random.default_rng(1)
        tokens = rng.standard_normal((2, 2, 16, 2, 2)).astype(np.float32)
        new = rng.standard_normal((2, 2, 3, 2, 2)).astype(np.float32)
        metric = rng.random((2, 2, 16)).astype(np.float32)
        write, add, shrink = run("write_prompt"), run("append"), run("compress")
        drop = run("release")
        cache = Geometry().init()
        for slot in range(2):
            cache, _ = write(cache, jnp.int32(slot), *tokens, metric, jnp.int32(15 - slot))
        group = jnp.arange(3, dtype=jnp.int32)
        for keep in (9, 6, 5):
            cache, _ = add(cache, *new, jnp.asarray([True, True, False]))
            cache, _ = shrink(cache, group, jnp.full(3, keep, jnp.int32))
        cache, ok = write(cache, jnp.int32(2), *tokens, metric, jnp.int32(16))
        assert ok
        cache = drop(cache, jnp.asarray([True, False, False]))
        kv.check_invariants(cache)
        return [np.asarray(x).tobytes() for x in jax.tree.leaves(cache)]

    assert history(donate=True) == history(donate=False)


@pytest.mark.parametrize(
    "name",
    [
        "append",
        pytest.param("begin_append", marks=pytest.mark.slow),
        pytest.param("release", marks=pytest.mark.slow),
        "write_prompt",
    ],
)
def test_temporaries_do_not_grow_with_the_pool(name):
    """What runs in every step visits no block but those that it takes, or gives back."""
    larger = MIDDLE._replace(N=4 * MIDDLE.N)
    sizes = []
    for shapes in (MIDDLE, larger):
        analysis = programs(shapes)[name].compile().memory_analysis()
        assert analysis is not None
        sizes.append(analysis.temp_size_in_bytes)
    assert sizes[1] == sizes[0]


@pytest.mark.parametrize("name", ["append", "compress", "write_survivors"])
def test_pools_over_two_to_the_31_compile_without_a_copy(name):
    program = programs(HUGE)[name]
    cache = program.args[0]
    assert cache.k.size > 2**31
    analysis = program.compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < pool_bytes(cache) / 10


FAR = 64
"""Blocks at the end of the huge pool that the test below may use."""


def far_end(cache: kv.PagedCache) -> kv.PagedCache:
    """The last blocks of a cache as a cache of their own."""
    total = cache.k.shape[0]
    first = total - FAR
    return kv.PagedCache(
        kv=jax.tree.map(lambda x: x[first:], cache.kv),
        metric=cache.metric[first:],
        position=cache.position[first:],
        block_table=cache.block_table - first,
        context_len=cache.context_len,
        seq_len=cache.seq_len,
        free=free_of(cache.free.mask[first:]),
    )


@pytest.mark.slow
def test_the_far_end_of_a_pool_over_two_to_the_31():
    """Writes, appends, moves, releases and reads beyond element 2^31, against the oracle.

    Takes about 5 GB.
    """
    with unchecked():
        use_the_far_end()


def use_the_far_end() -> None:
    s = HUGE
    geometry = Geometry(s.S, s.L, s.H, s.d, FAR, s.M, s.b, s.T)
    cache = kv.init_cache(
        num_slots=s.S,
        num_layers=s.L,
        num_kv_heads=s.H,
        head_dim=s.d,
        num_blocks=s.N,
        max_blocks_per_head=s.M,
        block_size=s.b,
        dtype=s.dtype,
    )
    # Hide everything but the end from the allocator.
    cache = dataclasses.replace(cache, free=free_of(np.arange(s.N) >= s.N - FAR))
    oracle: OracleCache = geometry.oracle()
    rng = np.random.default_rng(0)
    donated = {
        name: jax.jit(getattr(kv, name), donate_argnums=0)
        for name in ("write_prompt", "append", "compress", "release")
    }

    def numbers(*shape: int) -> np.ndarray:
        return rng.integers(-100, 100, shape).astype(np.int8)

    def agree() -> None:
        view = far_end(cache)
        kv.check_invariants(view)
        assert_well_formed(view)
        assert_same(view, oracle)

    for slot, length in enumerate((64, 50)):
        k, v = numbers(s.L, s.T, s.H, s.d), numbers(s.L, s.T, s.H, s.d)
        metric = rng.random((s.L, s.H, s.T)).astype(np.float32)
        cache, ok = donated["write_prompt"](cache, slot, k, v, metric, length)
        assert ok
        assert oracle.write_prompt(slot, k, v, metric, length)
    agree()
    for _ in range(3):
        k, v = numbers(s.L, s.S, s.H, s.d), numbers(s.L, s.S, s.H, s.d)
        cache, ok = donated["append"](cache, k, v, jnp.ones(s.S, bool))
        assert ok
        assert oracle.append(k, v, [True] * s.S)
    agree()
    before = heads_of(far_end(cache))
    for slot, keep in enumerate((5, 4)):
        oracle.compress(slot, keep, 3)
    cache, _ = donated["compress"](
        cache, jnp.arange(2, dtype=jnp.int32), jnp.asarray([5, 4], jnp.int32), protecting(3)
    )
    adopt_order(far_end(cache), oracle, before)
    agree()

    # Values reach ±100: attention to any other KV would be far off.
    q = 0.01 * rng.standard_normal((s.S, s.H, s.d)).astype(np.float32)
    # The public function takes no int8 pool; the gather and its indices are the same.
    out, _ = jax.jit(functools.partial(reference.paged_attention, scale=s.d**-0.5))(
        q, cache.k, cache.v, cache.block_table[:, 0], cache.context_len[:, 0]
    )
    for slot, h in np.ndindex(s.S, s.H):
        kvs = oracle.heads[slot, 0, h]
        keys = np.stack([x.k for x in kvs]).astype(np.float32)
        values = np.stack([x.v for x in kvs]).astype(np.float32)
        want, _ = attend(q[slot, h : h + 1], keys, values)
        np.testing.assert_allclose(out[slot, h], want[0], atol=1e-2)

    cache = donated["release"](cache, jnp.asarray([True, False]))
    oracle.release([True, False])
    agree()
    # An index that wrapped around would have landed in the blocks from here on.
    assert not np.asarray(cache.k[: 2 * FAR]).any()
    assert not np.asarray(cache.k[4096 - FAR : 4096 + FAR]).any()
    assert int(jnp.sum(cache.position[: s.N - FAR] != -1)) == 0
