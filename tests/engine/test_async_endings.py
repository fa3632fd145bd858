"""The engine under asyncio ends: closed, drained, dropped or dead, and nobody waits on."""

import asyncio
import gc
import subprocess
import sys
import weakref

import pytest

from kvjax.errors import UserError
from tests.engine.async_serving import make, run
from tests.engine.serving import alone, assert_empty, greedy, prompts_of, tokens_of

LENGTHS = (10, 40, 33)
pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.fixture(scope="module")
def expected(tiny_params):
    return alone(tiny_params, prompts_of(*LENGTHS), greedy(20))


@pytest.mark.parametrize("drain", [True, False])
def test_closing_while_requests_run(tiny_params, expected, drain):
    async def main():
        llm = make(tiny_params)
        outputs = [llm.add(prompt, greedy(20)) for prompt in prompts_of(*LENGTHS)]
        for one in outputs:
            await anext(one)
        closing = [asyncio.create_task(llm.aclose(drain=drain)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(UserError, match="the engine is closed"):
            llm.add(prompts_of(10)[0])
        for one, tokens in zip(outputs, expected, strict=True):
            seen = [output async for output in one]
            if seen:
                assert seen[-1].finish_reason in ("length", *(() if drain else ("abort",)))
                assert seen[-1].token_ids == tokens[: len(seen[-1].token_ids)]
                assert not drain or seen[-1].token_ids == tokens
        for task in closing:
            await task
        await llm.aclose()
        assert_empty(llm.llm)

    run(main())


@pytest.mark.parametrize("calls", [1, 2])
def test_closing_does_not_wait_for_what_is_retained(tiny_params, calls):
    """Which waits for its turn behind requests that run: they, and who asked, are told."""
    sizes = {"share_prefix": "auto", "share_grain": 16, "retained_prefixes": 3}

    async def main():
        llm = make(tiny_params, max_batch=1, max_len=4000, pool_tokens=4000, **sizes)
        running = llm.add(prompts_of(20)[0], greedy(3900))
        await anext(running)
        waiting = [asyncio.create_task(llm.retain(prompts_of(70 + n)[0])) for n in range(calls)]
        async with asyncio.timeout(60):
            while len(llm.llm.engine.intake.open) < 2:
                await asyncio.sleep(0.01)
        await llm.aclose()
        last = [output async for output in running][-1]
        assert last.finish_reason == "abort"
        told = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(error) for error in told} == {UserError}
        assert_empty(llm.llm)

    run(main())


def test_draining_may_be_given_up(tiny_params):
    async def main():
        llm = make(tiny_params)
        outputs = llm.stream(prompts_of(*LENGTHS) * 20, greedy(200))
        await anext(outputs)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await llm.aclose(drain=True)
        await llm.aclose()
        assert "abort" in {output.finish_reason async for output in outputs}

    run(main())


def test_an_engine_that_dies_tells_everybody(tiny_params, expected):
    async def main():
        async with make(tiny_params) as llm:
            outputs = [llm.add(prompt, greedy(200)) for prompt in prompts_of(*LENGTHS)]
            for one in outputs:
                await anext(one)
            whole = llm.llm.worker.decode

            def decode(*_):
                llm.llm.worker.cache.k.delete()
                raise RuntimeError("a bad kernel")

            setattr(llm.llm.worker, "decode", decode)  # noqa: B010
            for one in outputs:
                last = [output async for output in one][-1]
                assert last.error == "dead: the device's state is lost (RuntimeError: a bad kernel)"
            assert llm.dead == last.error
            with pytest.raises(UserError, match="the engine is dead"):
                llm.add(prompts_of(10)[0])
            llm.llm.worker.decode = whole
            await llm.reset()
            assert tokens_of(await llm.generate(prompts_of(*LENGTHS), greedy(20))) == expected
            # What the loop of rounds itself cannot catch.
            whole, llm.llm.step = llm.llm.step, lambda: 1 / 0  # type: ignore[assignment]
            last = [output async for output in llm.add(prompts_of(10)[0], greedy(200))][-1]
            assert "dead: a step failed (ZeroDivisionError" in (last.error or "")
            llm.llm.step = whole  # type: ignore[assignment]
            await llm.reset()
            with pytest.raises(UserError, match="prompt length"):
                await llm.warm_up([10_000])
            assert tokens_of(await llm.generate(prompts_of(10), greedy(20))) == expected[:1]

    run(main())


def test_a_thread_that_ends_leaves_nobody_waiting(tiny_params):
    async def main():
        llm = make(tiny_params)
        outputs = llm.add(prompts_of(10)[0], greedy(200))
        await anext(outputs)

        def broken(*_):
            raise MemoryError

        for owner, name in ((llm.llm, "step"), (llm.llm.recovery, "die")):
            setattr(owner, name, broken)
        with pytest.raises(UserError, match="the engine's thread has ended"):
            async for _ in outputs:
                pass
        with pytest.raises(UserError, match="the engine is closed"):
            llm.add(prompts_of(10)[0])
        await llm.aclose()

    run(main())


def test_an_engine_that_is_dropped_ends_its_thread(tiny_params):
    async def main():
        llm = make(tiny_params)
        await llm.generate(prompts_of(10), greedy(4))
        return weakref.ref(llm), llm._driver

    front, driver = asyncio.run(main())
    gc.collect()
    assert front() is None
    driver.join(60)
    assert not driver.is_alive()


def test_the_interpreter_may_leave_at_any_time():
    """Without aclose or close, in the middle of requests."""
    code = """
import asyncio
from kvjax.engine.async_llm import AsyncLLM
from kvjax.engine.config import EngineConfig
from kvjax.engine.llm import LLM
from kvjax.engine.sampling import SamplingParams
from kvjax.models import LoadedModel
from kvjax.models.decoder import init_params
from tests.engine.conftest import TINY
from tests.models.tokenizer_builders import tiny_tokenizer
sizes = EngineConfig(max_batch=2, max_len=2048, pool_tokens=4096, prefill_chunk=32)
model = LoadedModel(TINY, init_params(TINY, "float32", seed=3), tiny_tokenizer(), "")
llm = AsyncLLM(model, None, sizes)
async def main():
    global outputs
    outputs = llm.add([1, 2, 3], SamplingParams(max_tokens=2000, ignore_eos=True))
    print((await anext(outputs)).finish_reason)
asyncio.run(main())
stream = LLM(model, None, sizes).stream([1, 2, 3], SamplingParams(max_tokens=2000, ignore_eos=True))
print(next(stream).finish_reason)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "None\nNone\n", "")


@pytest.mark.parametrize("closed", [False, True])
def test_all_who_read_one_iterator_learn_of_its_end(tiny_params, closed):
    """Whoever reads the last output does not leave the others waiting, nor does who closes it."""

    async def main():
        async with make(tiny_params, max_len=512) as llm:
            outputs = llm.stream(prompts_of(20, 24), greedy(400 if closed else 4))

            async def read():
                return [output async for output in outputs]

            readers = [asyncio.create_task(read()) for _ in range(3)]
            if closed:
                await asyncio.sleep(0.2)
                outputs.close()
            found = await asyncio.wait_for(asyncio.gather(*readers), 60)
            assert closed or sum(one.finished for part in found for one in part) == 2

    asyncio.run(main())
