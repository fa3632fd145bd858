"""Invariants 6, 7, 9, 10, 13, 15 and 16: what the pool holds and what attention makes of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as kv
from kvjax.kernels import paged_attention
from tests.cache.pair import (
    Geometry,
    Pair,
    assert_identical,
    filled,
    heads_of,
    host,
    jitted,
    of_host,
    owned_mask,
    poison,
)
from tests.oracle import attend, decode_metric

ROOMY = Geometry(blocks=72)
ATTENTION = Geometry(slots=3, layers=2, heads=2, d=8, blocks=72, max_blocks=6, block=4, prompt=16)
GROUP = 3


@jax.jit
def attention(q, cache, layer, metric):
    return paged_attention(
        q,
        cache.k,
        cache.v,
        cache.block_table[:, layer],
        cache.context_len[:, layer],
        metric=metric,
        return_metric=True,
    )


def compressed(geometry: Geometry = ROOMY, seed: int = 0) -> Pair:
    pair = filled([16, 13, 11], geometry, seed)
    pair.compress([2, 0, 1], [5, 8, 7], protected=2)
    return pair


@pytest.mark.parametrize("seed", range(4))
def test_invariant_06_survivors_are_bit_equal(seed):
    """Nothing but the evicted KVs is lost, nothing appears, nothing changes a bit."""
    pair = filled([16, 14, 9], ROOMY, seed)
    before = {at: [x.bits() for x in kvs] for at, kvs in heads_of(pair.cache).items()}
    slots, evict = jnp.asarray([0, 1, 2], jnp.int32), jnp.asarray([5, 4, 3], jnp.int32)
    schedule = jitted("schedule_evictions")(pair.cache, slots, evict)
    mask = np.asarray(jitted("eviction_mask")(pair.cache, schedule))
    after = heads_of(jitted("move_cache")(pair.cache, schedule))
    for at, kvs in before.items():
        survivors = [x for i, x in enumerate(kvs) if not mask[at][i]]
        assert sorted(survivors) == sorted(x.bits() for x in after[at])


@pytest.mark.parametrize("seed", range(4))
def test_invariant_07_moves(seed):
    """Only holes below the new length are written, once per survivor above it."""
    pair = filled([16, 14, 9], ROOMY, seed)
    before, c = heads_of(pair.cache), host(pair.cache)
    slots, evict = jnp.asarray([0, 1, 2], jnp.int32), jnp.asarray([5, 4, 3], jnp.int32)
    schedule = jitted("schedule_evictions")(pair.cache, slots, evict)
    mask = np.asarray(jitted("eviction_mask")(pair.cache, schedule))
    moved = jitted("move_cache")(pair.cache, schedule)
    after, m = heads_of(moved), host(moved)
    moves = 0
    for at, kvs in before.items():
        length = len(after[at])
        owned = -(-length // 4)
        kept_blocks = c["block_table"][at][:owned]
        assert m["block_table"][at][:owned].tolist() == kept_blocks.tolist()
        changed = [i for i in range(length) if after[at][i].bits() != kvs[i].bits()]
        holes = [i for i in range(length) if mask[at][i]]
        sources = [i for i in range(length, len(kvs)) if not mask[at][i]]
        assert changed == holes
        assert len(sources) == len(holes)
        moves += len(holes)
    # Physically too: no other slot of the pool had its key or value written.
    written = (c["k"].view(np.int32) != m["k"].view(np.int32)).any(axis=-1)
    assert written.sum() == moves > 0


def test_invariant_09_allocator_partition():
    """Free and owned blocks partition the pool after every operation, refused ones too.

    `Pair` asserts it after each step; here each step is forced to occur.
    """
    pair = Pair(Geometry(blocks=20))
    assert pair.write_prompt(0, 16)  # 16 blocks
    assert not pair.write_prompt(1, 9)  # 12 more do not fit
    assert not pair.write_prompt(1, 9, kept_len=np.full((2, 2), 5))
    assert pair.write_prompt(1, 9, kept_len=np.array([[1, 4], [2, 3]]))
    assert int(kv.free_blocks(pair.cache)) == 0
    assert not pair.append([True, True, False])
    assert not pair.allocate(np.full((3, 2, 2), 5))
    pair.compress([0, 1], [8, 99])
    assert int(kv.free_blocks(pair.cache)) == 8
    assert pair.append([True, True, False])
    pair.release([True, False, False])  # preempted
    assert pair.write_prompt(0, 12)
    assert not pair.allocate(np.full((3, 2, 2), 25))  # beyond every head's table
    pair.release([True, True, True])
    assert int(kv.free_blocks(pair.cache)) == 20


def test_invariant_09_the_last_block_can_be_used():
    """Exactly as many free blocks as an operation needs are enough, one fewer are not."""
    pair = Pair(Geometry(blocks=8))
    assert pair.write_prompt(0, 4)
    assert pair.append([True, False, False])
    assert int(kv.free_blocks(pair.cache)) == 0
    pair.release([True, False, False])
    assert pair.write_prompt(1, 8)
    pair.release([False, True, False])
    assert pair.allocate(np.full((3, 2, 2), 4) * (np.arange(3) < 2)[:, None, None])
    pair = Pair(Geometry(blocks=7))
    assert not pair.write_prompt(1, 8)
    assert pair.write_prompt(0, 4)
    assert not pair.append([True, False, False])


def test_invariant_09_table_full():
    """A head at its largest length is refused one more KV, and nobody is advanced by half."""
    pair = Pair(Geometry(blocks=72, max_blocks=4))
    assert pair.write_prompt(0, 16)
    assert pair.write_prompt(1, 3)
    assert not pair.append([True, True, False])
    assert pair.append([False, True, False])


@pytest.mark.parametrize("seed", range(3))
def test_invariant_10_attention_over_survivors(seed):
    """After compression: dense attention over what is left, rotated where it was generated."""
    pair = compressed(ATTENTION, seed)
    rng = np.random.default_rng(seed)
    shape = (ATTENTION.slots, ATTENTION.heads * GROUP, ATTENTION.d)
    q = rng.standard_normal(shape).astype(np.float32)
    for layer in range(ATTENTION.layers):
        out, _ = attention(q, pair.cache, layer, pair.cache.metric)
        assert np.isfinite(np.asarray(out)).all()
        for s in range(ATTENTION.slots):
            for h in range(ATTENTION.heads):
                group = slice(h * GROUP, (h + 1) * GROUP)
                kvs = pair.oracle.heads[s, layer, h]
                want, _ = attend(
                    q[s, group], np.stack([x.k for x in kvs]), np.stack([x.v for x in kvs])
                )
                np.testing.assert_allclose(out[s, group], want, rtol=2e-5, atol=2e-6)


def shuffled(cache: kv.PagedCache, seed: int) -> kv.PagedCache:
    """The same contents with every physical block somewhere else."""
    c = host(cache)
    total = len(c["free"])
    new_home = np.random.default_rng(seed).permutation(total)
    for name in ("k", "v", "metric", "position", "free"):
        moved = np.empty_like(c[name])
        moved[new_home] = c[name]
        c[name] = moved
    c["order"] = new_home[c["order"]]
    c["block_table"] = np.append(new_home, total).astype(np.int32)[c["block_table"]]
    return of_host(c)


def test_invariant_10_physical_placement_is_invisible():
    pair = compressed(ATTENTION, 5)
    other = shuffled(pair.cache, 5)
    clean = jnp.where(other.free.mask[:, None], 0, other.metric)
    kv.check_invariants(dataclasses.replace(other, metric=clean))
    q = jax.random.normal(jax.random.key(0), (3, ATTENTION.heads * GROUP, ATTENTION.d))
    for layer in range(2):
        a, _ = attention(q, pair.cache, layer, pair.cache.metric)
        b, _ = attention(q, other, layer, other.metric)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    args = jnp.arange(3, dtype=jnp.int32), jnp.full(3, 4, jnp.int32)
    left, right = jitted("compress")(pair.cache, *args)[0], jitted("compress")(other, *args)[0]
    for at, kvs in heads_of(left).items():
        assert [x.bits() for x in kvs] == [x.bits() for x in heads_of(right)[at]]


def test_invariant_13_decode_adds_squared_attention():
    """Each KV of a running sequence gains Σ p² of its group; everything else keeps its bits."""
    pair = compressed(ATTENTION, 6)
    q = np.random.default_rng(6).standard_normal((3, ATTENTION.heads * GROUP, 8)).astype("f4")
    ran = np.array([True, False, True])
    lengths = jnp.where(ran[:, None, None], pair.cache.context_len, 0)
    running = dataclasses.replace(pair.cache, context_len=lengths)
    before = np.array(pair.cache.metric)
    for layer in range(ATTENTION.layers):
        out, metric = attention(q, running, layer, pair.cache.metric)
        assert not np.asarray(out)[~ran].any(), "an empty context gives zeros"
        got = heads_of(dataclasses.replace(pair.cache, metric=metric))
        changed = np.array(metric).view(np.int32) != before.view(np.int32)
        expected_changes = 0
        for (s, at_layer, h), kvs in pair.oracle.heads.items():
            if not ran[s] or at_layer != layer:
                continue
            group = slice(h * GROUP, (h + 1) * GROUP)
            keys, values = np.stack([x.k for x in kvs]), np.stack([x.v for x in kvs])
            added = decode_metric(attend(q[s, group], keys, values)[1])
            expected_changes += len(kvs)
            for x, y, gain in zip(got[s, layer, h], kvs, added, strict=True):
                np.testing.assert_allclose(x.metric, y.metric + gain, rtol=2e-5, atol=1e-7)
        assert changed.sum() <= expected_changes, "a slot that did not run was touched"


def replay(poison_seed: int) -> tuple[dict, list[bytes]]:
    """One fixed history over a pool whose unused slots hold seeded garbage."""
    pair = Pair(ATTENTION, seed=9)
    outputs = []

    def spoil():
        pair.cache = poison(pair.cache, poison_seed)

    for slot, length in enumerate([16, 13, 3]):
        spoil()
        assert pair.write_prompt(slot, length)
    for step in range(5):
        spoil()
        assert pair.append([True, step % 2 == 0, True])
        spoil()
        q = jax.random.normal(jax.random.key(step), (3, ATTENTION.heads * GROUP, 8))
        out, metric = attention(q, pair.cache, step % 2, pair.cache.metric)
        assert np.isfinite(np.asarray(out)).all()
        written = owned_mask(pair.cache)
        outputs += [np.asarray(out).tobytes(), np.asarray(metric)[written].tobytes()]
        spoil()
        pair.compress([1, 0, 2], [9, 9, 2], protected=2)
    return {at: [x.bits() for x in kvs] for at, kvs in heads_of(pair.cache).items()}, outputs


def test_invariant_15_garbage():
    """NaN, infinities and huge numbers in unused slots reach no output and no decision."""
    assert replay(1) == replay(2)


def test_invariant_15_a_claimed_block_starts_empty():
    """Whatever a free block held, its new owner finds metric 0 and no position in it."""
    pair = filled([6], ROOMY)  # and garbage in every free block
    cache, ok = jitted("allocate")(pair.cache, jnp.full((3, 2, 2), 12, jnp.int32))
    assert ok
    new = np.asarray(pair.cache.free.mask & ~cache.free.mask)
    assert new.sum() == 3 * 12 - 2 * 4
    assert (np.asarray(cache.metric)[new] == 0).all()
    assert (np.asarray(cache.position)[new] == -1).all()


@pytest.mark.parametrize("extra", [1, 3, 4])
def test_invariant_16_ragged_last_block(extra):
    """a = 1, b - 1 and b: the first block freed costs a KVs."""
    pair = filled([8 + extra] * 3, ROOMY, seed=extra)
    choices = pair.schedule_and_move([0, 1, 2], [1, 3, 99])
    assert [sum(c.blocks.values()) for c in choices] == [1, 3, 8]


def test_invariant_16_shorter_than_a_block():
    """ctx < b: nothing can be evicted, everything can be asked for."""
    pair = filled([3, 1, 4], ROOMY)
    choices = pair.compress([0, 1, 2], [0, 0, 0])
    assert [c.shortfall for c in choices] == [4, 4, 4]


def test_invariant_16_blocks_of_one():
    geometry = Geometry(
        slots=2, layers=1, heads=2, d=2, blocks=30, max_blocks=14, block=1, prompt=8
    )
    pair = filled([8, 5], geometry)
    assert pair.append([True, True])
    pair.compress([0, 1], [5, 2], protected=1)
    assert [pair.oracle.owned_blocks(s) for s in (0, 1)] == [5, 2]
    assert pair.append([True, False])
    pair.schedule_and_move([1, 0], [0, 99])
    assert pair.oracle.owned_blocks(0) == 2


@pytest.mark.parametrize("limit", [1, 24, 50, 100])
def test_invariant_16_larger_than_the_limit(limit):
    """A sequence with more KVs than one step may hold is split, not passed over."""
    pair = filled([16, 16, 16], ROOMY, seed=11)
    args = jnp.asarray([0, 1, 2], jnp.int32), jnp.full(3, 6, jnp.int32)
    whole, report = jitted("compress")(pair.cache, *args, protected=2)
    split, split_report = jitted("compress")(pair.cache, *args, protected=2, max_kvs_per_step=limit)
    assert np.asarray(split_report.freed).tolist() == np.asarray(report.freed).tolist() == [10] * 3
    assert_identical(whole, split, "compression in steps")
