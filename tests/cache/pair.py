"""A kvjax cache and its oracle, driven together and compared after every operation.

After each operation every slot of the pool that holds no KV is overwritten with NaN, infinities
and huge numbers: whatever kvjax does next must not depend on them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import cache as kv
from kvjax.cache.policy.method import PLAIN
from kvjax.cache.store import KVPool
from tests.cache.free import free_of
from tests.oracle import KV, Choice, OracleCache
from tests.oracle.eviction import num_blocks
from tests.oracle.kv import UNWRITTEN

NOBODY = Choice({}, 0, [])
"""What is evicted from a slot out of range, which stands for padding."""

POISON = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, -0.0], np.float32)


@dataclass(frozen=True)
class Geometry:
    """The static shapes of a test cache. `prompt` is the padded prompt length T."""

    slots: int = 3
    layers: int = 2
    heads: int = 2
    d: int = 2
    blocks: int = 40
    max_blocks: int = 6
    block: int = 4
    prompt: int = 16

    def init(self) -> kv.PagedCache:
        return kv.init_cache(
            num_slots=self.slots,
            num_layers=self.layers,
            num_kv_heads=self.heads,
            head_dim=self.d,
            num_blocks=self.blocks,
            max_blocks_per_head=self.max_blocks,
            block_size=self.block,
        )

    def oracle(self) -> OracleCache:
        return OracleCache(
            num_slots=self.slots,
            num_layers=self.layers,
            num_kv_heads=self.heads,
            num_blocks=self.blocks,
            max_blocks=self.max_blocks,
            block_size=self.block,
        )


SMALL = Geometry()
SINGLE = Geometry(slots=2, layers=1, heads=2, d=3, blocks=28, max_blocks=12, block=1, prompt=8)


def protecting(protected: Any = 0, sinks: Any = 0) -> kv.Method:
    """The globally cheapest blocks, with some tokens protected; inside a step, too."""
    return PLAIN._with(protected=protected, sinks=sinks)


@cache
def jitted(name: str):
    """One compiled function per operation, shared by all tests.

    Those that evict take what is protected by name, as `protected` and `sinks`.
    """
    limited = name in ("schedule_evictions", "move_cache", "compress")
    static = ("max_kvs_per_step",) if limited else ()
    step = jax.jit(getattr(kv, name), static_argnames=static)
    if name not in ("schedule_evictions", "compress", "write_survivors"):
        return step

    def evict(*args, protected: Any = 0, sinks: Any = 0, **options):
        return step(*args, protecting(protected, sinks), **options)

    return evict


def host(cache: kv.PagedCache) -> dict[str, Any]:
    """Copies of the cache's fields in host memory, keys and values as "k" and "v", the free blocks
    as a mask and, from the bottom of their stack, as "order"."""
    fields = {
        f.name: jax.tree.map(np.array, getattr(cache, f.name)) for f in dataclasses.fields(cache)
    }
    pool, free = fields.pop("kv"), fields.pop("free")
    order = free.stack[: free.count[0]]
    mask = np.isin(np.arange(len(free.stack)), order)
    return {"k": pool.stored_k, "v": pool.stored_v, "free": mask, "order": order, **fields}


def of_host(fields: dict[str, Any]) -> kv.PagedCache:
    """The cache that `host` copied."""
    fields = dict(fields)
    free = free_of(fields.pop("free"), fields.pop("order").tolist())
    fields = jax.tree.map(jnp.asarray, fields)
    k, v = fields.pop("k"), fields.pop("v")
    return kv.PagedCache(kv=KVPool(k, v, kv.Plain(k.dtype.name)), free=free, **fields)


def assert_identical(a: kv.PagedCache, b: kv.PagedCache, what: str) -> None:
    """Every field is bit-equal, garbage included."""
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        same = np.asarray(x).tobytes() == np.asarray(y).tobytes()
        assert same, f"{what}: {jax.tree_util.keystr(path)} differs"


def heads_of(cache: kv.PagedCache) -> dict[tuple[int, int, int], list[KV]]:
    """What every head of a cache holds, in logical order, read through the block tables."""
    c = host(cache)
    block_size = c["metric"].shape[1]
    result = {}
    for at in np.ndindex(*c["context_len"].shape):
        kvs = []
        for i in range(c["context_len"][at]):
            where = (c["block_table"][at][i // block_size], i % block_size)
            position = int(c["position"][where])
            if position == UNWRITTEN:
                kvs.append(KV(UNWRITTEN))
            else:
                metric = float(c["metric"][where])
                kvs.append(KV(position, c["k"][where], c["v"][where], metric))
        result[at] = kvs
    return result


def owned_mask(cache: kv.PagedCache) -> np.ndarray:
    """bool [N, b]: the slots that lie below some head's length."""
    c = host(cache)
    block_size = c["metric"].shape[1]
    mask = np.zeros(c["metric"].shape, bool)
    for at in np.ndindex(*c["context_len"].shape):
        for i in range(c["context_len"][at]):
            mask[c["block_table"][at][i // block_size], i % block_size] = True
    return mask


def poison(cache: kv.PagedCache, seed: int) -> kv.PagedCache:
    """Fill everything that is not a written KV with garbage (positions stay: they tell)."""
    rng = np.random.default_rng(seed)
    c = host(cache)
    unwritten = ~(owned_mask(cache) & (c["position"] >= 0))
    for name in ("k", "v", "metric"):
        count = c[name][unwritten].shape
        c[name][unwritten] = rng.choice(POISON, size=count).astype(c[name].dtype)
    return of_host(c)


def clean(cache: kv.PagedCache) -> kv.PagedCache:
    """Without the garbage in the metrics of free blocks, which kvjax clears itself."""
    return dataclasses.replace(cache, metric=jnp.where(cache.free.mask[:, None], 0, cache.metric))


def assert_well_formed(cache: kv.PagedCache) -> None:
    """Invariant 9 and clean metadata, checked without kvjax's own check."""
    c = host(cache)
    total, block_size = c["metric"].shape
    owned = []
    for at in np.ndindex(*c["context_len"].shape):
        used = num_blocks(int(c["context_len"][at]), block_size)
        owned += c["block_table"][at][:used].tolist()
        assert (c["block_table"][at][used:] == total).all(), f"{at}: entries beyond the length"
    assert len(set(owned)) == len(owned), "a block has two owners"
    assert set(owned) | set(c["order"].tolist()) == set(range(total))
    assert len(owned) + len(c["order"]) == total
    assert (c["position"][~owned_mask(cache)] == UNWRITTEN).all(), "stale positions"


def assert_same(cache: kv.PagedCache, oracle: OracleCache) -> None:
    """The whole contents of the cache are bit-equal to the oracle's, in logical order."""
    actual = heads_of(cache)
    assert actual.keys() == oracle.heads.keys()
    for at, kvs in oracle.heads.items():
        got, want = [x.bits() for x in actual[at]], [x.bits() for x in kvs]
        assert got == want, f"{at}: positions {[x[0] for x in got]} != {[x[0] for x in want]}"
    assert np.asarray(cache.seq_len).tolist() == oracle.seq_len
    assert int(kv.free_blocks(cache)) == oracle.free_blocks()


def adopt_order(cache: kv.PagedCache, oracle: OracleCache, before: dict) -> None:
    """Accept the order a move left its survivors in, once it is a rearrangement of the oracle's.

    Algorithm 1 fixes which hole takes which survivor, but only the set matters: a KV that stood
    below the new length must not have moved, and the others fill the holes in any order.
    """
    for at, kvs in heads_of(cache).items():
        got, want = [x.bits() for x in kvs], [x.bits() for x in oracle.heads[at]]
        assert sorted(got, key=repr) == sorted(want, key=repr), f"{at}: not the same KVs"
        kept = set(want)
        for i, kv_before in enumerate(before[at][: len(got)]):
            if kv_before.written and kv_before.bits() in kept:
                assert got[i] == kv_before.bits(), f"{at}: the KV at {i} moved needlessly"
        oracle.heads[at] = kvs


def levels(rng: np.random.Generator, shape: tuple[int, ...], ties: bool = True) -> np.ndarray:
    """Metrics >= 0, with many exact ties if asked for."""
    fine = rng.random(shape).astype(np.float32)
    coarse = rng.choice(np.array([0, 0.25, 1, 2], np.float32), size=shape)
    return np.where(rng.random(shape) < 0.6, coarse, fine) if ties else fine


class Pair:
    """kvjax and the oracle side by side. Every method asserts that they agree."""

    def __init__(self, geometry: Geometry = SMALL, seed: int = 0):
        self.g = geometry
        self.rng = np.random.default_rng(seed)
        self.cache = geometry.init()
        self.oracle = geometry.oracle()
        self._garbage = np.zeros(geometry.blocks, bool)
        self.check()

    def check(self) -> None:
        # Free blocks keep the garbage this class put in; those freed since must have been cleaned.
        c = host(self.cache)
        c["metric"][self._garbage & c["free"]] = 0
        kv.check_invariants(dataclasses.replace(self.cache, metric=jnp.asarray(c["metric"])))
        self._garbage = c["free"]
        assert_well_formed(self.cache)
        assert_same(self.cache, self.oracle)
        self.cache = poison(self.cache, int(self.rng.integers(1 << 30)))

    def _settle(self, cache: kv.PagedCache, ok, expected: bool, what: str) -> bool:
        assert bool(ok) is expected, f"{what}: ok is {bool(ok)}, the oracle says {expected}"
        if not expected:
            assert_identical(self.cache, cache, f"{what} failed")
        self.cache = cache
        self.check()
        return expected

    def allocate(self, context_len: np.ndarray) -> bool:
        cache, ok = jitted("allocate")(self.cache, jnp.asarray(context_len, jnp.int32))
        return self._settle(cache, ok, self.oracle.allocate(context_len), "allocate")

    def _random_prompt(
        self, length: int, given: np.ndarray | None, ties: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """k, v [L, T, H, d] and metrics [L, H, T]; the padding from `length` on is NaN."""
        g, rng = self.g, self.rng
        shape = (g.layers, g.prompt, g.heads, g.d)
        k, v = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
        metric = levels(rng, (g.layers, g.heads, g.prompt), ties) if given is None else given.copy()
        k[:, length:], v[:, length:], metric[..., length:] = np.nan, np.nan, np.nan
        return k, v, metric

    def write_prompt(
        self,
        slot: int,
        length: int,
        kept_len: np.ndarray | None = None,
        metric: np.ndarray | None = None,
        ties: bool = True,
    ) -> bool:
        """Random prompt tokens after what the slot holds. kept_len [L, H]: survivors per head."""
        g, rng = self.g, self.rng
        k, v, metrics = self._random_prompt(length, metric, ties)
        kwargs, kept = {}, None
        if kept_len is not None:
            index = np.full((g.layers, g.heads, g.prompt), -7, np.int32)
            for at in np.ndindex(g.layers, g.heads):
                chosen = np.sort(rng.choice(length, size=kept_len[at], replace=False))
                index[at][: kept_len[at]] = chosen
            kwargs = {
                "kept_index": jnp.asarray(index),
                "kept_len": jnp.asarray(kept_len, jnp.int32),
            }
            kept = lambda layer, h: index[layer, h, : kept_len[layer, h]].tolist()  # noqa: E731
        cache, ok = jitted("write_prompt")(
            self.cache, jnp.int32(slot), k, v, metrics, jnp.int32(length), **kwargs
        )
        expected = self.oracle.write_prompt(slot, k, v, metrics, length, kept)
        return self._settle(cache, ok, expected, "write_prompt")

    def write_survivors(
        self, slot: int, length: int, keep: int, protected: int = 0, sinks: int = 0
    ) -> tuple[bool, Choice]:
        """A random prompt for an empty slot, compressed before it is written."""
        prompt = self._random_prompt(length, None, ties=True)
        cache, report, ok = jitted("write_survivors")(
            self.cache,
            jnp.int32(slot),
            *prompt,
            jnp.int32(length),
            jnp.int32(keep),
            protected=protected,
            sinks=sinks,
        )
        expected, choice = self.oracle.write_survivors(
            slot, *prompt, length, keep, protected, sinks
        )
        self._report([choice], report.freed, report.shortfall)
        return self._settle(cache, ok, expected, "write_survivors"), choice

    def append(self, active: Sequence[bool]) -> bool:
        """One random KV per head of the active slots; NaN for the others."""
        g = self.g
        mask = np.asarray(active, bool)
        shape = (g.layers, g.slots, g.heads, g.d)
        k, v = (self.rng.standard_normal(shape).astype(np.float32) for _ in range(2))
        k[:, ~mask], v[:, ~mask] = np.nan, np.nan
        cache, ok = jitted("append")(self.cache, k, v, jnp.asarray(mask))
        return self._settle(cache, ok, self.oracle.append(k, v, mask.tolist()), "append")

    def release(self, slots: Sequence[bool]) -> None:
        self.cache = jitted("release")(self.cache, jnp.asarray(slots, bool))
        self.oracle.release(slots)
        self.check()

    def observe(self, add: np.ndarray | None = None) -> None:
        """Decode attention: the metric of every written KV grows (by `add` [N, b] if given)."""
        c = host(self.cache)
        add = levels(self.rng, c["metric"].shape) if add is None else add
        written = owned_mask(self.cache) & (c["position"] >= 0)
        metric = np.where(written, c["metric"] + add, c["metric"]).astype(np.float32)
        self.cache = dataclasses.replace(self.cache, metric=jnp.asarray(metric))
        after = heads_of(self.cache)
        self.oracle.observe(lambda at, i: after[at][i].metric)
        self.check()

    def _report(self, choices: list[Choice], freed, shortfall) -> None:
        assert np.asarray(freed).tolist() == [sum(c.blocks.values()) for c in choices]
        assert np.asarray(shortfall).tolist() == [c.shortfall for c in choices]

    def compress(
        self,
        slots: Sequence[int],
        keep: Sequence[int],
        protected: int = 0,
        sinks: int = 0,
        limit: int | None = None,
    ) -> list[Choice]:
        before = heads_of(self.cache)
        choices = [
            self.oracle.compress(s, n, protected, sinks) if s < self.g.slots else NOBODY
            for s, n in zip(slots, keep, strict=True)
        ]
        cache, report = jitted("compress")(
            self.cache,
            jnp.asarray(slots, jnp.int32),
            jnp.asarray(keep, jnp.int32),
            protected=protected,
            sinks=sinks,
            **({} if limit is None else {"max_kvs_per_step": limit}),
        )
        self._report(choices, report.freed, report.shortfall)
        if not any(sum(c.blocks.values()) for c in choices):
            assert_identical(self.cache, cache, "compression that evicts nothing")
        self.cache = cache
        adopt_order(self.cache, self.oracle, before)
        self.check()
        return choices

    def schedule_and_move(
        self, slots: Sequence[int], evict: Sequence[int], protected: int = 0, sinks: int = 0
    ) -> list[Choice]:
        """The same in its two halves, with every field of the schedule checked."""
        before = heads_of(self.cache)
        schedule = jitted("schedule_evictions")(
            self.cache,
            jnp.asarray(slots, jnp.int32),
            jnp.asarray(evict, jnp.int32),
            protected=protected,
            sinks=sinks,
        )
        mask = np.asarray(jitted("eviction_mask")(self.cache, schedule))
        choices = [
            self.oracle.schedule(s, e, protected, sinks) for s, e in zip(slots, evict, strict=True)
        ]
        blocks, count = np.asarray(schedule.blocks), np.asarray(schedule.count)
        threshold = np.asarray(schedule.threshold)
        self._report(choices, blocks.sum(axis=(1, 2)), schedule.shortfall)
        for i, (slot, choice) in enumerate(zip(slots, choices, strict=True)):
            evicted = self.oracle.evicted(slot, choice, protected, sinks)
            for (layer, h), gone in evicted.items():
                assert blocks[i, layer, h] == choice.blocks[layer, h]
                assert count[i, layer, h] == len(gone)
                assert set(np.flatnonzero(mask[i, layer, h]).tolist()) == gone
                if gone:
                    dearest = max(before[slot, layer, h][j].metric for j in gone)
                    assert threshold[i, layer, h] == np.float32(dearest)
            self.oracle.move(slot, evicted)
        self.cache = jitted("move_cache")(self.cache, schedule)
        adopt_order(self.cache, self.oracle, before)
        self.check()
        return choices


def filled(
    lengths: Sequence[int], geometry: Geometry = SMALL, seed: int = 0, ties: bool = True
) -> Pair:
    """A pair whose slots 0, 1, … hold prompts of these lengths (0: empty)."""
    pair = Pair(geometry, seed)
    for slot, length in enumerate(lengths):
        if length:
            assert pair.write_prompt(slot, length, ties=ties)
    return pair
