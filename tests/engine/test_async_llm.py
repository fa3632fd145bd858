"""The engine under asyncio: tasks that come and go, wait too long, read slowly and leave."""

import asyncio
import contextlib
import gc
import itertools
import threading
import time

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
