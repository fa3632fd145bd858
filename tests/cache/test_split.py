"""How budgets are split over layers and heads, and what age makes of a metric: the parts alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as kv
from kvjax.cache.evict import eviction_scores
from kvjax.cache.methods import get_method
from kvjax.cache.methods.pyramidkv import Pyramid
from kvjax.cache.methods.pyramidkv_ablations import ByMeasure
from kvjax.cache.policy import ByLayer, Global, Selector
from kvjax.cache.policy.allocate import Budget, CheapestBlocks, apportion
from kvjax.cache.policy.method import PLAIN
from tests.oracle.scores import Prompt
from tests.oracle.selection import newest_of, pyramid_layers, webster

WRITE = jax.jit(kv.write_survivors)


def test_apportion_is_websters_method():
    split = jax.jit(apportion, static_argnums=4)
    rng = np.random.default_rng(0)
    for _ in range(40):
        share = rng.integers(1, 50, 5).astype(np.float32)
        low = rng.integers(0, 4, 5).astype(np.int32)
        high = (low + rng.integers(0, 12, 5)).astype(np.int32)
        total = np.int32(rng.integers(low.sum(), high.sum() + 1))
        want = webster(share.tolist(), low.tolist(), high.tolist(), int(total))
        assert np.asarray(split(share, low, high, total, 16)).tolist() == want


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("cap", "length"), [(40, 300), (64, 90), (24, 30), (8, 200)])
def test_pyramids_are_those_of_the_oracle(exact, short, cap, length):
    layers, window = 6, 8
    none = np.zeros((layers, length, 2, 1), np.float32)
    prompt = Prompt(none, none, none, cap, 4)
    want, _ = pyramid_layers(exact=exact, short=short)(prompt, window)
    blocks = np.int32(cap * layers * 2 // 4)

    @jax.jit
    def tokens(blocks, window, length):
        budget = Budget.of(blocks, length, window, (0.0, 0.0), (layers, 2, 4))
        return Pyramid(exact=exact, short=short).tokens(budget, {})

    got = tokens(blocks, np.int32(window), np.int32(length))
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "want"),
    [("ada-pyramidkv", [90, 86, 82, 78, 74, 70]), ("pyramidkv-exact", [80] * 6)],
)
def test_short_prompts_have_a_pyramid_in_ada_kvs_code_alone(name, want):
    """Of 90 tokens 80: the first layer keeps all, for twice 48 beside its window are more."""
    method = get_method(name)
    blocks, length = jnp.int32(80 * 6 * 2 // 4), jnp.int32(90)
    budget = Budget.of(blocks, length, method.protected, (0.0, 0.0), (6, 2, 4))
    assert isinstance(method.allocator, ByLayer)
    found = method.allocator.layers.tokens(budget, {})
    np.testing.assert_allclose(found, want, rtol=1e-6)


def test_the_newest_get_a_share_of_the_cap_and_more_of_a_large_one():
    @jax.jit
    def newest(blocks):
        return Budget.of(blocks, jnp.int32(9000), 2, (1 / 8, 1 / 4), (3, 2, 4)).protected

    caps = [4, 60, 64, 68, 100, 128, 1000]
    got = [int(newest(np.int32(cap * 3 * 2 // 4))) for cap in caps]
    assert got == [newest_of(cap, 2, 1 / 8, 1 / 4) for cap in caps]
    assert got == [2, 7, 8, 9, 21, 32, 359]


@pytest.mark.parametrize("exact", [True, False])
def test_only_floored_pyramids_keep_more_than_the_budget(exact):
    layers, heads, window, cap, length, b = 6, 2, 8, 64, 300, 4
    none = np.zeros((layers, length, heads, 1), np.float32)
    want, _ = pyramid_layers(exact=exact)(Prompt(none, none, none, cap, b), window)
    blocks = cap * layers * heads // b
    budget = Budget.of(jnp.int32(blocks), jnp.int32(length), window, (0.0, 0.0), (layers, heads, b))
    allowed = int(ByLayer(Pyramid(exact=exact)).allowed(budget, {}))
    whole = round(heads * float(np.sum(want)) / b)
    assert allowed == (blocks if exact else max(blocks, whole))
    assert (allowed > blocks) is not exact


def test_a_safe_share_of_the_even_split_stays_in_every_head():
    """The cheap head of a layer, or of a sequence, keeps half of what an even split gives it."""
    layers, heads, b, length = 2, 2, 4, 64
    metric = np.zeros((layers, heads, length), np.float32)
    metric[0, 0], metric[1, 1] = 1, 1
    keep = 2 * layers * heads * 4
    by_layer = ByLayer(heads=CheapestBlocks(safe=0.5))
    # Of equal costs those of the first head go first; a part of a block is not safe.
    cases = (
        (Global(safe=0.5), [[8, 4], [4, 16]]),
        (by_layer, [[12, 4], [4, 12]]),
        (Global(safe=0.4), [[10, 3], [3, 16]]),
        (ByLayer(heads=CheapestBlocks(safe=0.4)), [[13, 3], [3, 13]]),
    )
    for allocator, want in cases:
        method = dataclasses.replace(PLAIN, allocator=allocator)
        cache = kv.init_cache(
            num_slots=1, num_layers=layers, num_kv_heads=heads, head_dim=1, num_blocks=64,
            max_blocks_per_head=16, block_size=b,
        )  # fmt: skip
        kvs = np.zeros((layers, length, heads, 1), np.float32)
        given = (np.int32(0), kvs, kvs, metric, np.int32(length), np.int32(keep), method)
        cache, _, ok = WRITE(cache, *given)
        assert ok
        blocks = np.asarray(cache.context_len[0]) // b
        assert blocks.tolist() == want


@pytest.mark.parametrize(
    "allocator", [ByLayer(Pyramid(beta=3)), ByMeasure()], ids=lambda x: type(x).__name__
)
def test_heads_that_share_their_choice_keep_as_many_blocks(allocator):
    """Also where a layer's blocks do not divide evenly."""
    selector = Selector(scope="layer")
    method = dataclasses.replace(PLAIN, selector=selector, allocator=allocator, protected=4)
    layers, heads, length = 3, 2, 64
    metric = np.random.default_rng(0).random((layers, heads, length)).astype(np.float32)
    kvs = np.zeros((layers, length, heads, 1), np.float32)
    for keep in (21, 23, 33):
        cache = kv.init_cache(
            num_slots=1, num_layers=layers, num_kv_heads=heads, head_dim=1, num_blocks=96,
            max_blocks_per_head=16, block_size=4,
        )  # fmt: skip
        given = (np.int32(0), kvs, kvs, metric, np.int32(length), np.int32(keep), method)
        cache, _, ok = WRITE(cache, *given)
        assert ok
        count = np.asarray(cache.context_len[0])
        assert (count[:, 0] == count[:, 1]).all()
        assert keep - heads < count.sum() // 4 <= keep


def test_metrics_per_age_are_divided_by_the_queries_that_could_see_the_kv():
    """OpenVINO's score; summed over pages of 32 and averaged over heads afterwards."""
    method = get_method("paged-h2o-openvino")
    rng = np.random.default_rng(1)
    metric = rng.random((2, 96)).astype(np.float32)
    position = np.broadcast_to(np.arange(96, dtype=np.int32), (2, 96))
    held, seen = np.full(2, 96, np.int32), np.full(2, 100, np.int32)
    keys, raw = jax.jit(eviction_scores)(method, metric, {}, position, held, seen, 4)
    each = (metric / (100 - np.arange(96))).mean(axis=0)
    pages = np.repeat([np.inf, each[32:64].sum(), each[64:96].sum()], 32)
    for head in range(2):
        np.testing.assert_allclose(keys[head], pages, rtol=1e-5)
        np.testing.assert_allclose(raw[head][32:], each[32:], rtol=1e-5)
