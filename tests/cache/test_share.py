"""Blocks with several owners: random operations against a model without counts, and each alone."""

import sys
from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as kv
from kvjax.cache.store import unshare_slots
from tests.cache import programs
from tests.cache.pair import Geometry, clean, heads_of, host, jitted, levels, of_host, poison
from tests.cache.test_merger import METHOD as MERGING
from tests.oracle import KV, audit
from tests.oracle.sharing import SharingOracle, recounted

S, L, H, D, N, M, B, T = 5, 2, 2, 2, 34, 5, 4, 9

share = jax.jit(kv.share)
own = jax.jit(unshare_slots)


@cache
def shrink():
    return jitted("compress")


class Shared:
    """A cache and its oracle, compared after every operation."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.cache = kv.init_cache(
            num_slots=S, num_layers=L, num_kv_heads=H, head_dim=D, num_blocks=N,
            max_blocks_per_head=M, block_size=B, sharing=True,
        )  # fmt: skip
        self.oracle = SharingOracle(S, L, H, N, M, B)
        self.done: Counter = Counter()

    def slots(self, empty: bool) -> list[int]:
        return [s for s, n in enumerate(self.oracle.seq_len) if (n == 0) == empty]

    def check(self, name: str, ok: bool = True) -> bool:
        self.done[name if ok else f"{name} refused"] += 1
        extra, free = recounted(np.asarray(self.cache.block_table), self.cache.num_blocks)
        assert np.asarray(self.cache.shared).tolist() == extra.tolist(), name
        stack = np.asarray(self.cache.free.stack)[: int(self.cache.free.count[0])]
        assert sorted(stack.tolist()) == np.flatnonzero(free).tolist(), name
        assert int(free.sum()) == self.oracle.free(), name
        assert np.asarray(self.cache.seq_len).tolist() == self.oracle.seq_len
        for (slot, *head), kvs in heads_of(self.cache).items():
            want = [x for block in self.oracle.heads[slot, head[0], head[1]] for x in block]
            assert [x.bits() for x in kvs] == [x.bits() for x in want], (name, slot, head)
        self.cache = poison(self.cache, int(self.rng.integers(1 << 30)))
        return ok

    def _rows(self, *shape: int) -> tuple[np.ndarray, np.ndarray]:
        k, v = (self.rng.standard_normal(shape).astype(np.float32) for _ in range(2))
        return k, v

    def write(self, slot: int, length: int) -> bool:
        k, v = self._rows(L, T, H, D)
        metric = levels(self.rng, (L, H, T))
        start = self.oracle.seq_len[slot]
        new = {
            (slot, l, h): [
                KV(start + t, k[l, t, h], v[l, t, h], float(metric[l, h, t])) for t in range(length)
            ]
            for l in range(L)
            for h in range(H)
        }
        self.cache, ok = jitted("write_prompt")(
            self.cache, jnp.int32(slot), k, v, metric, jnp.int32(length)
        )
        assert bool(ok) == self.oracle.add(new)
        self.oracle.seq_len[slot] += length if ok else 0
        return self.check("write", bool(ok))

    def append(self, slots: list[int]) -> bool:
        k, v = self._rows(L, S, H, D)
        new = {
            (s, l, h): [KV(self.oracle.seq_len[s], k[l, s, h], v[l, s, h], 0.0)]
            for s in slots
            for l in range(L)
            for h in range(H)
        }
        mask = np.isin(np.arange(S), slots)
        self.cache, ok = jitted("append")(self.cache, k, v, jnp.asarray(mask))
        assert bool(ok) == self.oracle.add(new)
        for slot in slots:
            self.oracle.seq_len[slot] += bool(ok)
        return self.check("append", bool(ok))

    def share(self, source: int, target: int) -> bool:
        self.cache, ok = share(self.cache, jnp.int32(source), jnp.int32(target))
        assert bool(ok) == self.oracle.share(source, target)
        return self.check("share", bool(ok))

    def own(self, slots: list[int]) -> bool:
        self.cache, ok = own(self.cache, jnp.isin(jnp.arange(S), jnp.asarray(slots, jnp.int32)))
        assert bool(ok) == self.oracle.own(slots)
        return self.check("own", bool(ok))

    def release(self, slots: list[int]) -> None:
        mask = np.isin(np.arange(S), slots)
        self.cache = jitted("release")(self.cache, jnp.asarray(mask))
        self.oracle.release(slots)
        self.check("release")

    def compress(self, slots: list[int], keep: list[int], protected: int = 0) -> None:
        slots, keep = slots + [S] * (S - len(slots)), keep + [0] * (S - len(keep))
        real = [(s, n) for s, n in zip(slots, keep, strict=True) if s < S]
        self.cache, report = shrink()(
            self.cache, jnp.asarray(slots, jnp.int32), jnp.asarray(keep, jnp.int32),
            protected=protected,
        )  # fmt: skip
        freed, short = self.oracle.compress(
            [s for s, _ in real], [n for _, n in real], protected, lambda: heads_of(self.cache)
        )
        assert np.asarray(report.freed)[: len(real)].tolist() == freed
        assert np.asarray(report.shortfall)[: len(real)].tolist() == short
        self.done["blocks evicted"] += sum(freed)
        self.check("compress")

    def step(self) -> None:
        """One random operation."""
        rng, held = self.rng, self.slots(empty=False)
        name = rng.choice(
            ["write", "append", "share", "fork", "compress", "release", "drop", "own"],
            p=[0.14, 0.26, 0.14, 0.1, 0.18, 0.06, 0.06, 0.06],
        )
        if name == "write" or not held:
            # Into an empty slot, or behind what one holds: the next part of a prompt.
            slots = self.slots(empty=True) if rng.random() < 0.7 else []
            self.write(int(rng.choice(slots or range(S))), int(rng.integers(1, T + 1)))
        elif name == "append":
            self.append([s for s in held if rng.random() < 0.7])
        elif name in ("share", "fork"):
            source = int(rng.choice(held))
            for target in rng.permutation(S)[: 2 if name == "fork" else 1].tolist():
                self.share(source, target)
        elif name == "compress":
            slots = rng.permutation(S)[: int(rng.integers(1, S + 1))].tolist()
            owned = [sum(len(self.oracle.heads[s, l, h]) for l in range(L) for h in range(H))
                     for s in slots]  # fmt: skip
            keep = [max(0, n - int(rng.integers(0, n + 2))) for n in owned]
            self.compress(slots, keep, int(rng.choice([0, 0, 2])))
        elif name == "own":
            self.own([s for s in held if rng.random() < 0.4])
        else:
            some = [s for s in held if rng.random() < (0.4 if name == "release" else 0.9)]
            self.release(some)


def drive(operations: int, seed: int) -> Counter:
    shared = Shared(seed)
    for _ in range(operations):
        shared.step()
    kv.check_invariants(clean(shared.cache))
    shared.release(list(range(S)))
    assert int(kv.free_blocks(shared.cache)) == N
    assert not np.asarray(shared.cache.shared).any()
    return shared.done


def test_random_operations():
    done = drive(500, seed=1)
    for name in ("write", "append", "share", "own"):
        assert done[name], f"{name} never worked"
        assert done[f"{name} refused"], f"{name} was never refused"
    assert done["blocks evicted"] > 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_random_operations(seed):
    drive(2500, seed=seed + 10)


def test_sharing_takes_no_block_and_appending_takes_the_ragged_ones():
    shared = Shared(3)
    shared.write(0, 6)
    held = N - L * H * 2
    assert shared.share(0, 1)
    assert int(kv.free_blocks(shared.cache)) == held
    shared.append([1])
    assert int(kv.free_blocks(shared.cache)) == held - L * H
    # The ragged blocks are each slot's own now, and stay where they are.
    table = np.asarray(shared.cache.block_table)
    shared.append([0, 1])
    assert (np.asarray(shared.cache.block_table) == table).all()
    assert int(kv.free_blocks(shared.cache)) == held - L * H
    shared.release([0])
    assert int(kv.free_blocks(shared.cache)) == held


def test_copies_leave_room_for_new_blocks():
    shared = Shared(4)
    shared.write(0, 6)
    shared.share(0, 1)
    shared.write(2, 8)
    shared.write(3, 9)
    # A copy and a new block for each of the heads, and six are free.
    assert int(kv.free_blocks(shared.cache)) == 6
    assert not shared.append([1, 2])
    assert shared.append([1])


def test_many_copies_are_made_in_rounds(monkeypatch):
    monkeypatch.setattr("kvjax.cache.store.sharing.COPIED_AT_ONCE", 4)
    monkeypatch.setattr(sys.modules[__name__], "own", jax.jit(lambda *args: unshare_slots(*args)))
    shared = Shared(9)
    shared.write(0, 9)
    shared.share(0, 1)
    assert shared.own([1])


def test_where_both_owners_append_at_once_their_old_block_ends():
    shared = Shared(4)
    shared.write(0, 5)
    shared.share(0, 1)
    shared.append([0, 1])
    assert int(kv.free_blocks(shared.cache)) == N - L * H * 3


def test_evicting_copies_the_blocks_that_survivors_move_into():
    shared = Shared(5)
    shared.write(0, 9)
    shared.share(0, 1)
    shared.compress([1], [L * H * 2])
    owned = np.asarray(shared.cache.block_table)
    same = (owned[0] == owned[1]) & (owned[0] < N)
    assert same.any(), "blocks without holes are still shared"
    assert not same.all()


def test_who_has_no_room_for_copies_keeps_everything_and_others_do_not():
    shared = Shared(6)
    for slot, length in ((0, 9), (2, 8), (3, 9)):
        shared.write(slot, length)
    shared.share(0, 1)
    assert int(kv.free_blocks(shared.cache)) == 2
    before = np.asarray(shared.cache.context_len[1])
    shared.compress([1, 2], [L * H, L * H])
    assert (np.asarray(shared.cache.context_len[1]) == before).all()
    assert int(kv.free_blocks(shared.cache)) == 2 + L * H


def test_who_has_no_room_for_copies_takes_none_from_those_behind():
    shared = Shared(8)
    for slot, length in ((0, 9), (2, 5)):
        shared.write(slot, length)
    shared.share(0, 1)
    shared.share(2, 3)
    shared.append([3])
    shared.write(4, 7)
    assert int(kv.free_blocks(shared.cache)) == 2
    before = np.asarray(shared.cache.context_len).sum(axis=(1, 2))
    # A copy in each head of the first, in one head of the second.
    shared.compress([1, 3], [L * H, 2 * L * H - 1])
    after = np.asarray(shared.cache.context_len).sum(axis=(1, 2))
    assert (before - after).tolist() == [0, 0, 0, 2, 0]


@pytest.mark.parametrize("dtype", ["float32", "int4+", "int4w3"])
def test_what_a_merger_changes_is_nobody_elses(dtype):
    """Survivors of blocks that go are changed where they move to: two that evict what they share
    have what each would have alone, and a third is left with all of it."""
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((L, 19, H, 8)).astype(np.float32) for _ in range(2))
    metric = rng.random((L, H, 19)).astype(np.float32)
    found = []
    for sharing in (True, False):
        cache = kv.init_cache(
            num_slots=3, num_layers=L, num_kv_heads=H, head_dim=8, num_blocks=120,
            max_blocks_per_head=M, block_size=B, sharing=sharing,
            codec=kv.as_codec(dtype, "float32"),
        )  # fmt: skip
        for slot in range(3):
            if sharing and slot:
                cache, ok = share(cache, 0, slot)
            else:
                cache, ok = jitted("write_prompt")(cache, slot, k, v, metric, 19)
            assert ok
        slots, keep = jnp.asarray([1, 2], jnp.int32), jnp.asarray([9, 12], jnp.int32)
        cache, report = jax.jit(kv.compress)(cache, slots, keep, MERGING)
        assert report.freed.tolist() == [11, 8]
        kv.check_invariants(cache)
        rows = [x.reshape(3, L, H, M * B, 8) for x in cache.kv.read(cache.block_table)]
        held = (np.arange(M * B) < cache.context_len[..., None])[..., None]
        found.append((cache.context_len, *(np.where(held, x, 0) for x in rows), cache.window))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize(
    ("source", "target"), [(0, 0), (0, 2), (-1, 1), (S, 1), (0, -1), (0, S)], ids=str
)
def test_what_cannot_be_shared_is_refused(source, target):
    shared = Shared(7)
    shared.write(0, 6)
    shared.write(2, 2)
    before = host(shared.cache)
    found, ok = share(shared.cache, jnp.int32(source), jnp.int32(target))
    assert not ok
    jax.tree.map(np.testing.assert_array_equal, before, host(found))


def test_a_cache_made_without_sharing_has_nothing_of_it():
    plain = programs.abstract_cache(programs.Shapes())
    sharing = programs.abstract_cache(programs.Shapes(), sharing=True)
    assert len(jax.tree.leaves(plain)) == len(jax.tree.leaves(sharing)) - 1
    with pytest.raises(ValueError, match="sharing=True"):
        kv.share(Geometry().init(), 0, 1)


@pytest.mark.parametrize(
    ("corrupt", "told"),
    [
        (lambda c: c["shared"].__setitem__(c["block_table"][0, 0, 0, 0], 0), "owners"),
        (lambda c: c["shared"].__setitem__(N - 1, 1), "owners"),
        (
            lambda c: (
                c["block_table"].__setitem__((1, 0, 0, 1), c["block_table"][1, 0, 1, 0]),
                c["shared"].__setitem__(c["block_table"][1, 0, 1, 0], 2),
                c["shared"].__setitem__(c["block_table"][0, 0, 0, 1], 0),
            ),
            "owns a block twice",
        ),
    ],
    ids=["not counted", "counted for nobody", "twice in a slot"],
)
def test_wrong_counts_are_found(corrupt, told):
    shared = Shared(8)
    shared.write(0, 6)
    shared.share(0, 1)
    fields = host(clean(shared.cache))
    kv.check_invariants(of_host(fields))
    assert audit(of_host(fields)) == []
    corrupt(fields)
    with pytest.raises(AssertionError, match=told):
        kv.check_invariants(of_host(fields))
    assert audit(of_host(fields))
