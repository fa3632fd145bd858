"""Requests that come, go and misbehave while others run."""

import dataclasses

import numpy as np
import pytest

from kvjax.cache import CompressionConfig
from kvjax.engine.checks import checked_request
from kvjax.errors import UserError
from tests.engine.serving import (
    FULL,
    HEADS,
    TIGHT,
    alone,
    assert_empty,
    drain,
    greedy,
    make_llm,
    prompts_of,
    tokens_of,
)


def test_requests_may_come_while_others_run(tiny_params):
    prompts = prompts_of(10, 40, 33, 70, 25, 21)
    llm = make_llm(tiny_params)
    names = []
    for prompt in prompts:
        names.append(llm.add_request(prompt, greedy()))
        llm.step()
    last = drain(llm)
    assert tokens_of([last[name] for name in names]) == alone(tiny_params, prompts, greedy())
    assert_empty(llm)


def test_aborted_requests_leave_the_others_alone(tiny_params):
    prompts = prompts_of(10, 40, 33, 127, 150, 21)
    llm = make_llm(tiny_params)
    names = [llm.add_request(prompt, greedy(20)) for prompt in prompts]
    outputs = {}
    for step in range(4):
        outputs |= {output.request_id: output for output in llm.step()}
        if step == 1:
            llm.abort(names[3])  # mid-prefill, or in the queue
        if step == 3:
            llm.abort(names[0])
            llm.abort(names[5])
            with pytest.raises(UserError, match="no unfinished request"):
                llm.abort(names[0])
    outputs |= drain(llm)
    reasons = [outputs[name].finish_reason for name in names]
    assert reasons == ["abort", "length", "length", "abort", "length", "abort"]
    expected = alone(tiny_params, prompts, greedy(20))
    for at, name in enumerate(names):
        got = outputs[name].token_ids
        assert got == expected[at][: len(got)]
        assert (len(got) == 20) == (reasons[at] == "length")
    assert_empty(llm)


def test_a_callback_that_raises_ends_its_own_request(tiny_params):
    prompts = prompts_of(10, 40, 33)
    llm = make_llm(tiny_params)
    seen = []

    def fail(output):
        raise RuntimeError("no more room on the screen")

    names = [
        llm.add_request(prompts[0], greedy(20), on_output=seen.append),
        llm.add_request(prompts[1], greedy(20), on_output=fail),
        llm.add_request(prompts[2], greedy(20)),
    ]
    last = drain(llm)
    assert last[names[1]].finish_reason == "error"
    assert last[names[1]].error == "on_output raised RuntimeError: no more room on the screen"
    expected = alone(tiny_params, prompts, greedy(20))
    assert [last[names[0]].token_ids, last[names[2]].token_ids] == [expected[0], expected[2]]
    assert seen[-1].finished
    assert "".join(output.new_text for output in seen) == seen[-1].text
    assert_empty(llm)


def test_requests_may_come_and_end_while_others_are_taken_in(tiny_params):
    """Another thread may be in between any two looks at what has come."""
    now = 0.0
    llm = make_llm(tiny_params, clock=lambda: now)
    intake, prompt = llm.engine.intake, prompts_of(10)[0]

    def meddled(take):
        def taken(*args):
            nonlocal now
            found = take(*args)
            if now < 6:
                llm.abort(llm.add_request(prompt, greedy(20)))
                llm.add_request(prompt, greedy(20), deadline=0.5)
                now += 1.0
            return found

        return taken

    for name in ("take_new", "take_aborted", "take_late"):
        setattr(intake, name, meddled(getattr(intake, name)))
    llm.add_request(prompt, greedy(4))
    reasons = sorted(output.finish_reason or "" for output in drain(llm).values())
    assert reasons == ["abort"] * 6 + ["deadline"] * 6 + ["length"]
    assert llm.metrics.as_dict()["kvjax_rounds_failed_total"] == 0
    assert_empty(llm)


def test_closing_a_stream_ends_its_requests_and_no_others(tiny_params):
    prompts = prompts_of(10, 40, 33)
    llm = make_llm(tiny_params)
    kept = llm.add_request(prompts[2], greedy(20), request_id="kept")
    stream = llm.stream(prompts[:2], greedy(20))
    next(stream)
    stream.close()
    last = drain(llm)
    assert last[kept].token_ids == alone(tiny_params, prompts[2:], greedy(20))[0]
    assert sorted(output.finish_reason or "" for output in last.values())[:2] == ["abort", "abort"]
    assert_empty(llm)


def test_an_interrupted_batch_ends_and_the_engine_goes_on(tiny_params):
    prompts = prompts_of(10, 40)
    llm = make_llm(tiny_params)

    def interrupt(ended):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, greedy(20), on_step=interrupt)
    assert tokens_of(llm.generate(prompts, greedy(20))) == alone(tiny_params, prompts, greedy(20))
    assert_empty(llm)


def test_two_streams_share_the_engine(tiny_params):
    prompts = prompts_of(10, 40)
    llm = make_llm(tiny_params)
    one, two = (llm.stream(prompt, greedy(20)) for prompt in prompts)
    first = next(one)
    texts = {"one": first.new_text, "two": ""}
    for output in two:
        texts["two"] += output.new_text
    for output in one:
        texts["one"] += output.new_text
    plain = make_llm(tiny_params).generate(prompts, greedy(20))
    assert texts == {"one": plain[0].text, "two": plain[1].text}
    assert_empty(llm)


def test_a_stream_of_bad_prompts_says_so(tiny_params):
    llm = make_llm(tiny_params)
    outputs = list(llm.stream([np.zeros(0, np.int32), prompts_of(10)[0]], greedy(3)))
    assert "empty" in (outputs[0].error or "")
    assert outputs[-1].finish_reason == "length"


@pytest.mark.slow
def test_methods_of_different_decode_rules_share_a_batch(tiny_params):
    """Whoever runs, nobody is refused, and each gets the tokens that it gets alone."""
    names = ("shared-reads", "h2o-decode", "tova", "kv-compress-continual")
    settings = [
        CompressionConfig(method=name, max_cache_tokens=24, protected=4, compress_every=6)
        for name in names
    ]
    settings[3] = dataclasses.replace(settings[3], window=8)
    prompt = prompts_of(40)[0]
    llm = make_llm(tiny_params)
    rules = {checked_request(llm, prompt, greedy(), one, "", 0).rule for one in settings}
    assert len(rules) == 4
    outputs = llm.generate([prompt] * 4, greedy(20), settings)
    expected = [alone(tiny_params, [prompt], greedy(20), one)[0] for one in settings]
    assert tokens_of(outputs) == expected
    assert len(set(expected)) >= 3
    found = llm.metrics.as_dict()
    # The first steps add nothing, so it decodes with another.
    assert found["kvjax_batch_largest"] == 2
    assert found["kvjax_compressions_total"] == 3 * 4
    assert_empty(llm)


def test_a_request_is_compressed_when_asked(tiny_params):
    llm = make_llm(tiny_params)
    settings = CompressionConfig(max_cache_tokens=32, protected=4)
    name = llm.add_request(prompts_of(40)[0], greedy(30), settings)
    whole = llm.add_request(prompts_of(40)[0], greedy(30))
    with pytest.raises(UserError, match="no request of that id decodes"):
        llm.compress(name, HEADS * 4)
    while len(llm.scheduler.running) < 2:
        llm.step()
    with pytest.raises(UserError, match="its settings evict nothing"):
        llm.compress(whole, HEADS * 4)
    held = int(llm.scheduler.accounts.owned[0].sum())
    free = llm.worker.free_blocks()
    freed = llm.compress(name, HEADS * 4)
    assert freed == held - HEADS * 4 > 0
    assert llm.worker.free_blocks() == llm.scheduler.accounts.num_free == free + freed
    last = drain(llm)
    assert last[name].stats.blocks_evicted_decoding == freed
    assert len(last[name].token_ids) == 30
    assert [last[whole].token_ids] == alone(tiny_params, prompts_of(40), greedy(30))
    assert_empty(llm)


def test_first_come_first_served_without_starvation(tiny_params):
    """A long request is not overtaken by short ones that would fit beside those that run."""
    lengths = (60, 20, 80, 5, 5, 5, 70, 5, 5, 5, 5, 60)
    prompts = [prompts_of(n)[0] for n in lengths]
    llm = make_llm(tiny_params, FULL, TIGHT)
    outputs = llm.generate(prompts, greedy(8))
    admitted = [output.stats.admitted for output in outputs]
    assert admitted == sorted(admitted, key=lambda time: time or 0.0)
    expected = alone(tiny_params, prompts, greedy(8))
    assert tokens_of(outputs) == expected
    assert_empty(llm)


def test_running_sequences_wait_for_one_chunk_at_most(tiny_params):
    llm = make_llm(tiny_params)
    llm.add_request(prompts_of(10)[0], greedy(40), request_id="running")
    llm.step()
    llm.add_request(prompts_of(127)[0], greedy(4), request_id="long")
    chunks = 0
    while llm.has_unfinished():
        before = llm.scheduler.running[0].length if llm.scheduler.running else 0
        job = llm.scheduler.job.done if llm.scheduler.job else 0
        llm.step()
        if llm.scheduler.job is not None and llm.scheduler.job.done > job:
            chunks += 1
            assert llm.scheduler.job.done - job <= 32
            assert llm.scheduler.running[0].length > before
    assert chunks >= 3
    assert_empty(llm)


def test_first_tokens_are_told_before_the_decode_steps_behind_them(tiny_params):
    llm, told = make_llm(tiny_params), []

    def note(output):
        steps = llm.metrics.as_dict()["kvjax_decode_steps_total"]
        told.append((len(output.token_ids), steps))

    llm.add_request(prompts_of(10)[0], greedy(9), on_output=note)
    llm.step()
    assert told == [(1, 0)]
    drain(llm)
    assert [number for number, _ in told] == [1, 5, 9]
