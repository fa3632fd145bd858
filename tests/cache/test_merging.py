"""Methods that fold what goes into what stays: `razor-attention` and `kvmerger`."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as kv
from kvjax.cache.methods.kvmerger import GaussianMerged, PivotsLast
from kvjax.cache.methods.razor_attention import Compensated
from kvjax.cache.policy import ByLayer
from kvjax.cache.policy.method import PLAIN
from kvjax.errors import UserError
from tests.cache.pair import heads_of
from tests.cache.stand_in import QUICKLY
from tests.oracle.merging import compensated, merged, pivot_of, sets_of

L, H, D, B, T = 2, 2, 8, 4, 43
PROTECTED, SINKS, KEEP = 6, 4, 20
RAZOR = PLAIN._with(merger=Compensated(SINKS), protected=PROTECTED, sinks=SINKS)
MERGER = PLAIN._with(
    allocator=ByLayer(), selector=PivotsLast(), merger=GaussianMerged(), protected=PROTECTED
)


def prompt(seed: int):
    """Keys that are much like their neighbours, values, and a metric."""
    rng = np.random.default_rng(seed)
    k, v = (rng.standard_normal((L, T, H, D)).astype(np.float32) for _ in range(2))
    for t in range(1, T):
        if t % 5:
            k[:, t] = k[:, t - 1] + 0.25 * k[:, t]
    return k, v, rng.random((L, H, T)).astype(np.float32)


@pytest.fixture(scope="module")
def compressed():
    """A prompt compressed on its way in or in the pool, and again if it is asked for."""

    @QUICKLY
    def again(cache, method, keep):
        return kv.compress(cache, jnp.zeros(1, jnp.int32), keep[None], method)[0]

    write, write_all = QUICKLY(kv.write_survivors), QUICKLY(kv.write_prompt)

    def run(way: str, method, k, v, metric, *keeps: int):
        cache = kv.init_cache(
            num_slots=1, num_layers=L, num_kv_heads=H, head_dim=D, num_blocks=60,
            max_blocks_per_head=12, block_size=B,
        )  # fmt: skip
        # Padding that would be merged if it were looked at.
        wide = [np.pad(x, ((0, 0), (0, 5), (0, 0), (0, 0)), constant_values=9) for x in (k, v)]
        scores = np.pad(metric, ((0, 0), (0, 0), (0, 5)), constant_values=9)
        first, *more = (jnp.int32(keep) for keep in keeps)
        if way == "in":
            cache, _, ok = write(cache, jnp.int32(0), *wide, scores, T, first, method)
        else:
            cache, ok = write_all(cache, jnp.int32(0), *wide, scores, T)
            more = [first, *more]
        assert ok
        for keep in more:
            cache = again(cache, method, keep)
        kv.check_invariants(cache)
        return cache

    return run


def by_position(kvs):
    kvs = sorted(kvs, key=lambda x: x.position)
    at = np.array([x.position for x in kvs])
    return at, np.array([x.k for x in kvs]), np.array([x.v for x in kvs])


@pytest.mark.parametrize("way", ["in", "in the pool"])
def test_one_kv_stands_for_all_that_go(compressed, way):
    k, v, metric = prompt(0)
    cache = compressed(way, RAZOR, k, v, metric, KEEP)
    for (_, layer, h), kvs in heads_of(cache).items():
        at, keys, values = by_position(kvs)
        stays = np.isin(np.arange(T), at)
        assert not stays.all()
        want = compensated(k[layer, :, h], v[layer, :, h], np.arange(T), stays, SINKS)
        np.testing.assert_allclose(keys, want[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(values, want[1], rtol=1e-5, atol=1e-6)


def test_a_compensation_token_is_taken_up_by_the_next(compressed):
    k, v, metric = prompt(1)
    before = heads_of(compressed("in", RAZOR, k, v, metric, 32))
    after = heads_of(compressed("in", RAZOR, k, v, metric, 32, 18))
    changed = 0
    for at, kvs in after.items():
        old, new = by_position(before[at]), by_position(kvs)
        stays = np.isin(old[0], new[0])
        want = compensated(old[1], old[2], old[0], stays, SINKS)
        np.testing.assert_allclose(new[1], want[0], rtol=1e-5, atol=1e-6)
        changed += not stays.all()
    assert changed


def test_a_head_of_sinks_alone_has_no_place_for_the_rest():
    rows = jnp.arange(8.0).reshape(1, 8, 1)
    kept = jnp.arange(8)[None] < 4
    position = jnp.arange(8, dtype=jnp.int32)[None]
    k, v = Compensated(4).fold(
        rows, 2 * rows, position, rows[..., 0], ~kept, kept, jnp.int32(8), {}
    )
    assert np.array_equal(k[:, :4], rows[:, :4])
    assert np.array_equal(v[:, :4], 2 * rows[:, :4])


@pytest.mark.parametrize("way", ["in", "in the pool"])
def test_neighbours_of_like_keys_become_one(compressed, way):
    k, v, metric = prompt(2)
    for keep in (KEEP, 32):
        cache = compressed(way, MERGER, k, v, metric, keep)
        seen = 0
        for (_, layer, h), kvs in heads_of(cache).items():
            at, keys, values = by_position(kvs)
            stays = np.isin(np.arange(T), at)
            rows, scores = k[layer, :, h], metric[layer, h]
            sets = sets_of(rows, scores, set(range(T - PROTECTED, T)), int(stays.sum()))
            want = merged(rows, v[layer, :, h], sets, scores, stays)
            np.testing.assert_allclose(keys, want[0], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(values, want[1], rtol=1e-5, atol=1e-6)
            pivots = {pivot_of(members, scores) for members in sets}
            gone = set(np.flatnonzero(~stays).tolist())
            # Pivots go only where there is nothing else left.
            assert not gone & pivots or not set(range(T)) - gone - pivots
            seen += any(len(members) > 1 for members in sets)
        assert seen == L * H


def test_a_sequence_is_merged_again_from_what_it_holds(compressed):
    k, v, metric = prompt(3)
    before = heads_of(compressed("in", MERGER, k, v, metric, 32))
    after = heads_of(compressed("in", MERGER, k, v, metric, 32, KEEP))
    for name, kvs in after.items():
        old, new = by_position(before[name]), by_position(kvs)
        scores = metric[name[1], name[2]][old[0]]
        guarded = set(np.flatnonzero(old[0] >= T - PROTECTED).tolist())
        stays = np.isin(old[0], new[0])
        sets = sets_of(old[1], scores, guarded, int(stays.sum()))
        want = merged(old[1], old[2], sets, scores, stays)
        np.testing.assert_allclose(new[1], want[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(new[2], want[1], rtol=1e-4, atol=1e-5)


def test_what_nothing_goes_of_stays_to_the_bit(compressed):
    k, v, metric = prompt(4)
    for method in (RAZOR, MERGER):
        for (_, layer, h), kvs in heads_of(compressed("in", method, k, v, metric, 99)).items():
            at, keys, values = by_position(kvs)
            assert np.array_equal(keys, k[layer, at, h])
            assert np.array_equal(values, v[layer, at, h])


@pytest.mark.parametrize(
    ("part", "wrong"),
    [(Compensated, {"sinks": -1}), (GaussianMerged, {"sigma": 0}), (PivotsLast, {"alike": 2}),
     (PivotsLast, {"read_most": 1.5})],
)  # fmt: skip
def test_settings_out_of_range_are_refused(part, wrong):
    with pytest.raises(UserError, match=f"^{next(iter(wrong))}[^\n]*$"):
        part(**wrong)
