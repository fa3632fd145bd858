"""What users ask of compression: refused in one line, or had, and at which rate."""

import contextlib
import dataclasses
import functools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from kvjax.cache import CompressionConfig, as_codec
from kvjax.cache.config import CALIBRATED
from kvjax.cache.methods import METHODS, get_method
from kvjax.cache.methods.adakv import Ada
from kvjax.cache.methods.fastgen import ByNeed
from kvjax.cache.methods.h2o import Accumulated
from kvjax.cache.methods.k_means import NearCentroids
from kvjax.cache.methods.kv_compress import KVCompress
from kvjax.cache.methods.kvcrush import SpreadOverBits
from kvjax.cache.methods.lazyeviction import HitAgain
from kvjax.cache.methods.pyramidkv import Pyramid
from kvjax.cache.methods.random import Random
from kvjax.cache.methods.scissorhands import OftenImportant
from kvjax.cache.methods.shared_reads import SharedReads
from kvjax.cache.methods.snapkv import SnapKV
from kvjax.cache.policy import ByLayer, Global, Method, Selector
from kvjax.cache.policy.allocate import CheapestBlocks
from kvjax.cache.store import CacheSpec
from kvjax.errors import UserError
from tests import oracle

# What is wrong has to be found by the code: users have no type checks.
pytestmark = pytest.mark.usefixtures("unchecked_signatures")

WHOLE = {
    "max_cache_tokens": (1, 2**31 - 1),
    "budget_bytes": (1, 2**50),
    "floor": (1, 2**31 - 1),
    "window": (1, 4096),
    "protected": (0, 2**31 - 1),
    "sinks": (0, 2**31 - 1),
    "compress_every": (1, 2**31 - 1),
    "max_kvs_per_step": (1, 100_000_000),
}


def made(**settings: Any) -> CompressionConfig:
    return CompressionConfig(**settings)


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_of_a_config_have_limits(name):
    least, most = WHOLE[name]
    for good in (least, most, np.int64(least)):
        value = getattr(made(**{name: good}), name)
        assert value == good
        assert type(value) is int
    wrong = (least - 1, most + 1, 10**30, 2.5, 8.0, math.nan, math.inf, True, "8", b"8", [8], -1)
    for bad in wrong:
        with pytest.raises(UserError, match=rf"^{name} .*: give a whole number from {least} to "):
            made(**{name: bad})


@pytest.mark.parametrize(
    "bad", [0, 0.999, -2, math.nan, math.inf, 10**400, "8", True, [8], 2j, np.array([2.0, 3.0])]
)
def test_rates_are_finite_and_from_one_on(bad):
    with pytest.raises(UserError, match=r"^rate .*: give a number of at least 1$"):
        made(rate=bad)


def test_flags_and_names_have_their_type():
    for name in ("on_prefill", "before_preemption"):
        for bad in (1, 0, None, "no", np.True_):
            with pytest.raises(UserError, match=f"^{name} .*: give True or False$"):
                made(**{name: bad})
    for bad in (5, None, b"snapkv", METHODS["snapkv"].scorer, "\ud800"):
        with pytest.raises(UserError, match=r"^method .*: give the name of a method$"):
            made(method=bad)
    for bad in ("x" * 5000, "kvcrush-chunk" + "9" * 5000 + ":snapkv", "a\nb"):
        with pytest.raises(UserError, match=r"^no method '.{1,60}; did you mean [^\n]*\?$"):
            made(method=bad)
    with pytest.raises(UserError, match="give one of them"):
        CompressionConfig(rate=2, max_cache_tokens=100)
    with pytest.raises(UserError, match=r"^max_cache_tokens 100 and budget_bytes 9: "):
        CompressionConfig(budget_bytes=9, max_cache_tokens=100)


def test_numbers_that_are_like_plain_ones_become_those():
    config = made(rate=Fraction(5, 2), window=np.int32(6))
    assert (config.rate, type(config.rate)) == (2.5, float)
    assert hash(config) == hash(CompressionConfig(rate=2.5, window=6))
    assert type(CompressionConfig(rate=8).rate) is int  # as it is shown


def test_a_window_reaches_the_method_or_is_refused():
    without = []
    for name in METHODS:
        for window in (1, 3, 4096):
            with contextlib.suppress(UserError):
                method = CompressionConfig(method=name, window=window).resolved
                assert getattr(method.scorer, "window", window) == window
                continue
            without.append(name)
    for name in without:
        says = f"window 7: method {name} observes no window: leave one of them out"
        with pytest.raises(UserError, match=f"^{says}$"):
            CompressionConfig(method=name, window=7)
    # All that a method which evicts nothing is given is without effect.
    assert METHODS["full"].scorer is None
    assert "full" not in without
    assert {"key-norm", "predicted-reads-blind"} <= set(without)
    assert "h2o" not in without  # it can have one
    reads = CompressionConfig(method="shared-reads", window=2).resolved
    assert reads.scorer == SharedReads(window=2, queries=2)
    assert CompressionConfig(window=2).resolved.scorer == SnapKV(window=2)
    with pytest.raises(UserError, match=r"^window 2: method matched:predicted-reads-blind "):
        CompressionConfig(window=2).chosen(CALIBRATED)


def test_a_rate_of_one_evicts_nothing():
    for rate in (1, 1.0):
        config = CompressionConfig(rate=rate)
        assert not config.sized
        for length in (1, 15, 16, 17, 100, 84_870):
            assert config.cap(length, 16) is None
            assert config.blocks(length, 6, 16) is None
            assert config.reached_rate(length, 6, 16) == 1
    assert CompressionConfig(rate=1.001).sized
    assert not CompressionConfig(method="full", rate=8).sized
    assert CompressionConfig(rate=1, sinks=10**9).cap(1000, 16) is None


@pytest.mark.parametrize("block", [1, 16, 32])
@pytest.mark.parametrize("rate", [1, 1.0001, 1.5, 2, 8, 32, 64, 10.0**300])
def test_the_rate_that_is_reached_counts_the_blocks_that_are_kept(rate, block):
    layers, heads = 3, 2
    for floor in (1, 100, 128):
        config = CompressionConfig(rate=rate, floor=floor, protected=0)
        for length in (1, 16, 17, 128, 129, 500, 1000, 6001):
            budget = oracle.rate_blocks(length, rate, layers * heads, block, floor)
            reached = config.reached_rate(length, layers * heads, block)
            if rate == 1:
                assert config.blocks(length, layers * heads, block) is None
                assert reached == 1
            else:
                assert config.blocks(length, layers * heads, block) == budget
                assert reached == max(1, length * layers * heads / (budget * block))


def test_the_floor_is_told():
    for rate in (8, 16, 32, 64):
        assert CompressionConfig(rate=rate).reached_rate(1000, 90, 16) == 1000 / 128
    assert CompressionConfig(max_cache_tokens=100).reached_rate(1000, 90, 16) == 1000 / 112
    assert CompressionConfig(rate=8).reached_rate(100, 90, 16) == 1


def test_a_rate_is_what_it_says():
    """Over all heads: less than a block of theirs is lost, whatever a head's whole blocks hold."""
    for rate, length in ((8, 8000), (32, 1000), (16, 1000), (7.3, 4097)):
        reached = CompressionConfig(rate=rate, floor=8).reached_rate(length, 90, 8)
        assert rate <= reached < rate * 1.01
    assert CompressionConfig(rate=32, floor=8).reached_rate(1000, 90, 32) == 1000 / 32


@pytest.mark.parametrize(("dtype", "kv_bytes"), [("int4", 68), ("int8", 132), ("bfloat16", 256)])
def test_bytes_become_tokens_of_what_is_stored(dtype, kv_bytes):
    spec = CacheSpec(3, 2, 64, as_codec(dtype, "float32"), 16)
    # A block of each head, with the metric and the position of each KV.
    least = 3 * 2 * 16 * (kv_bytes + 8)
    for blocks in (1, 5):
        for further in (0, least - 1):
            asked = CompressionConfig(budget_bytes=blocks * least + further, protected=0)
            assert asked.sized
            given = asked.in_tokens(spec)
            assert (given.max_cache_tokens, given.budget_bytes) == (16 * blocks, None)
            assert given.cap(1000, 16) == 16 * blocks
            with pytest.raises(ValueError, match="in_tokens"):
                asked.cap(1000, 16)
    said = f"^budget_bytes {least - 1}: a block of 16 KVs in {dtype} for each of 6 heads takes"
    with pytest.raises(UserError, match=f"{said} {least}; give that or more$"):
        CompressionConfig(budget_bytes=least - 1).in_tokens(spec)
    rate = CompressionConfig(rate=2)
    assert rate.in_tokens(spec) is rate


def test_a_cap_below_what_is_protected_is_refused():
    config = CompressionConfig(method="streaming-llm", max_cache_tokens=100, protected=97)
    assert config.cap(100, 16) == 100
    for ask in (
        config.cap,
        *(functools.partial(f, heads=6) for f in (config.blocks, config.reached_rate)),
    ):
        with pytest.raises(UserError, match=r"101 tokens .* \(97 newest, 4 oldest\)"):
            ask(prompt_len=101, block_size=16)
    assert dataclasses.replace(config, protected=96).cap(101, 16) == 100


WINDOWED = (KVCompress, SnapKV, Accumulated, OftenImportant, HitAgain)
SAFE, STAND_INS = (Global, CheapestBlocks), (SpreadOverBits, NearCentroids)


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        *(
            (SharedReads, {name: value})
            for name in ("tokens", "queries", "ahead", "oldest", "newest")
            for value in (-1, 2.5, True, 10**12)
        ),
        (SharedReads, {"ahead": 256}),
        *((SharedReads, {"fade": value}) for value in (-0.1, 1.5, math.nan, "1")),
        *((SharedReads, {name: math.inf}) for name in ("sure", "unsure")),
        *((SharedReads, {name: -0.1}) for name in ("sure", "unsure")),
        *((kind, {"window": value}) for kind in WINDOWED for value in (0, 4097, 2.5, True, "8")),
        *((KVCompress, {"power": value}) for value in (0, 3, 1.5)),
        *((kind, {"pool": value}) for kind in (KVCompress, SnapKV) for value in (0, 4, 257, 7.5)),
        *((KVCompress, {"excluded_distance": value}) for value in (-1, 0.5)),
        (KVCompress, {"group": "median"}),
        (KVCompress, {"continual": 1}),
        (SnapKV, {"pool_kind": "min"}),
        (SnapKV, {"group_first": 1}),
        *((Accumulated, {"forget": value}) for value in (-0.1, 1.5, math.nan)),
        (Accumulated, {"continual": "yes"}),
        *((SharedReads, {"decay": value}) for value in (-0.1, 1.5, math.nan)),
        *((SharedReads, {name: math.inf}) for name in ("background", "sure", "unsure")),
        *((SharedReads, {name: -1}) for name in ("tokens", "ahead", "oldest", "newest", "fade")),
        *((SharedReads, {"queries": value}) for value in (0, 256)),
        (SharedReads, {"window": 3}),
        *((Random, {"seed": value}) for value in (-1, 2**31)),
        (HitAgain, {"least": math.nan}),
        *((kind, {"safe": value}) for kind in SAFE for value in (-0.1, 2.0, math.nan)),
        (Ada, {"floor": -0.1}),
        (Pyramid, {"exact": 0}),
        (Pyramid, {"beta": 0}),
        (ByLayer, {"layers": "all"}),
        (ByLayer, {"heads": Ada}),
        *((kind, {"share": x}) for kind in STAND_INS for x in (0, 1, math.nan)),
        *((SpreadOverBits, {"compared": value}) for value in (0, 4097, 1.5)),
        *((SpreadOverBits, {name: "none"}) for name in ("anchor", "mode", "pick")),
        (SpreadOverBits, {"seed": -1}),
        (NearCentroids, {"iterations": 0}),
        *((Selector, {"unit": value}) for value in (0, -1, 4097, 10**12)),
        (Selector, {"scope": "model"}),
        *((Method, {name: -1}) for name in ("protected", "sinks")),
        *((Method, {name: 10**12}) for name in ("protected", "sinks")),
        *((Method, {name: 1.1}) for name in ("protected_share", "protected_more")),
        (Method, {"evidence": "hearsay"}),
        (Method, {"scorer": "attention"}),
        (Method, {"allocator": ByLayer}),
        (Method, {"selector": 0.25}),
        (Method, {"merger": "mean"}),
        (Method, {"query_aware": 1}),
    ],
)
def test_wrong_values_of_a_method_are_named(kind, bad):
    needed = {Method: {"name": "x", "summary": "", "scorer": None}}
    with pytest.raises(UserError, match=rf"^{next(iter(bad))} [^\n]*: (give|wanted) [^\n]+$"):
        kind(**{**needed.get(kind, {}), **bad})


def test_parts_that_cannot_go_together_are_named():
    same = Selector(scope="layer")
    with pytest.raises(UserError, match=r"^scope 'layer': wanted an allocator by layer"):
        Method("x", "", KVCompress(), selector=same)
    with pytest.raises(UserError, match=r"^scope 'layer': wanted an allocator by layer, which By"):
        Method("x", "", KVCompress(), ByNeed(), same)
    with pytest.raises(UserError, match=r"^scope 'head': wanted layer for openvino's mode"):
        Method("x", "", KVCompress(), ByLayer(), SpreadOverBits(mode="openvino"))
    with pytest.raises(UserError, match=r"^window 3: wanted at least 4"):
        SharedReads(window=3)


def test_units_of_wrappers_have_a_limit():
    assert get_method("kvcrush-chunk4096:snapkv").selector == SpreadOverBits(compared=4096)
    with pytest.raises(UserError, match="no method"):
        get_method("kvcrush-chunk4097:snapkv")
