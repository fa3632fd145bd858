"""The steps of continuous batching one by one: first tokens, decode loops, reports.

What a loop yields is compared with a dense run of the same model, what it reports with what the
cache holds afterwards.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import init_cache
from kvjax.cache.methods import get_method
from kvjax.engine import decode, insert, prefill, reclaim
from kvjax.engine.sampling import SamplingParams, sampling_row
from tests.cache.free import free_of
from tests.engine.conftest import TINY
from tests.engine.serving import HEADS, prompts_of
from tests.models.decoder_helpers import dense_scores

SLOTS, BLOCK, STEPS, TOP, ROOM = 4, 4, 4, 3, 16
NO_EOS = (-1, -1)
METHOD = get_method("kv-compress-continual")
"""Its decode steps add to metrics."""
BUDGET = 2**31 - 1
BLOCKS = 20 * HEADS

# Nothing is donated: tests go on from the same cache.
_prefill = jax.jit(prefill.prefill, static_argnums=(0, 1))
_place = jax.jit(insert.place)
_start = jax.jit(insert.start, static_argnums=(0, 1))
_decode = jax.jit(decode.decode, static_argnums=(0, 1, 2, 3, 4))
_empty = jax.jit(reclaim.empty)
_compress = jax.jit(reclaim.compress_slots, static_argnums=(0, 1))


_dense_scores = jax.jit(functools.partial(dense_scores, TINY))


class Bench:
    """A cache with its slots, and the steps on them; each call goes on from the one before."""

    def __init__(self, params, num_free: int = BLOCKS):
        self.params = params
        cache = init_cache(
            num_slots=SLOTS,
            num_layers=TINY.num_layers,
            num_kv_heads=TINY.num_kv_heads,
            head_dim=TINY.head_dim,
            num_blocks=BLOCKS,
            max_blocks_per_head=8,
            block_size=BLOCK,
            dtype=jnp.float32,
        )
        # A pool of another size would compile every step again.
        self.cache = dataclasses.replace(
            cache, free=free_of(np.arange(BLOCKS) >= BLOCKS - num_free)
        )
        self.state = decode.init_slots(SLOTS)

    def start(
        self, slot, prompt, *, remaining=20, stop=True, observed=True, eos=NO_EOS, **sampling
    ) -> insert.InsertReport:
        tokens = np.zeros(ROOM, np.int32)
        tokens[: len(prompt)] = prompt
        made, scores = _prefill(
            TINY, METHOD.observer, self.params, {}, tokens, np.int32(len(prompt))
        )
        row = insert.Start(
            np.int32(slot),  # type: ignore[arg-type]
            scores,
            np.int32(remaining),  # type: ignore[arg-type]
            np.bool_(stop),  # type: ignore[arg-type]
            np.bool_(observed),  # type: ignore[arg-type]
            sampling_row(SamplingParams(**sampling)),
        )
        self.cache, _, _, ok = _place(None, {}, self.cache, made, np.int32(BUDGET), np.int32(slot))
        self.state, report = _start(
            TOP, None, self.cache, self.state, row, np.asarray(eos, np.int32), ok
        )
        return report

    def loop(self, *slots: int, limit: int = STEPS, eos=NO_EOS) -> decode.DecodeReport:
        self.cache, self.state, report = _decode(
            TINY, METHOD.decode, STEPS, TOP, None, self.params, self.cache, self.state,
            np.asarray(slots, np.int32), np.int32(limit), np.asarray(eos, np.int32),
        )  # fmt: skip
        return report

    def held(self, name: str, slot: int, num_kvs: int) -> np.ndarray:
        """Metrics or positions of the first KVs of all heads of a slot."""
        table = np.asarray(self.cache.block_table[slot])
        pages = np.minimum(table, self.cache.num_blocks - 1)
        pool = np.asarray(getattr(self.cache, name))
        return pool[pages].reshape(*table.shape[:2], -1)[..., :num_kvs]

    def dense(self, prompt, tokens=(), count: int = 6) -> list[int]:
        """Greedy tokens without a cache, after a prompt and tokens."""
        text = [*map(int, prompt), *tokens]
        length = len(text)
        for _ in range(count):
            text.append(int(np.argmax(self.log_p(text)[-1])))
        return text[length:]

    def log_p(self, text) -> np.ndarray:
        """Log-probabilities of the token after each of a text's, without a cache."""
        padded = np.zeros(32, np.int32)
        padded[: len(text)] = text
        scores = np.asarray(_dense_scores(self.params, padded)[: len(text)], np.float64)
        scores -= scores.max(axis=-1, keepdims=True)
        return scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))


@pytest.fixture
def bench(tiny_params) -> Bench:
    return Bench(tiny_params)


SHORT, LONG, OTHER = prompts_of(6, 11, 9)


@pytest.mark.slow
def test_each_slot_goes_on_with_its_own_tokens(bench):
    firsts = [int(bench.start(slot, p).token) for slot, p in ((3, SHORT), (0, LONG), (2, OTHER))]
    report = bench.loop(2, 9, 3, 0)
    tokens = np.asarray(report.tokens)
    assert (tokens[:, 1] == -1).all()
    for column, first, prompt in (
        (2, firsts[0], SHORT),
        (3, firsts[1], LONG),
        (0, firsts[2], OTHER),
    ):
        assert [first, *tokens[:, column]] == bench.dense(prompt, count=1 + STEPS)
    assert report.active.tolist() == [True, False, True, True]
    assert bool(report.ok)


def test_a_first_token_that_ends_the_text_ends_the_sequence(bench):
    token = bench.dense(SHORT, count=1)[0]
    for slot, (given, runs) in enumerate(
        (
            ({"eos": (token, -1)}, False),
            ({"eos": (-1, token)}, False),
            ({"eos": (token, -1), "stop": False}, True),
            ({"eos": (token + 1, -1)}, True),
        )
    ):
        report = bench.start(slot, SHORT, **given)
        assert int(report.token) == token
        assert bool(report.active) == runs
        assert bool(bench.state.active[slot]) == runs


def test_the_first_token_counts(bench):
    assert not bool(bench.start(0, SHORT, remaining=1).active)
    assert bool(bench.start(1, SHORT, remaining=2).active)
    assert bench.state.remaining.tolist()[:2] == [0, 1]
    report = bench.loop(0, 1, 9, 9)
    tokens = np.asarray(report.tokens)
    assert tokens[:, 0].tolist() == [-1] * STEPS
    assert tokens[:, 1].tolist() == [*bench.dense(SHORT, count=2)[1:], -1, -1, -1]
    assert report.active.tolist() == [False] * 4


def test_a_sequence_ends_at_its_own_end_of_text(bench):
    text = bench.dense(LONG, count=6)
    at = next(i for i in range(1, 5) if text[i] not in text[:i])
    eos = (-1, text[at])
    bench.start(0, LONG, eos=eos)
    bench.start(1, LONG, eos=eos, stop=False)
    tokens = np.asarray(bench.loop(0, 1, 9, 9, eos=eos).tokens)
    assert tokens[:, 0].tolist() == [*text[1 : at + 1], *[-1] * (STEPS - at)]
    assert tokens[:, 1].tolist() == text[1 : STEPS + 1]
    assert bench.state.active.tolist()[:2] == [False, True]
    assert int(bench.state.remaining[1]) == 20 - 1 - STEPS
    # What has ended takes no part any more.
    before = bench.cache.context_len[0]
    tokens = np.asarray(bench.loop(0, 1, 9, 9, eos=eos).tokens)
    assert tokens[:, 0].tolist() == [-1] * STEPS
    assert (bench.cache.context_len[0] == before).all()


def test_a_loop_keeps_its_limit(bench):
    bench.start(0, SHORT)
    text = bench.dense(SHORT, count=6)
    tokens = [np.asarray(bench.loop(0, 9, 9, 9, limit=n).tokens)[:, 0].tolist() for n in (2, 0, 3)]
    assert tokens == [[*text[1:3], -1, -1], [-1] * 4, [*text[3:6], -1]]


def test_only_observed_sequences_have_their_metrics_touched(bench):
    """Of a batch that mixes methods, and of a slot that takes no part."""
    for slot, observed in ((0, True), (1, False), (2, True), (3, False)):
        bench.start(slot, LONG, observed=observed)
    before = [bench.held("metric", slot, len(LONG)) for slot in range(4)]
    assert np.ptp(before, axis=0).max() == 0
    bench.loop(0, 1, 9, 3)
    after = [bench.held("metric", slot, len(LONG)) for slot in range(4)]
    for slot in (1, 2, 3):
        np.testing.assert_array_equal(after[slot], before[slot])
    assert (after[0] > before[0]).all()
    new = bench.held("metric", 1, len(LONG) + STEPS)[..., len(LONG) :]
    np.testing.assert_array_equal(new, 0)
    assert (bench.held("metric", 0, len(LONG) + STEPS)[..., len(LONG) :] > 0).all()


def test_scores_are_those_of_the_token_that_was_drawn(bench):
    given = {"temperature": 2.0, "seed": 5}
    started = bench.start(1, SHORT, **given)
    report = bench.loop(9, 1, 9, 9)
    tokens = [int(started.token), *np.asarray(report.tokens)[:, 1]]
    wanted = bench.log_p([*SHORT, *tokens])[len(SHORT) - 1 : -1]
    chosen = [started.log_probs.chosen[0], *report.log_probs.chosen[:, 1]]
    top = [started.log_probs.top[0], *report.log_probs.top[:, 1]]
    top_ids = [started.log_probs.top_ids[0], *report.log_probs.top_ids[:, 1]]
    best = np.argsort(-wanted, axis=-1)[:, :TOP]
    assert (best[:, 0] != tokens).all()
    np.testing.assert_allclose(chosen, wanted[np.arange(1 + STEPS), tokens], atol=2e-4)
    np.testing.assert_array_equal(top_ids, best)
    np.testing.assert_allclose(top, np.take_along_axis(wanted, best, -1), atol=2e-4)


def test_a_random_number_belongs_to_its_position(bench):
    """A request that was preempted goes on with the tokens it would have had."""
    given = {"temperature": 1.5, "seed": 11}
    first = int(bench.start(0, SHORT, **given).token)
    tokens = [first, *np.asarray(bench.loop(0, 9, 9, 9).tokens)[:, 0].tolist()]
    assert tokens != bench.dense(SHORT, count=5)
    for done in range(1, 4):
        bench.cache, bench.state = _empty(bench.cache, bench.state, np.arange(SLOTS) == 1)
        resumed = bench.start(1, [*SHORT, *tokens[:done]], **given)
        assert int(resumed.token) == tokens[done]
        rest = np.asarray(bench.loop(9, 1, 9, 9, limit=1).tokens)[0, 1]
        assert rest == tokens[done + 1]


def test_nothing_is_lost_where_blocks_run_out(tiny_params):
    """One token fits, the next does not; once there is room, the sequences go on."""
    bench = Bench(tiny_params, num_free=3 * 2 * HEADS)
    text = {slot: bench.dense(p, count=6) for slot, p in ((0, LONG[:7]), (1, OTHER[:7]))}
    bench.start(0, LONG[:7], temperature=0.0)
    bench.start(1, OTHER[:7])
    bench.start(2, SHORT)
    report = bench.loop(0, 1, 9, 9)
    assert not bool(report.ok)
    assert int(report.free) == 0
    assert np.asarray(report.tokens).tolist() == [[text[0][1], text[1][1], -1, -1], *[[-1] * 4] * 3]
    assert report.active.tolist() == [True, True, False, False]
    assert bench.state.remaining.tolist()[:2] == [18, 18]
    again = bench.loop(0, 1, 9, 9)
    assert not bool(again.ok)
    assert (np.asarray(again.tokens) == -1).all()
    assert bench.state.remaining.tolist()[:2] == [18, 18]
    assert bench.cache.seq_len.tolist()[:2] == [8, 8]
    bench.cache, bench.state = _empty(bench.cache, bench.state, np.arange(SLOTS) == 2)
    report = bench.loop(0, 1, 9, 9)
    assert bool(report.ok)
    for slot in (0, 1):
        assert np.asarray(report.tokens)[:, slot].tolist() == text[slot][2:6]


def test_a_prompt_that_does_not_fit_leaves_its_slot_alone(tiny_params):
    bench = Bench(tiny_params, num_free=4 * HEADS)
    bench.start(0, LONG)
    before = jax.tree.leaves((bench.cache, bench.state))
    report = bench.start(1, OTHER)
    assert not bool(report.ok)
    assert not bool(report.active)
    for old, new in zip(before, jax.tree.leaves((bench.cache, bench.state))):
        np.testing.assert_array_equal(old, new)


def test_a_report_counts_what_the_cache_holds(bench):
    bench.start(0, SHORT, remaining=7)
    bench.start(1, LONG, remaining=30)
    bench.start(2, OTHER, remaining=2)
    report = bench.loop(2, 0, 9, 1, limit=3)
    kvs = np.asarray(bench.cache.context_len).sum(axis=(1, 2))
    assert kvs.tolist() == [HEADS * 9, HEADS * 14, HEADS * 10, 0]
    assert report.kvs.tolist() == [HEADS * n for n in (10, 9, 0, 14)]
    assert report.longest.tolist() == [10, 9, 0, 14]
    assert report.owned.tolist() == [HEADS * n for n in (3, 3, 0, 4)]
    assert int(report.free) == BLOCKS - HEADS * 10 == int(bench.cache.free.count[0])
    # One has ended, one may go on from 9 to 12 KVs, one will from 14 to 18.
    assert report.growth.tolist() == [0, 0, 0, HEADS]
    assert bench.state.remaining.tolist()[:2] == [3, 26]
    # From 10 to 12, and from 15 to 19.
    assert bench.loop(2, 0, 9, 1, limit=1).growth.tolist() == [0, 0, 0, HEADS]


def test_emptied_slots_do_not_run(bench):
    bench.start(0, SHORT)
    bench.start(1, LONG)
    marked = np.asarray([True, False, False, False])
    bench.cache, bench.state = _empty(bench.cache, bench.state, marked)
    assert bench.state.active.tolist() == [False, True, False, False]
    assert bench.cache.context_len.sum(axis=(1, 2)).tolist() == [0, HEADS * 11, 0, 0]
    tokens = np.asarray(bench.loop(0, 1, 9, 9).tokens)
    assert (tokens[:, 0] == -1).all()
    assert tokens[:, 1].tolist() == bench.dense(LONG, count=5)[1:]


def test_compression_keeps_each_sequences_newest(bench):
    """As many as the caller says; the others of the cheapest blocks go."""
    method = dataclasses.replace(METHOD, protected=0, sinks=0)
    for slot, prompt in ((0, LONG), (1, LONG), (2, SHORT)):
        bench.start(slot, prompt)
    bench.loop(0, 1, 9, 9)  # 15 KVs per head
    slots, keep = np.asarray([1, 9, 0, 9], np.int32), np.full(4, 2 * HEADS, np.int32)
    protected = np.asarray([7, 0, 1, 0], np.int32)
    before = bench.cache
    bench.cache, freed = _compress(100_000, 8, method, {}, before, slots, keep, protected)
    assert freed.tolist() == [2 * HEADS, 0, 2 * HEADS, 0]
    lengths = np.asarray(bench.cache.context_len)
    for layer, head in np.ndindex(TINY.num_layers, TINY.num_kv_heads):
        stays = bench.held("position", 1, lengths[1, layer, head])[layer, head]
        assert set(range(8, 15)) <= set(stays.tolist())
    np.testing.assert_array_equal(lengths[2], len(SHORT))
    newest = [
        14 in bench.held("position", 0, lengths[0, layer, head])[layer, head]
        for layer, head in np.ndindex(TINY.num_layers, TINY.num_kv_heads)
    ]
    assert all(newest)
    everywhere = [
        set(range(8, 15)) <= set(bench.held("position", 0, n)[layer, head].tolist())
        for (layer, head), n in np.ndenumerate(lengths[0])
    ]
    assert not all(everywhere)


def test_the_longest_of_unequal_heads_is_reported(bench):
    bench.start(0, LONG)
    cache = bench.cache
    # As after a compression: one head holds a block less than the others.
    short = cache.context_len.at[0, 1, 0].add(-BLOCK)
    table = cache.block_table.at[0, 1, 0, 2].set(BLOCKS)
    bench.cache = dataclasses.replace(cache, context_len=short, block_table=table)
    report = bench.loop(0, limit=1)
    lengths = np.asarray(bench.cache.context_len[0])
    assert lengths.min() + BLOCK == lengths.max() == len(LONG) + 1
    assert report.longest.tolist() == [lengths.max()]
    assert report.owned.tolist() == [(-(-lengths // BLOCK)).sum()]
    assert report.kvs.tolist() == [lengths.sum()]
