"""What users ask of compression: refused in one line, or had, and at which rate."""

import dataclasses
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from kvjax.cache import CompressionConfig
from kvjax.cache.methods import METHODS, get_method
from kvjax.cache.methods.base import Allocation, Method, Observation, Reads, Representatives
from kvjax.errors import UserError
from tests import oracle

# What is wrong has to be found by the code: users have no type checks.
pytestmark = pytest.mark.usefixtures("unchecked_signatures")

WHOLE = {
    "max_cache_tokens": (1, 2**31 - 1),
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
    for bad in (5, None, b"snapkv", METHODS["snapkv"], "\ud800"):
        with pytest.raises(UserError, match=r"^method .*: give the name of a method$"):
            made(method=bad)
    for bad in ("x" * 5000, "kvcrush-chunk" + "9" * 5000 + ":snapkv", "a\nb"):
        with pytest.raises(UserError, match=r"^no method '.{1,60}; did you mean [^\n]*\?$"):
            made(method=bad)
    with pytest.raises(UserError, match="give one of them"):
        CompressionConfig(rate=2, max_cache_tokens=100)


def test_numbers_that_are_like_plain_ones_become_those():
    config = made(rate=Fraction(5, 2), window=np.int32(6))
    assert (config.rate, type(config.rate)) == (2.5, float)
    assert hash(config) == hash(CompressionConfig(rate=2.5, window=6))
    assert type(CompressionConfig(rate=8).rate) is int  # as it is shown


def test_every_accepted_window_gives_a_method():
    for name in METHODS:
        for window in (1, 3, 4096):
            method = CompressionConfig(method=name, window=window).resolved
            if method.observation is not None:
                assert method.observation.window == window
    reads = CompressionConfig(window=2).resolved.observation
    assert reads is not None
    assert reads.reads == Reads(queries=2)


def test_a_rate_of_one_evicts_nothing():
    for rate in (1, 1.0):
        config = CompressionConfig(rate=rate)
        assert not config.sized
        for length in (1, 15, 16, 17, 100, 84_870):
            assert config.cap(length, 16) is None
            assert config.reached_rate(length, 16) == 1
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
            cap = oracle.cache_cap(length, rate, block, floor)
            whole = layers * heads * -(-length // block)
            budget = oracle.budget_blocks(cap, layers, heads, block)
            reached = config.reached_rate(length, block)
            if rate == 1 or whole <= budget:
                assert reached == 1
            else:
                assert reached == pytest.approx(length * layers * heads / (budget * block))
                assert reached > 1


def test_the_floor_is_told():
    for rate in (8, 16, 32, 64):
        assert CompressionConfig(rate=rate).reached_rate(1000, 16) == 1000 / 128
    assert CompressionConfig(rate=8).reached_rate(8000, 16) == 8000 / 992
    assert CompressionConfig(max_cache_tokens=100).reached_rate(1000, 16) == 1000 / 112
    assert CompressionConfig(rate=8).reached_rate(100, 16) == 1


def test_a_cap_below_what_is_protected_is_refused():
    config = CompressionConfig(method="streaming-llm", max_cache_tokens=100, protected=97)
    assert config.cap(100, 16) == 100
    for ask in (config.cap, config.reached_rate):
        with pytest.raises(UserError, match=r"101 tokens .* \(97 newest, 4 oldest\)"):
            ask(101, 16)
    assert dataclasses.replace(config, protected=96).cap(101, 16) == 100


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        *(
            (Reads, {name: value})
            for name in ("tokens", "queries", "ahead", "oldest", "newest")
            for value in (-1, 2.5, True, 10**12)
        ),
        (Reads, {"tokens": 0}),
        (Reads, {"queries": 0}),
        (Reads, {"ahead": 256}),
        *((Reads, {"fade": value}) for value in (-0.1, 1.5, math.nan, "1")),
        *((Reads, {name: math.inf}) for name in ("sure", "unsure")),
        *((Reads, {name: -0.1}) for name in ("sure", "unsure")),
        *((Observation, {"window": value}) for value in (0, 4097, 2.5, True, "8")),
        *((Observation, {"power": value}) for value in (0, 3, 1.5)),
        *((Observation, {"pool": value}) for value in (0, 4, 257, 7.5)),
        *((Observation, {"query_decay": value}) for value in (-0.1, 1.5, math.nan)),
        *((Observation, {"decode_decay": value}) for value in (-0.1, 1.5)),
        *((Observation, {"background": value}) for value in (-1, math.inf)),
        *((Observation, {"seed": value}) for value in (-1, 2**31)),
        (Observation, {"least": math.nan}),
        (Observation, {"excluded_distance": -1}),
        (Observation, {"pool_kind": "min"}),
        (Observation, {"group": "median"}),
        (Observation, {"statistic": ["sum"]}),
        (Observation, {"source": "tea leaves"}),
        (Observation, {"reads": 10}),
        (Observation, {"pool_window": 1}),
        (Observation, {"accumulate": True, "statistic": "hits"}),
        *((Allocation, {"floor": value}) for value in (-0.1, 2.0, math.nan)),
        (Allocation, {"exact": False}),
        (Allocation, {"beta": 0}),
        (Allocation, {"layers": "all"}),
        (Allocation, {"heads": "all"}),
        (Allocation, {"weights": [1.0]}),
        (Allocation, {"weights": (1.0, math.nan)}),
        (Allocation, {"weights": (0.0, 0.0), "layers": "weights"}),
        *((Representatives, {"share": value}) for value in (0, 1, math.nan)),
        *((Representatives, {"unit": value}) for value in (0, 4097, 1.5)),
        (Representatives, {"unit": 8, "kind": "k-means"}),
        (Representatives, {"anchor": "none"}),
        (Representatives, {"mode": "none"}),
        (Representatives, {"kind": "none"}),
        (Representatives, {"pick": "first"}),
        (Representatives, {"seed": -1}),
        (Representatives, {"iterations": 0}),
        *((Method, {name: -1}) for name in ("protected", "sinks", "unit")),
        *((Method, {name: 10**12}) for name in ("protected", "sinks", "unit")),
        (Method, {"protected_share": 1.1}),
        (Method, {"shared": True}),
        (Method, {"per_age": 1}),
        (Method, {"runs": "always"}),
        (Method, {"evidence": "hearsay"}),
        (Method, {"observation": "attention"}),
        (Method, {"allocation": "uniform"}),
        (Method, {"representatives": 0.25}),
    ],
)
def test_wrong_values_of_a_method_are_named(kind, bad):
    needed = {Observation: {"window": 8}, Method: {"name": "x", "summary": "", "observation": None}}
    with pytest.raises(UserError, match=rf"^{next(iter(bad))} [^\n]*: (give|wanted) [^\n]+$"):
        kind(**{**needed.get(kind, {}), **bad})


def test_reads_need_a_window_that_sums():
    bad: dict[str, Any]
    for bad in ({"window": None}, {"window": 3}, {"window": 4, "statistic": "hits"}):
        with pytest.raises(UserError, match="window"):
            Observation(**bad, reads=Reads())


def test_units_of_wrappers_have_a_limit():
    assert get_method("kvcrush-chunk4096:snapkv").representatives == Representatives(unit=4096)
    with pytest.raises(UserError, match="no method"):
        get_method("kvcrush-chunk4097:snapkv")
