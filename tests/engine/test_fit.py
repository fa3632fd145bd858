"""The fit of a calibration, against least squares; what claims count as."""

import numpy as np
import pytest

from kvjax.cache.methods.predicted_reads import CLAIM_LEVELS, LEAST
from kvjax.engine.calibrate import run
from kvjax.engine.calibrate.fit import (
    FIRST,
    Sums,
    explained,
    extras_of,
    rank_correlation,
    solve,
    target,
)


def drawn(rng, tokens: int = 60, layers: int = 2, heads: int = 2, size: int = 5):
    hidden = rng.standard_normal((layers, tokens, size)).astype(np.float32)
    k, v = rng.uniform(0.5, 2, (2, layers, heads, tokens)).astype(np.float32)
    return hidden, k, v, np.exp(rng.standard_normal((layers, heads, tokens)) * 3).astype(np.float32)


def test_the_fit_is_that_of_least_squares():
    rng = np.random.default_rng(4)
    texts = [drawn(rng) for _ in range(3)]
    sums = Sums.zeros(2, 2, 5)
    for text in texts:
        sums.add(*text)
    assert sums.count == 3 * (60 - FIRST)
    weight, extra = solve(sums, 0.0)
    good = explained(sums, weight, extra)
    for layer, head in np.ndindex(2, 2):
        columns = [
            np.concatenate(
                [h[layer, FIRST:], extras_of(k, v)[layer, head, FIRST:]], axis=1, dtype=np.float64
            )
            for h, k, v, _ in texts
        ]
        x = np.concatenate(columns)
        y = np.concatenate([target(score)[layer, head, FIRST:] for *_, score in texts])
        expected, *_ = np.linalg.lstsq(x, y, rcond=None)
        mine = np.concatenate([weight[layer, :, head], extra[layer, head]])
        np.testing.assert_allclose(mine, expected, rtol=1e-3, atol=1e-4)
        left = np.sum((y - x @ mine) ** 2) / np.sum((y - y.mean()) ** 2)
        np.testing.assert_allclose(good[layer, head], 1 - left, atol=1e-4)


def test_a_ridge_draws_weights_to_nought_but_not_the_constant():
    rng = np.random.default_rng(5)
    sums = Sums.zeros(2, 2, 5)
    hidden, k, v, score = drawn(rng)
    sums.add(hidden, k, v, score * np.float32(np.exp(7)))
    weight, extra = solve(sums, 1e4)
    assert np.abs(weight).max() < 1e-2
    mean = target(score * np.float32(np.exp(7)))[..., FIRST:].mean(axis=-1)
    np.testing.assert_allclose(extra[..., 3], mean, rtol=0.05)


def test_rank_correlation_is_spearmans():
    rng = np.random.default_rng(6)
    true = rng.standard_normal((1, 2, 40))
    assert rank_correlation(np.exp(true), true) == pytest.approx(1)
    assert rank_correlation(-true, true) == pytest.approx(-1)
    other = rng.standard_normal((1, 2, 40))
    ranks = [[sorted(row).index(x) for x in row] for row in (other[0, 1], true[0, 1])]
    expected = np.corrcoef(ranks).ravel().tolist()[1]
    assert rank_correlation(other, true).item(1) == pytest.approx(expected)


def test_a_claim_counts_as_the_prediction_that_is_as_rare():
    predictions = np.arange(100.0)
    share = np.zeros(CLAIM_LEVELS)
    share[1], share[2:] = 0.1, 0.6
    share[3:] = 1.0
    table = run.claim_table(share, predictions, 0.5)
    # None is as large as the first level: above all; a tenth: the tenth from the top.
    assert table[:3].tolist() == [99.0, 89.0, 39.0]
    assert (table[3:] == LEAST).all()
    # With a fifth of the budget, a tenth of the claims stands where two fifths of the rest do.
    assert run.claim_table(share, predictions, 0.2)[1] == 59.0
