"""What goes wrong inside a round ends the request it belongs to; the others lose nothing."""

import logging
from typing import Any

import jax
import numpy as np
import pytest

from kvjax.engine.recovery import MOST_FAILURES
from kvjax.errors import UserError
from tests.engine.serving import (
    FULL,
    SMALL,
    alone,
    assert_empty,
    drain,
    greedy,
    make_llm,
    prompts_of,
    tokens_of,
)

LENGTHS = (10, 40, 33)


@pytest.fixture(scope="module")
def expected(tiny_params):
    """The tokens of each prompt when nothing goes wrong."""
    return alone(tiny_params, prompts_of(*LENGTHS), greedy(20))


def failing(llm, name: str, bad, error: Exception | None = None):
    """Have a method of the worker raise whenever `bad` says so of its arguments."""
    error = error or RuntimeError("a bad kernel")
    whole = getattr(llm.worker, name)

    def method(*args):
        if bad(*args):
            raise error
        return whole(*args)

    setattr(llm.worker, name, method)


def add_all(llm, **settings) -> list[str]:
    return [llm.add_request(prompt, greedy(20), **settings) for prompt in prompts_of(*LENGTHS)]


def assert_only_the_second_failed(last, names, expected, error: str) -> None:
    outputs = [last[name] for name in names]
    assert [o.finish_reason for o in outputs] == ["length", "error", "length"]
    assert outputs[1].error == error
    assert [outputs[0].token_ids, outputs[2].token_ids] == [expected[0], expected[2]]
    got = outputs[1].token_ids
    assert got == expected[1][: len(got)]


@pytest.mark.parametrize("name", ["begin", "advance", "insert"])
def test_a_prompt_that_cannot_be_prefilled_ends_alone(tiny_params, expected, name, caplog):
    llm = make_llm(tiny_params)

    def bad(what, *_):
        prompt = what.prompt if name == "begin" else what.request.prompt
        return len(prompt) == 40

    failing(llm, name, bad)
    names = add_all(llm)
    with caplog.at_level(logging.ERROR, "kvjax"):
        last = drain(llm)
    assert_only_the_second_failed(last, names, expected, "RuntimeError: a bad kernel")
    assert names[1] in caplog.text
    assert_empty(llm)


@pytest.mark.parametrize("after", [2, -1])
def test_a_request_that_cannot_be_decoded_ends_alone(tiny_params, expected, after):
    """Also in the round in which its prompt came to its slot, before its first token is known."""
    llm = make_llm(tiny_params)
    names = add_all(llm)
    bad = llm.engine.intake.open[names[1]][0]
    together = []

    def raises(slots, *_):
        fails = bad.slot in slots and len(bad.tokens) > after
        together.extend([len(slots)] * fails)
        return fails

    failing(llm, "decode", raises, ValueError("two\nlines"))
    last = drain(llm)
    # Once with the others, once alone: it is found in the round that fails.
    assert together[-1] == 1 < together[0]
    assert len(together) == 2
    assert not any(output.stats.preemptions for output in last.values())
    assert_only_the_second_failed(last, names, expected, "ValueError: two lines")
    assert len(last[names[1]].token_ids) > after
    assert_empty(llm)


def test_a_text_that_cannot_be_read_ends_its_request(tiny_params, expected):
    llm = make_llm(tiny_params)
    names = add_all(llm)

    def push(token):
        raise KeyError("no such token")

    decoder: Any = llm.engine.intake.open[names[1]][1]._decoder
    decoder.push = push
    assert_only_the_second_failed(drain(llm), names, expected, "KeyError: 'no such token'")
    assert_empty(llm)


def test_a_round_that_fails_for_no_request_is_begun_again(tiny_params, expected):
    llm = make_llm(tiny_params)
    names, calls = add_all(llm), 0
    whole = llm.scheduler.begin_next

    def sometimes():
        nonlocal calls
        calls += 1
        if calls % 4 == 3:
            raise RuntimeError("a rare fault")
        return whole()

    llm.scheduler.begin_next = sometimes
    last = drain(llm)
    assert tokens_of([last[n] for n in names]) == expected
    # More than would be too many in a row.
    assert llm.metrics.as_dict()["kvjax_rounds_failed_total"] > MOST_FAILURES
    assert llm.dead is None
    assert_empty(llm)


def test_a_round_that_always_fails_does_not_go_on_for_ever(tiny_params):
    llm = make_llm(tiny_params)
    names = add_all(llm)
    llm.step()

    def never(*_):
        raise RuntimeError("for ever")

    llm.scheduler.begin_next = never
    last = drain(llm)
    assert {last[n].error for n in names} == {
        f"dead: {MOST_FAILURES} rounds failed, the last one of RuntimeError: for ever"
    }
    del llm.scheduler.begin_next
    llm.reset()
    assert_alive(llm, tiny_params)


def lose_the_cache(llm) -> None:
    for leaf in jax.tree.leaves(llm.worker.cache):
        leaf.delete()


def assert_alive(llm, params) -> None:
    prompts = prompts_of(10, 40)
    assert llm.dead is None
    assert tokens_of(llm.generate(prompts, greedy(20))) == alone(params, prompts, greedy(20))
    assert_empty(llm)


@pytest.mark.parametrize("when", ["decode", "advance", "insert", "empty"])
def test_an_engine_that_lost_its_cache_says_so_until_it_is_reset(
    tiny_params, expected, when, caplog
):
    llm = make_llm(tiny_params)
    names = add_all(llm)
    for _ in range(2):
        llm.step()
    failed = False

    def lost(*_):
        nonlocal failed
        failed = True
        lose_the_cache(llm)
        return True

    failing(llm, when, lost)
    seen = []
    late = llm.add_request(prompts_of(21)[0], greedy(20), on_output=seen.append)
    with caplog.at_level(logging.CRITICAL, "kvjax"):
        last = drain(llm)
    assert failed
    assert llm.dead == "dead: the device's state is lost (RuntimeError: a bad kernel)"
    assert llm.dead in caplog.text
    for name, tokens in zip(names, expected, strict=True):
        output = last[name]
        if output.finish_reason != "length":
            assert (output.finish_reason, output.error) == ("error", llm.dead)
        assert output.token_ids == tokens[: len(output.token_ids)]
    assert seen[-1].error == llm.dead
    assert last[late].error == llm.dead
    assert llm.step() == []
    with pytest.raises(UserError, match=r"the engine is dead: .*; call reset\(\)"):
        llm.add_request(prompts_of(10)[0])
    assert "dead" in (llm.generate(prompts_of(10))[0].error or "")
    delattr(llm.worker, when)
    llm.reset()
    assert_alive(llm, tiny_params)


def test_a_step_that_fails_on_the_device_is_noticed(tiny_params):
    """An error may come when the result is read, long after the call."""
    llm = make_llm(tiny_params)
    names = add_all(llm)
    llm.step()
    whole = jax.device_get

    def device_get(tree):
        lose_the_cache(llm)
        raise RuntimeError("INTERNAL: a kernel failed")

    jax.device_get = device_get
    try:
        last = drain(llm)
    finally:
        jax.device_get = whole
    assert {last[n].finish_reason for n in names} == {"error"}
    assert "INTERNAL: a kernel failed" in (llm.dead or "")
    llm.reset()
    assert_alive(llm, tiny_params)


def test_a_dead_engine_loads_no_prefix_until_it_is_reset(tiny_params, tmp_path):
    llm, path = make_llm(tiny_params, share_prefix="auto"), tmp_path / "document.safetensors"
    llm.save_prefix(path, prompts_of(20)[0])
    jax.tree.map(lambda x: x.delete(), llm.worker.cache.kv)
    llm.generate(prompts_of(5), greedy(2))
    with pytest.raises(UserError, match=r"the engine is dead: .*; call reset\(\)$"):
        llm.load_prefix(path)
    llm.reset()
    assert llm.load_prefix(path) == 20


def test_reset_ends_what_is_open(tiny_params, expected):
    llm = make_llm(tiny_params)
    names = add_all(llm)
    for _ in range(3):
        llm.step()
    assert llm.metrics.as_dict()["kvjax_blocks_used"] > 0
    llm.reset()
    gauges = llm.metrics.as_dict()
    assert gauges["kvjax_requests_running"] == gauges["kvjax_blocks_used"] == 0
    last = drain(llm)
    assert {last[n].error for n in names} == {"dead: reset() was called"}
    for name, tokens in zip(names, expected, strict=True):
        assert last[name].token_ids == tokens[: len(last[name].token_ids)]
    assert last[names[0]].token_ids
    assert_alive(llm, tiny_params)


def test_callbacks_may_add_and_abort_and_nothing_else(tiny_params, expected):
    llm = make_llm(tiny_params)
    prompts = prompts_of(*LENGTHS)
    refused, added = [], []

    def meddle(output):
        for forbidden in (
            llm.step,
            llm.reset,
            lambda: llm.generate(prompts[:1], greedy(2)),
            lambda: next(llm.stream(prompts[:1], greedy(2))),
        ):
            with pytest.raises(UserError, match="inside a callback") as caught:
                forbidden()
            refused.append(caught.value)
        if len(added) < 1:
            added.append(llm.add_request(prompts[1], greedy(20)))
            llm.abort(names[2])

    names = [
        llm.add_request(prompts[0], greedy(20), on_output=meddle),
        llm.add_request(prompts[1], greedy(20)),
        llm.add_request(prompts[2], greedy(200)),
    ]
    last = drain(llm)
    assert refused
    assert last[names[0]].token_ids == expected[0]
    assert last[names[1]].token_ids == last[added[0]].token_ids == expected[1]
    assert last[names[2]].finish_reason == "abort"
    assert_empty(llm)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_callback_that_is_interrupted_costs_nobody_a_token(tiny_params, expected, error):
    llm = make_llm(tiny_params)
    prompts, calls = prompts_of(*LENGTHS), 0

    def interrupted(output):
        nonlocal calls
        calls += 1
        if calls in (1, 3):
            raise error

    names = [
        llm.add_request(prompts[0], greedy(20)),
        llm.add_request(prompts[1], greedy(20), on_output=interrupted),
        llm.add_request(prompts[2], greedy(20)),
    ]
    last, raised = {}, 0
    while llm.has_unfinished():
        try:
            last |= {output.request_id: output for output in llm.step()}
        except error:
            raised += 1
    assert raised == 2
    assert tokens_of([last[n] for n in names]) == expected
    # The round that was under way came to its end: nothing had to be done again.
    assert llm.metrics.as_dict()["kvjax_preemptions_total"] == 0
    assert_empty(llm)


def test_new_text_adds_up_when_nobody_stepped_for_a_request(tiny_params):
    """Outputs of a request without a callback wait, whatever other calls step meanwhile."""
    llm = make_llm(tiny_params)
    first, second = prompts_of(10, 40)
    name = llm.add_request(first, greedy(20))
    assert llm.generate([second], greedy(40))[0].finish_reason == "length"
    assert list(llm.stream(second, greedy(4)))[-1].finish_reason == "length"
    assert llm.has_unfinished()
    (output,) = [o for o in llm.step() if o.request_id == name]
    assert output.token_ids == alone(tiny_params, [first], greedy(20))[0]
    assert output.new_text == output.text
    assert not llm.has_unfinished()
    assert_empty(llm)


def test_logprobs_and_text_survive_a_round_that_is_begun_again(tiny_params):
    """An interruption between the device's tokens and the host's note of them."""
    prompt, sampling = prompts_of(10)[0], greedy(20, logprobs=1)
    plain = make_llm(tiny_params).generate([prompt], sampling)[0]
    llm = make_llm(tiny_params)
    name = llm.add_request(prompt, sampling)
    told = [o for _ in range(3) for o in llm.step()]
    request, _ = llm.engine.intake.open[name]
    request.tokens.append(96)  # noted, its log-probability not yet
    llm.recovery._under_way = True
    while llm.has_unfinished():
        told += llm.step()
    assert told[-1].token_ids == plain.token_ids
    assert "".join(o.new_text for o in told) == told[-1].text == plain.text
    assert told[-1].logprobs is not None
    assert plain.logprobs is not None
    assert [p.token for p in told[-1].logprobs] == list(plain.token_ids)
    np.testing.assert_allclose(
        [p.logprob for p in told[-1].logprobs], [p.logprob for p in plain.logprobs], atol=1e-5
    )
    assert_empty(llm)


@pytest.mark.parametrize("compression", [FULL, SMALL])
def test_a_deadline_ends_a_request_with_what_it_has(tiny_params, compression):
    now = 0.0
    llm = make_llm(tiny_params, compression, clock=lambda: now)
    first, second = prompts_of(10, 40)
    late = llm.add_request(first, greedy(200), deadline=5)
    kept = llm.add_request(second, greedy(20), deadline=500)
    last = {}
    while llm.has_unfinished():
        now += 1.0
        last |= {output.request_id: output for output in llm.step()}
    assert last[late].finish_reason == "deadline"
    assert 0 < len(last[late].token_ids) < 200
    assert last[kept].finish_reason == "length"
    assert_empty(llm)


def test_a_queue_has_a_limit_where_one_is_set(tiny_params):
    # Beside those that a slot is free for.
    llm = make_llm(tiny_params, max_waiting=2, max_batch=1)
    for _ in range(3):
        llm.add_request(prompts_of(10)[0], greedy(4))
    with pytest.raises(UserError, match="3 requests run or wait, which is max_waiting 2 beside"):
        llm.add_request(prompts_of(10)[0], greedy(4))
    drain(llm)
    llm.add_request(prompts_of(10)[0], greedy(4))
    drain(llm)
    found = llm.metrics.as_dict()
    assert found["kvjax_requests_total"] == 4
    assert found["kvjax_requests_refused_total"] == 1
    assert found['kvjax_requests_ended_total{reason="length"}'] == 4
    assert_empty(llm)


def test_closing_a_stream_before_its_first_output_ends_its_requests(tiny_params):
    llm = make_llm(tiny_params)
    stream = llm.stream(prompts_of(10, 40), greedy(20))
    stream.close()
    drain(llm)
    with llm.stream(prompts_of(10), greedy(20)) as stream:
        next(stream)
    assert list(stream) == []
    drain(llm)
    found = llm.metrics.as_dict()
    assert found['kvjax_requests_ended_total{reason="abort"}'] == 3
    del stream
    llm.stream(prompts_of(10), greedy(20))
    drain(llm)
    assert llm.metrics.as_dict()['kvjax_requests_ended_total{reason="abort"}'] == 4
    assert_empty(llm)


@pytest.mark.usefixtures("unchecked_signatures")
def test_an_error_among_the_prompts_leaves_no_request_behind(tiny_params):
    llm = make_llm(tiny_params)

    class Bad:
        def __array__(self, dtype=None, copy=None):
            raise KeyboardInterrupt

    prompts: list[Any] = [prompts_of(10)[0], Bad()]
    for start in (llm.generate, llm.stream):
        with pytest.raises(KeyboardInterrupt):
            start(prompts, greedy(20))
        # They have gone, they are not run to their ends.
        llm.step()
        llm.step()
        assert_empty(llm)
    assert llm.metrics.as_dict()['kvjax_requests_ended_total{reason="abort"}'] == 2
