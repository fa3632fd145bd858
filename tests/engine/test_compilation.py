"""Compiled steps: what a request needs is compiled side by side, once, before it is needed."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from kvjax.engine import compilation
from kvjax.engine.compilation import CompiledSteps, StepCall, StepKey
from kvjax.engine.interrupts import held
from kvjax.engine.steps import FUNCTIONS, ON_ONE_DEVICE
from tests.engine.serving import SMALL, greedy, make_llm, prompts_of, tokens_of


class Step:
    """Stands in for a jitted function."""

    def __init__(self, on_compile: Callable[[], object]):
        self.on_compile, self.compiled = on_compile, 0

    def __call__(self, x: int) -> int:
        return x + 1

    def lower(self, x: int) -> "Step":
        return self

    def compile(self) -> None:
        self.on_compile()
        self.compiled += 1


def calls_of(*steps: Step) -> list[StepCall]:
    return [StepCall(StepKey("prefill", number), step, (2,)) for number, step in enumerate(steps)]


def test_steps_are_compiled_side_by_side_and_once():
    meet = threading.Barrier(2)
    steps, known = [Step(lambda: meet.wait(10)) for _ in range(2)], CompiledSteps()
    calls = calls_of(*steps)
    known.compile(calls)
    known.compile(calls)
    assert [known.run(call) for call in calls] == [3, 3]
    assert [step.compiled for step in steps] == [1, 1]
    assert known.seconds.keys() == {call.key for call in calls}
    assert known.waited > 0


@pytest.mark.parametrize(
    ("platform", "options"),
    [("cpu", None), ("gpu", {"xla_disable_hlo_passes": "rematerialization"}), ("tpu", None)],
)
def test_no_step_of_a_gpu_is_computed_twice_to_save_memory(platform, options, monkeypatch):
    """What this keeps out of the programs: benchmarks/kernels/compile.py, with the toolchain."""
    assert ON_ONE_DEVICE.keys() == FUNCTIONS.keys()
    assert all(isinstance(step, compilation.Step) for step in ON_ONE_DEVICE.values())
    given, jit = [], jax.jit

    def noted(function, *, compiler_options, **more):
        given.append(compiler_options)
        return jit(function, **more)

    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(jax, "jit", noted)
    one = compilation.Step(lambda x, n: x + n, static_argnums=1)
    assert int(one(jnp.int32(1), 2)) == 3
    assert one.eval_shape(jnp.int32(1), 2).dtype == jnp.int32
    assert int(one.lower(jnp.int32(1), 2).compile()(jnp.int32(1))) == 3
    assert given == [options]


def test_two_threads_jit_a_step_once(monkeypatch):
    """Engines share the steps, and what one of them traced is there for the other."""
    both, asked = threading.Barrier(2), []

    def options(platform: str) -> None:
        asked.append(platform)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)

    monkeypatch.setattr(compilation, "compiler_options", options)
    step = compilation.Step(lambda x: x)
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(lambda _: step.jitted, range(2))
    assert one is other
    assert len(asked) == 1


def test_one_step_is_traced_at_a_time():
    """The interpreter has one thread at a time; who is traced first can be compiled first."""
    tracing, most = [], []

    class Traced(Step):
        def lower(self, x: int) -> Step:
            tracing.append(self)
            time.sleep(0.05)  # lets another thread in, if there is any
            most.append(len(tracing))
            tracing.remove(self)
            return self

    meet = threading.Barrier(2)
    CompiledSteps().compile(calls_of(*(Traced(lambda: meet.wait(10)) for _ in range(2))))
    assert most == [1, 1]


def test_a_step_that_does_not_compile_says_so_when_it_is_run():
    def fail() -> None:
        raise ValueError("no such kernel")

    known, (good, bad) = CompiledSteps(), calls_of(Step(lambda: None), Step(fail))
    known.compile([good, bad])
    assert known.seconds.keys() == {good.key}
    assert known.run(good) == 3
    with pytest.raises(ValueError, match="no such kernel"):
        known.run(bad)


def test_interruptions_come_through_while_threads_compile():
    known, before = CompiledSteps(), signal.signal(signal.SIGINT, signal.default_int_handler)
    calls, reached = calls_of(Step(lambda: os.kill(os.getpid(), signal.SIGINT))), []

    def a_round() -> None:
        with held():
            known.compile(calls)
            reached.append(True)

    try:
        with pytest.raises(KeyboardInterrupt):
            a_round()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not reached
    assert known.run(calls[0]) == 3


def test_the_first_request_waits_once_for_all_its_steps(tiny_params, caplog):
    """Compiled of shapes: the same programs that its arrays then ask for."""
    llm = make_llm(tiny_params, SMALL, max_batch=3)
    name = llm.add_request(prompts_of(20)[0], greedy(6))
    # Records of this thread alone.
    with jax.log_compiles():
        llm.step()
        steps = sorted(key.step for key in llm.worker.compiled.seconds)
        last = {}
        while llm.has_unfinished():
            last |= {output.request_id: output for output in llm.step()}
    assert steps == ["decode", "empty", "place", "prefill", "start"]
    assert len(llm.worker.compiled.seconds) == 5
    ours = tuple(f"Compiling jit({step})" for step in steps)
    assert not [record for record in caplog.records if record.getMessage().startswith(ours)]
    assert len(tokens_of([last[name]])[0]) == 6
