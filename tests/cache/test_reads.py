"""Tokens that all heads keep because one reads them, and the sampled background."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.cache.methods import Observation, get_method
from kvjax.cache.metrics import fading_pool
from kvjax.cache.observe import (
    READ,
    Observed,
    background,
    keep_reads,
    observe_chunk,
    observe_prompt,
    plain_metric,
    unobserved,
)
from kvjax.kernels import prefill_attention_with_log_sum
from tests.oracle.scores import Prompt, read_by_any, sampled_mean

L, H, R, D, T = 2, 2, 2, 8, 64
METHOD = get_method("shared-reads")


def prompt(length: int, seed: int, *, ties: bool = False) -> tuple[np.ndarray, ...]:
    """q, k of T tokens, those from `length` on padding that must not matter."""
    rng = np.random.default_rng(seed)
    q = 2 * rng.standard_normal((L, T, H * R, D)).astype(np.float32)
    k = rng.standard_normal((L, T, H, D)).astype(np.float32)
    if ties:
        k[:] = k[:, :1]
    q[:, length:], k[:, length:] = 1e4, -1e4
    return q, k


@jax.jit
def observed_whole(q, k, length):
    def one(part):
        return observe_prompt(METHOD, 0, *part, length)  # type: ignore[call-arg]

    return keep_reads(METHOD, jax.lax.map(one, (q, k)), length, T)


def in_chunk(method, q, k, held: int, length: int, order: np.ndarray):
    """The same prompt of which `held` tokens are there already, in any order within each head."""
    taken = order[..., None]
    held_k = np.take_along_axis(k[:, :held].swapaxes(1, 2), taken, axis=2)

    @jax.jit
    def run(q, k, held_k, position, length):
        def one(part):
            q, k, held_k, position = part
            start = jnp.int32(held)
            return observe_chunk(method, 0, q, k, length - held, start, held_k, position)

        parts = (q[:, held:], k[:, held:], held_k, position)
        return keep_reads(method, jax.lax.map(one, parts), length, T)

    return np.asarray(run(q, k, held_k, order.astype(np.int32), np.int32(length)))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=14), st.integers(0, 9), st.booleans())
@settings(max_examples=40, deadline=None)
def test_fading_pool(values, ahead, flat):
    """Small whole numbers, so that there are ties; rows shorter than the reach too."""
    fade = 1.0 if flat else 0.5
    row = np.array(values, np.float32)
    want = [max(row[j - d] * fade**d for d in range(min(j, ahead) + 1)) for j in range(len(row))]
    assert np.asarray(fading_pool(jnp.asarray(row), ahead, fade)).tolist() == want


@pytest.mark.parametrize(
    ("length", "read_at", "found"),
    [
        (64, 10, True), (64, 4, True), (64, 3, False), (64, 31, True), (64, 32, False),
        (63, 20, True), (50, None, True), (37, 4, True), (37, 5, False), (36, 4, False),
        (20, 5, False), (64, None, False), (3, None, False), (1, None, False),
    ],
)  # fmt: skip
def test_all_heads_keep_what_one_reads(length, read_at, found):
    """The first 4 and the last 32 tokens are not read, but the latter may follow one that is."""
    q, k = prompt(length, length)
    if read_at is not None:
        q[1, length - 1, 3], k[1, read_at, 1] = 4, 4
    metric = np.asarray(observed_whole(q, k, np.int32(length)))
    read = read_by_any(Prompt(q[:, :length], k[:, :length], k[:, :length], 8, 4))
    want = [j for j in sorted(read, key=lambda j: (-read[j], j)) if read[j] >= 0.3][:10]
    assert bool(want) == found
    if read_at is not None and found:
        assert want == list(range(read_at, read_at + 10))
    for row in metric.reshape(L * H, T):
        assert [int(j) for j in np.argsort(-row, kind="stable") if row[j] > READ] == want


def test_reading_goes_on_where_it_was():
    """What was read two tokens before the end is by now two tokens further."""
    q, k = prompt(64, 64)
    q[1, 61, 3], k[1, 10, 1] = 4, 4
    metric = np.asarray(observed_whole(q, k, np.int32(64)))
    read = read_by_any(Prompt(q, k, k, 8, 4))
    assert sorted(read, key=lambda j: (-read[j], j))[:10] == list(range(12, 22))
    for row in metric.reshape(L * H, T):
        assert [int(j) for j in np.argsort(-row, kind="stable") if row[j] > READ] == [
            *range(12, 22)
        ]


def test_where_nothing_is_read_heads_go_by_their_own_metric():
    """Equal keys: every query spreads its attention evenly, and far less than that is read."""
    q, k = prompt(64, 0, ties=True)
    without = dataclasses.replace(METHOD.observation, reads=None)  # type: ignore[type-var]
    method = dataclasses.replace(METHOD, observation=without)

    def one(part):
        return observe_prompt(method, 0, *part, 64)  # type: ignore[call-arg]

    own = jax.jit(lambda *qk: jax.lax.map(one, qk))
    np.testing.assert_allclose(observed_whole(q, k, np.int32(64)), own(q, k), rtol=1e-5)


@pytest.mark.parametrize("length", [64, 50, 20, 5])
@pytest.mark.parametrize("log_sum", [False, True])
def test_background_is_the_mean_of_a_sample(length, log_sum):
    """Also where the attention has told the log-sum-exp of each query."""
    q, k = prompt(length, length)
    observation = Observation(window=4, background=60)

    @jax.jit
    def sampled(q, k, n):
        sums = prefill_attention_with_log_sum(q, k, k)[1] if log_sum else None
        return background(observation, q, k, jnp.int32(0), n, None, sums)

    got = np.asarray(sampled(q[0], k[0], np.int32(length)))
    oracle = Prompt(q[:, :length], k[:, :length], k[:, :length], 8, 4)
    for head in range(H):
        want = 60 * sampled_mean(oracle, 0, head)
        np.testing.assert_allclose(got[head, :length], want, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("held", [13, 40])
def test_chunks_read_what_the_whole_prompt_reads(held):
    """Where heads hold everything, in whatever order. The background is that of the chunk alone:
    tests/cache/test_chunks.py has it, and heads that do not hold everything."""
    observation = dataclasses.replace(METHOD.observation, background=0.0)  # type: ignore[type-var]
    method = dataclasses.replace(METHOD, observation=observation)
    length = 61
    q, k = prompt(length, held)
    rng = np.random.default_rng(held)
    order = np.stack([[rng.permutation(held) for _ in range(H)] for _ in range(L)])
    got = in_chunk(method, q, k, held, length, order)

    def one(part):
        return observe_prompt(method, 0, *part, length)  # type: ignore[call-arg]

    whole = jax.jit(lambda *qk: keep_reads(method, jax.lax.map(one, qk), jnp.int32(length), T))
    want = np.asarray(whole(q, k))
    there = np.take_along_axis(want, order, axis=2)
    np.testing.assert_allclose(got[..., :held], there, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(got[..., held:length], want[..., held:length], rtol=1e-5, atol=1e-7)


def test_the_order_in_which_heads_hold_kvs_does_not_matter():
    """The background's sample included: two orders give each token the same metric."""
    q, k = prompt(60, 1)
    metrics = []
    for order in (np.arange(20), np.random.default_rng(0).permutation(20)):
        orders = np.broadcast_to(order, (L, H, 20))
        got = in_chunk(METHOD, q, k, 20, 60, orders)
        by_position = np.empty_like(got[..., :20])
        np.put_along_axis(by_position, orders, got[..., :20], axis=2)
        metrics.append(np.concatenate([by_position, got[..., 20:60]], axis=2))
    np.testing.assert_allclose(metrics[0], metrics[1], rtol=1e-5, atol=1e-7)
    assert (metrics[0][..., :20] > 0).all()


def test_room_has_the_shape_of_what_is_observed():
    q, k = prompt(60, 2)
    for name in ("shared-reads", "kvcrush:shared-reads", "kv-compress", "kvcrush:snapkv"):
        method = get_method(name)

        def one(part, method=method):
            return observe_prompt(method, 0, *part, jnp.int32(60))  # type: ignore[call-arg]

        got = jax.eval_shape(lambda *qk, one=one: jax.lax.map(one, qk), q, k)
        room = unobserved(method, (L, H, R), T)
        assert jax.tree.structure(room) == jax.tree.structure(got)
        assert [x.shape for x in jax.tree.leaves(room)] == [x.shape for x in jax.tree.leaves(got)]


def test_what_is_observed_ends_as_plain_metrics():
    q, k = prompt(60, 3)
    method = get_method("kvcrush:shared-reads")

    def one(part):
        return observe_prompt(method, 0, *part, jnp.int32(60))  # type: ignore[call-arg]

    def all_layers(*qk):
        return keep_reads(method, jax.lax.map(one, qk), jnp.int32(60), T)

    seen = jax.jit(all_layers)(q, k)
    assert isinstance(seen, Observed)
    assert seen.votes is not None
    assert seen.window is None
    assert np.array_equal(plain_metric(seen), observed_whole(q, k, np.int32(60)))
