"""Levels of keys and values: gradients against differences, k-means by weight against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.engine.calibrate import levels as subject
from kvjax.engine.calibrate.levels import KEY_RANGE, LEVELS, NORM, Weighed
from kvjax.engine.dense import dense_pass
from kvjax.models import LoadedModel
from kvjax.models.decoder import init_params
from kvjax.models.rope import rope_frequencies
from kvjax.models.tokenizer import ByteTokenizer
from tests.eval.conftest import TINY
from tests.oracle import prompt_codecs as oracle

LENGTH, ROOM = 20, 32


@functools.cache
def tiny(stack: bool = True) -> LoadedModel:
    params = init_params(TINY, "float32", seed=3, stacked=stack)
    return LoadedModel(TINY, params, ByteTokenizer(), "dummy weights")


TEXT = np.random.default_rng(2).integers(0, 256, ROOM).astype(np.int32)
"""With what no text has behind it."""


@functools.cache
def found() -> tuple[np.ndarray, ...]:
    step = jax.jit(functools.partial(subject.gradients, TINY))
    return tuple(np.asarray(x) for x in step(tiny().params, TEXT, np.int32(LENGTH)))


def test_keys_are_those_before_rope():
    dense = dense_pass(TINY, tiny().params, jnp.asarray(TEXT), jnp.zeros(1, jnp.int32))
    k, v = (x.reshape(3, ROOM, 2, 8) for x in found()[:2])
    frequency = np.asarray(rope_frequencies(TINY))
    np.testing.assert_allclose(oracle.turned(k, frequency), dense.k, atol=1e-4)
    np.testing.assert_allclose(v, dense.v, atol=1e-4)


def test_the_loss_is_that_of_the_next_tokens():
    at = jnp.arange(LENGTH - 1)
    dense = dense_pass(TINY, tiny().params, jnp.asarray(TEXT), at)
    said = np.asarray(jax.nn.log_softmax(dense.logits))
    nothing = jnp.zeros((3, ROOM, 2, 8))
    got, _ = subject.loss(
        TINY, tiny().params, jnp.asarray(TEXT), jnp.int32(LENGTH), nothing, nothing
    )
    want = -np.mean(said[np.arange(LENGTH - 1), TEXT[1:LENGTH]])
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_gradients_are_those_of_differences():
    """Along a way through all numbers, and of single tokens of a layer."""
    run = jax.jit(functools.partial(subject.loss, TINY))
    frequency = np.asarray(rope_frequencies(TINY))
    rng = np.random.default_rng(4)
    k_gradient, v_gradient = (x.reshape(3, ROOM, 2, 8) for x in found()[2:])
    size = 3e-3 / np.abs(k_gradient).max()

    def slope(change: np.ndarray, of: str) -> float:
        ways = {"k": oracle.turned(change, frequency), "v": change}
        both = [ways[of] if name == of else np.zeros_like(change) for name in ("k", "v")]
        ends = []
        for sign in (1, -1):
            moved = (jnp.asarray(sign * x, jnp.float32) for x in both)
            ends.append(float(run(tiny().params, TEXT, jnp.int32(LENGTH), *moved)[0]))
        return (ends[0] - ends[1]) / 2

    for of, gradient in (("k", k_gradient), ("v", v_gradient)):
        assert np.abs(gradient[:, :LENGTH]).max() > 0
        # The last token's own prediction does not count, and nothing behind the text does.
        assert not gradient[:, LENGTH - 1 :].any()
        for where in (np.s_[:], np.s_[0, 3], np.s_[2, 7]):
            way = np.zeros_like(gradient, np.float64)
            way[where] = rng.standard_normal(way[where].shape)
            way *= min(size, 0.05) / np.linalg.norm(way) ** 0.5
            want = np.sum(gradient * way)
            assert slope(way, of) == pytest.approx(want, rel=0.03, abs=3e-6), (of, where)


def test_layers_that_are_not_stacked_are_the_same():
    each = subject.stacked(tiny(False).params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), each, tiny().params)
    assert subject.stacked(tiny().params) is tiny().params


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(60, 120), st.sampled_from([2, 4, 8]))
def test_k_means_by_weight(seed, size, count):
    rng = np.random.default_rng(seed)
    x, weight = rng.standard_t(3, size), rng.uniform(0.5, 2, size)
    weight[rng.random(size) < 0.2] = 0
    got = subject.k_means(x, weight, count)
    np.testing.assert_allclose(got, oracle.weighed_means(x, weight, count), atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(4, 60), st.sampled_from([2, 4, 16]))
def test_k_means_lose_no_more_by_weight_than_what_they_begin_with(seed, size, count):
    """Whatever outweighs all else, and with fewer numbers than levels."""
    rng = np.random.default_rng(seed)
    x, weight = rng.standard_t(3, size), rng.exponential(1, size) ** 5
    losses = []
    for steps in (0, 3, 50):
        levels = subject.k_means(x, weight, count, steps)
        assert (np.diff(levels) >= 0).all()
        losses.append(np.sum(weight * (oracle.nearest(x, levels) - x) ** 2))
    assert losses[2] <= losses[1] * (1 + 1e-9) + 1e-12
    assert losses[1] <= losses[0] * (1 + 1e-9) + 1e-12


def test_weights_move_levels():
    x = np.array([0.0, 1, 2, 3])
    np.testing.assert_allclose(subject.k_means(x, np.ones(4), 2), [0.5, 2.5])
    np.testing.assert_allclose(subject.k_means(x, np.array([3.0, 1, 1, 3]), 2), [0.25, 2.75])
    np.testing.assert_allclose(subject.k_means(x, np.zeros(4), 2), [0.5, 2.5])


def test_arrays_of_numbers_and_weights():
    rng = np.random.default_rng(5)
    k, v = rng.standard_t(4, (2, 2, 300, 12)) + 2 * rng.standard_normal((2, 2, 1, 12))
    k_weight, v_weight = rng.exponential(1, (2, 2, 300, 12)) ** 2
    arrays = subject.fitted(Weighed(k, v, k_weight, v_weight))
    want = oracle.kvquant_levels(k, v, k_weight, v_weight, 5)
    assert sorted(arrays) == sorted([KEY_RANGE, *LEVELS.values(), NORM])
    np.testing.assert_allclose(arrays[KEY_RANGE], want["range"], atol=1e-5)
    for bits, name in LEVELS.items():
        np.testing.assert_allclose(arrays[name], want[bits], atol=1e-5)
    np.testing.assert_allclose(arrays[NORM], want["norm"], atol=1e-5)
    assert (arrays[NORM][..., 0] > 1).all()  # levels are means, which lie closer together


def test_levels_of_a_model():
    """Texts of different lengths: none counts its first token, nor what pads it."""
    model, prompts = tiny(False), [TEXT[:30], TEXT[5:LENGTH]]
    arrays = subject.levels_of(model, prompts)
    step = jax.jit(functools.partial(subject.gradients, TINY))
    parts = []
    for ids in prompts:
        each = step(tiny().params, np.pad(ids, (0, 64 - len(ids))), np.int32(len(ids)))
        parts.append([np.asarray(x)[:, 1 : len(ids)] for x in each])
    k, v, *slopes = (np.concatenate(each, axis=1) for each in zip(*parts))
    want = subject.fitted(Weighed(k, v, *(x**2 for x in slopes)))
    assert {name: x.shape for name, x in arrays.items()} == {
        KEY_RANGE: (3, 2, 16), NORM: (3, 2, 2), **{LEVELS[b]: (3, 2, 2**b) for b in (4, 3, 2)}
    }  # fmt: skip
    for name, array in want.items():
        np.testing.assert_allclose(arrays[name], array, rtol=1e-3, atol=1e-4)
    assert subject.digest_of(prompts) != subject.digest_of(prompts[::-1])
