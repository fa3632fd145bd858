"""OpenVINO's rule of representatives and the paper's, on one small layer, against the oracle."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.methods import kvcrush
from kvjax.cache.methods.k_means import spread
from kvjax.cache.methods.kvcrush import SpreadOverBits
from kvjax.cache.policy.representatives import times_over
from kvjax.cache.policy.select import Candidates
from tests.cache.stand_in import QUICKLY
from tests.oracle.representatives import crush
from tests.oracle.scores import Prompt

H, T, B, D = 2, 48, 4, 4
GUARDED = set(range(4)) | set(range(T - 4, T))


def layer(seed: int) -> tuple[np.ndarray, Prompt]:
    """Metrics of the heads' KVs, and a prompt for what the oracle asks of its shape."""
    rng = np.random.default_rng(seed)
    none = np.zeros((1, T, H, D), np.float32)
    return rng.random((H, T)).astype(np.float32), Prompt(none, none, none, 24, B)


@pytest.mark.parametrize(
    ("openvino", "unit", "anchor"),
    [
        (True, 1, "random"),
        (True, 4, "mean"),
        (False, 1, "mean"),
        (False, 4, "alternating"),
        (False, 1, "zeros"),
        (False, 4, "ones"),
    ],
)
def test_representatives_are_those_of_the_oracle(openvino, unit, anchor):
    mode = "openvino" if openvino else "paper"
    selector = SpreadOverBits(
        scope="layer" if openvino else "head", share=0.5, mode=mode, anchor=anchor, compared=unit
    )
    evicted = QUICKLY(lambda *x: selector.choose(Candidates(*x)))
    for seed, kept in enumerate((3, 6, 9)):
        metric, prompt = layer(seed)
        if openvino:  # all heads of a layer keep the same, by one vector of metrics
            metric[:] = metric.mean(axis=0)
        guard = np.isin(np.arange(T), list(GUARDED))
        keys = np.where(guard, np.inf, metric).astype(np.float32)
        count = np.full(H, T - kept * B, np.int32)
        threshold = np.sort(keys, axis=-1)[:, T - kept * B - 1]
        position = np.broadcast_to(np.arange(T, dtype=np.int32), (H, T))
        gone = evicted(keys, keys, position, np.full(H, T, np.int32), count, threshold)
        scores = {(0, head): metric[head].astype(np.float64) for head in range(H)}
        rule = crush(None, share=0.5, anchor=anchor, unit=unit, openvino=openvino)
        want = rule(prompt, 0, scores, GUARDED, [kept] * H)
        for head in range(H):
            got = np.flatnonzero(~np.asarray(gone)[head]).tolist()
            assert got == want[0, head], (openvino, unit, anchor, kept)


MANY = [(114_688, 49_152), (114_688, 114_688), (1 << 20, 262_147), ((1 << 30) - 1, 3), (70_001, 1)]
"""Candidates and representatives whose product passes 32 bits, and others."""


@pytest.mark.parametrize(("amount", "wanted"), MANY)
def test_shares_of_many_are_whole_numbers(amount, wanted):
    index = np.random.default_rng(0).integers(0, wanted, 1000, endpoint=True)
    for whole, parts in ((amount, wanted), (wanted, amount)):
        got = QUICKLY(times_over)(*(np.asarray(x, np.uint32) for x in (index, whole, parts)))
        want = np.divmod(index.astype(np.uint64) * np.uint64(whole), np.uint64(parts))
        for one, other in zip(got, want, strict=True):
            assert np.array_equal(one, other)


def test_each_bin_of_many_has_one_representative():
    amount, wanted = 114_688, 49_152
    number = np.arange(wanted + 1, dtype=np.int64) * amount // wanted
    want = (number[:-1] + number[1:] - 1) // 2
    selector, position = SpreadOverBits(pick="middle"), np.arange(amount, dtype=np.int32)
    picked = QUICKLY(lambda *x: kvcrush._one_per_bin(selector, *x))(
        np.zeros(amount, np.float32), np.ones(amount, bool), position, np.int32(wanted)
    )
    assert np.array_equal(np.flatnonzero(picked), want)


def test_centroids_of_many_begin_evenly_spaced():
    start = spread(49_152, jnp.uint32(114_688), jnp.int32(49_152))
    assert np.array_equal(start, np.arange(49_152, dtype=np.int64) * 114_688 // 49_152)


def test_heads_that_lack_a_token_do_not_find_it_important():
    """Heads that lost different tokens and hold theirs in different orders."""
    rng = np.random.default_rng(5)
    heads, size = 3, 24
    count = np.array([20, 24, 13], np.int32)
    position = np.full((heads, size), -1, np.int32)
    for head in range(heads):
        position[head, : count[head]] = rng.permutation(40)[: count[head]]
    important = rng.random((heads, size)) < 0.7
    found = np.asarray(QUICKLY(kvcrush._bits_by_position)(important, position, count))
    held = [dict(zip(position[h, : count[h]], important[h])) for h in range(heads)]
    lacking = 0
    for head, other in np.ndindex(heads, heads):
        at = position[head, : count[head]]
        want = [held[other].get(token, False) for token in at]
        assert found[head, other, : count[head]].tolist() == want
        lacking += sum(token not in held[other] for token in at)
    assert lacking > 20
