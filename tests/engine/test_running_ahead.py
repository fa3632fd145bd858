"""Single decode steps, and what is dispatched before what runs has reported, as on GPUs."""

import jax
import numpy as np
import pytest

from kvjax.cache import CompressionConfig
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
    tokens_of,
)


def noted(llm, monkeypatch) -> list[str]:
    """What a worker is told to do, in order."""
    log: list[str] = []

    def noting(name):
        call = getattr(llm.worker, name)

        def noted_call(*args):
            log.append(name)
            return call(*args)

        monkeypatch.setattr(llm.worker, name, noted_call)

    for name in ("advance", "decode", "on_host"):
        noting(name)
    return log


@pytest.mark.parametrize("ahead", [False, True])
def test_a_chunk_is_dispatched_before_decode_steps_report(tiny_params, monkeypatch, ahead):
    """Else a device waits until the host has taken in what they report."""
    llm = make_llm(tiny_params)
    assert not llm.engine.runs_ahead  # on CPUs
    llm.engine.runs_ahead = ahead
    log = noted(llm, monkeypatch)
    prompts = prompts_of(20, 120)
    outputs = llm.generate(prompts, greedy(12))
    # Four chunks of 30, of which none runs with the first prompt.
    assert " ".join(log).count("decode advance on_host") == 4 * ahead
    assert tokens_of(outputs) == alone(tiny_params, prompts, greedy(12))
    assert_empty(llm)


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "top_p": 0.8, "logprobs": 2}],
    ids=["greedy", "drawn", "filtered"],
)
@pytest.mark.parametrize("rule", [FULL, SMALL])
def test_single_steps_do_what_a_loop_does(tiny_params, sampling, rule):
    """On GPUs: in another compiled step, which knows how tokens are chosen."""
    prompts = prompts_of(20, 120, 33)
    params = [greedy(12, **sampling), greedy(9), greedy(1, **sampling)]

    def outputs(once: bool) -> tuple:
        llm = make_llm(tiny_params, rule)
        llm.worker.decodes_once = llm.engine.runs_ahead = once
        found = llm.generate(prompts, params)
        assert_empty(llm)
        steps = {key.step for key in llm.worker.compiled.seconds}
        assert ("decode once" in steps) is once
        return tokens_of(found), [o.logprobs for o in found], [o.stats.kept for o in found]

    alone_, in_loops = outputs(True), outputs(False)
    assert alone_[0] == in_loops[0]
    for one, other in zip(alone_[1:], in_loops[1:], strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_steps_before_one_that_fails_count(tiny_params, monkeypatch):
    """The device has run them: nothing that follows would fit without."""
    (prompt,) = prompts_of(20)
    llm = make_llm(tiny_params, FULL)
    llm.worker.decodes_once = True
    run, calls = llm.worker.compiled.run, []

    def fails_at_times(call):
        if call.key.step == "decode once":
            calls.append(call)
            if len(calls) == 3:
                raise RuntimeError("not now")
        return run(call)

    monkeypatch.setattr(llm.worker.compiled, "run", fails_at_times)
    outputs = llm.generate([prompt], greedy(12))
    assert tokens_of(outputs) == alone(tiny_params, [prompt], greedy(12))
    assert_empty(llm)


def test_no_more_single_steps_than_tokens_are_left(tiny_params, monkeypatch):
    """They are dispatched before anybody knows that a sequence has ended."""
    llm = make_llm(tiny_params, FULL)
    llm.worker.decodes_once = True
    decode, limits = llm.worker.decode, []

    def noted_limit(slots, limit, *rest):
        limits.append(limit)
        return decode(slots, limit, *rest)

    monkeypatch.setattr(llm.worker, "decode", noted_limit)
    llm.generate(prompts_of(20, 24), [greedy(4), greedy(3)])
    assert limits[-1] <= 3


def gpu_like(llm) -> None:
    """What it does on GPUs."""
    llm.worker.decodes_once = llm.engine.runs_ahead = True


def test_blocks_that_a_step_took_that_was_held_back_are_not_free(tiny_params, monkeypatch):
    """Else a prompt is let in that has no room, and begins again."""
    llm = make_llm(tiny_params, FULL, max_batch=4, block_size=1)
    gpu_like(llm)
    round_of, held, counted = llm.scheduler.round, [], []

    def noted_round():
        if held.pop():
            counted.append((llm.scheduler.accounts.num_free, int(llm.worker.free_blocks().sum())))
        return round_of()

    monkeypatch.setattr(llm.scheduler, "round", noted_round)
    for prompt in prompts_of(20, 24):
        llm.add_request(prompt, greedy(24))
    for number in range(99):
        if number in (4, 6):
            (prompt,) = prompts_of(9)
            llm.add_request(prompt, greedy(3))
        held.append(bool(llm.engine.reports.held) and number in (4, 6))
        llm.step()
        if not llm.has_unfinished():
            break
    assert counted
    for ours, device in counted:
        assert ours == device
    assert_empty(llm)


def test_the_next_steps_are_dispatched_before_the_last_one_has_reported(tiny_params, monkeypatch):
    """The device has work while the host takes in what it said of the others."""
    prompts = prompts_of(20, 24)
    llm = make_llm(tiny_params, FULL)
    gpu_like(llm)
    decode, reports_of, log = llm.worker.decode, llm.engine.reports._told, []

    def noted_decode(slots, limit, *rest):
        log.append(f"{limit} steps")
        return decode(slots, limit, *rest)

    def noted_reports(loops):
        log.extend(f"{len(reports)} reports" for _, reports in loops)
        return reports_of(loops)

    monkeypatch.setattr(llm.worker, "decode", noted_decode)
    monkeypatch.setattr(llm.engine.reports, "_told", noted_reports)
    outputs = llm.generate(prompts, greedy(24))
    assert tokens_of(outputs) == alone(tiny_params, prompts, greedy(24))
    assert "4 steps, 3 reports, 4 steps, 1 reports, 3 reports" in ", ".join(log)
    # Nothing follows the last ones.
    assert log[-3:] == ["4 steps", "1 reports", "4 reports"]
    assert_empty(llm)


def test_slots_are_sent_once_for_all_their_steps(tiny_params):
    llm = make_llm(tiny_params, FULL)
    gpu_like(llm)
    llm.generate(prompts_of(20, 24), greedy(24))
    sent = llm.worker._numbers.cache_info()
    # Either alone or both, however many are compiled for.
    assert sent.misses <= 4 < sent.hits


@pytest.mark.parametrize("rule", [FULL, SMALL])
def test_others_may_come_and_go_while_a_step_is_held_back(tiny_params, rule, monkeypatch):
    prompts = prompts_of(20, 24, 40)
    llm = make_llm(tiny_params, rule)
    gpu_like(llm)
    names = [llm.add_request(prompt, greedy(24)) for prompt in prompts[:2]]
    while not llm.engine.reports.held:
        llm.step()
    begin, begun = llm.worker.begin, []

    def noted_begin(request):
        begun.append(bool(llm.engine.reports.held))
        return begin(request)

    monkeypatch.setattr(llm.worker, "begin", noted_begin)
    names.append(llm.add_request(prompts[2], greedy(12)))
    llm.step()
    # Whether there is room depends on all that has run.
    assert begun == [False]
    ended = {}
    while llm.has_unfinished():
        for output in llm.step():
            ended[output.request_id] = output
        if llm.engine.reports.held and names[0] not in ended:
            llm.abort(names[0])
    wanted = [
        *alone(tiny_params, prompts[1:2], greedy(24), rule),
        *alone(tiny_params, prompts[2:], greedy(12), rule),
    ]
    assert tokens_of([ended[name] for name in names[1:]]) == wanted
    assert_empty(llm)


def test_all_may_leave_while_a_step_is_held_back(tiny_params):
    """Then it says something of nobody."""
    llm = make_llm(tiny_params)
    gpu_like(llm)
    names = [llm.add_request(prompt, greedy(24)) for prompt in prompts_of(20, 24)]
    while not llm.engine.reports.held:
        llm.step()
    for name in names:
        llm.abort(name)
    assert {output.finish_reason for output in drain(llm).values()} == {"abort"}
    assert llm.metrics.as_dict()["kvjax_rounds_failed_total"] == 0
    assert_empty(llm)


def test_compressed_every_few_tokens_nothing_is_decided_a_step_behind(tiny_params, monkeypatch):
    settings = CompressionConfig(max_cache_tokens=16, protected=8, compress_every=6)
    llm = make_llm(tiny_params, settings)
    gpu_like(llm)
    collect, held = llm.engine.reports.collect, []

    def noted_collect(*args):
        collect(*args)
        held.append(bool(llm.engine.reports.held))

    monkeypatch.setattr(llm.engine.reports, "collect", noted_collect)
    prompts = prompts_of(20, 24)
    outputs = llm.generate(prompts, greedy(24))
    assert held
    assert not any(held)
    assert tokens_of(outputs) == alone(tiny_params, prompts, greedy(24), settings)


def test_a_request_is_compressed_as_it_is_after_the_step_that_was_held_back(tiny_params):
    prompts = prompts_of(60, 64)
    llm = make_llm(tiny_params, LATE)
    gpu_like(llm)
    names = [llm.add_request(prompt, greedy(40)) for prompt in prompts]
    while not llm.engine.reports.held:
        llm.step()
    before = len(llm.scheduler.running[0].tokens)
    assert llm.compress(names[0], HEADS * 4) > 0
    assert len(llm.scheduler.running[0].tokens) == before + 1
    outputs = drain(llm)
    assert all(len(outputs[name].token_ids) == 40 for name in names)
    assert_empty(llm)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [FULL, SMALL])
def test_nothing_is_compiled_after_a_warm_up(tiny_params, rule):
    """However tokens are chosen, and whatever runs while a prompt comes in, as on GPUs."""
    llm = make_llm(tiny_params, rule)
    gpu_like(llm)
    prompts = prompts_of(120, 120, 120)
    llm.warm_up([120])
    warmed = set(llm.worker.compiled.seconds)
    for sampling in ({}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}):
        llm.generate(prompts, greedy(12, **sampling))
    assert not llm.worker.compiled.seconds.keys() - warmed


def test_a_single_step_without_room_changes_nothing(tiny_params):
    """It is tried again once there is some, as a loop is."""
    prompts = prompts_of(30, 40, 33, 24)
    llm = make_llm(tiny_params, FULL, TIGHT, decode_steps_per_sync=1)
    llm.worker.decodes_once = True
    outputs = llm.generate(prompts, greedy(40))
    assert sum(output.stats.preemptions for output in outputs) > 0
    assert tokens_of(outputs) == alone(tiny_params, prompts, greedy(40))
    assert_empty(llm)


def test_a_scratch_is_let_go_before_the_next_is_made(tiny_params, monkeypatch):
    """The plan has memory for one."""
    llm = make_llm(tiny_params)
    llm.engine.runs_ahead = True
    make, alive, inserted = llm.worker.scratch_maker, [], []

    def counted(job):
        inserted.append(len(llm.engine.reports.starts))
        alive.append(sum(start.prompt is not None for start, _ in llm.engine.reports.starts))
        return make(job)

    monkeypatch.setattr(llm.worker, "scratch_maker", counted)
    outputs = llm.generate(prompts_of(20, 120, 110, 100), greedy(12))
    assert [output.finish_reason for output in outputs] == ["length"] * 4
    # Each is made while the prompt before it has just come to its slot.
    assert sum(inserted) >= 2
    assert alive == [0] * 3


def test_a_chunk_that_fails_behind_decode_steps_ends_its_request_alone(tiny_params, monkeypatch):
    llm = make_llm(tiny_params)
    llm.engine.runs_ahead = True
    advance, calls = llm.worker.advance, []

    def fails(job):
        calls.append(job)
        if len(calls) == 3:
            raise ValueError("a chunk")
        advance(job)

    monkeypatch.setattr(llm.worker, "advance", fails)
    prompts = prompts_of(20, 120, 25)
    first, second, third = llm.generate(prompts, greedy(12))
    assert second.finish_reason == "error"
    assert "a chunk" in (second.error or "")
    assert tokens_of([first, third]) == alone(tiny_params, prompts[::2], greedy(12))
    assert_empty(llm)
