"""Interruptions and threads: the engine goes on or says that it is dead, and is never wrong."""

import ctypes
import os
import signal
import threading
import time

import numpy as np
import pytest

from kvjax.engine.compilation import CompiledSteps, StepCall, StepKey
from kvjax.engine.interrupts import held, released
from kvjax.errors import UserError
from kvjax.startup import Terminated
from tests.engine.serving import (
    FULL,
    alone,
    assert_empty,
    drain,
    greedy,
    make_llm,
    prompts_of,
    tokens_of,
)


@pytest.fixture
def interruptible():
    """SIGINT raises KeyboardInterrupt, as in a notebook, whatever runs the tests."""
    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def kept(done: list[int]) -> None:
    with held():
        with held():
            interrupt()
            done.append(1)
        done.append(2)


def twice(done: list[int]) -> None:
    with held():
        interrupt()
        done.append(1)
        interrupt()
        done.append(2)


def let_through(done: list[int]) -> None:
    with held():
        interrupt()
        done.append(1)
        with released():
            done.append(2)


def let_through_meanwhile(done: list[int]) -> None:
    with held(), released():
        done.append(1)
        with released():
            interrupt()
        done.append(2)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("run", "expected", "harmless"),
    [
        (kept, [1, 2], False),
        (twice, [1], False),
        (let_through, [1], True),
        (let_through_meanwhile, [1], True),
    ],
)
def test_interruptions_wait_until_nothing_is_half_done(run, expected, harmless):
    """A second one does not wait, and those that come where nothing can be lost do not either."""
    done, released.interrupted = [], False
    with pytest.raises(KeyboardInterrupt):
        run(done)
    assert done == expected
    assert released.interrupted == harmless
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with held(), released():
        pass
    with released():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


KEY = StepKey("empty")
TOLD = """static arguments should be comparable using __eq__. The error was:
Traceback (most recent call last):
  File "<string>", line 2, in __eq__
"""
"""How JAX begins to tell of what was raised while it compared arguments."""


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (f"{TOLD}KeyboardInterrupt: ", KeyboardInterrupt),
        (f"{TOLD}kvjax.startup.Terminated", Terminated),
        (f"{TOLD}TypeError: KeyboardInterrupt", ValueError),
        ("KeyboardInterrupt: said somebody", ValueError),
    ],
)
def test_an_interruption_that_jax_makes_an_error_of_is_one(text, kind):
    """In a step, where another error would end its request."""

    def interrupted(*arguments):
        raise ValueError(text)

    steps = CompiledSteps()
    steps.seconds[KEY] = 0.0
    raised = None
    try:
        steps.run(StepCall(KEY, interrupted, ()))
    except (ValueError, KeyboardInterrupt) as error:
        raised = type(error)
    assert raised is kind


def test_other_threads_and_other_handlers_are_left_alone():
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        with held():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)
    seen = []

    def elsewhere():
        with held(), released():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [before]


SWALLOWED = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""What comes in a callback of the garbage collector is only printed; JAX has one."""


def interrupted_runs(llm, times: int, seed: int, send, expected) -> int:
    """Interrupt batches at random moments and use the engine again. Returns how often it died."""
    rng = np.random.default_rng(seed)
    prompts = prompts_of(10, 40, 33)
    for _ in range(2):  # the first one compiles
        start = time.perf_counter()
        llm.generate(prompts, greedy(20))
        took = time.perf_counter() - start
    interrupted = died = 0
    for _ in range(times):
        timer = threading.Timer(rng.uniform(0, took), send)
        give_up = time.perf_counter() + took + 10
        try:
            timer.start()
            # One that comes while garbage is collected is printed and forgotten by Python.
            while time.perf_counter() < give_up:
                assert tokens_of(llm.generate(prompts, greedy(20))) == expected
        except KeyboardInterrupt:
            interrupted += 1
        timer.join()
        if not llm.has_unfinished() and llm.dead is None:
            llm.step()  # notices what was left half way
        outputs = llm.generate(prompts, greedy(20))
        if llm.dead is not None:
            assert all("dead: " in (output.error or "") for output in outputs)
            llm.reset()
            died += 1
            outputs = llm.generate(prompts, greedy(20))
        assert tokens_of(outputs) == expected
        drain(llm)
        assert_empty(llm)
    assert interrupted > 0.9 * times - 1
    return died


@pytest.fixture(scope="module")
def expected(tiny_params):
    return alone(tiny_params, prompts_of(10, 40, 33), greedy(20))


@SWALLOWED
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    "times", [15, pytest.param(200, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_an_engine_interrupted_at_any_moment_goes_on(tiny_params, expected, times):
    llm = make_llm(tiny_params)
    died = interrupted_runs(llm, times, 0, lambda: os.kill(os.getpid(), signal.SIGINT), expected)
    assert died == 0
    assert llm.metrics.as_dict()["kvjax_rounds_failed_total"] == 0


@SWALLOWED
@pytest.mark.parametrize(
    "times", [10, pytest.param(200, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_exceptions_from_nowhere_leave_it_right_or_dead(tiny_params, expected, times):
    """What no handler keeps back: an exception raised between two instructions."""
    llm = make_llm(tiny_params)
    main = ctypes.c_ulong(threading.main_thread().ident or 0)

    def send():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(KeyboardInterrupt))

    interrupted_runs(llm, times, 1, send, expected)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_prefill_is_done_again(tiny_params, expected):
    """Compilation and prefill take long: interruptions come through there, and cost nothing."""
    llm = make_llm(tiny_params)
    names = [llm.add_request(prompt, greedy(20)) for prompt in prompts_of(10, 40, 33)]
    whole, calls = llm.worker.compiled.run, 0

    def run(call):
        nonlocal calls
        calls += 1
        if calls % 3 == 0 and calls < 20:
            with released():
                interrupt()
        return whole(call)

    llm.worker.compiled.run = run
    last, interrupted = {}, 0
    while llm.has_unfinished():
        try:
            last |= {output.request_id: output for output in llm.step()}
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted >= 5
    assert tokens_of([last[name] for name in names]) == expected
    # Nothing had to be done again but the interrupted call.
    assert llm.metrics.as_dict()["kvjax_preemptions_total"] == 0
    assert sum(last[name].stats.preemptions for name in names) == 0
    assert_empty(llm)


def test_requests_come_and_go_from_other_threads(tiny_params, expected):
    llm = make_llm(tiny_params)
    prompts = prompts_of(10, 40, 33)
    results: dict[str, object] = {}
    names, errors = [], []

    def client(number: int) -> None:
        rng = np.random.default_rng(number)
        try:
            for _ in range(10):
                which = int(rng.integers(3))
                done = threading.Event()

                def note(output, done=done):
                    if output.finished:
                        results[output.request_id] = output
                        done.set()

                name = llm.add_request(prompts[which], greedy(20), on_output=note)
                names.append((name, which))
                if rng.integers(3) == 0:
                    try:
                        llm.abort(name)
                    except UserError:
                        assert done.is_set()
                assert done.wait(60)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or llm.has_unfinished():
        llm.step()
    assert not errors
    assert len(names) == len({name for name, _ in names}) == 40
    for name, which in names:
        output = results[name]
        assert output.finish_reason in ("length", "abort")  # type: ignore[attr-defined]
        got = output.token_ids  # type: ignore[attr-defined]
        assert got == expected[which][: len(got)]
    assert_empty(llm)


def test_one_thread_at_a_time_steps(tiny_params, expected):
    llm = make_llm(tiny_params)
    prompts = prompts_of(10, 40, 33)
    inside, go_on, errors = threading.Event(), threading.Event(), []

    def pause(_):
        inside.set()
        assert go_on.wait(60)

    def first() -> None:
        errors.append(tokens_of(llm.generate(prompts, greedy(20), on_step=pause)) == expected)

    thread = threading.Thread(target=first, name="the first")
    thread.start()
    assert inside.wait(60)
    try:
        for forbidden in (
            llm.step,
            llm.reset,
            lambda: llm.generate(prompts, greedy(2)),
            lambda: next(llm.stream(prompts, greedy(2))),
            lambda: llm.warm_up([10]),
        ):
            with pytest.raises(UserError, match="thread 'the first' is using this engine"):
                forbidden()
    finally:
        go_on.set()
        thread.join()
    assert errors == [True]
    drain(llm)
    assert tokens_of(llm.generate(prompts, greedy(20), FULL)) == expected
    assert_empty(llm)
