"""`python -m benchmarks.filling`: which finer codes are left as a pool fills up, and of what."""

import argparse

import numpy as np
import pytest

from benchmarks.filling import demoted, kinds, lines, main
from kvjax.cache import check_invariants
from kvjax.cli import main_of
from tests.cache.test_fine import B, H, L, T, empty, prompted, tags


@pytest.mark.parametrize("share", [0, 0.3, 0.5, 1])
@pytest.mark.parametrize("dearest", [False, True])
def test_a_share_keeps_its_finer_codes(share, dearest):
    cache, metric, _ = prompted()
    costs = np.sort(metric.reshape(L, H, T // B, B).max(-1).ravel())
    found = demoted(cache, share, dearest)
    check_invariants(found)
    left = round(share * len(costs))
    refined = np.asarray(tags(found).of(found.block_table[0]))[..., : T // B] < cache.num_blocks
    kept = metric.reshape(L, H, T // B, B).max(-1)[refined]
    assert (
        np.sort(kept).tolist() == (costs[:left] if dearest else costs[len(costs) - left :]).tolist()
    )
    assert (found.free.count == cache.free.count).all()


def test_a_type_without_finer_codes_stays():
    cache = empty("int4")
    assert demoted(cache, 0.5, False) is cache


def test_results_of_a_share_are_its_own():
    def result(label, kl):
        same = {"protocol": "chat", "rate": 8.0, "bytes_full": 80, "score": 1.0}
        return {**same, "method": f"m in {label}", "bytes": 10, "kl": kl}

    options = argparse.Namespace(
        protocols="chat", rates=[8.0], shares=[0.0, 0.5], method="m", type="int4+", beside="int8"
    )
    assert list(kinds(options.shares)) == [(0.0, False), (0.5, False), (0.5, True)]
    shares = ("0 %", "50 %", "50 %")
    orders = ("", ", the cheapest lost", ", the dearest lost")
    labels = [f"int4+, {s} with finer codes{o}" for s, o in zip(shares, orders, strict=True)]
    results = [result(label, 0.25 * i) for i, label in enumerate(["int8", *labels])]
    results += [result("int4+", 9.0)]
    found = list(lines(options, results))
    assert [row[3] for row in found] == ["8.0"] * 4
    assert [row[6].split()[0] for row in found] == ["0.0000", "0.2500", "0.5000", "0.7500"]


def test_what_is_refused(capsys):
    for given, says in (
        (("--shares", "2"), "--shares 2"),
        (("--rates", "a"), "--rates"),
        (("--type", "none"), "none"),
    ):
        assert main_of(main, list(given)) == 2
        assert says in capsys.readouterr().err.strip().splitlines()[-1]
