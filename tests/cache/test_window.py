"""A window of exact newest KVs beside a pool of codes: what it holds, and what attention reads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvjax import cache as kv
from kvjax.cache.store import CacheSpec, Windowed, put_slots, restored, saved, take_slots, typed
from kvjax.errors import UserError
from kvjax.kernels import paged_attention
from tests.cache.test_merger import METHOD
from tests.oracle import attend
from tests.oracle.window import OracleWindow

S, L, H, D, B, M, T, N = 3, 2, 2, 8, 4, 8, 12, 90
WINDOW, GROUP = 5, 2


def empty(dtype: str = f"int2w{WINDOW}", sharing: bool = True) -> kv.PagedCache:
    return kv.init_cache(
        num_slots=S, num_layers=L, num_kv_heads=H, head_dim=D, num_blocks=N, max_blocks_per_head=M,
        block_size=B, codec=kv.as_codec(dtype, "float32"), sharing=sharing,
    )  # fmt: skip


@functools.cache
def jitted(name: str):
    return jax.jit(getattr(kv, name))


def held_of(cache: kv.PagedCache) -> dict[tuple[int, int, int], list[int]]:
    """Token positions of what every head holds, in logical order."""
    table, lengths = np.asarray(cache.block_table), np.asarray(cache.context_len)
    position = np.asarray(cache.position)
    return {
        at: [int(position[table[at][i // B], i % B]) for i in range(lengths[at])]
        for at in np.ndindex(*lengths.shape)
    }


def rows_of(cache: kv.PagedCache) -> dict[tuple[int, int, int], dict[int, tuple]]:
    """The window's rows of every head, by token position."""
    window = cache.window
    assert window is not None
    k, v, position = (np.asarray(x) for x in (window.rows_k, window.rows_v, window.position))
    return {
        at: {int(p): (k[at][w], v[at][w]) for w, p in enumerate(position[at]) if p >= 0}
        for at in np.ndindex(*position.shape[:3])
    }


class Both:
    """A cache and the oracle of its window, driven together."""

    def __init__(self):
        self.cache, self.oracle, self.done = empty(), OracleWindow(WINDOW), set()

    def rows(self, rng, *shape):
        return [rng.standard_normal((*shape, D)).astype(np.float32) for _ in range(2)]

    def prompt(self, rng, survivors: bool) -> None:
        slot, length = int(rng.integers(S)), int(rng.integers(1, T + 1))
        k, v = self.rows(rng, L, T, H)
        metric = rng.random((L, H, T)).astype(np.float32)
        start = int(self.cache.seq_len[slot])
        before = {at: set(held) for at, held in held_of(self.cache).items()}
        if survivors:
            self.cache, _, ok = jitted("write_survivors")(
                self.cache, slot, k, v, metric, length, int(rng.integers(2, 9))
            )
        else:
            self.cache, ok = jitted("write_prompt")(self.cache, slot, k, v, metric, length)
        for at, held in held_of(self.cache).items():
            new = sorted(set(held) - before[at]) if ok and at[0] == slot else []
            own = {p: (k[at[1], p - start, at[2]], v[at[1], p - start, at[2]]) for p in new}
            self.oracle.write(at, own)
        self.done.add(("survivors" if survivors else "prompt", bool(ok)))

    def append(self, rng) -> None:
        k, v = self.rows(rng, L, S, H)
        active = rng.random(S) < 0.7
        position = np.asarray(self.cache.seq_len)
        self.cache, ok = jitted("append")(self.cache, k, v, jnp.asarray(active))
        for s, layer, h in np.ndindex(S, L, H) if ok else ():
            if active[s]:
                row = {int(position[s]): (k[layer, s, h], v[layer, s, h])}
                self.oracle.write((s, layer, h), row)
        self.done.add(("append", bool(ok)))

    def compress(self, rng) -> None:
        lengths = rng.random(np.shape(self.cache.metric)).astype(np.float32)
        written = np.asarray(self.cache.position) >= 0
        metric = jnp.asarray(np.where(written, lengths, 0))
        cache = dataclasses.replace(self.cache, metric=metric)
        slots = jnp.asarray(rng.permutation(S + 1)[:S], jnp.int32)
        keep = jnp.asarray(rng.integers(4, 20, S), jnp.int32)
        self.cache, report = jitted("compress")(cache, slots, keep)
        self.oracle.keep(held_of(self.cache))
        self.done.add(("compress", bool(np.asarray(report.freed).any())))

    def release(self, rng) -> None:
        self.cache = jitted("release")(self.cache, jnp.asarray(rng.random(S) < 0.4))
        self.oracle.keep(held_of(self.cache))

    def share(self, rng) -> None:
        source, target = (int(x) for x in rng.permutation(S)[:2])
        self.cache, ok = jitted("share")(self.cache, source, target)
        if ok:
            self.oracle.share(source, target)
        self.done.add(("share", bool(ok)))

    def some_slots(self, rng) -> None:
        """A step on a few slots alone."""
        slots = jnp.asarray(rng.permutation(S + 2)[:2], jnp.int32)
        part = take_slots(self.cache, slots)
        k, v = self.rows(rng, L, 2, H)
        position, inside = np.asarray(part.seq_len), np.asarray(slots) < S
        part, ok = jitted("append")(part, k, v, jnp.asarray(inside))
        self.cache = put_slots(self.cache, slots, part)
        for g, layer, h in np.ndindex(2, L, H) if ok else ():
            if inside[g]:
                row = {int(position[g]): (k[layer, g, h], v[layer, g, h])}
                self.oracle.write((int(slots[g]), layer, h), row)

    def check(self, rng) -> None:
        kv.check_invariants(self.cache)
        found = rows_of(self.cache)
        for at, rows in found.items():
            wanted = self.oracle.of(at)
            assert sorted(rows) == sorted(wanted), at
            for position, pair in rows.items():
                assert np.array_equal(pair, wanted[position]), (at, position)
        self.check_attention(rng)

    def check_attention(self, rng) -> None:
        """Exact rows where the oracle has one, what codes decode to elsewhere; and the metric."""
        cache = self.cache
        layer = int(rng.integers(L))
        q = rng.standard_normal((S, H * GROUP, D)).astype(np.float32)
        out, metric = read(cache, layer, q)
        coded = [np.asarray(x, np.float64) for x in decode(cache)]
        table, held = np.asarray(cache.block_table), held_of(cache)
        wanted = np.zeros((N, B))
        for s, h in np.ndindex(S, H):
            at = (s, layer, h)
            pages = [(table[at][i // B], i % B) for i in range(len(held[at]))]
            exact = self.oracle.of(at)
            k, v = (
                np.array(
                    [
                        exact[p][part] if p in exact else coded[part][page]
                        for p, page in zip(held[at], pages, strict=True)
                    ]
                ).reshape(-1, D)
                for part in range(2)
            )
            mine = slice(h * GROUP, (h + 1) * GROUP)
            own, p = attend(q[s, mine], k, v)
            np.testing.assert_allclose(out[s, mine], own, atol=1e-4)
            for i, page in enumerate(pages):
                wanted[page] += np.sum(p[:, i] ** 2)
        np.testing.assert_allclose(metric, wanted, atol=1e-4)


@jax.jit
def decode(cache):
    return cache.kv.read(jnp.arange(N, dtype=jnp.int32))


@jax.jit
def read(cache, layer, q):
    k, v = cache.kv.operands
    return paged_attention(
        q, k, v, cache.block_table[:, layer], cache.context_len[:, layer],
        metric=jnp.zeros((N, B), jnp.float32), return_metric=True,
        exact=cache.window.of_layer(layer),
    )  # fmt: skip


STEPS = {
    "prompt": lambda both, rng: both.prompt(rng, False),
    "survivors": lambda both, rng: both.prompt(rng, True),
    "append": Both.append,
    "compress": Both.compress,
    "release": Both.release,
    "share": Both.share,
    "some slots": Both.some_slots,
}
STEP = st.sampled_from([*STEPS, "append", "append", "compress"])


@settings(
    max_examples=6, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
@given(st.lists(STEP, min_size=6, max_size=14), st.integers(0, 2**20))
def test_the_window_holds_the_newest_and_attention_reads_them(names, seed):
    rng = np.random.default_rng(seed)
    both = Both()
    both.prompt(rng, False)
    both.prompt(rng, True)
    for name in names:
        STEPS[name](both, rng)
        both.check(rng)


def prompted(dtype: str, length: int = 19) -> kv.PagedCache:
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.standard_normal((L, length, H, D)), jnp.float32) for _ in range(2))
    metric = jnp.asarray(rng.random((L, H, length)), jnp.float32)
    cache, ok = jax.jit(kv.write_prompt)(empty(dtype), 0, k, v, metric, length)
    assert ok
    return cache


@pytest.mark.slow
def test_a_merger_folds_exact_rows():
    """Where the window has every KV, what is merged is merged as in a pool of exact ones."""
    found = []
    for dtype in ("int2w32", "float32"):
        cache, report = jax.jit(kv.compress)(
            prompted(dtype), jnp.zeros(1, jnp.int32), jnp.asarray([9], jnp.int32), METHOD
        )
        assert report.freed[0] > 0
        found.append(cache)
    kv.check_invariants(found[0])
    held, rows = held_of(found[1]), rows_of(found[0])
    assert held_of(found[0]) == held
    k, v = (np.asarray(x) for x in decode(found[1]))
    table = np.asarray(found[1].block_table)
    for at, positions in held.items():
        for i, position in enumerate(positions):
            page = table[at][i // B], i % B
            np.testing.assert_allclose(rows[at][position][0], k[page], atol=1e-6)
            np.testing.assert_allclose(rows[at][position][1], v[page], atol=1e-6)


def test_what_was_saved_is_read_from_its_codes():
    """A file has the pool's part alone: its heads have no exact KV until some are written."""
    cache = prompted("int4w5")
    held = typed(cache, saved(cache, 0))
    cache, ok = jax.jit(restored)(empty("int4w5"), jnp.int32(1), held)
    assert ok
    assert not any(rows_of(cache).values())
    row = jnp.ones((L, S, H, D), jnp.float32)
    cache, ok = jax.jit(kv.append)(cache, row, row, jnp.arange(S) == 1)
    assert ok
    kv.check_invariants(cache)
    assert {at[0] for at, rows in rows_of(cache).items() if rows} == {1}


def test_bytes_of_a_window_count_for_every_slot():
    cache = empty("int4w5", sharing=False)
    spec = cache.spec
    assert (
        spec.codec
        == kv.as_codec("int4w5", "float32")
        == Windowed(codes=kv.as_codec("int4", "float32"), size=5)
    )
    assert spec.window_bytes == L * H * 5 * (2 * 4 * D + 8)
    assert sum(x.nbytes for x in jax.tree.leaves(cache.window)) == S * spec.window_bytes
    everything = sum(x.nbytes for x in jax.tree.leaves(cache))
    assert spec.pool_bytes(N) + spec.table_bytes(S, M) == everything
    assert spec.kv_bytes == CacheSpec(L, H, D, kv.as_codec("int4", "float32"), B).kv_bytes
    assert spec.plain.window_bytes == 0
    small = kv.as_codec("k8v4w3", "bfloat16")
    assert CacheSpec(L, H, D, small, B).window_bytes == L * H * 3 * (2 * 2 * D + 8)
    assert small.name == "k8v4w3"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("int4w0", "cache_dtype int4w0: a window of 0: give a whole number from 1 to 2147483647"),
        ("int4w-3", "cache_dtype int4w-3: a window of -3: give a whole number from 1 to 214.*"),
        ("float32w8", "cache_dtype float32w8: float32 has no codes .*; give float32, .*"),
        ("bfloat16w8", "cache_dtype bfloat16w8: bfloat16 has no codes .*; give bfloat16, .*"),
        ("int4w", "cache_dtype 'int4w': give one of .*as int4w16, or a codec"),
        ("int4w8w8", "cache_dtype 'int4w8w8': give one of .*"),
        ("int3w8", "cache_dtype 'int3w8': give one of .*"),
    ],
)  # fmt: skip
def test_windows_that_make_no_sense_are_refused_in_one_line(asked, said):
    with pytest.raises(UserError, match=f"^{said}$") as caught:
        kv.as_codec(asked, "float32")
    assert "\n" not in str(caught.value)
