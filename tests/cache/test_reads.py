"""Tokens that all heads keep because one reads them, and the sampled background."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.cache.methods import get_method
from kvjax.cache.methods.shared_reads import READ, SharedReads, background
from kvjax.cache.policy import LayerView, Observer
from kvjax.cache.policy.pooling import fading_pool
from kvjax.kernels import prefill_attention_with_log_sum
from tests.oracle.scores import Prompt, read_by_any, sampled_mean

L, H, R, D, T = 2, 2, 2, 8, 64
SCORER = SharedReads()
OBSERVER = Observer(SCORER)


def prompt(length: int, seed: int, *, ties: bool = False) -> tuple[np.ndarray, ...]:
    """q, k of T tokens, those from `length` on padding that must not matter."""
    rng = np.random.default_rng(seed)
    q = 2 * rng.standard_normal((L, T, H * R, D)).astype(np.float32)
    k = rng.standard_normal((L, T, H, D)).astype(np.float32)
    if ties:
        k[:] = k[:, :1]
    q[:, length:], k[:, length:] = 1e4, -1e4
    return q, k


def layers(observer: Observer, q, k, length) -> Any:
    """Scores of all layers of a whole prompt."""

    def one(part):
        q, k = part
        return observer.observe(LayerView(0, q, k, length, jnp.int32(0)), {})

    return jax.lax.map(one, (q, k))


def whole(observer: Observer, q, k, length) -> Any:
    """The same once the last layer is through."""
    length = jnp.asarray(length, jnp.int32)
    return observer.finish(layers(observer, q, k, length), None, length, T)


@jax.jit
def observed_whole(q, k, length):
    return whole(OBSERVER, q, k, length).metric


def in_chunk(observer, q, k, held: int, length: int, order: np.ndarray):
    """The same prompt of which `held` tokens are there already, in any order within each head."""
    taken = order[..., None]
    held_k = np.take_along_axis(k[:, :held].swapaxes(1, 2), taken, axis=2)

    @jax.jit
    def run(q, k, held_k, position, length):
        token = jnp.arange(held, T, dtype=jnp.int32)
        new = jnp.broadcast_to(jnp.where(token < length, token, -1), (L, H, T - held))
        position = jnp.concatenate([position, new], axis=-1)
        keys = jnp.concatenate([jnp.swapaxes(held_k, 1, 2), k[:, held:]], axis=1)

        def one(part):
            q, k, position = part
            view = LayerView(0, q, k, length - held, jnp.int32(held), position)
            return observer.observe(view, {})

        scores = jax.lax.map(one, (q[:, held:], keys, position))
        return observer.finish(scores, position, length, T).metric

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
    without = Observer(dataclasses.replace(SCORER, tokens=0))
    own = jax.jit(lambda q, k: layers(without, q, k, jnp.int32(64)).metric)
    np.testing.assert_allclose(observed_whole(q, k, np.int32(64)), own(q, k), rtol=1e-5)


@pytest.mark.parametrize("length", [64, 50, 20, 5])
@pytest.mark.parametrize("log_sum", [False, True])
def test_background_is_the_mean_of_a_sample(length, log_sum):
    """Also where the attention has told the log-sum-exp of each query."""
    q, k = prompt(length, length)

    @jax.jit
    def sampled(q, k, n):
        sums = prefill_attention_with_log_sum(q, k, k)[1] if log_sum else None
        return 60 * background(LayerView(0, q, k, n, jnp.int32(0), log_sum=sums))

    got = np.asarray(sampled(q[0], k[0], np.int32(length)))
    oracle = Prompt(q[:, :length], k[:, :length], k[:, :length], 8, 4)
    for head in range(H):
        want = 60 * sampled_mean(oracle, 0, head)
        np.testing.assert_allclose(got[head, :length], want, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("held", [13, 40])
def test_chunks_read_what_the_whole_prompt_reads(held):
    """Where heads hold everything, in whatever order. The background is that of the chunk alone:
    tests/cache/test_chunks.py has it, and heads that do not hold everything."""
    plain = Observer(dataclasses.replace(SCORER, background=0.0))
    length = 61
    q, k = prompt(length, held)
    rng = np.random.default_rng(held)
    order = np.stack([[rng.permutation(held) for _ in range(H)] for _ in range(L)])
    got = in_chunk(plain, q, k, held, length, order)

    want = np.asarray(jax.jit(lambda q, k: whole(plain, q, k, length).metric)(q, k))
    there = np.take_along_axis(want, order, axis=2)
    np.testing.assert_allclose(got[..., :held], there, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(got[..., held:length], want[..., held:length], rtol=1e-5, atol=1e-7)


def test_the_order_in_which_heads_hold_kvs_does_not_matter():
    """The background's sample included: two orders give each token the same metric."""
    q, k = prompt(60, 1)
    metrics = []
    for order in (np.arange(20), np.random.default_rng(0).permutation(20)):
        orders = np.broadcast_to(order, (L, H, 20))
        got = in_chunk(OBSERVER, q, k, 20, 60, orders)
        by_position = np.empty_like(got[..., :20])
        np.put_along_axis(by_position, orders, got[..., :20], axis=2)
        metrics.append(np.concatenate([by_position, got[..., 20:60]], axis=2))
    np.testing.assert_allclose(metrics[0], metrics[1], rtol=1e-5, atol=1e-7)
    assert (metrics[0][..., :20] > 0).all()


def test_room_has_the_shape_of_what_is_observed():
    q, k = prompt(60, 2)
    for name in ("shared-reads", "kvcrush:shared-reads", "kv-compress", "lazyeviction"):
        observer = get_method(name).observer
        got = jax.eval_shape(lambda q, k, o=observer: layers(o, q, k, jnp.int32(60)), q, k)
        view = LayerView(0, jnp.asarray(q[0]), jnp.asarray(k[0]), jnp.int32(60), jnp.int32(0))
        room = observer.room(view, {}, L)
        assert jax.tree.structure(room) == jax.tree.structure(got)
        assert [x.shape for x in jax.tree.leaves(room)] == [x.shape for x in jax.tree.leaves(got)]


def test_scores_of_query_heads_are_kept_where_they_are_wanted():
    q, k = prompt(60, 3)
    method = get_method("kvcrush:shared-reads")
    seen = jax.jit(lambda q, k: whole(method.observer, q, k, 60))(q, k)
    assert seen.query_heads.shape == (L, H, R, T)
    assert seen.joint is None
    assert np.array_equal(seen.metric, observed_whole(q, k, np.int32(60)))
    assert jax.eval_shape(lambda q, k: whole(OBSERVER, q, k, 60), q, k).query_heads is None
