"""The server's state: an engine, what may be asked of it, and whether it takes requests."""

import asyncio
import bisect
import concurrent.futures
import contextlib
import dataclasses
import functools
import time
import warnings
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from kvjax.cache import CompressionConfig
from kvjax.cache.config import USUAL_RATE
from kvjax.cache.methods import METHODS
from kvjax.engine import AsyncLLM, AsyncOutputs, RateWarning, RequestOutput, warming
from kvjax.errors import QueueFull, UserError
from kvjax.serve.errors import ApiError
from kvjax.serve.jobs import Job, named
from kvjax.serve.logs import log
from kvjax.serve.metrics import ServerMetrics
from kvjax.serve.settings import ServerSettings

MOST_RETRY = 60
"""Seconds after which a client is asked to come back, at most."""
_RECENT = 64
_COMPRESSION = frozenset(field.name for field in dataclasses.fields(CompressionConfig))
TOKENISERS = 2
"""Threads that turn texts into tokens, so that a long one does not hold up the others."""


class Service:
    """What the routes share. It belongs to the event loop that serves."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings | None = None):
        """Check the methods that requests may ask for.

        Raises:
            UserError: the engine does not offer one of them.
        """
        self.llm, self.settings = llm, settings or ServerSettings()
        engine = llm.llm
        self.name = self.settings.served_name or engine.model.config.name
        self.created = int(time.time())
        self.tokenizer = engine.model.tokenizer
        self.ready = self.draining = False
        self.metrics = ServerMetrics(llm.metrics.registry)
        own = engine.compression.method
        # A method of a user's own has no name by which others could ask for it.
        named = [own] if isinstance(own, str) else []
        self.methods = list(dict.fromkeys([*named, "full", *self.settings.methods]))
        for method in self.methods:
            engine.check_offers(method)
        self._ended: deque[float] = deque(maxlen=_RECENT)
        self._threads = concurrent.futures.ThreadPoolExecutor(TOKENISERS, "kvjax tokens")
        self._open: set[AsyncOutputs] = set()

    # State

    @property
    def dead(self) -> str | None:
        """Why nothing will be answered any more, or None."""
        if self.llm.dead is not None:
            return self.llm.dead
        return "the engine's thread has ended" if self.llm.closed and not self.draining else None

    def status(self) -> dict[str, Any]:
        """The model, its cache and its pool at this moment, for the page."""
        engine, found = self.llm.llm, self.llm.metrics.as_dict()
        plan, usual = engine.plan, engine.compression
        stalls = found["kvjax_compile_stalls_total"]
        return {
            "model": self.name,
            "layers": plan.spec.num_layers,
            "kv_heads": plan.spec.num_kv_heads,
            "max_len": engine.max_len,
            "block_size": plan.spec.block_size,
            "block_bytes": plan.spec.block_bytes,
            "blocks": plan.num_blocks,
            "blocks_used": int(found["kvjax_blocks_used"]),
            "blocks_free": int(found["kvjax_blocks_free"]),
            "pool_tokens": plan.pool_tokens,
            "waiting": int(found["kvjax_requests_waiting"]),
            "running": int(found["kvjax_requests_running"]),
            "output_tokens": int(found["kvjax_output_tokens_total"]),
            "compile_stalls": int(stalls),
            "compiling": int(found["kvjax_requests_compiling"]),
            "method": usual.resolved.name,
            "rate": usual.rate,
            "floor": usual.floor,
            "methods": [
                {
                    "name": name,
                    "summary": METHODS[name].summary if name in METHODS else "",
                }
                for name in self.methods
            ],
            "ready": self.ready,
        }

    async def warm_up(self, prompt_lens: Sequence[int], logprobs: bool = False) -> None:
        """Compile what prompts of these lengths need, by every method that can be asked for them;
        then the server is ready."""
        usual = self.llm.llm.compression
        for method in self.methods:
            rate = usual.rate or USUAL_RATE
            asked = CompressionConfig(method=method, rate=rate, floor=usual.floor)
            plain = asked if method != usual.method else usual
            rounds = [(False, plain), (True, asked)] if logprobs else [(False, plain)]
            refused: dict[int, str] = {}
            for with_logprobs, settings in rounds:
                found = {n: self._refusal(n, settings) for n in prompt_lens}
                served = [n for n, why in found.items() if why is None]
                refused |= {n: why for n, why in found.items() if why is not None}
                await self.llm.warm_up(served, with_logprobs, settings)
            for prompt_len, why in refused.items():
                told = {"method": str(method), "prompt_len": prompt_len, "why": why}
                log.info("not warmed up for", extra={"fields": told})
        self.ready = True

    def _refusal(self, prompt_len: int, compression: CompressionConfig) -> str | None:
        """Why the engine cannot serve a prompt of this length, if so: a pool that is there for
        compressed caches need not hold a whole one."""
        try:
            warming.like(self.llm.llm, [prompt_len], False, compression)
        except UserError as error:
            return str(error)
        return None

    async def drain(self, seconds: float) -> int:
        """Take no more requests and let those that run end; after `seconds` they are aborted.

        Returns:
            How many were aborted.
        """
        self.draining, self.ready = True, False
        end = time.monotonic() + seconds
        while self._open and time.monotonic() < end:
            await asyncio.sleep(0.02)
        left = [name for outputs in self._open for name in outputs.request_ids]
        for name in left:
            with contextlib.suppress(UserError):  # it has ended in this moment
                self.llm.abort(name)
        return len(left)

    def close(self) -> None:
        """Nothing more will be tokenised."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # Requests

    def check_model(self, name: str | None) -> None:
        """Refuse the name of another model.

        Raises:
            ApiError: there is no such model here.
        """
        if name is not None and name != self.name:
            raise ApiError(
                404, f"model {name[:60]!r}: this server has {self.name!r}", param="model",
                code="model_not_found",
            )  # fmt: skip

    async def in_thread(self, param: str, function: Callable[..., Any], *args: Any) -> Any:
        """What a function returns that may take long and waits for no other thread.

        Args:
            param: the field that it reads.
            function: it.
            args: its arguments.

        Raises:
            ApiError: it refuses what it reads.
        """
        loop = asyncio.get_running_loop()
        call = functools.partial(function, *args)
        try:
            return await loop.run_in_executor(self._threads, call)
        except (UserError, ValueError) as error:
            raise ApiError(400, str(error), param=param) from error

    def check_open(self) -> None:
        """Refuse requests when none is taken.

        Raises:
            ApiError: the server is going, or its engine is dead.
        """
        if self.draining:
            raise ApiError(503, "the server is shutting down: ask another", code="shutting_down",
                           headers={"Retry-After": "5", "Connection": "close"})  # fmt: skip
        if self.dead is not None:
            raise ApiError(503, f"the engine is {self.dead}", code="engine_dead")

    def retry_after(self, waiting: int) -> int:
        """Seconds after which a queue of so many will have moved on, as far as one can tell."""
        if len(self._ended) < 2:
            return 1
        each = (time.monotonic() - self._ended[0]) / len(self._ended)
        return max(1, min(MOST_RETRY, round(each * max(1, waiting / 4))))

    def begin(self, job: Job) -> "Running":
        """Hand a job to the engine: all of it, or none.

        Raises:
            ApiError: it can never be served, or not now.
        """
        self.check_open()
        most = self.llm.llm.engine.intake.most
        if most is not None and job.choices > most:
            raise ApiError(400, f"{job.choices} sequences at once: this server runs and queues at "
                           f"most {most}: ask for fewer",
                           param="n" if len(job.samplings) > 1 else job.source)  # fmt: skip
        try:
            job = self._fitting(job)
            asked = [(prompt, sampling) for prompt in job.prompts for sampling in job.samplings]
            # The response says what was reached.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RateWarning)
                choices = self.llm.add_together(
                    asked, job.compression, deadline=job.deadline, report_kept=job.detail
                )
        except UserError as error:
            if isinstance(error, QueueFull):
                waiting = len(self.llm.llm.scheduler.waiting)
                headers = {"Retry-After": str(self.retry_after(waiting))}
                raise ApiError(429, f"the queue is full: {error}", code="queue_full",
                               headers=headers) from error  # fmt: skip
            self.check_open()
            param = "compression" if named(error, _COMPRESSION) else job.source
            raise ApiError(400, str(error), param=param) from error
        if not self._open:
            # How fast answers end is not told by hours without any.
            self._ended.clear()
        self._open.add(choices)
        return Running(self, choices)

    def _fitting(self, job: Job) -> Job:
        """The job with as many tokens to generate as the engine has room for, where nobody asked
        for a number; as it is where there is no room for one."""
        sampling = job.samplings[0]

        def room(tokens: int) -> bool:
            one = dataclasses.replace(sampling, max_tokens=tokens)
            try:
                for prompt in job.prompts:
                    self.llm.llm.check(prompt, one, job.compression)
            except UserError:
                return False
            return True

        if not job.shortens or room(sampling.max_tokens) or not room(1):
            return job
        fits = bisect.bisect_left(range(1, sampling.max_tokens), True, key=lambda n: not room(n))
        samplings = [dataclasses.replace(one, max_tokens=fits) for one in job.samplings]
        return dataclasses.replace(job, samplings=samplings)

    def note_end(self, outputs: AsyncOutputs) -> None:
        """The choices of a request are done with."""
        self._open.discard(outputs)
        self._ended.extend([time.monotonic()] * len(outputs.request_ids))


class Running:
    """The choices of one request while they run; close it to end those that still do."""

    def __init__(self, service: Service, choices: AsyncOutputs):
        self._service, self._choices = service, choices
        self._numbers = {name: number for number, name in enumerate(choices.request_ids)}
        self.last: list[RequestOutput | None] = [None] * len(self._numbers)
        """The newest output of each."""
        self._closed = False

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End those that still run."""
        if not self._closed:
            self._closed = True
            self._choices.close()
            self._service.note_end(self._choices)

    @property
    def outputs(self) -> list[RequestOutput]:
        """The newest output of each choice that has one."""
        return [output for output in self.last if output is not None]

    async def each(self, silence: float | None = None) -> AsyncGenerator[tuple[int, Any], None]:
        """Outputs as they come, with the number of their choice; (−1, None) for each time that
        nothing came for `silence` seconds.

        Raises:
            ApiError: one of them failed, or none had begun when time or blocks ran out.
        """
        clocks: dict[int, float] = {}
        late: list[tuple[int, RequestOutput]] = []
        begun = time.perf_counter()
        while self._choices.running:
            try:
                output = await self._choices.next_within(silence)
            except UserError as error:
                raise ApiError(503, str(error), code="engine_dead") from error
            if output is None:
                yield -1, None
                continue
            self._check(output)
            number, now = self._numbers[output.request_id], time.perf_counter()
            before = self.last[number]
            new = len(output.token_ids) - (len(before.token_ids) if before else 0)
            self._service.metrics.sent(
                new, now - clocks.get(number, begun), first=number not in clocks
            )
            if new:
                clocks[number] = now
            self.last[number] = output
            if output.finish_reason in ("deadline", "pool") and not output.token_ids:
                late.append((number, output))
                continue
            yield number, output
        if late and not any(output.token_ids for output in self.outputs):
            if late[0][1].finish_reason == "deadline":
                raise ApiError(504, "the deadline passed before the first token", code="deadline")
            raise ApiError(503, "blocks ran out before the first token: ask for fewer tokens or a "
                           "higher rate", code="pool_full")  # fmt: skip
        # Beside choices that began, it is one without a token.
        for number, output in late:
            yield number, output

    def _check(self, output: RequestOutput) -> None:
        """Raise what the client is told where an output is a failure."""
        if output.finish_reason == "error":
            if self._service.dead is not None:
                raise ApiError(503, f"the engine is {self._service.dead}", code="engine_dead")
            raise ApiError(500, f"the request failed: {output.error}", code="request_failed")
        if output.finish_reason == "abort":
            raise ApiError(503, "the server is shutting down: ask another", code="shutting_down",
                           headers={"Retry-After": "5"})  # fmt: skip
