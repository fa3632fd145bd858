"""What decode steps do to metrics, against the oracle: every rule, several steps, mixed batches."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as kv
from kvjax.cache.methods import METHODS, get_method
from kvjax.engine.decode import decode, init_slots
from kvjax.engine.decode import decode_step as run_step
from tests.cache.pair import heads_of
from tests.cache.stand_in import (
    MODEL,
    QUICKLY,
    D,
    H,
    L,
    R,
    assert_same_kvs,
    drawn,
    holding,
    stand_in,  # noqa: F401
)
from tests.oracle import KV
from tests.oracle.audit import audit
from tests.oracle.decode import ADDED, GIVEN, decode_step
from tests.oracle.question_free import calibrated

PARAMS = drawn()
ARTEFACTS = jax.tree.map(jnp.asarray, calibrated(L, H, D))
LENGTHS = [15, 24, 9]
NONE = ("kv-compress", "shared-reads", "full")
"""Methods that decode steps do not touch: new KVs have metric 0."""

pytestmark = pytest.mark.usefixtures("stand_in")


@pytest.fixture(scope="module")
def start() -> kv.PagedCache:
    return holding(PARAMS, LENGTHS, seed=1, most=1.4)


@cache
def stepper(rule):
    """One compiled step for all methods of one decode rule."""

    def step(params, cache, active, observed):
        return run_step(
            MODEL, rule, params, cache, jnp.zeros(3, int), active,
            observed=observed, artefacts=ARTEFACTS,
        )  # fmt: skip

    return QUICKLY(step)


def new_kv(position: int, layer: int, head: int) -> KV:
    return KV(position, PARAMS["k"][layer, position, head], PARAMS["v"][layer, position, head])


def step_of_the_oracle(name, heads, lengths, active, observed) -> np.ndarray:
    """Changes `heads` and `lengths` in place; returns what attention gives, [S, L·H·r·d]."""
    outs = np.full((len(lengths), L, H * R, D), np.nan)
    for (s, layer, h), kvs in heads.items():
        if not active[s]:
            continue
        q = PARAMS["q"][layer, lengths[s], h * R : (h + 1) * R]
        rule = name if observed[s] else "full"
        new = new_kv(lengths[s], layer, h)
        heads[s, layer, h], outs[s, layer, h * R : (h + 1) * R] = decode_step(
            rule, kvs, new, q, layer, h, PARAMS["q"][layer, lengths[s]].reshape(-1)
        )
    for s in range(len(lengths)):
        lengths[s] += int(active[s])
    return outs.reshape(len(lengths), -1)


def test_the_oracle_knows_every_rule():
    rules = {
        name for name, method in METHODS.items() if method.decode is not None and not method.planes
    }
    assert {name.split(":")[-1] for name in rules} == set(ADDED) | set(GIVEN)


@pytest.mark.parametrize("name", [*ADDED, *GIVEN, *NONE])
def test_decode_steps_measure_what_the_oracle_measures(start, name):
    """Slot 1 runs, but its metrics are another method's business; which slots run changes."""
    step = stepper(get_method(name).decode)
    now, heads, lengths = start, heads_of(start), list(LENGTHS)
    observed = np.array([True, False, True])
    for active in ([1, 1, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1], [1, 1, 1]):
        active = np.array(active, bool)
        now, scores, ok = step(PARAMS, now, active, observed)
        assert ok
        want = step_of_the_oracle(name, heads, lengths, active, observed)
        np.testing.assert_allclose(
            np.asarray(scores)[active], want[active], rtol=1e-4, atol=1e-5, err_msg=name
        )
        got = heads_of(now)
        for at, kvs in heads.items():
            assert_same_kvs(got[at], kvs, f"{name}, head {at}")
        assert np.asarray(now.seq_len).tolist() == lengths
    assert audit(now) == []


def test_all_slots_are_observed_unless_told(start):
    step = QUICKLY(
        lambda params, cache, active: run_step(
            MODEL, get_method("h2o-decode").decode, params, cache, jnp.zeros(3, int), active
        )
    )
    now, heads, lengths = start, heads_of(start), list(LENGTHS)
    active = np.array([True, False, True])
    now, _, _ = step(PARAMS, now, active)
    step_of_the_oracle("h2o-decode", heads, lengths, active, [True] * 3)
    got = heads_of(now)
    for at, kvs in heads.items():
        assert_same_kvs(got[at], kvs, at)


def test_a_loop_measures_only_those_that_are_observed(start):
    """Slots 2 and 0 take part, in that order; only slot 2 has the method of the loop."""

    @QUICKLY
    def loop(params, cache, state, slots):
        return decode(
            MODEL, get_method("a2sf").decode, 4, None, None, params, cache, state, slots,
            jnp.int32(3), jnp.full(1, -1),
        )  # fmt: skip

    state = dataclasses.replace(
        init_slots(3),
        active=jnp.ones(3, bool),
        remaining=jnp.full(3, 9),
        stop_at_eos=jnp.zeros(3, bool),
        observed=jnp.array([False, False, True]),
    )
    now, state, report = loop(PARAMS, start, state, jnp.array([2, 3, 0, 5], jnp.int32))
    assert (np.asarray(report.tokens)[:3, [0, 2]] >= 0).all()
    heads, lengths = heads_of(start), list(LENGTHS)
    for _ in range(3):
        step_of_the_oracle("a2sf", heads, lengths, [True, False, True], [False, False, True])
    got = heads_of(now)
    for at, kvs in heads.items():
        assert_same_kvs(got[at], kvs, at)
    assert np.asarray(now.seq_len).tolist() == [18, 24, 12] == lengths
