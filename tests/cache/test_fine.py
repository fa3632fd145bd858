"""Free blocks that hold finer codes of others: which have them, and what is read then."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvjax import cache as kv
from kvjax.cache.store import (
    CacheSpec,
    FreeBlocks,
    Integers,
    KVPool,
    Refined,
    drop_blocks,
    refined_blocks,
    restored,
    saved,
    typed,
)
from kvjax.cache.store.fine import FineBlocks
from kvjax.cache.store.paged import claim
from kvjax.errors import UserError
from kvjax.kernels import paged_attention
from tests.cache.test_merger import METHOD
from tests.oracle import attend

S, L, H, D, B, M, T, N = 3, 2, 2, 8, 4, 8, 12, 60
GROUP = 2


# What is read


def empty(dtype: str = "int2+", blocks: int = N, sharing: bool = True) -> kv.PagedCache:
    return kv.init_cache(
        num_slots=S, num_layers=L, num_kv_heads=H, head_dim=D, num_blocks=blocks,
        max_blocks_per_head=M, block_size=B, codec=kv.as_codec(dtype, "float32"), sharing=sharing,
    )  # fmt: skip


@functools.cache
def jitted(name: str):
    return jax.jit(getattr(kv, name))


def rows_of(rng, *shape):
    return [rng.standard_normal((*shape, D)).astype(np.float32) for _ in range(2)]


class Driven:
    """A cache, and what was handed to it: (slot, layer, head, position) -> key and value."""

    def __init__(self, dtype: str = "int2+"):
        self.cache = empty(dtype)
        self.given: dict[tuple, np.ndarray] = {}

    def put(self, slot: int, start: int, rows: list[np.ndarray]) -> None:
        for layer, token, head in np.ndindex(*rows[0].shape[:3]):
            at = slot, layer, head, start + token
            self.given[at] = np.stack([x[layer, token, head] for x in rows])

    def prompt(self, rng, survivors: bool) -> None:
        slot, length = int(rng.integers(S)), int(rng.integers(1, T + 1))
        rows, start = rows_of(rng, L, T, H), int(self.cache.seq_len[slot])
        metric = rng.random((L, H, T)).astype(np.float32)
        if survivors:
            self.cache, _, ok = jitted("write_survivors")(
                self.cache, slot, *rows, metric, length, int(rng.integers(2, 9))
            )
        else:
            self.cache, ok = jitted("write_prompt")(self.cache, slot, *rows, metric, length)
        if ok:
            self.put(slot, start, rows)

    def append(self, rng) -> None:
        rows, active = rows_of(rng, L, S, H), rng.random(S) < 0.7
        starts = np.asarray(self.cache.seq_len)
        self.cache, ok = jitted("append")(self.cache, *rows, jnp.asarray(active))
        for slot in np.flatnonzero(active & bool(ok)):
            self.put(int(slot), int(starts[slot]), [x[:, slot][:, None] for x in rows])

    def compress(self, rng) -> None:
        slots = jnp.asarray(rng.permutation(S)[:2], jnp.int32)
        keep = jnp.asarray(rng.integers(2, 14, 2), jnp.int32)
        self.cache, _ = jitted("compress")(self.cache, slots, keep)

    def release(self, rng) -> None:
        self.cache = jitted("release")(self.cache, jnp.asarray(rng.random(S) < 0.4))

    def share(self, rng) -> None:
        source, target = (int(x) for x in rng.permutation(S)[:2])
        self.cache, ok = jitted("share")(self.cache, source, target)
        if ok:
            of = {at[1:]: rows for at, rows in self.given.items() if at[0] == source}
            self.given |= {(target, *at): rows for at, rows in of.items()}

    def check(self) -> None:
        """Every KV is what its codes say, with finer codes or without."""
        kv.check_invariants(self.cache)
        cache, codec = self.cache, self.cache.kv.codec
        found = held(cache)
        if not found:
            return
        given = np.stack([self.given[at] for at in found])
        coarse = codec.decode(codec.encode(jnp.asarray(given)))
        finer = coarse + codec.decode(codec.encode(jnp.asarray(given) - coarse))
        rows = np.stack([rows for rows, _ in found.values()])
        tagged = np.asarray([tagged for _, tagged in found.values()])
        close = np.isclose(rows, np.asarray(coarse), atol=1e-5)
        is_coarse = np.asarray(close.all((1, 2)))
        # A number between two levels may be coded as either.
        is_finer = off(rows, given) < off(np.asarray(finer), given) + 0.05
        assert (is_coarse | is_finer).all()
        assert is_coarse[np.logical_not(tagged)].all()


def off(rows: np.ndarray, given: np.ndarray) -> np.ndarray:
    """By how much keys and values are off."""
    return np.sqrt(np.mean((rows - given) ** 2, axis=(1, 2)))


def tags(cache: kv.PagedCache) -> FineBlocks:
    assert cache.kv.fine is not None
    return cache.kv.fine


def held(cache: kv.PagedCache) -> dict[tuple, tuple[np.ndarray, bool]]:
    """What is read of every KV, by slot, layer, head and position, and whether its block has finer
    codes."""
    table, lengths = np.asarray(cache.block_table), np.asarray(cache.context_len)
    position, refined = np.asarray(cache.position), np.asarray(tags(cache).tag) < cache.num_blocks
    k, v = (np.asarray(x) for x in cache.kv.read(cache.block_table))
    found = {}
    for at in np.ndindex(*lengths.shape):
        for i in range(lengths[at]):
            block, offset = table[at][i // B], i % B
            rows = np.stack([x[at][i // B, offset] for x in (k, v)])
            found[(*at, int(position[block, offset]))] = rows, bool(refined[block])
    return found


@pytest.mark.slow
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**31), st.lists(st.sampled_from("psacrh"), min_size=3, max_size=9))
def test_every_kv_is_the_sum_of_its_codes(seed, kinds):
    rng, driven = np.random.default_rng(seed), Driven()
    for kind in ["p", *kinds]:
        if kind in "ps":
            driven.prompt(rng, kind == "s")
        else:
            {"a": driven.append, "c": driven.compress, "r": driven.release, "h": driven.share}[
                kind
            ](rng)
        driven.check()


def prompted(dtype: str = "int2+", length: int = T, seed: int = 0, blocks: int = N):
    """A cache with a prompt in slot 0, and the metrics of its KVs."""
    rng = np.random.default_rng(seed)
    cache, rows = empty(dtype, blocks), rows_of(rng, L, T, H)
    metric = rng.random((L, H, T)).astype(np.float32)
    cache, ok = jitted("write_prompt")(cache, 0, *rows, metric, length)
    assert ok
    return cache, metric, rows


def taken(cache: kv.PagedCache, count: int) -> kv.PagedCache:
    """A cache of which somebody takes so many free blocks."""
    return claim(cache, cache.free.peek(jnp.arange(count, dtype=jnp.int32)))


def test_blocks_are_demoted_as_others_take_the_room_the_cheapest_first():
    cache, metric, _ = prompted()
    blocks = L * H * T // B
    assert int(refined_blocks(cache).sum()) == blocks
    costs = metric.reshape(L, H, T // B, B).max(-1)
    for left in (blocks, blocks - 1, 5, 1, 0):
        now = taken(cache, N - blocks - left)
        refined = np.asarray(tags(now).of(now.block_table[0]))[..., : T // B] < N
        assert sorted(costs[refined]) == sorted(costs.ravel())[blocks - left :]
        assert np.asarray(refined_blocks(now))[0].tolist() == refined.sum(-1).tolist()
    # What is left is what would have been stored of the fewer bits alone, bit by bit.
    plain, _, _ = prompted("int2")
    for one, other in zip(now.kv.read(now.block_table), plain.kv.read(plain.block_table)):
        assert (one == other).all()


def test_a_block_that_lost_its_finer_codes_does_not_get_those_of_another():
    """Blocks come back after a demotion: who gets them writes to them, or has none."""
    cache, _, _ = prompted()
    before = held(taken(cache, N - L * H * T // B))
    cache = taken(cache, N - L * H * T // B)
    cache = drop_blocks(cache, jnp.asarray([b for b in range(N) if b not in owned_by(cache, 0)]))
    after, rows = held(cache), rows_of(np.random.default_rng(1), L, T, H)
    assert all((after[at][0] == before[at][0]).all() for at in before)
    cache, ok = jitted("write_prompt")(cache, 1, *rows, np.ones((L, H, T), np.float32), T)
    after = held(cache)
    assert ok
    assert all((after[at][0] == before[at][0]).all() for at in before)
    assert all(tagged == (at[0] == 1) for at, (_, tagged) in after.items())


def owned_by(cache: kv.PagedCache, slot: int) -> set[int]:
    return set(np.asarray(cache.block_table[slot]).ravel().tolist())


def test_a_full_pool_is_one_of_fewer_bits():
    blocks = L * H * T // B
    (cache, _, _), (plain, _, _) = prompted(blocks=blocks), prompted("int2", blocks=blocks)
    assert int(refined_blocks(cache).sum()) == 0
    assert (cache.kv.read(cache.block_table)[0] == plain.kv.read(plain.block_table)[0]).all()


def test_a_prompt_without_room_changes_nothing():
    """One that outgrows the table: no block that is there gets finer codes of what is not."""
    cache, metric, rows = prompted()
    for _ in range(2):
        cache, ok = jitted("write_prompt")(cache, 0, *rows, metric, T - 2)
    cache = taken(cache, int(cache.free.count[0]))
    cache = drop_blocks(cache, jnp.asarray([b for b in range(N) if b not in owned_by(cache, 0)]))
    before = held(cache)
    cache, ok = jitted("write_prompt")(cache, 0, *rows, metric, T)
    after = held(cache)
    assert not ok
    assert all((after[at][0] == row).all() and not tag for at, (row, tag) in before.items())


def test_more_is_worth_more_across_sequences():
    """A second prompt whose metrics are larger takes the finer codes of the first."""
    blocks = L * H * T // B
    cache, _, _ = prompted(blocks=3 * blocks)
    rows = rows_of(np.random.default_rng(1), L, T, H)
    cache, ok = jitted("write_prompt")(cache, 1, *rows, np.full((L, H, T), 2, np.float32), T)
    assert ok
    assert np.asarray(refined_blocks(cache)).sum((1, 2)).tolist() == [0, blocks, 0]
    cheap, ok = jitted("write_prompt")(
        prompted(blocks=3 * blocks)[0], 1, *rows, np.full((L, H, T), -1, np.float32), T
    )
    assert ok
    assert np.asarray(refined_blocks(cheap)).sum((1, 2)).tolist() == [blocks, 0, 0]


def test_survivors_keep_their_finer_codes_when_they_move():
    cache, _, rows = prompted()
    cache, _ = jitted("compress")(cache, jnp.asarray([0], jnp.int32), jnp.asarray([5], jnp.int32))
    found = held(cache)
    assert int(np.asarray(refined_blocks(cache)).sum()) == 5
    given = np.stack([[x[layer, p, h] for x in rows] for _, layer, h, p in found])
    coarse = cache.kv.codec.decode(cache.kv.codec.encode(jnp.asarray(given)))
    assert off(np.stack([r for r, _ in found.values()]), given).mean() < 0.1
    assert off(np.asarray(coarse), given).mean() > 0.2


def test_copies_of_shared_blocks_have_finer_codes_too():
    cache, _, _ = prompted(length=T - 1)
    before = {at[1:]: rows for at, (rows, _) in held(cache).items()}
    cache, ok = jitted("share")(cache, 0, 1)
    active = jnp.asarray([False, True, False])
    rows = rows_of(np.random.default_rng(1), L, S, H)
    cache, grew = jitted("append")(cache, *rows, active)
    kv.check_invariants(cache)
    assert ok
    assert grew
    assert (np.asarray(refined_blocks(cache))[:2] == T // B).all()
    after = held(cache)
    assert all((after[0, *at][0] == row).all() for at, row in before.items())
    assert all((after[1, *at][0] == row).all() for at, row in before.items())


def test_new_blocks_of_running_sequences_have_finer_codes():
    cache, _, _ = prompted()
    rows = rows_of(np.random.default_rng(1), L, S, H)
    cache, ok = jitted("append")(cache, *rows, jnp.asarray([True, False, True]))
    kv.check_invariants(cache)
    assert ok
    assert (np.asarray(refined_blocks(cache)) == [[[T // B + 1]], [[0]], [[1]]]).all()
    for slot, position in ((0, T), (2, 0)):
        for layer, head in np.ndindex(L, H):
            found, _ = held(cache)[slot, layer, head, position]
            assert np.abs(found - [x[layer, slot, head] for x in rows]).max() < 0.3


def test_the_newest_take_the_room_of_the_cheapest():
    """Eight free blocks hold finer codes: four are taken, and four hold those of these."""
    cache, metric, _ = prompted()
    cache = taken(cache, N - L * H * T // B - 2 * L * H)
    rows = rows_of(np.random.default_rng(1), L, S, H)
    cache, ok = jitted("append")(cache, *rows, jnp.asarray([True, False, False]))
    refined = np.asarray(tags(cache).of(cache.block_table[0])) < N
    assert ok
    assert refined[..., T // B].all()
    assert not refined[..., : T // B].any()
    cache, _, _ = prompted()
    cache = taken(cache, N - L * H * T // B - 3 * L * H)
    cache, ok = jitted("append")(cache, *rows, jnp.asarray([True, False, False]))
    refined = np.asarray(tags(cache).of(cache.block_table[0]))[..., : T // B] < N
    costs = metric.reshape(L, H, T // B, B).max(-1)
    assert sorted(costs[refined]) == sorted(costs.ravel())[-L * H :]


def test_what_is_coded_twice_is_coded_of_float32():
    """Codes of rows of bfloat16 hold what bfloat16 rounds away of their sum."""
    pool = KVPool.empty(Refined(codes=Integers("bfloat16", bits=4)), 2, B, D)
    pool = dataclasses.replace(pool, fine=one_pair())
    k, v = (jnp.asarray(x, jnp.bfloat16) for x in rows_of(np.random.default_rng(3), 1, B))
    at = jnp.zeros(1, jnp.int32)
    pool = pool.write((at,), k, v)
    exact = Integers(bits=4)
    coarse = exact.decode(exact.encode(k))
    want = coarse + exact.decode(exact.encode(k.astype(jnp.float32) - coarse))
    rows = pool.operands[0].factors(at).rows
    np.testing.assert_allclose(exact.turned(rows), want, atol=1e-6)
    assert pool.read(at)[0].dtype == jnp.bfloat16


def one_pair() -> FineBlocks:
    """Of two blocks the first is owned, and its finer codes are in the second."""
    free = FreeBlocks.every(2).without(jnp.int32(1))
    return FineBlocks.none(2).grown(jnp.zeros(1, jnp.int32), free)


def test_what_is_saved_has_the_fewer_bits():
    cache, _, _ = prompted()
    file = typed(cache, saved(cache, 0))
    cache, ok = jax.jit(restored)(empty(), jnp.int32(1), file)
    plain, _, _ = prompted("int2")
    kv.check_invariants(cache)
    read = cache.kv.read(cache.block_table[1])[0]
    assert ok
    assert (read == plain.kv.read(plain.block_table[0])[0]).all()


def test_a_merger_writes_both_codes_and_leaves_what_it_does_not_change():
    cache, _, _ = prompted()
    before = held(cache)
    slots, keep = jnp.asarray([0], jnp.int32), jnp.asarray([6], jnp.int32)
    cache, _ = jax.jit(kv.compress)(cache, slots, keep, METHOD)
    kv.check_invariants(cache)
    after = held(cache)
    changed = [at for at in after if not (after[at][0] == before[at][0]).all()]
    assert 0 < len(changed) < len(after)


# What attention reads


@pytest.mark.parametrize("left", [0, 7, 100])
@pytest.mark.parametrize(
    ("dtype", "implementation"), [("int4+", "xla"), ("int4+", "numba"), ("int4+w2", "xla")]
)
def test_attention_reads_the_sum(dtype, implementation, left):
    cache, _, _ = prompted(dtype)
    cache = taken(cache, max(0, int(cache.free.count[0]) - left))
    rng = np.random.default_rng(2)
    q = jnp.asarray(rng.standard_normal((S, H * GROUP, D)), jnp.float32)
    exact = None if cache.window is None else cache.window.of_layer(jnp.int32(1))
    call = functools.partial(paged_attention, implementation=implementation, return_metric=True)
    of_layer = cache.block_table[:, 1], cache.context_len[:, 1]
    out, metric = jax.jit(call)(q, cache.k, cache.v, *of_layer, metric=cache.metric, exact=exact)
    k, v = (x.reshape(H, -1, D) for x in cache.kv.read(cache.block_table[0, 1]))
    if cache.window is not None:
        k, v = cache.window.over(jnp.int32(0), jnp.int32(1), k, v)
    blocks = np.asarray(cache.block_table[0, 1, :, : T // B])
    for head in range(H):
        group = slice(head * GROUP, head * GROUP + GROUP)
        rows = (np.asarray(x[head, :T]) for x in (k, v))
        want, p = attend(np.asarray(q[0, group]), *rows, scale=D**-0.5)
        np.testing.assert_allclose(out[0, group], want, atol=1e-5)
        received = np.asarray((metric - cache.metric)[blocks[head]])
        np.testing.assert_allclose(received.ravel(), (p**2).sum(0), atol=1e-5)
    assert not np.asarray(out[1:]).any()


# What it is called, and what it takes


def test_its_name_and_its_bytes():
    cache, int4 = empty("int4+", sharing=False), kv.as_codec("int4", "float32")
    assert cache.spec.codec == kv.as_codec("int4+", "float32") == Refined(codes=int4)
    assert empty("int4+w5").spec.codec.name == "int4+w5"
    spec = CacheSpec(L, H, D, int4, B)
    arrays = (cache.kv, cache.metric, cache.position, cache.free)
    assert cache.spec.pool_bytes(N) == sum(x.nbytes for x in jax.tree.leaves(arrays))
    assert cache.spec.kv_bytes == spec.kv_bytes
    assert cache.spec.pool_bytes(N) == spec.pool_bytes(N) + 4 * N + 4
    assert cache.spec.blocks_in(cache.spec.pool_bytes(N)) == N


def test_rows_as_they_are_have_no_finer_codes():
    with pytest.raises(UserError, match=r"has no codes that could be finer; give .*, or int4\+"):
        Refined(codes=kv.as_codec("bfloat16", "float32"))


@pytest.mark.parametrize("name", ["float32+", "int8++", "+", "int4 +", "int4w2+"])
def test_names_that_are_none(name):
    with pytest.raises(UserError, match="give one of"):
        kv.as_codec(name, "float32")


def test_invariants_name_what_is_wrong():
    cache, _, _ = prompted()
    fine = tags(cache)

    def broken(**changes):
        pool = dataclasses.replace(cache.kv, fine=dataclasses.replace(fine, **changes))
        return dataclasses.replace(cache, kv=pool)

    a, b = (int(x) for x in cache.block_table[0, 0, 0, :2])
    both_owned = fine.tag.at[fine.tag[jnp.asarray([a, b])]].set(N).at[a].set(b).at[b].set(a)
    for changes, said in (
        ({"tag": fine.tag.at[a].set(fine.tag[b])}, "no pair"),
        ({"tag": both_owned}, "owned and a free"),
        ({"count": fine.count - 1}, "none are looked for"),
        ({"count": fine.count * 0 + N}, "more blocks hold"),
    ):
        with pytest.raises(AssertionError, match=said):
            kv.check_invariants(broken(**changes))
