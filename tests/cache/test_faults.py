"""One test for each fault known of the reference implementation (the tenth is a tokenizer's)."""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as kv
from kvjax.kernels import paged_attention, window_metrics
from kvjax.kernels.paged_attention import reference
from tests.cache.pair import SINGLE, Geometry, Pair, filled, heads_of, host, jitted, of_host
from tests.cache.programs import (
    Shapes,
    abstract_cache,
    bytes_of,
    equations,
    programs,
)
from tests.oracle import max_pool

ROOMY = Geometry(blocks=72)


def test_fault_01_unevictable_kvs_are_counted_per_sequence():
    """Each sequence of a batch, wherever it stands, evicts all it is asked for."""
    pair = filled([16, 16, 16], ROOMY, seed=1)
    choices = pair.compress([0, 1, 2], [9, 9, 9], protected=6, sinks=1)
    assert [sum(c.blocks.values()) for c in choices] == [7, 7, 7]
    assert [c.shortfall for c in choices] == [0, 0, 0]


def test_fault_02_a_freed_block_carries_nothing_over():
    """The next owner of a preempted sequence's blocks is compressed as in a new pool."""

    def history(occupied: bool) -> kv.PagedCache:
        cache = ROOMY.init()
        rng = np.random.default_rng(2)
        k, v = (rng.standard_normal((2, 16, 2, 2)).astype(np.float32) for _ in range(2))
        if occupied:
            low = np.zeros((2, 2, 16), np.float32)
            for slot in range(3):
                cache, _ = jitted("write_prompt")(cache, slot, k, v, low, jnp.int32(16))
            cache = jitted("release")(cache, jnp.ones(3, bool))
            freed = host(cache)
            assert (freed["position"] == -1).all()
            assert (freed["metric"] == 0).all()
        metric = rng.random((2, 2, 16)).astype(np.float32)
        cache, _ = jitted("write_prompt")(cache, 1, k, v, metric, jnp.int32(13))
        one = jnp.ones(1, jnp.int32)
        cache, report = jitted("compress")(cache, one, 9 * one, protected=2)
        assert np.asarray(report.freed).tolist() == [7]
        return cache

    new, used = heads_of(history(occupied=False)), heads_of(history(occupied=True))
    for at, kvs in new.items():
        assert [x.bits() for x in kvs] == [x.bits() for x in used[at]]


@pytest.mark.parametrize("limit", [1, 16, 63])
def test_fault_03_no_sequence_is_too_large_to_compress(limit):
    """One of 64 KVs, over every limit given, is compressed all the same."""
    pair = filled([16], ROOMY, seed=3)
    (choice,) = pair.compress([0], [6], limit=limit)
    assert sum(choice.blocks.values()) == 10


@pytest.mark.parametrize("protected", [0, 5, 16])
def test_fault_04_a_shortfall_is_reported(protected):
    pair = filled([16, 3], ROOMY, seed=4)
    before = int(kv.free_blocks(pair.cache))
    choices = pair.compress([0, 1], [0, 0], protected=protected)  # compares the whole report
    freed = int(kv.free_blocks(pair.cache)) - before
    asked = 16 + 4
    assert sum(c.shortfall for c in choices) == asked - freed > 0


def plateaus(rng: np.random.Generator) -> np.ndarray:
    """Max-pooled spikes: runs of equal metrics, the same values in several heads."""
    spikes = np.zeros((2, 2, 16))
    for row in spikes.reshape(4, 16):
        row[rng.choice(16, 3, replace=False)] = rng.choice([0.5, 1.0], 3)
    pooled = [max_pool(row, 7) for row in spikes.reshape(4, 16)]
    return np.stack(pooled).reshape(2, 2, 16).astype(np.float32)


@pytest.mark.parametrize("seed", range(3))
def test_fault_05_ties_fall_the_same_way_everywhere(seed):
    """On plateaus each head loses a prefix of one order, for any number of blocks and any limit."""
    nested: dict = {}
    for evict in range(1, 13):
        for limit in (None, 20):
            pair = Pair(ROOMY, seed)
            metric = plateaus(np.random.default_rng(seed))
            assert pair.write_prompt(0, 16, metric=metric)
            pair.compress([0], [16 - evict], limit=limit)
            for at, kvs in heads_of(pair.cache).items():
                gone = set(range(16)) - {x.position for x in kvs} if at[0] == 0 else set()
                assert nested.get((at, evict - 1), set()) <= gone
                assert nested.setdefault((at, evict), gone) == gone


def test_fault_06_blocks_of_one_are_counted():
    """b = 1: every token takes a block of its own in every head."""
    pair = Pair(SINGLE)
    assert pair.write_prompt(0, 5)
    assert int(kv.free_blocks(pair.cache)) == 28 - 10
    for step in range(3):
        assert pair.append([True, False])
        assert int(kv.free_blocks(pair.cache)) == 28 - 12 - 2 * step
    pair.compress([0], [13])
    assert int(kv.free_blocks(pair.cache)) == 28 - 13


def test_fault_06_unwritten_slots_have_no_metric():
    """NaN or a tempting -inf behind a ragged head's last KV changes no decision."""
    chosen = []
    for garbage in (0.0, np.nan, -np.inf, np.inf):
        pair = filled([13, 9], ROOMY, seed=6)
        c = host(pair.cache)
        c["metric"][c["position"] < 0] = garbage
        cache = of_host(c)
        args = jnp.arange(2, dtype=jnp.int32), jnp.full(2, 5, jnp.int32)
        schedule = jitted("schedule_evictions")(cache, *args, protected=0, sinks=0)
        mask = np.asarray(jitted("eviction_mask")(cache, schedule))
        chosen.append((np.asarray(schedule.threshold).tobytes(), mask.tobytes()))
    assert len(set(chosen)) == 1


@pytest.mark.parametrize("protected", [1, 4, 7])
def test_fault_06_the_oldest_protected_token_is_protected(protected):
    """The token at length - protected stays although it is the cheapest; the one before goes."""
    pair = Pair(ROOMY)
    metric = np.ones((2, 2, 16), np.float32)
    metric[..., 13 - protected] = 0
    metric[..., 13 - protected - 1] = 0.5
    assert pair.write_prompt(0, 13, metric=metric)
    pair.compress([0], [12], protected=protected)
    for at, kvs in heads_of(pair.cache).items():
        if at[0] == 0:
            positions = {x.position for x in kvs}
            assert 13 - protected in positions
            assert 13 - protected - 1 not in positions


def attention_arguments(r: int, s: Shapes, d: int) -> tuple:
    def spec(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    pool = spec(s.N, s.b, d)
    lengths = spec(s.S, s.H, dtype=jnp.int32)
    return spec(s.S, s.H * r, d), pool, pool, spec(s.S, s.H, s.M, dtype=jnp.int32), lengths


def test_fault_07_a_query_group_shares_each_kv():
    """Keys and values are not repeated for the r query heads that read them."""
    s, d = Shapes(S=4, L=1, H=2, M=64, N=512), 48  # 48: no other axis has this length

    def largest(r: int) -> int:
        args = attention_arguments(r, s, d)
        jaxpr = jax.make_jaxpr(lambda *a: paged_attention(*a, implementation="xla"))(*args)
        shapes = [getattr(o.aval, "shape", ()) for e in equations(jaxpr.jaxpr) for o in e.outvars]
        return max(math.prod(shape) for shape in shapes if shape[-1:] == (d,))

    assert largest(8) == largest(1)


def test_fault_07_work_follows_the_compressed_length(monkeypatch):
    """Heads with room for 1,024 KVs gather pieces of 64 KVs that they hold, whatever others do."""
    assert "seq_len" not in inspect.signature(paged_attention).parameters
    heads, blocks = 2, 64
    q = jnp.ones((1, heads, 8))
    pool = jnp.ones((heads * blocks, 16, 8))
    table = jnp.arange(heads * blocks, dtype=jnp.int32).reshape(1, heads, blocks)
    rounds = []

    def loop(start, stop, body, carry):
        """`lax.fori_loop`, one round after the other: lengths are known here."""
        for i in range(int(start), int(stop)):
            rounds.append(body)
            carry = body(jnp.int32(i), carry)
        return carry

    monkeypatch.setattr(reference.lax, "fori_loop", loop)

    def gathered(*lengths: int, at_once: tuple[int, ...] = (1,)) -> int:
        rounds.clear()
        held = jnp.asarray([lengths], jnp.int32)
        reference.paged_attention(q, pool, pool, table, held, scale=1.0, pieces_at_once=at_once)
        return sum(
            body.args[0].__name__ == "attend_pieces" for body in rounds if hasattr(body, "args")
        )

    assert gathered(16, 16) == gathered(64, 3) == 2
    assert gathered(65, 0) == 2
    assert gathered(16 * blocks, 16) == gathered(16, 16 * blocks) == 16 + 1
    # Heads of any lengths fill the turns: these take as many as their sum.
    for lengths in ((16 * blocks, 16), (8 * blocks, 9 * blocks)):
        assert gathered(*lengths, at_once=(4,)) == 5
        assert gathered(*lengths, at_once=(12, 2)) == 1 + 3
        assert gathered(*lengths, at_once=(12, 6, 2)) == 1 + 0 + 3
    assert gathered(0, 0) == 0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn])
def test_fault_08_metadata_is_eight_bytes_per_kv(dtype):
    """Whatever the group size or dtype: a metric and a position, and an id per block."""
    cache = abstract_cache(Shapes(N=1 << 16, dtype=dtype))
    kvs = cache.k.shape[0] * cache.k.shape[1]
    assert bytes_of(cache.metric, cache.position) == 8 * kvs
    everything = bytes_of(*jax.tree.leaves(cache))
    tables = bytes_of(cache.block_table, cache.context_len, cache.seq_len)
    ids = 4 * (cache.k.shape[0] + 1)
    assert everything - bytes_of(cache.k, cache.v) == 8 * kvs + ids + tables


IN_PLACE = {"scatter", "scatter-add", "scan", "while", "cond", "jit", "pjit"}


@pytest.mark.parametrize("name", programs(Shapes()))
def test_fault_08_no_pass_over_the_pool(name):
    """Arrays of the pool's shape come from nothing but scatters into it."""
    s = Shapes(N=4099)  # no other axis has this length
    program = programs(s)[name]
    made = {
        e.primitive.name
        for e in equations(program.jaxpr())
        for o in e.outvars
        if getattr(o.aval, "shape", ())[:2] in ((s.N, s.b), (s.N * s.b,))
    }
    assert made <= IN_PLACE, f"{name} makes pool-sized arrays with {made - IN_PLACE}"


def test_fault_08_attention_passes_over_no_pool():
    s = Shapes(S=4, L=1, H=2, M=64, N=509)
    metric = jax.ShapeDtypeStruct((s.N, s.b), jnp.float32)

    def step(q, k, v, table, lengths, metric):
        return paged_attention(
            q, k, v, table, lengths, metric=metric, return_metric=True, implementation="xla"
        )

    jaxpr = jax.make_jaxpr(step)(*attention_arguments(3, s, 64), metric)
    made = {
        e.primitive.name
        for e in equations(jaxpr.jaxpr)
        for o in e.outvars
        if getattr(o.aval, "shape", ())[:1] == (s.N,) or s.N * s.b == getattr(o.aval, "size", 0)
    }
    assert made <= IN_PLACE


HOST = ("callback", "infeed", "outfeed", "debug", "device_get", "host")


@pytest.mark.parametrize("name", programs(Shapes()))
def test_fault_09_no_host_round_trip(name):
    """Each operation traces with abstract arguments (it reads no value) and calls nobody back."""
    names = {e.primitive.name for e in equations(programs(Shapes())[name].jaxpr())}
    assert not [n for n in names if any(word in n for word in HOST)]


def test_fault_09_one_program_serves_any_number_of_sequences():
    """Which slots run, and how many, is data: the step is compiled once."""
    pair = filled([5, 6, 7], ROOMY)
    traces = []

    def step(*args):
        traces.append(args)
        return kv.append(*args)

    compiled = jax.jit(step)
    new = jnp.zeros((2, 3, 2, 2))
    for active in ([True, True, True], [False, True, False], [False, False, False]):
        compiled(pair.cache, new, new, jnp.asarray(active))
    assert len(traces) == 1


def test_fault_09_kernels_call_nobody_back():
    q, k = jax.ShapeDtypeStruct((8, 4, 16), jnp.float32), jax.ShapeDtypeStruct((64, 2, 16), "f4")
    at = jax.ShapeDtypeStruct((8,), jnp.int32)
    metric = jax.make_jaxpr(lambda q, k, at: window_metrics(q, k, query_position=at))(q, k, at)
    s = Shapes(S=4, L=1, H=2, M=8, N=64)
    attention = jax.make_jaxpr(paged_attention)(*attention_arguments(2, s, 16))
    for jaxpr in (metric, attention):
        names = {e.primitive.name for e in equations(jaxpr.jaxpr)}
        assert not [n for n in names if any(word in n for word in HOST)]


def test_a_slot_that_does_not_exist_takes_and_frees_nothing():
    cache = kv.init_cache(
        num_slots=2,
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        num_blocks=8,
        max_blocks_per_head=4,
        block_size=2,
    )
    keys, metric = jnp.ones((1, 4, 1, 2)), jnp.ones((1, 1, 4))
    for slot in (-1, 2):
        after, ok = kv.write_prompt(cache, slot, keys, keys, metric, 4)
        assert not ok
        kv.check_invariants(after)
    cache, ok = kv.write_prompt(cache, 1, keys, keys, metric, 4)
    assert ok
    after, report = kv.compress(cache, jnp.asarray([-1]), jnp.asarray([1]))
    assert int(report.freed[0]) == 0
    kv.check_invariants(after)
    np.testing.assert_array_equal(after.context_len, cache.context_len)
