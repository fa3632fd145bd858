"""Numbers per KV that decode steps keep: Scissorhands' misses, LazyEviction's last and longest."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as kv
from kvjax.cache.methods import get_method
from kvjax.cache.methods.lazyeviction import HitAgain
from kvjax.cache.methods.scissorhands import PARTS, OftenImportant
from kvjax.engine.decode import decode_step
from kvjax.engine.prefill import prefill
from tests.cache.pair import heads_of, host
from tests.cache.stand_in import MODEL, QUICKLY, B, H, L, R, drawn, empty, stand_in  # noqa: F401
from tests.oracle.attention import attend
from tests.oracle.audit import audit
from tests.oracle.representatives import redundancy
from tests.oracle.scores import again

PARAMS = drawn(4)
PARAMS["q"] *= 2
LENGTH, STEPS, SLOT = 37, 23, 1
SCISSORHANDS = dataclasses.replace(
    get_method("scissorhands"), scorer=OftenImportant(window=16), protected=3
)
LAZY = dataclasses.replace(
    get_method("lazyeviction"),
    scorer=HitAgain(least=0.02),
    protected=3,
)

pytestmark = pytest.mark.usefixtures("stand_in")


def run(method: kv.Method) -> tuple[kv.PagedCache, kv.PagedCache]:
    """The cache after a prompt and some steps, before and after compression to half."""

    @QUICKLY
    def begin(params, cache):
        tokens = jnp.zeros(LENGTH + 3, jnp.int32)
        length = jnp.int32(LENGTH)
        prompt, _ = prefill(MODEL, method.observer, params, {}, tokens, length)
        scores = prompt.scores
        return kv.write_prompt(
            cache, SLOT, prompt.k, prompt.v, scores.metric, length, state=scores.state
        )[0]

    @QUICKLY
    def go_on(params, cache):
        def one(cache, _):
            active = jnp.array([False, True])
            step = decode_step(MODEL, method.decode, params, cache, jnp.zeros(2, int), active)
            return step[0], step[2]

        return jax.lax.scan(one, cache, None, length=STEPS)

    cache, ok = go_on(PARAMS, begin(PARAMS, empty(planes=method.planes)))
    assert ok.all()
    keep = kv.budget_blocks((LENGTH + STEPS) // 2, L, H, B)
    after, _ = QUICKLY(kv.compress)(cache, jnp.array([SLOT]), jnp.array([keep], jnp.int32), method)
    assert audit(after) == []
    return cache, after


def attention() -> dict[tuple[int, int], list[np.ndarray]]:
    """The attention [r, n] that each query of the text pays to the n tokens it sees."""
    given = {}
    for layer, h in np.ndindex(L, H):
        k, v = PARAMS["k"][layer, :, h], PARAMS["v"][layer, :, h]
        given[layer, h] = [
            attend(PARAMS["q"][layer, t, h * R : (h + 1) * R], k[: t + 1], v[: t + 1])[1]
            for t in range(LENGTH + STEPS)
        ]
    return given


def numbers(cache: kv.PagedCache, name: str, at: tuple[int, int]) -> dict[int, np.ndarray]:
    """A plane's numbers of a head by token position."""
    c = host(cache)
    table, count = c["block_table"][SLOT, *at], c["context_len"][SLOT, *at]
    where = [(table[i // B], i % B) for i in range(count)]
    return {int(c["position"][x]): c["state"][name][x] for x in where}


def test_scissorhands_counts_the_misses_of_its_window():
    """Those of the prompt per query head, those of a step by the mean of the group."""
    cache, after = run(SCISSORHANDS)
    steps, end = 2, LENGTH + STEPS
    for at, given in attention().items():
        want = np.zeros(end)
        for t in range(LENGTH - 16, end):
            if t // steps <= (end - 1) // steps - PARTS:
                continue
            p = given[t] * (t + 1)
            miss = (p < 1).sum(axis=0) if t < LENGTH else R * (p.mean(axis=0) < 1)
            want[: t + 1] += miss
        got = numbers(cache, "misses", at)
        assert [float(got[j].sum()) for j in range(end)] == want.tolist(), at
        goes_by(-want, got, numbers(after, "misses", at), at)
        assert not any(x.any() for x in numbers(cache, "received", at).values())


def test_lazyeviction_notes_last_hits_and_longest_intervals():
    cache, after = run(LAZY)
    end, least = LENGTH + STEPS, 0.02
    for at, given in attention().items():
        last, longest = np.arange(end) - 1, np.zeros(end, int)
        for t, p in enumerate(given):
            hit = (p > least).any(axis=0) if t < LENGTH else p.sum(axis=0) > least
            for j in np.flatnonzero(hit):
                longest[j] = max(longest[j], t - last[j])
                last[j] = t
        got = {name: numbers(cache, name, at) for name in ("last", "longest")}
        assert [int(got["last"][j][0]) for j in range(end)] == last.tolist(), at
        assert [int(got["longest"][j][0]) for j in range(end)] == longest.tolist(), at
        rank = np.array([again(end - 1 - int(x), int(n)) for x, n in zip(last, longest)])
        goes_by(rank, got["last"], numbers(after, "last", at), at)


def test_r_kv_notes_what_each_of_the_last_queries_gives():
    """Those of the prompt and those of steps, the mean over the group; likeness decides with it."""
    cache, _ = run(get_method("r-kv"))
    end = LENGTH + STEPS
    for at, given in attention().items():
        got = numbers(cache, "recent", at)
        for t in range(end - 8, end):
            want = np.zeros(end)
            want[: t + 1] = given[t].mean(axis=0)
            found = [got[j][t % 8] for j in range(end)]
            np.testing.assert_allclose(found, want, rtol=2e-4, atol=2e-6)
        assert not any(x.any() for x in numbers(cache, "received", at).values())
    short = dataclasses.replace(get_method("r-kv"), protected=3)
    cache, after = run(short)
    for at, given in attention().items():
        last = [np.pad(given[t].mean(axis=0), (0, end - 1 - t)) for t in range(end - 8, end)]
        mean = np.mean(last, axis=0)
        k = PARAMS["k"][at[0], :end, at[1]]
        like = redundancy(k)
        free = np.arange(end - 3)
        pooled = [mean[free[abs(free - j) <= 3]].max() for j in free]
        rank = 0.07 * np.array(pooled) - 0.93 * like[: end - 3]
        rank = np.append(rank, [np.inf] * 3)
        goes_by(rank, numbers(cache, "recent", at), numbers(after, "recent", at), at)


def goes_by(rank: np.ndarray, before: dict, after: dict, at: tuple[int, int]) -> None:
    """The lowest went, and those that stay have the numbers they had."""
    end = LENGTH + STEPS
    gone = [j for j in before if j not in after]
    stay = [j for j in after if j < end - 3]
    assert gone
    assert set(range(end - 3, end)) <= set(after)
    assert max(rank[gone]) <= min(rank[stay]) + 1e-6, at
    for j, value in after.items():
        assert np.array_equal(value, before[j])


@pytest.mark.parametrize("method", [SCISSORHANDS, LAZY], ids=["hits", "last hits"])
def test_survivors_of_a_prompt_bring_their_numbers(method):
    """The same by token position as where everything is written and then compressed."""
    rng = np.random.default_rng(1)
    shape = (L, LENGTH, H, PARAMS["k"].shape[-1])
    kvs = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    state = {
        plane.name: jnp.asarray(rng.integers(0, 9, (L, H, LENGTH, plane.width)), plane.dtype)
        for plane in method.planes
    }
    metric = jnp.asarray(rng.random((L, H, LENGTH)), jnp.float32)
    given = (jnp.int32(SLOT), kvs, kvs)
    keep = jnp.int32(3 * L * H)
    scores = kv.Scores(metric, state=state)
    direct, _, ok = QUICKLY(kv.write_survivors)(
        empty(planes=method.planes), *given, scores, LENGTH, keep, method.eviction
    )
    assert ok
    for plane in method.planes:
        for at in np.ndindex(L, H):
            got = numbers(direct, plane.name, at)
            assert len(got) == 3 * B
            for j, value in got.items():
                assert np.array_equal(value, np.asarray(state[plane.name])[at][j])


def test_blocks_that_change_hands_carry_no_numbers_over():
    cache, _ = run(LAZY)
    free = kv.release(cache, jnp.array([True, True]))
    assert not any(np.asarray(x).any() for x in free.state.values())
    assert not any(len(kvs) for kvs in heads_of(free).values())


@pytest.mark.slow
def test_a_prompt_in_a_cache_without_planes_goes_by_its_metric():
    """Who decodes without the planes is refused before; evictions go by the prompt's metric."""
    metric = jnp.asarray(np.random.default_rng(0).random((L, H, 12)), jnp.float32)
    kvs = jnp.zeros((L, 12, H, PARAMS["k"].shape[-1]))
    cache, ok = kv.write_prompt(empty(), SLOT, kvs, kvs, metric, 12)
    assert ok
    after, _ = kv.compress(cache, jnp.array([SLOT]), jnp.array([2 * L * H], jnp.int32), LAZY)
    for at, held in heads_of(after).items():
        if at[0] == SLOT:
            row = np.where(np.arange(12) < 9, metric[at[1:]], np.inf)
            assert sorted(x.position for x in held) == sorted(np.argsort(row)[4:].tolist())
