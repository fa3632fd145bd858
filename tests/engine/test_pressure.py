"""When blocks run out: who gives way, and that nothing is lost by it."""

import dataclasses
import logging

import jax.numpy as jnp
import pytest

from kvjax.cache import CompressionConfig
from tests.engine.serving import (
    FULL,
    SMALL,
    TIGHT,
    alone,
    assert_empty,
    drain,
    greedy,
    make_llm,
    prompts_of,
)


def test_the_newest_gives_way(tiny_params, caplog):
    llm = make_llm(tiny_params, FULL, TIGHT)
    with caplog.at_level(logging.INFO, "kvjax"):
        outputs = llm.generate(prompts_of(20, 20, 20, 20), greedy(60))
    told = [r.getMessage() for r in caplog.records if "preempted" in r.getMessage()]
    assert len(told) == sum(output.stats.preemptions for output in outputs)
    assert told[0] == f"request {outputs[2].request_id!r} is preempted: no blocks are free"
    preempted = [output.stats.preemptions for output in outputs]
    assert preempted[0] == 0 < sum(preempted)
    ended = [output.stats.finished or 0.0 for output in outputs]
    assert ended == sorted(ended)
    assert_empty(llm)


def test_a_chunk_that_found_no_room_runs_again(tiny_params):
    """A sequence grows while a long prompt is prefilled in the pool; compressing it makes room."""
    small = CompressionConfig(max_cache_tokens=16, protected=8, window=4)
    llm = make_llm(tiny_params, small, 184, prefill_chunk=8, prefill_scratch=64)
    llm.add_request(prompts_of(20)[0], greedy(100))
    while not llm.scheduler.running:
        llm.step()
    long = prompts_of(150)[0]
    name = llm.add_request(long, greedy(8), FULL)
    refused, settle = 0, llm.engine._settle_chunk

    def counted(job, size):
        nonlocal refused
        refused += not bool(job.fits)
        return settle(job, size)

    llm.engine._settle_chunk = counted
    last = drain(llm)
    assert refused > 0
    assert last[name].stats.preemptions == 0
    assert last[name].token_ids == alone(tiny_params, [long], greedy(8))[0]
    assert last[name].stats.kept is not None
    assert last[name].stats.kept.min() == last[name].stats.kept.max() == 150
    assert_empty(llm)


def test_a_prompt_that_keeps_more_than_its_budget_waits_for_room(tiny_params):
    """What an attempt could not evict is asked for when it is let in again: no thrashing."""
    first, second = prompts_of(20, 60)
    llm = make_llm(tiny_params, FULL, TIGHT)
    llm.add_request(first, greedy(20))
    llm.step()
    name = llm.add_request(second, greedy(8), SMALL)
    request, start = llm.engine.intake.open[name][0], llm.worker.start
    assert request.budget is not None
    before, more = request.blocks_to_admit(), 9
    refused = 0

    def too_small(job, *args):
        nonlocal refused
        report = start(job, *args)
        if job.request is not request or refused:
            return report
        refused += 1
        whole = request.blocks_whole(len(second))
        freed = jnp.int32(whole - (request.budget or 0) - more)
        return dataclasses.replace(report, ok=jnp.bool_(False), freed=freed)

    llm.worker.start = too_small
    last = drain(llm)
    assert refused == 1
    assert request.unevictable == more
    assert request.blocks_to_admit() == before + more
    assert last[name].stats.preemptions == 1
    assert last[name].token_ids == alone(tiny_params, [second], greedy(8), SMALL)[0]
    assert_empty(llm)


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
