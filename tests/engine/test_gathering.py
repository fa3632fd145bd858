"""The thread of an idle engine under asyncio: it sleeps, and gathers what comes together."""

import asyncio

import pytest

from tests.engine.async_serving import asleep, make, run
from tests.engine.serving import SMALL, greedy, prompts_of

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def test_an_idle_thread_sleeps(tiny_params):
    async def main():
        llm, looks = make(tiny_params), 0
        whole = llm._driver._wait

        def wait():
            nonlocal looks
            looks += 1
            return whole()

        llm._driver._wait = wait
        async with llm:
            await llm.generate(prompts_of(10), greedy(4))
            before = looks
            await asyncio.sleep(0.3)
            # The round in which the last output came may still have been under way.
            assert looks <= before + 2
            await llm.generate(prompts_of(10), greedy(4), SMALL)

    run(main())


def test_requests_that_come_together_run_together(tiny_params, monkeypatch):
    """However long the loop takes to hand in the next one, up to a bound."""
    prompts = prompts_of(10, 10, 10)

    async def main():
        async with make(tiny_params) as llm:

            def steps() -> float:
                return llm.llm.metrics.as_dict()["kvjax_decode_steps_total"]

            # Or those whose steps are not compiled yet run one by one.
            await llm.warm_up([10])
            await asleep(llm)
            monkeypatch.setattr("kvjax.engine.driver.APART_SECONDS", 20.0)
            monkeypatch.setattr("kvjax.engine.driver.GATHER_SECONDS", 20.0)
            before, streams = steps(), []
            for prompt in prompts:
                streams.append(llm.add(prompt, greedy(4)))
                await asyncio.sleep(0.1)
            # Which waits for nobody, and so ends the gathering.
            await llm._call(lambda: None)
            for stream in streams:
                async for output in stream:
                    last = output
                assert last.finish_reason == "length"
            await asleep(llm)
            # Those behind the first tokens, which all take together.
            assert steps() - before == 3

    run(main())


@pytest.mark.parametrize("drain", [True, False])
def test_calls_and_the_end_wait_for_no_request(tiny_params, monkeypatch, drain):
    monkeypatch.setattr("kvjax.engine.driver.APART_SECONDS", 50.0)
    monkeypatch.setattr("kvjax.engine.driver.GATHER_SECONDS", 50.0)

    async def main():
        async with make(tiny_params) as llm, asyncio.timeout(25):
            await llm._call(lambda: None)
            await asleep(llm)
            first = llm.add(prompts_of(10)[0], greedy(4))
            await asyncio.sleep(0.05)
            await llm._call(lambda: None)
            assert [output async for output in first][-1].finish_reason == "length"
            await asleep(llm)
            second = llm.add(prompts_of(10)[0], greedy(4))
            await asyncio.sleep(0.05)
            await llm.aclose(drain=drain)
            ended = [output async for output in second][-1]
            assert ended.finish_reason == ("length" if drain else "abort")

    run(main())
