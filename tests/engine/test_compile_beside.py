"""Steps that are new compile beside the rounds: who needs them waits in the queue, and nobody else.

Compilations are made slow by an event, so no time decides anything here.
"""

import asyncio
import itertools
import logging
import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import jax
import numpy as np
import pytest

from kvjax.cache import CompressionConfig, get_method
from kvjax.cache.policy import Merger
from kvjax.cache.policy.score import QuerySample
from kvjax.engine import warming
from kvjax.engine.async_llm import AsyncLLM
from kvjax.engine.compilation import StepCall, StepKey
from kvjax.engine.needs import needs_ahead
from kvjax.engine.request import RequestOutput
from kvjax.engine.sampling import DRAWN, FILTERED, GREEDY
from tests.engine.async_serving import make, run, settled
from tests.engine.serving import FULL, alone, assert_empty, greedy, prompts_of

SHORT, LONG = 20, 60
"""Lengths of two classes: a chunk, and two of them."""


class Gate:
    """Holds up the compilation of some steps, or fails it."""

    def __init__(self, llm: AsyncLLM, which: Callable[[StepCall], bool]):
        self.reached, self.open = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.tried = 0
        self.order: list[StepKey] = []
        """What was compiled."""
        compiled = llm.llm.worker.compiled
        add = compiled.add

        def slow(call: StepCall) -> None:
            if which(call):
                self.tried += 1
                self.reached.set()
                assert self.open.wait(60)
                if self.error is not None:
                    raise self.error
            add(call)
            self.order.append(call.key)

        compiled.add = slow  # type: ignore[method-assign]


def of_long_prompts(call: StepCall) -> bool:
    return call.key.step == "prefill in scratch"


async def reached(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 60)


async def last_of(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in outputs][-1]


def metric(llm: AsyncLLM, name: str) -> float:
    return llm.metrics.as_dict()[f"kvjax_{name}"]


@asynccontextmanager
async def gated(params, which=of_long_prompts, **config):
    """An engine whose gate is opened in the end, whatever happens."""
    async with make(params, **config) as llm:
        gate = Gate(llm, which)
        try:
            yield llm, gate
        finally:
            gate.open.set()


@pytest.fixture(scope="module")
def expected(tiny_params):
    return alone(tiny_params, prompts_of(SHORT, LONG), greedy(20))


def test_others_go_on_and_overtake_while_a_step_compiles(tiny_params, expected):
    async def main():
        async with gated(tiny_params) as (llm, gate):
            running = llm.add(prompts_of(SHORT)[0], greedy(200))
            await anext(running)
            waits = asyncio.create_task(last_of(llm.add(prompts_of(LONG)[0], greedy(20))))
            await reached(gate.reached)
            before = metric(llm, "output_tokens_total")
            behind = await last_of(llm.add(prompts_of(SHORT)[0], greedy(20)))
            assert behind.token_ids == expected[0]
            assert metric(llm, "output_tokens_total") >= before + 20
            assert not waits.done()
            assert metric(llm, "requests_compiling") == 1
            assert metric(llm, "requests_waiting") == 1
            assert metric(llm, "background_compilations_under_way") == 1
            gate.open.set()
            assert (await waits).token_ids == expected[1]
            running.close()
            await settled(llm)
            assert metric(llm, "requests_compiling") == 0
            assert metric(llm, "background_compilations_total") > 0
            assert metric(llm, "background_compile_seconds_total") > 0
            assert metric(llm, "compile_stalls_total") == 0
            assert gate.tried == 1
        assert_empty(llm.llm)

    run(main())


def test_a_step_that_does_not_compile_ends_who_needs_it(tiny_params, expected):
    async def main():
        async with gated(tiny_params) as (llm, gate):
            gate.error = ValueError("no such kernel\nat all")
            running = llm.add(prompts_of(SHORT)[0], greedy(200))
            await anext(running)
            waits = asyncio.create_task(last_of(llm.add(prompts_of(LONG)[0], greedy(20))))
            await reached(gate.reached)
            # It waits for steps of its own.
            told = greedy(20, logprobs=0)
            other = asyncio.create_task(last_of(llm.add(prompts_of(SHORT)[0], told)))
            while metric(llm, "requests_compiling") < 2:
                await asyncio.sleep(0.01)
            gate.open.set()
            failed = await waits
            assert (failed.finish_reason, failed.token_ids) == ("error", ())
            assert failed.error == "ValueError: no such kernel at all"
            assert (await other).token_ids == expected[0]
            # Whoever comes later tries again.
            gate.error = None
            again = await last_of(llm.add(prompts_of(LONG)[0], greedy(20)))
            assert again.token_ids == expected[1]
            assert gate.tried == 2
            assert llm.dead is None
            running.close()
            await settled(llm)
        assert_empty(llm.llm)

    run(main())


def test_a_request_whose_steps_cannot_be_told_ends_alone(tiny_params, expected):
    async def main():
        async with make(tiny_params) as llm:
            worker = llm.llm.worker
            begin = worker.begin

            def bad(request):
                if len(request.prompt) == LONG:
                    raise RuntimeError("no such chunk")
                return begin(request)

            worker.begin = bad  # type: ignore[method-assign]
            both = llm.generate(prompts_of(SHORT, LONG), greedy(20))
            good, failed = await both
            assert good.token_ids == expected[0]
            assert (failed.finish_reason, failed.error) == ("error", "RuntimeError: no such chunk")
            assert llm.dead is None
            assert metric(llm, "rounds_failed_total") == 0
        assert_empty(llm.llm)

    run(main())


@pytest.mark.parametrize("leaves", ["abort", "deadline", "aclose", "reset"])
def test_whoever_waits_for_a_step_can_leave(tiny_params, expected, leaves):
    async def main():
        async with gated(tiny_params) as (llm, gate):
            deadline = 0.5 if leaves == "deadline" else None
            outputs = llm.add(
                prompts_of(LONG)[0], greedy(20), request_id="waits", deadline=deadline
            )
            waits = asyncio.create_task(last_of(outputs))
            await reached(gate.reached)
            if leaves == "abort":
                llm.abort("waits")
            elif leaves == "reset":
                await llm.reset()
            elif leaves == "aclose":
                await llm.aclose()
            output = await waits
            ends = {"abort": "abort", "deadline": "deadline", "aclose": "abort", "reset": "error"}
            assert output.finish_reason == ends[leaves]
            assert not gate.open.is_set()
            assert_empty(llm.llm)
            gate.open.set()
            if leaves != "aclose":
                # What was compiled meanwhile is of use to the next.
                later = await last_of(llm.add(prompts_of(LONG)[0], greedy(20)))
                assert later.token_ids == expected[1]
                assert gate.tried == 1

    run(main())


def test_an_id_that_comes_again_waits_for_its_own_steps(tiny_params):
    async def main():
        async with make(tiny_params) as llm:
            (prompt,) = prompts_of(SHORT)
            await last_of(llm.add(prompt, greedy(4), request_id="again"))
            await settled(llm)
            told = greedy(4, logprobs=3)
            running = llm.add(prompt, greedy(200))
            await last_of(llm.add(prompt, told, request_id="again"))
            running.close()
            await settled(llm)
            assert metric(llm, "compile_stalls_total") == 0

    run(main())


def test_draining_waits_for_the_step(tiny_params, expected):
    async def main():
        async with gated(tiny_params) as (llm, gate):
            waits = asyncio.create_task(last_of(llm.add(prompts_of(LONG)[0], greedy(20))))
            await reached(gate.reached)
            ends = asyncio.create_task(llm.aclose(drain=True))
            await asyncio.sleep(0.05)
            assert not ends.done()
            gate.open.set()
            await ends
            assert (await waits).token_ids == expected[1]

    run(main())


def test_a_batch_whose_step_compiles_runs_in_parts(tiny_params):
    """And as one once it is there."""

    def larger(call: StepCall) -> bool:
        return call.key.step == "decode" and call.key.sizes[0] > 1

    async def main():
        async with gated(tiny_params, larger) as (llm, gate):
            running = [llm.add(prompts_of(n)[0], greedy(200)) for n in (10, SHORT)]
            for outputs in running:
                await anext(outputs)
            await reached(gate.reached)
            for outputs in running:
                await anext(outputs)
            assert metric(llm, "batch_largest") == 1
            for outputs in running:
                outputs.close()
            gate.open.set()
            # However long it takes to compile.
            while metric(llm, "batch_largest") == 1:
                await llm.generate(prompts_of(10, SHORT), greedy(20))

    run(main())


def test_single_steps_are_of_use_once_they_are_compiled(tiny_params, expected):
    """Loops do until then, and nobody waits for them."""

    async def main():
        async with gated(tiny_params, lambda call: call.key.step == "decode once") as (llm, gate):
            llm.llm.worker.decodes_once = llm.llm.engine.runs_ahead = True

            async def both() -> list[RequestOutput]:
                asked = (llm.add(prompt, greedy(20)) for prompt in prompts_of(SHORT, LONG))
                return await asyncio.gather(*map(last_of, asked))

            assert [output.token_ids for output in await both()] == expected
            await reached(gate.reached)
            assert "decode once" not in {key.step for key in llm.llm.worker.compiled.seconds}
            gate.open.set()
            while "decode once" not in {key.step for key in llm.llm.worker.compiled.seconds}:
                await asyncio.sleep(0.01)
            assert [output.token_ids for output in await both()] == expected
            assert metric(llm, "compile_stalls_total") == 0
        assert_empty(llm.llm)

    run(main())


def test_a_warm_up_holds_up_nobody(tiny_params, expected):
    async def main():
        async with gated(tiny_params) as (llm, gate):
            running = llm.add(prompts_of(SHORT)[0], greedy(200))
            await anext(running)
            warm = asyncio.create_task(llm.warm_up([LONG]))
            await reached(gate.reached)
            behind = await last_of(llm.add(prompts_of(SHORT)[0], greedy(20)))
            assert behind.token_ids == expected[0]
            assert not warm.done()
            # Steps that a request waits for come before those that none has needed.
            waits = asyncio.create_task(last_of(llm.add(prompts_of(100)[0], greedy(4))))
            while metric(llm, "requests_compiling") < 1:
                await asyncio.sleep(0.01)
            gate.open.set()
            await warm
            assert (await waits).error is None
            running.close()
            placed = [key.sizes for key in gate.order if key.step == "place"]
            assert placed == [(32,), (128,), (64,)]
            known = set(llm.llm.worker.compiled.seconds)
            decoded = {key.sizes[0] for key in known if key.step == "decode"}
            assert decoded == set(llm.llm.worker.decode_tables.sizes(1))
            (after,) = await llm.generate(prompts_of(LONG), greedy(20))
            assert after.token_ids == expected[1]
            assert set(llm.llm.worker.compiled.seconds) == known
            assert metric(llm, "compile_stalls_total") == 0
            assert metric(llm, "compile_seconds") == 0

    run(main())


def test_nothing_is_compiled_after_a_warm_up(tiny_params):
    """However tokens are chosen, where decode steps have no loop, as on GPUs."""

    async def main():
        async with make(tiny_params) as llm:
            llm.llm.worker.decodes_once = llm.llm.engine.runs_ahead = True
            await llm.warm_up([LONG])
            warmed = set(llm.llm.worker.compiled.seconds)
            # Without one of these a loop takes its place until it is compiled.
            singles = {key.sizes for key in warmed if key.step == "decode once"}
            sizes = llm.llm.worker.decode_tables.holding(1, 1)
            kinds = (GREEDY, DRAWN, FILTERED)
            assert singles == {(*size, kind) for size, kind in itertools.product(sizes, kinds)}
            for sampling in ({}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}):
                await llm.generate(prompts_of(LONG, LONG, LONG), greedy(12, **sampling))
            assert set(llm.llm.worker.compiled.seconds) == warmed
            assert metric(llm, "compile_stalls_total") == 0

    run(main())


def test_a_warm_up_that_fails_says_so(tiny_params, expected):
    async def main():
        async with gated(tiny_params) as (llm, gate):
            gate.error = ValueError("no such kernel")
            gate.open.set()
            with pytest.raises(ValueError, match="no such kernel"):
                await llm.warm_up([LONG])
            gate.error = None
            await llm.warm_up([LONG])
            (output,) = await llm.generate(prompts_of(LONG), greedy(20))
            assert output.token_ids == expected[1]
            assert gate.tried == 2

    run(main())


def test_a_step_that_failed_is_told_before_it_is_tried_again(tiny_params):
    """Also where a round has noticed it before who waits looks again."""

    async def main():
        async with gated(tiny_params) as (llm, gate):
            gate.error = ValueError("no such kernel")
            engine, worker = llm.llm.engine, llm.llm.worker
            (request,) = warming.like(llm.llm, [LONG], False, None)
            needs = list(needs_ahead(worker, request))
            while not gate.reached.is_set():
                await llm._call(lambda: engine.compile_ahead(needs))
            gate.open.set()
            await reached_none(worker.compiled.under_way, engine, llm)
            found = await llm._call(lambda: engine.compile_ahead(needs, False))
            assert found is not None
            failed = [future for key, future in found.items() if key.step == "prefill in scratch"]
            assert [str(future.exception()) for future in failed] == ["no such kernel"]
            # What was begun would be tried by then.
            await reached_none(worker.compiled.under_way, engine, llm)
            assert gate.tried == 1
            await llm._call(lambda: engine.compile_ahead(needs))
            while gate.tried < 2:
                await asyncio.sleep(0.01)

    run(main())


async def reached_none(under_way, engine, llm):
    """Rounds notice what has ended, until nothing is under way."""
    while under_way:
        await llm._call(lambda: engine.beside.begin_round(True))
        await asyncio.sleep(0.01)


@pytest.mark.slow
def test_a_prefix_that_is_loaded_holds_up_nobody(tiny_params, tmp_path, expected):
    document, path = prompts_of(40)[0], tmp_path / "document.safetensors"
    sizes = {"share_prefix": "auto", "share_grain": 16, "retained_prefixes": 2}

    async def main():
        async with make(tiny_params, **sizes) as llm:
            await llm.save_prefix(path, document)
        async with gated(tiny_params, lambda c: c.key.step == "restore", **sizes) as (llm, gate):
            running = llm.add(prompts_of(SHORT)[0], greedy(200))
            await anext(running)
            loads = asyncio.create_task(llm.load_prefix(path))
            await reached(gate.reached)
            other = await last_of(llm.add(prompts_of(SHORT)[0], greedy(20)))
            assert other.token_ids == expected[0]
            assert not loads.done()
            gate.open.set()
            assert await loads == len(document)
            running.close()
            assert metric(llm, "compile_stalls_total") == 0
            (output,) = await llm.generate([np.append(document, 7)], greedy(2))
            assert output.stats.cached_tokens == len(document)

    run(main())


class Asks(Merger):
    """Changes nothing, and wants to see queries of the prompt."""

    @property
    def queries(self):
        return QuerySample(newest=2, spread=1)

    def fold(self, k, v, *_):
        return k, v


EVICTS = CompressionConfig(method="kv-compress", rate=2, floor=8, window=4)
SUMS = CompressionConfig(method="h2o", rate=2, floor=8, compress_every=8)
READS = CompressionConfig(method="kvzip", rate=2, floor=8)
LOOKS_AHEAD = CompressionConfig(method="speckv", rate=2, floor=8)
RECALLS = CompressionConfig(method="epicache", rate=2, floor=8)
Kind = tuple[int, CompressionConfig, dict, bool]
ASKS = CompressionConfig(method=get_method("kv-compress")._with(merger=Asks()), rate=2, floor=8)
FEW: list[Kind] = [
    (SHORT, EVICTS, {"logprobs": 3}, True),
    (150, EVICTS, {}, False),
    (150, ASKS, {}, False),
]
MANY: list[Kind] = [
    (LONG, EVICTS, {"logprobs": 0}, False),
    (LONG, SUMS, {}, False),
    (30, READS, {}, False),
    (40, FULL, {}, True),
]
PROBES: list[Kind] = [
    (80, LOOKS_AHEAD, {}, False),
    (70, RECALLS, {}, False),
]
SHARES = {"share_prefix": "always", "share_grain": 8, "retained_prefixes": 4}
SHARES |= {"methods": ("kv-compress", "h2o", "kvzip"), "pool_tokens": 900}


@pytest.mark.parametrize(
    ("kinds", "config"),
    [
        (FEW, {}),
        pytest.param(FEW + MANY, SHARES, marks=pytest.mark.slow),
        pytest.param(PROBES, {"methods": ("h2o", "epicache")}, marks=pytest.mark.slow),
    ],
)
def test_nothing_compiles_in_the_engines_thread(tiny_params, caplog, kinds, config):
    """Whatever a request brings: all its steps are known before it begins."""

    async def main():
        async with make(tiny_params, max_batch=2, **config) as llm:
            for _ in range(2):
                outputs = [
                    llm.add(prompts_of(length)[0], greedy(12, **given), used, report_kept=kept)
                    for length, used, given, kept in kinds
                ]
                for one in outputs:
                    assert (await last_of(one)).error is None
            assert metric(llm, "compile_stalls_total") == 0
            assert metric(llm, "compile_seconds") == 0

    jax.config.update("jax_log_compiles", True)
    try:
        with caplog.at_level(logging.WARNING):
            run(main())
    finally:
        jax.config.update("jax_log_compiles", False)
    steps = (
        r"prefill\w*|draft|probe_again|start|place|share|decode|compress_slots|empty|positions_of"
    )
    ours = re.compile(rf"Compiling jit\(({steps})\)")
    found = [record for record in caplog.records if ours.match(record.getMessage())]
    assert len(found) > 5
    assert {record.threadName.split("_")[0] for record in found} == {"kvjax compiler"}
