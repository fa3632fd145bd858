"""Who runs when blocks run out, and what an operator is told of it."""

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvjax.cache import CompressionConfig
from kvjax.engine.config import EngineConfig
from kvjax.engine.decisions import Preempt
from kvjax.engine.memory import plan_memory
from kvjax.engine.metrics import EngineMetrics
from kvjax.engine.request import Request
from kvjax.engine.scheduler import Scheduler
from kvjax.errors import UserError
from kvjax.models import LoadedModel
from tests.cache.free import free_of
from tests.engine.conftest import TINY
from tests.engine.serving import (
    FULL,
    HEADS,
    LATE,
    SMALL,
    TIGHT,
    alone,
    assert_empty,
    drain,
    greedy,
    make_llm,
    prompts_of,
)
from tests.engine.test_engine_parts import request_of
from tests.models.tokenizer_builders import tiny_tokenizer

SIZES = EngineConfig(max_batch=2, block_size=4, prefill_chunk=32, prefill_scratch=512)


def test_the_newest_gives_way(tiny_params, caplog):
    prompts = prompts_of(30, 40, 33, 24, 25, 28)
    llm = make_llm(tiny_params, FULL, TIGHT)
    with caplog.at_level(logging.INFO, "kvjax"):
        outputs = llm.generate(prompts, greedy(40))
    times = [output.stats.preemptions for output in outputs]
    assert times[0] == 0 < sum(times)
    for output, number in zip(outputs, times, strict=True):
        record = f"request {output.request_id!r} is preempted: no blocks are free"
        assert caplog.text.count(record) == number
    assert llm.metrics.as_dict()["kvjax_preemptions_total"] == sum(times)
    ends = [output.stats.finished or 0.0 for output in outputs]
    assert ends[0] == min(ends)


def test_a_request_that_needs_the_whole_pool_gets_it():
    request = request_of(0, 400, None)
    need = request.blocks_to_admit()
    scheduler = Scheduler(SIZES, [need])
    scheduler.add(request)
    assert scheduler.begin_next() is request
    # Beside another a hundredth of the pool stays free.
    for spare, fits in ((need // 100, False), (1 + (2 * need) // 100, True)):
        scheduler = Scheduler(SIZES, [2 * need])
        scheduler.running.append(request_of(0, 40, None))
        scheduler.accounts.free[:] = need + spare
        assert scheduler.fits(request) == fits


def test_a_chunk_without_room_runs_again(tiny_params):
    """While a long prompt comes into the pool, others may take the blocks that it needs."""
    llm = make_llm(tiny_params)
    other, long = (prompts_of(n)[0] for n in (60, 150))
    llm.add_request(other, greedy(30), LATE)
    while not llm.scheduler.running:
        llm.step()
    name = llm.add_request(long, greedy(8), FULL)
    while llm.scheduler.job is None or not 0 < llm.scheduler.job.done < 100:
        llm.step()
    done, cache = llm.scheduler.job.done, llm.worker.cache
    mask = cache.free.mask
    # As if somebody held all that is free; the other request is over its budget.
    llm.worker.cache = dataclasses.replace(cache, free=free_of(np.zeros(cache.num_blocks, bool)))
    llm.step()
    assert llm.scheduler.job.done == done
    assert llm.metrics.as_dict()["kvjax_compressions_total"] == 1
    now = llm.worker.cache
    llm.worker.cache = dataclasses.replace(now, free=free_of(now.free.mask | mask))
    last = {}
    while llm.has_unfinished():
        last |= {output.request_id: output for output in llm.step()}
    assert last[name].stats.preemptions == 0
    assert [last[name].token_ids] == alone(tiny_params, [long], greedy(8))
    assert_empty(llm)


def test_what_comes_back_after_a_preemption_needs_no_more_than_before(tiny_params):
    """Its prompt was left whole; with what it has generated the pool would not hold that."""
    late = CompressionConfig(
        method="kv-compress", max_cache_tokens=8, protected=4, on_prefill=False
    )
    llm = make_llm(tiny_params, pool_tokens=40, prefill_chunk=128)
    llm.add_request(prompts_of(4)[0], greedy(34), FULL)
    name = llm.add_request(prompts_of(20)[0], greedy(80), late)
    last = drain(llm)
    assert last[name].finish_reason == "length"
    assert last[name].stats.preemptions
    assert_empty(llm)


def test_what_could_not_come_back_is_refused_at_once(tiny_params):
    """With all it generates its prompt no longer fits the scratch: chunks of it go to the pool."""
    small = CompressionConfig(method="kv-compress", max_cache_tokens=8, protected=4)
    llm = make_llm(tiny_params, pool_tokens=32, prefill_chunk=64, prefill_scratch=64)
    with pytest.raises(UserError, match="blocks and the pool has 48: give a pool of 76 tokens"):
        llm.add_request(prompts_of(62)[0], greedy(40), small)
    (output,) = llm.generate(prompts_of(62), greedy(2), small)
    assert output.finish_reason == "length"


@pytest.mark.parametrize("scratch", [256, 64])
def test_what_could_not_be_evicted_of_a_prompt_is_told(tiny_params, scratch):
    """Also of one that runs in the pool: its twelve newest stay, whatever its budget is."""
    llm = make_llm(tiny_params, prefill_scratch=scratch)
    name = llm.add_request(
        prompts_of(150)[0], greedy(4), CompressionConfig(max_cache_tokens=16, protected=12)
    )
    llm.engine.intake.open[name][0].budget = HEADS
    stats = drain(llm)[name].stats
    assert stats.shortfall == stats.blocks_after - HEADS
    assert stats.shortfall >= 2 * HEADS


def test_what_a_second_prefill_evicts_is_not_of_decoding(tiny_params):
    never = dataclasses.replace(SMALL, before_preemption=False)
    llm = make_llm(tiny_params, pool_tokens=110, prefill_scratch=64)
    llm.add_request(prompts_of(20)[0], greedy(70), FULL)
    name = llm.add_request(prompts_of(150)[0], greedy(60), never)
    stats = drain(llm)[name].stats
    assert stats.preemptions
    assert stats.blocks_evicted_decoding == 0


def test_what_cannot_be_evicted_is_made_room_for():
    """A prompt of ten blocks per head with a budget of three, of which only five can go."""
    scheduler = Scheduler(SIZES, [20 * HEADS])
    request, other = request_of(0, 40, 3 * HEADS), request_of(1, 40, None)
    assert request.blocks_to_admit() == HEADS * (3 + 1)
    for one in (request, other):
        scheduler.add(one)
        scheduler.begin_next()
        scheduler.inserted(one)
    assert list(scheduler.refuse(request, 5 * HEADS)) == [Preempt(request)]
    assert scheduler.waiting == [request]
    assert request.blocks_to_admit() == HEADS * (5 + 1)
    # The device reports what is free, and it gave none to the first.
    assert scheduler.accounts.num_free == (20 - 4 - 11) * HEADS


def test_nobody_ends_for_a_document_that_keeps_more_than_it_may(tiny_params, monkeypatch):
    """What has to stay of it does not fit beside who runs: it comes again when that has ended."""
    other, document = prompts_of(60, 33)
    small = CompressionConfig(method="key-norm", max_cache_tokens=12, protected=8)
    llm = make_llm(tiny_params, pool_tokens=92, share_prefix="auto")
    older = llm.add_request(other, greedy(20), FULL)
    while not llm.scheduler.running:
        llm.step()
    newer = llm.enqueue(document, greedy(3), small, shared=len(document)).id
    monkeypatch.setattr(Request, "budget_at", lambda request, length: 9 * HEADS)
    last = drain(llm)
    assert [last[name].finish_reason for name in (older, newer)] == ["length"] * 2
    assert [last[name].stats.preemptions for name in (older, newer)] == [0, 1]


@pytest.mark.parametrize("before_preemption", [True, False])
def test_preempted_requests_keep_what_they_generated(tiny_params, before_preemption):
    compression = CompressionConfig(
        max_cache_tokens=32, protected=8, before_preemption=before_preemption
    )
    llm = make_llm(tiny_params, compression, TIGHT)
    names = [llm.add_request(prompt, greedy(40)) for prompt in prompts_of(40, 41, 42, 43)]
    told: dict[str, tuple[int, ...]] = dict.fromkeys(names, ())
    while llm.has_unfinished():
        for output in llm.step():
            assert output.token_ids[: len(told[output.request_id])] == told[output.request_id]
            told[output.request_id] = output.token_ids
    assert [len(told[name]) for name in names] == [40] * 4
    assert_empty(llm)


def test_an_interval_is_kept_to_the_token(tiny_params, monkeypatch):
    llm = make_llm(tiny_params, dataclasses.replace(SMALL, compress_every=6))
    compress, seen = llm.engine._compress, []

    def noted(requests):
        seen.extend(request.since_compression for request in requests)
        return compress(requests)

    monkeypatch.setattr(llm.engine, "_compress", noted)
    llm.generate(prompts_of(40), greedy(30))
    assert len(seen) >= 3
    assert set(seen) == {6}


def test_an_interval_begins_with_the_first_step_whoever_waits(tiny_params, monkeypatch):
    """Beside a prompt that waits steps are single ones: the first comes with the prompt's token."""
    own = dataclasses.replace(SMALL, compress_every=3)
    llm = make_llm(tiny_params, own)
    compress, seen = llm.engine._compress, []

    def noted(requests):
        seen.extend(r.length for r in requests if r.id == "one")
        return compress(requests)

    monkeypatch.setattr(llm.engine, "_compress", noted)
    one, other = prompts_of(40, 30)
    for beside in ([], [other]):
        llm.add_request(one, greedy(16), request_id="one")
        for prompt in beside:
            llm.add_request(prompt, greedy(16), FULL)
        while llm.has_unfinished():
            llm.step()
        # A token more than steps: the newest one's KV is not written yet.
        assert seen == [44, 47, 50, 53]
        seen.clear()


def test_a_full_pool_ends_who_is_alone(tiny_params):
    llm = make_llm(tiny_params, FULL)
    name = llm.add_request(prompts_of(10)[0], greedy(100))
    while not llm.scheduler.running:
        llm.step()
    cache = llm.worker.cache
    llm.worker.cache = dataclasses.replace(cache, free=free_of(np.zeros(cache.num_blocks, bool)))
    last = {}
    for _ in range(30):
        last |= {output.request_id: output for output in llm.step()}
        if not llm.has_unfinished():
            break
    assert last[name].finish_reason == "pool"
    assert last[name].stats.preemptions == 0
    expected = alone(tiny_params, prompts_of(10), greedy(100))[0]
    got = last[name].token_ids
    assert 0 < len(got) < 100
    assert got == expected[: len(got)]


def test_deadlines_count_from_now(tiny_params):
    now = 1000.0
    llm = make_llm(tiny_params, clock=lambda: now)
    llm.add_request(prompts_of(10)[0], greedy(6), deadline=500, request_id="in time")
    last = {}
    while llm.has_unfinished():
        now += 1.0
        last |= {output.request_id: output for output in llm.step()}
    assert last["in time"].finish_reason == "length"


def test_generated_tokens_take_half_of_a_cap():
    request = request_of(0, 40, 4 * HEADS)
    request.measured = 40
    for count, stay in ((0, 0), (3, 3), (8, 8), (30, 8)):
        request.tokens = [1] * count
        assert request.unmeasured == stay


def test_decode_steps_are_counted():
    """Two heads: a sequence reads 18 and 20 KVs in two steps, another 8 in one."""
    metrics = EngineMetrics(100)
    tokens = np.asarray([[5, 6], [7, -1], [-1, -1]])
    metrics.decoded(tokens, np.asarray([20, 8]), heads=2)
    found = metrics.as_dict()
    assert found["kvjax_kvs_read_total"] == 18 + 20 + 8
    assert found["kvjax_decode_steps_total"] == 2
    assert found["kvjax_output_tokens_total"] == 3


def test_most_blocks_in_use_are_remembered(tiny_params):
    llm = make_llm(tiny_params)
    (output,) = llm.generate(prompts_of(30), greedy(10))
    assert output.finish_reason == "length"
    # 40 tokens, of which the last one is not in the cache.
    found = llm.metrics.as_dict()
    assert found["kvjax_blocks_peak"] == HEADS * 10
    assert found["kvjax_batch_largest"] == 1


def test_compilation_stalls_whoever_waits():
    metrics = EngineMetrics(100)
    metrics.compiled(2.0, stalled=True)
    metrics.compiled(3.0, stalled=False)
    found = metrics.as_dict()
    assert found["kvjax_compile_stall_seconds_total"] == 2.0
    assert found['kvjax_seconds_total{phase="compile"}'] == 5.0


def test_a_pool_beyond_the_memory_is_refused(tiny_params, monkeypatch):
    model = LoadedModel(TINY, tiny_params, tiny_tokenizer(), "")
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 2 * 10**7})
    monkeypatch.setattr("jax.local_devices", lambda: [device])
    sizes: dict[str, Any] = {"max_batch": 2, "prefill_chunk": 64, "prefill_scratch": 64}
    assert (
        plan_memory(model, EngineConfig(pool_tokens=4_000, **sizes), 256, "float32").total < 10**7
    )
    with pytest.raises(UserError, match=r"this does not fit: .*pool of 75,000 blocks"):
        plan_memory(model, EngineConfig(pool_tokens=200_000, **sizes), 256, "float32")


@pytest.mark.parametrize("share", ["never", "always"])
def test_a_pool_of_all_that_is_left_fits(tiny_params, monkeypatch, share):
    """What lies beside the blocks, a number or two of each, is left room for."""
    model = LoadedModel(TINY, tiny_params, tiny_tokenizer(), "")
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 10**8})
    monkeypatch.setattr("jax.local_devices", lambda: [device])
    sizes = EngineConfig(
        max_batch=64, prefill_chunk=64, prefill_scratch=64, share_prefix=share
    )  # fmt: skip
    plan = plan_memory(model, sizes, 4096, "float32")
    assert plan.num_blocks < sizes.num_rows * HEADS * 4096 // 16
    assert plan.limit - plan.spec.block_bytes - 8 < plan.total <= plan.limit


def test_a_first_token_that_is_the_last_one_ends_its_request(tiny_params, monkeypatch):
    """Also where its rule decodes nothing in that round: it might be preempted before, come back
    and go on."""
    llm = make_llm(tiny_params)
    other, last = prompts_of(20, 9)
    llm.add_request(other, greedy(30))
    while not llm.scheduler.running:
        llm.step()
    (first,) = llm.scheduler.running
    monkeypatch.setattr(llm.scheduler, "_by_rule", lambda: {None: [first]})
    name = llm.add_request(last, greedy(1))
    request, last = llm.engine.intake.open[name][0], {}
    while not request.tokens:
        last |= {output.request_id: output for output in llm.step()}
    assert request.finish_reason == "length"
    monkeypatch.undo()
    last |= drain(llm)
    assert len(last[name].token_ids) == 1
    assert_empty(llm)
