"""Methods that fold what goes into what stays: `razor-attention`, `kvmerger` and `ems`."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import cache as kv
from kvjax.cache.methods.ems import AT_ONCE, GlobalLocal, ToCentres
from kvjax.cache.methods.kvmerger import GaussianMerged, PivotsLast
from kvjax.cache.methods.razor_attention import Compensated
from kvjax.cache.policy import ByLayer
from kvjax.cache.policy.method import PLAIN
from kvjax.errors import UserError
from tests.cache.pair import heads_of
from tests.cache.stand_in import QUICKLY
from tests.oracle.merging import (
    classes_of,
    compensated,
    merged,
    pivot_of,
    sets_of,
    with_centres,
)

L, H, D, B, T = 2, 2, 8, 4, 43
PROTECTED, SINKS, KEEP = 6, 4, 20
RAZOR = PLAIN._with(merger=Compensated(SINKS), protected=PROTECTED, sinks=SINKS)
MERGER = PLAIN._with(
    allocator=ByLayer(), selector=PivotsLast(), merger=GaussianMerged(), protected=PROTECTED
)
CENTRES = PLAIN._with(allocator=ByLayer(), merger=ToCentres(), protected=PROTECTED)


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


@pytest.mark.parametrize("keeps", [(32,), (38, 30)], ids=["in order", "moved"])
def test_a_sequence_is_merged_again_from_what_it_holds(compressed, keeps):
    """Neighbours are those in the text, wherever a compression has moved them."""
    k, v, metric = prompt(3)
    before = heads_of(compressed("in", MERGER, k, v, metric, *keeps))
    after = heads_of(compressed("in", MERGER, k, v, metric, *keeps, KEEP))
    ways = [np.diff([x.position for x in kvs]) for kvs in before.values()]
    assert any((way < 0).any() for way in ways) == (len(keeps) > 1)
    for name, kvs in after.items():
        old, new = by_position(before[name]), by_position(kvs)
        scores = metric[name[1], name[2]][old[0]]
        guarded = set(np.flatnonzero(old[0] >= T - PROTECTED).tolist())
        stays = np.isin(old[0], new[0])
        sets = sets_of(old[1], scores, guarded, int(stays.sum()))
        want = merged(old[1], old[2], sets, scores, stays)
        np.testing.assert_allclose(new[1], want[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(new[2], want[1], rtol=1e-4, atol=1e-5)


def alike(seed: int):
    """Keys and values that are much like their neighbours', and a metric of which some is small."""
    k, v, metric = prompt(seed)
    for t in range(1, T):
        if t % 5 or t % 3:
            v[:, t] = v[:, t - 1] + 0.25 * v[:, t]
    return k, v, metric**3


@pytest.mark.parametrize("way", ["in", "in the pool"])
def test_what_is_worth_it_goes_into_the_centre_that_it_is_like(compressed, way):
    k, v, metric = alike(5)
    cache = compressed(way, CENTRES, k, v, metric, KEEP)
    guarded, joined = set(range(T - PROTECTED, T)), np.zeros(3)
    for (_, layer, h), kvs in heads_of(cache).items():
        at, keys, values = by_position(kvs)
        stays = np.isin(np.arange(T), at)
        rows = k[layer, :, h], v[layer, :, h], metric[layer, h]
        classes = classes_of(*rows, guarded, stays)
        want = with_centres(*rows, classes, stays)
        np.testing.assert_allclose(keys, want[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(values, want[1], rtol=1e-5, atol=1e-6)
        others = ({"irrelevant": 0}, {"alike": 0})
        found = [classes, *(classes_of(*rows, guarded, stays, **x) for x in others)]
        joined += [sum(map(len, x.values())) for x in found]
    # Of what goes some is irrelevant, some is like a centre, some is like none.
    assert 0 < joined[0] < joined[1:].min()


def test_centres_are_merged_into_again(compressed):
    k, v, metric = alike(6)
    before = heads_of(compressed("in", CENTRES, k, v, metric, 32))
    after = heads_of(compressed("in", CENTRES, k, v, metric, 32, KEEP))
    joined = 0
    for name, kvs in after.items():
        old, new = by_position(before[name]), by_position(kvs)
        scores = metric[name[1], name[2]][old[0]]
        guarded = set(np.flatnonzero(old[0] >= T - PROTECTED).tolist())
        stays = np.isin(old[0], new[0])
        classes = classes_of(old[1], old[2], scores, guarded, stays)
        want = with_centres(old[1], old[2], scores, classes, stays)
        np.testing.assert_allclose(new[1], want[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(new[2], want[1], rtol=1e-4, atol=1e-5)
        joined += sum(map(len, classes.values()))
    assert joined


@QUICKLY
def folded(k, v, score, dropped):
    """One head after `ToCentres`; slots that are not held have score NaN."""
    kept = ~dropped & ~jnp.isnan(score)
    position, seq_len = jnp.zeros((1, len(k)), jnp.int32), jnp.int32(len(k))
    k, v = ToCentres().fold(
        k[None], v[None], position, score[None], dropped[None], kept[None], seq_len, {}
    )
    return k[0], v[0]


def test_directions_are_averaged_and_norms_apart():
    k = np.array([[4, 0], [0, 1], [2, 2], [-4, 0], [0, 8]], np.float32)
    v = np.array([[1, 0], [0, 1], [1, 0.25], [-1, 0], [0, 1]], np.float32)
    score = np.array([3, 2, 1, 1, np.inf], np.float32)
    # The fourth is the opposite of the first in key and value; the last is no centre.
    dropped = np.array([False, False, True, True, False])
    keys, values = folded(k, v, score, dropped)
    sum_of = np.array([3 + 0.5**0.5, 0.5**0.5])
    norm = (3 * 4 + 8**0.5) / 4
    np.testing.assert_allclose(keys[0], sum_of / np.linalg.norm(sum_of) * norm, rtol=1e-6)
    np.testing.assert_allclose(values[0], [1, 0.0625], rtol=1e-6)
    assert np.array_equal(keys[1:], k[1:])
    assert np.array_equal(values[1:], v[1:])


def test_what_nobody_read_is_merged_with_nothing():
    k = np.ones((4, 2), np.float32)
    score = np.array([0, 0, 0, np.inf], np.float32)
    keys, values = folded(k, k, score, np.array([True, True, False, False]))
    assert np.array_equal(keys, k)
    assert np.array_equal(values, k)


def test_more_kvs_than_are_compared_at_once():
    rng, size = np.random.default_rng(7), AT_ONCE + 44
    k, v = (rng.standard_normal((size, 3)).astype(np.float32) for _ in range(2))
    score = rng.random(size).astype(np.float32)
    stays = score > 0.6
    keys, values = folded(k, v, score, ~stays)
    classes = classes_of(k, v, score, set(), stays)
    want = with_centres(k, v, score, classes, stays)
    assert any(max(members, default=0) >= AT_ONCE for members in classes.values())
    np.testing.assert_allclose(keys[stays], want[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(values[stays], want[1], rtol=1e-4, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 12), st.integers(0, 12))
def test_centres_lie_among_what_they_stand_for(seed, held, gone):
    rng, size = np.random.default_rng(seed), 12
    k, v = (rng.integers(-2, 3, (size, 2)).astype(np.float32) for _ in range(2))
    score = rng.random(size).astype(np.float32) * rng.integers(0, 2, size)
    score[held:] = np.nan
    k[held:], v[held:] = np.inf, np.nan
    dropped = np.arange(size) < min(gone, held)
    score[min(gone, held) : held : 3] = np.inf
    keys, values = (np.asarray(x) for x in folded(k, v, score, dropped))
    for i in range(held):
        if dropped[i]:
            continue
        if np.isinf(score[i]):
            assert np.array_equal(keys[i], k[i])
            assert np.array_equal(values[i], v[i])
        joined = [i, *np.flatnonzero(dropped).tolist()]
        norms = np.linalg.norm(k[joined], axis=-1)
        assert norms.min() - 1e-5 <= np.linalg.norm(keys[i]) <= norms.max() + 1e-5
        assert (v[joined].min(axis=0) - 1e-5 <= values[i]).all()
        assert (values[i] <= v[joined].max(axis=0) + 1e-5).all()


def test_what_nothing_goes_of_stays_to_the_bit(compressed):
    k, v, metric = prompt(4)
    for method in (RAZOR, MERGER, CENTRES):
        for (_, layer, h), kvs in heads_of(compressed("in", method, k, v, metric, 99)).items():
            at, keys, values = by_position(kvs)
            assert np.array_equal(keys, k[layer, at, h])
            assert np.array_equal(values, v[layer, at, h])


@pytest.mark.parametrize(
    ("part", "wrong"),
    [(Compensated, {"sinks": -1}), (GaussianMerged, {"sigma": 0}), (PivotsLast, {"alike": 2}),
     (PivotsLast, {"read_most": 1.5}), (ToCentres, {"irrelevant": -0.1}),
     (ToCentres, {"alike": 1.1}), (GlobalLocal, {"window": 0})],
)  # fmt: skip
def test_settings_out_of_range_are_refused(part, wrong):
    with pytest.raises(UserError, match=f"^{next(iter(wrong))}[^\n]*$"):
        part(**wrong)
