"""Which device gets which heads."""

import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from kvjax.models.parallel import Dealing


@pytest.mark.parametrize(
    ("layers", "heads", "devices"), [(30, 3, 2), (4, 3, 4), (2, 8, 4), (5, 2, 8)]
)
def test_even_dealing(layers, heads, devices):
    dealing = Dealing.even(layers, heads, devices)
    assert dealing.number.shape == (layers, devices * -(-heads // devices))
    for row in dealing.number:
        assert sorted(row[row < heads]) == list(range(heads))
    assert np.ptp(dealing.heads_of_shards) <= 1
    assert dealing.heads_of_shards.sum() == layers * heads


def test_whole_dealings_leave_the_order_alone():
    np.testing.assert_array_equal(Dealing.even(2, 6, 3).number, [range(6)] * 2)


def test_by_head_undoes_a_dealing():
    dealing = Dealing(np.array([[2, 3, 0, 1], [3, 0, 1, 2]], np.int32), 3, 2)
    placed = np.array([[20, -1, 0, 10], [-1, 1, 11, 21]])
    np.testing.assert_array_equal(dealing.by_head(placed), [[0, 10, 20], [1, 11, 21]])
    np.testing.assert_array_equal(
        dealing.loads(np.array([[1, 2, 4], [8, 16, 32]])), [4 + 8, 3 + 48]
    )


@hypothesis.settings(max_examples=15)
@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from([(6, 3, 2), (4, 8, 4), (3, 4, 3)]))
def test_by_load_deals_every_head_once_and_no_exchange_helps(seed, sizes):
    layers, heads, devices = sizes
    load = np.random.default_rng(seed).lognormal(sigma=0.8, size=(layers, heads))
    dealing = Dealing.by_load(load, devices)
    for row in dealing.number:
        assert sorted(row[row < heads]) == list(range(heads))
    total = dealing.loads(load)
    assert total.sum() == pytest.approx(load.sum())
    full, spare = dealing.number.reshape(layers, devices, -1)[
        :, [total.argmax(), total.argmin()]
    ].swapaxes(0, 1)
    for layer in range(layers):
        for heavy, light in itertools.product(full[layer], spare[layer]):
            if heads not in (heavy, light):
                moved = load[layer, heavy] - load[layer, light]
                assert max(total.max() - moved, total.min() + moved) >= total.max() - 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_by_load_is_near_the_best_of_all(seed):
    """Of all ways to deal three heads of four layers to three devices, by loads of three rates."""
    load = np.random.default_rng(seed).lognormal(sigma=0.8, size=(4, 3, 3))
    load /= load.sum((0, 1)) / 3
    orders = list(itertools.permutations(range(3)))
    # By layer, way and device; devices are alike, so the first layer stays as it is.
    ways = np.array([[layer[list(order)] for order in orders] for layer in load])
    dealt = [ways[0, 0] + a + b + c for a, b, c in itertools.product(*ways[1:])]
    best = min(one.max() for one in dealt)
    dealing = Dealing.by_load(load, 3)
    found = max(dealing.loads(load[..., r]).max() for r in range(3))
    assert best - 1e-9 <= found <= 1.02 * best


def test_heads_are_a_load_too():
    """Where a few keep all, the others still have a block each."""
    load = np.zeros((30, 3))
    load[::3, 0] = 1
    dealing = Dealing.by_load(load, 2)
    assert np.ptp(dealing.heads_of_shards) <= 2
    assert dealing.loads(load).tolist() == [5, 5]


def test_a_head_that_has_more_than_a_device_leaves_the_others_even():
    load = np.random.default_rng(2).lognormal(sigma=0.5, size=(8, 4, 2))
    load[3, 1, 0] = load[..., 0].sum()
    dealing = Dealing.by_load(load, 4)
    other = dealing.loads(load[..., 1])
    assert other.max() < 1.05 * other.mean()
    rest = np.sort(dealing.loads(load[..., 0]))
    assert rest[-1] < 1.2 * load[3, 1, 0]


def test_several_loads_are_balanced_at_once():
    """What is even at one rate, or for their mean, is not so at another."""
    rng = np.random.default_rng(5)
    few, many = rng.lognormal(sigma=0.6, size=(2, 30, 3))
    # At high rates a fifth of the heads have nearly all.
    few *= np.where(rng.random((30, 3)) < 0.2, 10, 1)
    both = np.stack([few / few.mean(), many / many.mean()], axis=-1)

    def worst(dealing):
        return max(dealing.loads(both[..., r]).max() * 3 / both[..., r].sum() for r in (0, 1))

    together = Dealing.by_load(both, 3)
    assert worst(together) < 1.005
    assert worst(Dealing.by_load(both[..., 1], 3)) > 1.03
    assert worst(Dealing.by_load(both.sum(-1), 3)) > 1.02
    units = Dealing.by_load(both * [1, 1e6], 3)
    assert units.same_as(together)
    nothing = Dealing.by_load(np.zeros((4, 3, 2)), 2)
    assert nothing.whole
