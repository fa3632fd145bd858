"""Answers as they come: server-sent events, and what becomes of those whose client has left."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvjax.serve.answers import Answer, detail_of, kept_of, usage_of
from kvjax.serve.errors import ApiError
from kvjax.serve.jobs import Job
from kvjax.serve.service import Running, Service

Note = Callable[..., None]
"""Takes down what the log says of a request."""
CLOSED = 499
"""The status that the log has for a client that left before its answer."""


async def until_gone(work: Coroutine[Any, Any, Any], receive: Receive) -> bool:
    """Wait for some work, or until the client leaves, which cancels it.

    Returns:
        Whether the work was done. What it raises is raised.
    """
    doing = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((doing, watching), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            doing.result()
            return True
        return False
    finally:
        for task in (doing, watching):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def told(service: Service, running: Running, job: Job) -> dict[str, Any]:
    """What a whole answer says of its caches."""
    plan = service.llm.llm.plan
    found = kept_of(running.outputs, plan.spec)
    found["ended_by"] = [output.finish_reason for output in running.outputs]
    if job.detail and running.outputs:
        found["detail"] = detail_of(running.outputs[0], service.tokenizer)
    return found


def note_answer(note: Note, running: Running, usage: dict[str, Any], kept: dict[str, Any]) -> None:
    """The log's numbers of an answer."""
    first = [output.stats.time_to_first_token for output in running.outputs]
    times = [seconds for seconds in first if seconds is not None]
    note(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        kvs_before=kept["kvs_before"],
        kvs_after=kept["kvs_after"],
        ended_by=kept["ended_by"],
        time_to_first_token=round(min(times), 4) if times else None,
    )


async def whole(
    service: Service, running: Running, job: Job, answer: Answer, receive: Receive, note: Note
) -> dict[str, Any] | None:
    """The answer in one piece; None if its client has left."""

    async def run() -> None:
        async with contextlib.aclosing(running.each()) as outputs:
            async for _ in outputs:
                pass

    with running:
        if not await until_gone(run(), receive):
            service.metrics.gone.inc()
            return None
        usage, kept = usage_of(job.prompts, running.outputs), told(service, running, job)
        note_answer(note, running, usage, kept)
        return answer.whole(running.outputs, usage, kept)


async def events(
    service: Service, running: Running, job: Job, answer: Answer, include_usage: bool, note: Note
) -> AsyncGenerator[bytes, None]:
    """The parts of an answer as server-sent events, to the last."""
    choices = job.choices
    usage_so_far: dict[str, Any] = {"usage": None} if include_usage else {}
    plan = service.llm.llm.plan
    seen, begun = [0] * choices, [False] * choices
    try:
        for number in range(choices):
            if (first := answer.first(number)) is not None:
                yield _event({**first, **usage_so_far})
        async with contextlib.aclosing(running.each(service.settings.keep_alive_seconds)) as parts:
            async for number, output in parts:
                if number < 0:
                    yield b": the answer goes on\n\n"
                    continue
                extra = dict(usage_so_far)
                if not begun[number] or output.finished:
                    extra["kvjax"] = kept_of([output], plan.spec)
                if not begun[number] and (found := detail_of(output, service.tokenizer)):
                    extra["kvjax"]["detail"] = found
                begun[number] = True
                if output.finished:
                    extra["kvjax"]["ended_by"] = [output.finish_reason]
                yield _event(answer.chunk(number, output, seen[number], **extra))
                seen[number] = len(output.logprobs or ())
        usage, kept = usage_of(job.prompts, running.outputs), told(service, running, job)
        kept.pop("detail", None)
        note_answer(note, running, usage, kept)
        if service.settings.log_prompts:
            note(answer=[output.text for output in running.outputs])
        if include_usage:
            yield _event(answer.usage_chunk(usage, kept))
    except ApiError as error:
        note(error=error.code or error.status)
        yield _event(error.body)
    yield b"data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


class EventStream(Response):
    """A stream of events; when its client leaves, what is behind it ends at once."""

    media_type = "text/event-stream"

    def __init__(
        self, running: Running, parts: AsyncGenerator[bytes, None], gone: Callable[[], None]
    ):
        super().__init__()
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-store"
        # Proxies that gather answers would undo it.
        self.headers["x-accel-buffering"] = "no"
        self._running, self._parts, self._left = running, parts, gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def run() -> None:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            async with contextlib.aclosing(self._parts) as parts:
                async for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        with self._running:
            done = False
            with contextlib.suppress(OSError):  # it left while something was being sent
                done = await until_gone(run(), receive)
            if not done:
                self._left()
