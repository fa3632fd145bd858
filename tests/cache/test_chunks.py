"""A further chunk of a prompt behind what heads hold, in any order, against the oracle.

`shared-reads` and one method of each other rule; through the engine's own steps.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as kv
from kvjax.cache.methods import METHODS, get_method
from kvjax.cache.policy.score import QuerySample
from kvjax.engine import prefill
from kvjax.engine.prefill import empty_prompt, prefill_in_pool, prefill_in_scratch
from tests.cache.pair import assert_identical, heads_of
from tests.cache.stand_in import (
    MODEL,
    QUICKLY,
    B,
    D,
    H,
    L,
    assert_close,
    drawn,
    holding,
    metrics_of,
    stand_in,  # noqa: F401
)
from tests.cache.test_methods import marked
from tests.oracle.audit import audit
from tests.oracle.chunks import METRICS, Chunk, pooled
from tests.oracle.matched import turned
from tests.oracle.question_free import calibrated

START, CHUNK, WIDTH, READ_AT = 58, 37, 40, 19
"""Tokens before the chunk, tokens of it, those that run (the rest are padding); what is read."""
PARAMS = drawn(2)
ARTEFACTS = jax.tree.map(jnp.asarray, calibrated(L, H, D))
# One head of the last layer reads a token that only heads of the first layer hold to be read.
PARAMS["q"][1, START + CHUNK - 1, 3] = 4
PARAMS["k"][1, READ_AT, 1] = 4

pytestmark = pytest.mark.usefixtures("stand_in", "sizes")


@pytest.fixture(scope="module")
def sizes():
    """A layer is read with a block of its table, with two, with four, or with more."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prefill, "LEAST_READ", B)
        patched.setattr(prefill, "READ_FACTOR", 2)
        yield


@pytest.fixture(scope="module")
def held() -> kv.PagedCache:
    """Slot 1 holds part of 58 tokens, each head another part in no order; slot 0 something else."""
    return holding(PARAMS, [11, START], seed=9, most=1.3)


def contents(cache: kv.PagedCache) -> dict:
    return {
        at[1:]: (
            np.array([x.position for x in kvs]),
            np.array([x.k for x in kvs]),
            np.array([x.v for x in kvs]),
            np.array([x.metric for x in kvs]),
        )
        for at, kvs in heads_of(cache).items()
        if at[0] == 1
    }


def chunk_of(held: dict) -> Chunk:
    part = slice(START, START + CHUNK)
    return Chunk.of(START, PARAMS["q"][:, part], PARAMS["k"][:, part], PARAMS["v"][:, part], held)


@pytest.fixture(scope="module")
def oracle(held) -> Chunk:
    return chunk_of(contents(held))


@cache
def chunked(observer):
    """One compiled step for all methods that score alike."""

    def step(params, cache, length):
        slot, tokens = jnp.int32(1), jnp.zeros(WIDTH, jnp.int32)
        return prefill_in_pool(MODEL, observer, params, ARTEFACTS, cache, slot, tokens, length)

    return QUICKLY(step)


def test_the_scenario_is_one(held, oracle):
    """Heads hold different tokens out of order, one of them is read, and the chunk is ragged."""
    at = {name: x[0].tolist() for name, x in contents(held).items()}
    assert len({frozenset(x) for x in at.values()}) == L * H
    assert all(x != sorted(x) for x in at.values())
    assert not all(READ_AT in x for x in at.values())
    assert any(READ_AT in x for x in at.values())
    read = METRICS["shared-reads"](oracle)
    assert all(READ_AT not in x or read[name][x.index(READ_AT)] > 10_000 for name, x in at.items())
    longest = np.asarray(held.context_len[1]).max(axis=1)
    assert len(set(np.ceil(np.log2(longest)))) > 1, "layers are read with other sizes"
    assert (START + CHUNK) % B
    assert WIDTH % B == 0


def test_the_oracle_knows_every_rule():
    """Pooling, windows and statistics of all methods but those that differ in a number only."""
    known = {get_method(name).scorer for name in METRICS}
    like = {
        "kv-compress-w8-l1",
        "kv-compress-w32-l1",
        "kv-compress-continual",
        "snapkv-w32",
        "snapkv-w64-avg5",
        "kvzip-plus",
        "windowkv-average",
    }
    for name, method in METHODS.items():
        base = METHODS[name.split(":")[-1]].scorer
        same = {METHODS[n].scorer for n in like} | known
        plain = ("full", "h2o-decode", "paged-h2o", "paged-h2o-openvino")
        assert name.split(":")[-1] in plain or base in same, name
        assert method.scorer == base


# Their scores are asked of whole prompts by default, and chunks do to them what they do to others.
AS_OTHERS = (
    "a2sf-f20", "ems", "key-norm", "keydiff", "kv-compress-full-l2", "kv-compress-w32-l2",
    "kvzap-linear", "kvzap-mlp", "lazyeviction", "predicted-reads", "random", "snapkv-w32-avg5",
    "streaming-llm", "tova", "wide-pool", "windowkv",
)  # fmt: skip


@pytest.mark.parametrize("name", [marked(name, *AS_OTHERS) for name in METRICS])
def test_a_chunk_measures_what_the_oracle_measures(held, oracle, name):
    after, scores, ok, _ = chunked(get_method(name).observer)(PARAMS, held, np.int32(CHUNK))
    assert ok
    assert audit(after) == []
    want = METRICS[name](oracle)
    got = metrics_of(after, 1)
    for head, x in oracle.heads.items():
        row = dict(zip(x.at.tolist(), want[head].tolist(), strict=True))
        assert_close(got[head], row, f"{name}, head {head}")
    out = np.concatenate([oracle.heads[at].out[:, -1].reshape(-1) for at in np.ndindex(L, H)])
    np.testing.assert_allclose(scores, out, rtol=1e-4, atol=1e-5)
    before, now = heads_of(held), heads_of(after)
    for at, kvs in before.items():
        if at[0] == 0:
            assert [x.bits() for x in now[at]] == [x.bits() for x in kvs], "another slot"


def test_a_chunk_of_impossible_length_is_refused(held):
    step = chunked(get_method("h2o").observer)
    for length in (-1, WIDTH + 1, 2**31 - 1):
        after, _, ok, _ = step(PARAMS, held, np.int32(length))
        assert not ok
        assert_identical(held, after, f"{length} tokens")


@pytest.mark.parametrize("name", ["shared-reads", "a2sf", "compactor", "predicted-reads"])
def test_parts_of_a_prompt_in_a_scratch(name):
    """Two parts, the second behind the first: nothing is missing and everything is in order."""
    observer = get_method(name).observer

    @QUICKLY
    def parts(params, lengths):
        prompt = empty_prompt(MODEL, observer, 2 * WIDTH, jnp.float32)
        tokens = jnp.zeros(WIDTH, jnp.int32)

        def part(prompt, length):
            prompt, scores = prefill_in_scratch(
                MODEL, observer, params, ARTEFACTS, prompt, tokens, length
            )
            return prompt, (prompt.scores.metric, scores)

        return jax.lax.scan(part, prompt, lengths)

    lengths = np.array([29, CHUNK], np.int32)
    prompt, (metric, scores) = parts(PARAMS, lengths)
    nothing = (np.zeros(0, int), np.zeros((0, D)), np.zeros((0, D)), np.zeros(0))
    none = dict.fromkeys(np.ndindex(L, H), nothing)
    first = Chunk.of(0, *(PARAMS[x][:, :29] for x in "qkv"), held=none)
    before = METRICS[name](first)
    held = {
        (layer, h): (
            np.arange(29), PARAMS["k"][layer, :29, h], PARAMS["v"][layer, :29, h], before[layer, h]
        )
        for layer, h in np.ndindex(L, H)
    }  # fmt: skip
    rest = slice(29, 29 + CHUNK)
    second = Chunk.of(29, *(PARAMS[x][:, rest] for x in "qkv"), held=held)
    want = METRICS[name](second)
    for at in np.ndindex(L, H):
        np.testing.assert_allclose(metric[0][at][:29], before[at], rtol=2e-4, atol=2e-6)
        got = np.asarray(metric[1][at])[: 29 + CHUNK]
        np.testing.assert_allclose(got, want[at], rtol=2e-4, atol=2e-6)
    out = np.concatenate([second.heads[at].out[:, -1].reshape(-1) for at in np.ndindex(L, H)])
    np.testing.assert_allclose(scores[1], out, rtol=1e-4, atol=1e-5)
    assert int(prompt.length) == 29 + CHUNK
    assert np.array_equal(prompt.k[:, : 29 + CHUNK], PARAMS["k"][:, : 29 + CHUNK])


def test_queries_of_the_last_part_are_kept_for_what_folds():
    observer = get_method("matched:predicted-reads-blind").observer
    sample = observer.queries
    assert sample is not None

    @QUICKLY
    def parts(params):
        prompt = empty_prompt(MODEL, observer, 2 * WIDTH, jnp.float32)
        tokens = jnp.zeros(WIDTH, jnp.int32)
        for length in (29, CHUNK):
            before = prompt
            prompt, _ = prefill_in_scratch(
                MODEL, observer, params, ARTEFACTS, prompt, tokens, jnp.int32(length)
            )
            assert jax.tree.structure(before) == jax.tree.structure(prompt)
        return prompt.scores.queries

    assert_queries_before_rope(np.asarray(parts(PARAMS)), sample, 29)


def test_queries_of_a_chunk_are_told_to_what_folds(held):
    observer = get_method("matched:predicted-reads-blind").observer
    sample = observer.queries
    assert sample is not None
    _, _, ok, got = chunked(observer)(PARAMS, held, np.int32(CHUNK))
    assert ok
    assert_queries_before_rope(np.asarray(got), sample, START)


def assert_queries_before_rope(got: np.ndarray, sample: QuerySample, start: int) -> None:
    """The newest ones of a chunk that begins at `start`, and some of all of it."""
    at = [start + CHUNK - 1 - i for i in range(sample.newest)]
    at += [start + (2 * i + 1) * CHUNK // (2 * sample.spread) for i in range(sample.spread)]
    frequency = np.asarray(ARTEFACTS["rope_frequency"])
    assert got.shape[2] == len(at)
    for layer, head, i in np.ndindex(*got.shape[:3]):
        want = turned(np.asarray(PARAMS["q"])[layer, at[i], head], -at[i], frequency[layer])
        np.testing.assert_allclose(got[layer, head, i], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "measured"), [("kv-compress-continual", False), ("h2o", True)])
def test_what_the_last_part_measures_anew_is_measured_once(name, measured):
    """Nothing is observed of the first part, where the last one sees all there is to see; what the
    scratch holds in the end is the same."""
    observer = get_method(name).observer

    @QUICKLY
    def parts(params, lengths, last):
        prompt = empty_prompt(MODEL, observer, 2 * WIDTH, jnp.float32)
        tokens = jnp.zeros(WIDTH, jnp.int32)

        def part(prompt, inputs):
            prompt, logits = prefill_in_scratch(
                MODEL, observer, params, ARTEFACTS, prompt, tokens, *inputs
            )
            return prompt, (prompt.scores.metric, logits)

        return jax.lax.scan(part, prompt, (lengths, last))

    lengths = np.array([29, CHUNK], np.int32)
    always, (first, logits) = parts(PARAMS, lengths, np.array([True, True]))
    once, (unseen, same) = parts(PARAMS, lengths, np.array([False, True]))
    assert np.asarray(first[0]).any()
    assert np.asarray(unseen[0]).any() == measured
    for x, y in zip(jax.tree.leaves(always), jax.tree.leaves(once), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
    assert np.array_equal(logits, same)


def test_mean_pooling_counts_absent_keys_as_zero():
    assert pooled(np.array([4, 0, 1]), np.array([6.0, 3.0, 9.0]), 3, "avg").tolist() == [2, 4, 4]
