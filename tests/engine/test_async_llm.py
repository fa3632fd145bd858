"""The engine under asyncio: tasks that come and go, wait too long, read slowly and leave."""

import asyncio
import contextlib
import gc
import itertools
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from kvjax.engine import warming
from kvjax.engine.driver import Mailbox
from kvjax.engine.engine import Engine
from kvjax.engine.stream import refused
from kvjax.errors import UserError
from tests.engine.async_serving import asleep, make, run, settled
from tests.engine.serving import alone, assert_empty, greedy, prompts_of, tokens_of

LENGTHS = (10, 40, 33)
pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.fixture(scope="module")
def expected(tiny_params):
    return alone(tiny_params, prompts_of(*LENGTHS), greedy(20))


def test_many_streams_give_the_tokens_of_each_alone(tiny_params, expected):
    async def client(llm, number):
        which, texts = number % 3, []
        async for output in llm.add(prompts_of(LENGTHS[which])[0], greedy(20)):
            texts.append(output.new_text)
        assert output.token_ids == expected[which]
        assert "".join(texts) == output.text
        assert output.finish_reason == "length"

    async def main():
        async with make(tiny_params) as llm:
            await llm.warm_up(LENGTHS)
            async with asyncio.TaskGroup() as group:
                for number in range(24):
                    group.create_task(client(llm, number))
            assert tokens_of(await llm.generate(prompts_of(*LENGTHS), greedy(20))) == expected
            bad, good = await llm.generate([[], prompts_of(10)[0]], greedy(20))
            assert "empty" in (bad.error or "")
            assert good.token_ids == expected[0]
            assert llm.metrics.as_dict()["kvjax_batch_largest"] == 4
        assert_empty(llm.llm)

    run(main())


def test_a_cancelled_task_ends_its_request(tiny_params, expected):
    async def reads(outputs, begun):
        async for _ in outputs:
            begun.set()

    async def main():
        async with make(tiny_params) as llm:
            kept = llm.add(prompts_of(40)[0], greedy(20))
            begun = asyncio.Event()
            task = asyncio.create_task(reads(llm.add(prompts_of(10)[0], greedy(240)), begun))
            waits = asyncio.create_task(llm.generate(prompts_of(10, 33), greedy(200)))
            await begun.wait()
            for one in (task, waits):
                one.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await one
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await llm.generate(prompts_of(10), greedy(240))
            assert [o async for o in kept][-1].token_ids == expected[1]
            await settled(llm)
            found = llm.metrics.as_dict()
            assert found['kvjax_requests_ended_total{reason="abort"}'] == 4
            assert found['kvjax_requests_ended_total{reason="length"}'] == 1
            assert_empty(llm.llm)

    run(main())


def test_a_wait_that_is_cancelled_ends_the_request(tiny_params):
    """Also where the iterator lives on."""

    async def main():
        async with make(tiny_params) as llm:
            outputs = llm.add(prompts_of(10)[0], greedy(240))
            await anext(outputs)
            wait = asyncio.ensure_future(anext(outputs))
            await asyncio.sleep(0)
            wait.cancel()
            # An output may have come just then; whoever waits for the next is cancelled.
            while not wait.cancelled():
                await asyncio.wait([wait])
                if not wait.cancelled():
                    wait = asyncio.ensure_future(anext(outputs))
                    await asyncio.sleep(0)
                    wait.cancel()
            assert [output async for output in outputs] == []
            await settled(llm)
            assert llm.metrics.as_dict()['kvjax_requests_ended_total{reason="abort"}'] == 1

    run(main())


def test_whoever_leaves_an_iterator_ends_its_request(tiny_params):
    async def main():
        async with make(tiny_params) as llm:
            outputs = llm.add(prompts_of(10)[0], greedy(240))
            await anext(outputs)
            outputs.close()
            assert [output async for output in outputs] == []
            async with contextlib.aclosing(llm.add(prompts_of(10)[0], greedy(240))) as outputs:
                await anext(outputs)
            outputs = llm.stream(prompts_of(10, 40), greedy(200))
            await anext(outputs)
            del outputs
            await settled(llm)
            found = llm.metrics.as_dict()
            assert found['kvjax_requests_ended_total{reason="abort"}'] == 4

    run(main())


def test_whoever_leaves_ends_no_later_request_of_the_same_id(tiny_params, expected):
    """The end of the first was never read, so its iterator does not know of it."""

    async def main():
        async with make(tiny_params) as llm:
            outputs = llm.add(prompts_of(10)[0], greedy(20), request_id="chat")
            await anext(outputs)
            await settled(llm)
            # The first iterator is dropped here.
            outputs = llm.add(prompts_of(40)[0], greedy(20), request_id="chat")
            gc.collect()
            last = [output async for output in outputs][-1]
            assert tokens_of([last]) == [expected[1]]

    run(main())


def test_an_iterator_may_be_dropped_while_its_output_is_brought():
    """The collector runs wherever something is allocated, in the engine's thread too."""

    async def main():
        mailbox = Mailbox(asyncio.get_running_loop())
        first = refused("one", "an error")

        def then(later):
            mailbox.clear()
            return later

        object.__setattr__(first, "then", then)
        assert mailbox.put(first)
        thread = threading.Thread(target=mailbox.put, args=(first,), daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, 60)
        assert not thread.is_alive()

    run(main())


def test_rounds_go_on_between_the_parts_of_a_warm_up(tiny_params, monkeypatch):
    """Where nothing compiles beside them: with several processes."""
    monkeypatch.setattr(Engine, "compile_beside", lambda *_: None)
    rounds, seen = [], []
    parts_of = warming.parts

    def noted(*args):
        parts = parts_of(*args)
        return [lambda part=part: (seen.append(len(rounds)), part()) for part in parts]

    monkeypatch.setattr(warming, "parts", noted)

    async def main():
        async with make(tiny_params) as llm:
            step = llm.llm.step
            llm.llm.step = lambda: (rounds.append(1), step())[1]
            running = llm.add(prompts_of(10)[0], greedy(240))
            await anext(running)
            await llm.warm_up(LENGTHS)
            assert running.running
            running.close()

    run(main())
    assert len(seen) > 2 * len(LENGTHS)
    assert all(one < other for one, other in itertools.pairwise(seen))


def test_abort_and_deadline_leave_what_there_is(tiny_params, expected):
    async def main():
        async with make(tiny_params) as llm:
            first = llm.add(prompts_of(10)[0], greedy(240), request_id="first")
            await anext(first)
            llm.abort("first")
            last = [output async for output in first][-1]
            assert last.finish_reason == "abort"
            assert last.token_ids[:20] == expected[0][: len(last.token_ids)]
            with pytest.raises(UserError, match="no unfinished request"):
                llm.abort("first")
            late = llm.add(prompts_of(10)[0], greedy(240), deadline=1e-4)
            assert [output async for output in late][-1].finish_reason == "deadline"
            with pytest.raises(UserError, match="the prompt is empty"):
                llm.add([])
            with pytest.raises(UserError, match="there are no prompts"):
                llm.stream([])
            with pytest.raises(UserError, match="2 sampling for 1 prompts"):
                await llm.generate(prompts_of(10), [greedy(), greedy()])

    run(main())


def test_a_slow_reader_holds_up_nobody_and_loses_nothing(tiny_params, expected):
    async def main():
        async with make(tiny_params) as llm:
            slow = llm.add(prompts_of(10)[0], greedy(20))
            texts = [(await anext(slow)).new_text]
            assert tokens_of(await llm.generate(prompts_of(40, 33), greedy(20))) == expected[1:]
            await settled(llm)
            rest = [output async for output in slow]
            # All that came meanwhile is one output.
            assert len(rest) == 1
            assert rest[0].token_ids == expected[0]
            assert "".join([*texts, rest[0].new_text]) == rest[0].text

    run(main())


def test_one_call_of_the_loop_wakes_all_readers_of_a_round(tiny_params, monkeypatch):
    outputs = calls = 0

    async def reads(llm, prompt):
        nonlocal outputs
        async for _ in llm.add(prompt, greedy(60)):
            outputs += 1

    async def main():
        nonlocal calls
        async with make(tiny_params) as llm:
            await llm.generate(prompts_of(*LENGTHS), greedy(4))
            loop = asyncio.get_running_loop()
            call = loop.call_soon_threadsafe

            def counted(*args, **settings):
                nonlocal calls
                calls += 1
                return call(*args, **settings)

            monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
            async with asyncio.TaskGroup() as group:
                for prompt in prompts_of(10) * 4:
                    group.create_task(reads(llm, prompt))
            # Each has more parts than one, and no part a call of its own.
            assert calls * 2 < outputs

    run(main())


def test_requests_that_come_together(tiny_params, expected):
    """All or none, from one iterator."""

    async def main():
        async with make(tiny_params) as llm:
            with pytest.raises(UserError, match="the prompt is empty"):
                llm.add_together([(prompts_of(10)[0], greedy(200)), ([], greedy(20))])
            await asleep(llm)
            assert llm.metrics.as_dict()['kvjax_requests_ended_total{reason="abort"}'] == 1
            asked = [(prompt, greedy(20)) for prompt in prompts_of(*LENGTHS)]
            outputs, last = llm.add_together(asked, deadline=60.0, report_kept=True), {}
            async for output in outputs:
                last[output.request_id] = output
            found = [last[name] for name in outputs.request_ids]
            assert tokens_of(found) == expected
            assert [one.stats.kept_tokens is None for one in found] == [False, True, True]

    run(main())


def test_silence_is_told(tiny_params, expected):
    async def main():
        async with make(tiny_params, max_batch=1) as llm:
            first, second = (llm.add(prompts_of(10)[0], greedy(20)) for _ in range(2))
            silent = 0
            while (output := await second.next_within(1e-4)) is None:
                silent += 1
            assert silent > 0
            tokens = [output, *[one async for one in second]][-1].token_ids
            assert tokens == expected[0]
            assert not second.running
            assert first.running
            assert tokens_of([[one async for one in first][-1]]) == [expected[0]]

    run(main())


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


def test_another_loop_is_refused(tiny_params):
    llm = make(tiny_params)
    with pytest.raises(UserError, match="outside of an event loop"):
        llm.add(prompts_of(10)[0])

    kept = []

    async def first():
        kept.append(llm.add(prompts_of(10)[0], greedy(200)))
        await anext(kept[0])

    async def second(outputs):
        for use in (
            lambda: llm.add(prompts_of(10)[0]),
            lambda: llm.stream(prompts_of(10)),
            lambda: llm.abort("request-0"),
        ):
            with pytest.raises(UserError, match="another event loop"):
                use()
        for use in (llm.aclose, llm.reset, lambda: anext(outputs), lambda: llm.generate([[1]])):
            with pytest.raises(UserError, match="another event loop"):
                await use()

    asyncio.run(first())
    asyncio.run(second(kept[0]))
    # The first loop is closed: its request ends with that, and the thread with its engine.
    deadline = time.perf_counter() + 60
    while llm.llm.has_unfinished() and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert not llm.llm.has_unfinished()
    assert llm.dead is None
    kept.clear()


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


@pytest.mark.slow
def test_a_document_is_retained_while_others_run(tiny_params, tmp_path):
    (document, question) = prompts_of(70, 9)
    asked, path = np.concatenate([document, question]), tmp_path / "document.safetensors"
    sizes = {"share_prefix": "auto", "share_grain": 16, "retained_prefixes": 3}

    async def answer(llm) -> tuple[int, ...]:
        (output,) = await llm.generate([asked], greedy(8))
        assert output.stats.cached_tokens == len(document)
        return output.token_ids

    async def main():
        async with make(tiny_params, **sizes) as llm:
            running = llm.add(prompts_of(10)[0], greedy(240))
            await anext(running)
            assert await llm.retain(document) == len(document)
            first = await answer(llm)
            assert await llm.save_prefix(path, document) == len(document)
            running.close()
        async with make(tiny_params, **sizes) as llm:
            assert await llm.load_prefix(path) == len(document)
            assert await answer(llm) == first
            with pytest.raises(UserError, match="No such file"):
                await llm.load_prefix(tmp_path / "none")

    run(main())


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
