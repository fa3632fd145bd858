"""A calibration made on several devices is the one that one device makes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.engine.calibrate import CalibrationSettings, calibrate, practice, semantic
from kvjax.engine.calibrate.choice import Change, Fitted
from kvjax.engine.calibrate.exercises import exercise
from kvjax.engine.calibrate.fit import EXTRAS
from kvjax.engine.calibrate.generated import generated_text
from kvjax.engine.calibrate.heads import Probe, reads_of_copies
from kvjax.engine.calibrate.loads import head_load
from kvjax.engine.calibrate.own_words import OwnWords
from kvjax.engine.calibrate.practice import passes_of
from kvjax.engine.parallel import SAME
from kvjax.engine.spread import Spread, by_heads
from tests.sharded.test_passes import dealt
from tests.sharded.tiny import TINY, made_calibration, model_of

TEXTS = [generated_text(i, lines=8) for i in range(6)]
LAYERS, HEADS = TINY.num_layers, TINY.num_kv_heads
CASES = [(2, 1, 2), pytest.param(2, 2, 3, marks=pytest.mark.slow)]
"""Shards, replicas, query heads of a group."""


def fitted() -> Fitted:
    rng = np.random.default_rng(1)
    parts = (
        rng.standard_normal((LAYERS, TINY.hidden_size, HEADS)),
        rng.standard_normal((LAYERS, HEADS, EXTRAS)),
        rng.standard_normal((LAYERS, TINY.hidden_size)),
        rng.uniform(0.5, 2, (LAYERS, TINY.hidden_size)),
        99,
    )
    return Fitted(*(jnp.asarray(part, jnp.float32) for part in parts))


@pytest.mark.parametrize(("shards", "replicas", "group"), CASES)
def test_the_choice_learns_what_it_learns_on_one_device(shards, replicas, group):
    one = model_of(False, group=group)
    context, length, *said = exercise(one.tokenizer, TEXTS, 3, 256).padded(256)
    none, found = Change.none(one.config), []
    # A draw in which no two KVs at the edge of the choice are worth nearly the same.
    rng = np.random.default_rng(7)
    change = Change(*(jnp.asarray(rng.standard_normal(x.shape), jnp.float32) / 9 for x in none))
    for model in (one, dealt(one, shards, replicas)):
        look, lost = passes_of(model)
        of = look(model.params, context, length, *said)
        learn = jax.jit(jax.value_and_grad(lost))
        found += [learn(change, fitted(), model.params, of, np.int32(n)) for n in (20, 40)]
    for (value, slope), (other, others) in zip(found[:2], found[2:], strict=True):
        assert float(value) > 1e-3
        assert float(other) == pytest.approx(float(value), rel=1e-3)
        for part, whole in zip(others, slope, strict=True):
            assert part.shape == whole.shape
            scale = float(np.abs(whole).max())
            assert scale > 0
            np.testing.assert_allclose(part, whole, rtol=2e-2, atol=2e-3 * scale)


@pytest.mark.parametrize(("shards", "replicas", "group"), CASES)
def test_what_a_model_asks_itself_is_what_it_asks_on_one_device(shards, replicas, group):
    one = model_of(False, group=group)
    found = [
        OwnWords(model).exercise(TEXTS, 1, 256) for model in (one, dealt(one, shards, replicas))
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(("shards", "replicas", "group"), CASES)
def test_heads_are_ranked_as_on_one_device(shards, replicas, group):
    one, found = model_of(False, group=group), []
    tokens = np.tile(np.random.default_rng(3).integers(0, 256, 16), 3).astype(np.int32)
    facts = np.random.default_rng(4).random((LAYERS, HEADS * group)).astype(np.float32)
    for model in (one, dealt(one, shards, replicas)):
        spread = Spread(model)
        weights, shard = spread.specs(model.params), spread.shard

        def run(call, out, *args, weights=weights, spread=spread, params=model.params):
            specs = (weights, *spread.specs(args))
            step = spread.jitted(functools.partial(call, spread.config), specs, out)
            return spread.on_host(step(params, *args))

        copies = functools.partial(reads_of_copies, period=16)
        fact = np.array([4, 9], np.int32)
        found.append(
            [
                *run(copies, by_heads(1), tokens),
                *run(semantic.reads_of_fact, (SAME, by_heads(1)), tokens, fact, np.int32(20)),
                run(
                    semantic.errors_with_few, SAME, tokens, np.int32(40), np.int32(6), facts, shard
                ),
            ]
        )
    for whole, part in zip(*found, strict=True):
        assert np.unique(whole).size > 1
        np.testing.assert_allclose(part, whole, rtol=2e-3, atol=1e-5)
    assert Probe(16, 3).drawn(one.config).shape == tokens.shape


def test_loads_are_counted_as_on_one_device():
    one, arrays = model_of(True), made_calibration().arrays
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 256, size).astype(np.int32) for size in (70, 100)]
    want, found = (head_load(model, arrays, prompts) for model in (one, dealt(one, 2)))
    np.testing.assert_allclose(found, want, rtol=0.02)
    assert want.std(axis=(0, 1)).min() > 0


@pytest.mark.slow
@pytest.mark.parametrize(("shards", "replicas", "group"), [*CASES, (4, 1, 2)])
def test_a_calibration_is_that_of_one_device(monkeypatch, shards, replicas, group):
    monkeypatch.setattr(practice, "HELD_OUT", 2)
    settings = CalibrationSettings(tokens=96, least_tokens=32, exercises=2, exercise_tokens=256)
    one = model_of(False, group=group)
    want, found = (
        calibrate(model, TEXTS, settings) for model in (one, dealt(one, shards, replicas))
    )
    assert found.calibration.model_hash == want.calibration.model_hash
    assert found.calibration.recipe == want.calibration.recipe
    assert found.calibration.arrays.keys() == want.calibration.arrays.keys()
    for name, array in want.calibration.arrays.items():
        scale = float(np.abs(array).max())
        other = found.calibration.arrays[name]
        np.testing.assert_allclose(other, array, rtol=2e-2, atol=2e-2 * scale, err_msg=name)
    np.testing.assert_allclose(found.explained, want.explained, atol=1e-2)
    for rate, values in want.divergence.items():
        # Which of two KVs that score the same is kept depends on how sums are rounded.
        np.testing.assert_allclose(found.divergence[rate], values, rtol=0.1)
