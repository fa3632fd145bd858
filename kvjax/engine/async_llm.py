"""An engine for asyncio: one thread owns the device, tasks add requests and wait for their outputs.

Everything here is used from the tasks of one event loop. The thread (`Driver`) steps while there is
anything to do and sleeps otherwise; what it has to say reaches the loop through a `Mailbox`, in
which the outputs of one request are merged while they wait, so that a slow reader holds up nobody
and loses nothing. One call of the loop wakes all readers of a round.
"""

import asyncio
import atexit
import contextlib
import functools
import itertools
import os
import sys
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import jax

from kvjax.cache import Codec, CompressionConfig
from kvjax.cache.calibration import Calibration
from kvjax.engine import retaining, warming
from kvjax.engine.config import EngineConfig
from kvjax.engine.driver import Driver, Mailbox
from kvjax.engine.llm import LLM
from kvjax.engine.metrics import EngineMetrics
from kvjax.engine.needs import Need, needs_ahead, needs_of_file, without_state
from kvjax.engine.prompts import Prompt
from kvjax.engine.request import Request, RequestOutput
from kvjax.engine.retaining import PAUSE_SECONDS
from kvjax.engine.sampling import SamplingParams
from kvjax.errors import UserError
from kvjax.models import LoadedModel

_DRIVERS: weakref.WeakSet[Driver] = weakref.WeakSet()


@atexit.register
def _end_drivers() -> None:
    """No thread works on the device while the interpreter goes."""
    for driver in list(_DRIVERS):
        driver.close("abort")
        driver.join()


class AsyncLLM:
    """A model that serves the requests of many asyncio tasks at once.

    It belongs to the event loop that first uses it. Leaving `async with` aborts what runs.

    Example:
      >>> async with AsyncLLM("smollm2-135m", CompressionConfig(rate=8)) as llm:
      ...     async for output in llm.add("The capital of France is"):
      ...         print(output.new_text, end="")
    """

    def __init__(
        self,
        model: LoadedModel | str,
        compression: CompressionConfig | None = None,
        config: EngineConfig | None = None,
        *,
        cache_dtype: Codec | jax.typing.DTypeLike | None = None,
        calibration: Calibration | str | os.PathLike[str] | None = "auto",
        draft: LLM | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Load the model and plan the memory, which takes as long as it takes.

        Arguments and errors as for `LLM`.
        """
        self.llm = LLM(
            model,
            compression,
            config,
            cache_dtype=cache_dtype,
            calibration=calibration,
            draft=draft,
            clock=clock,
        )
        """The engine; the thread steps it."""
        self._driver = Driver(self.llm)
        self._loop: asyncio.AbstractEventLoop | None = None
        weakref.finalize(self, self._driver.close, "abort").atexit = False

    async def __aenter__(self) -> "AsyncLLM":
        self._begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def dead(self) -> str | None:
        """Why the engine has stopped for good, or None. See `reset`."""
        return self.llm.dead

    @property
    def closed(self) -> bool:
        """Whether nothing can be added any more: it was closed, or its thread has ended."""
        return self._driver.closing != "no"

    @property
    def metrics(self) -> EngineMetrics:
        return self.llm.metrics

    def add(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        compression: CompressionConfig | None = None,
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        report_kept: bool = False,
    ) -> "AsyncOutputs":
        """Queue a request; its outputs come from the iterator that is returned.

        A text becomes tokens here, in the loop's thread. Arguments as for `LLM.add_request`.

        Raises:
            UserError: the request can never be served, too many wait, the engine is dead or closed,
                or this is another event loop.
        """
        mailbox, on_output = self._mailbox()
        request = self.llm.enqueue(
            prompt,
            sampling,
            compression,
            request_id=request_id,
            on_output=on_output,
            deadline=deadline,
            report_kept=report_kept,
        )
        return AsyncOutputs(self, mailbox, [request])

    def add_together(
        self,
        asked: Sequence[tuple[Prompt, SamplingParams]],
        compression: CompressionConfig | None = None,
        *,
        deadline: float | None = None,
        report_kept: bool = False,
    ) -> "AsyncOutputs":
        """Queue some requests, all or none; their outputs come from one iterator.

        Args:
            asked: prompts, each with how its tokens are chosen.
            compression: settings of their caches.
            deadline: seconds from now after which they end with what they have.
            report_kept: whether the first one's output says which tokens each head kept.

        Raises:
            UserError: as for `add`, of any of them.
        """
        mailbox, on_output = self._mailbox()
        requests: list[Request] = []
        try:
            for prompt, sampling in asked:
                requests.append(
                    self.llm.enqueue(
                        prompt,
                        sampling,
                        compression,
                        on_output=on_output,
                        deadline=deadline,
                        report_kept=report_kept and not requests,
                    )
                )
        except BaseException:
            self.abandon(requests)
            raise
        return AsyncOutputs(self, mailbox, requests)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        compression: CompressionConfig | Sequence[CompressionConfig] | None = None,
    ) -> "AsyncOutputs":
        """The outputs of some prompts as they come; a prompt that is refused has an `error`.

        Arguments as for `LLM.generate`.

        Raises:
            UserError: there are no prompts, or not as many settings as prompts; the engine is
                closed, or this is another event loop.
        """
        mailbox, on_output = self._mailbox()
        requests: list[Request | RequestOutput] = []
        try:
            self.llm.add_all(requests, prompts, sampling, compression, on_output)
        except BaseException:
            self.llm.abandon(requests)
            raise
        return AsyncOutputs(self, mailbox, requests)

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        compression: CompressionConfig | Sequence[CompressionConfig] | None = None,
    ) -> list[RequestOutput]:
        """The last output of each prompt, in order; arguments and errors as for `stream`."""
        last = {}
        with self.stream(prompts, sampling, compression) as outputs:
            names = outputs.request_ids
            async for output in outputs:
                last[output.request_id] = output
        return [last[name] for name in names]

    def abort(self, request_id: str) -> None:
        """End a request; its last output says what it has generated.

        Raises:
            UserError: there is no unfinished request of that id, or this is another event loop.
        """
        self._own_loop()
        self.llm.abort(request_id)
        self._driver.look()

    async def reset(self) -> None:
        """Make a new cache and go on; open requests end with an error, as `LLM.reset` says."""
        await self._call(self.llm.reset)

    async def warm_up(
        self,
        prompt_lens: Sequence[int],
        logprobs: bool = False,
        compression: CompressionConfig | None = None,
    ) -> None:
        """Compile what prompts of these lengths need, as `LLM.warm_up`; requests go on meanwhile,
        and those that wait for steps come first. With several processes they go on between two
        steps that are compiled."""
        if self.llm.engine.beside is None:
            for part in warming.parts(self.llm, prompt_lens, logprobs, compression):
                await self._call(part)
            return
        requests = warming.like(self.llm, prompt_lens, logprobs, compression)
        worker = self.llm.worker
        for request in requests:
            await self._compile(await self._call(lambda one=request: [*needs_ahead(worker, one)]))

    async def _compile(self, needs: Sequence[Need]) -> None:
        """Have some steps compiled beside the rounds.

        Raises:
            Exception: one of them does not compile.
        """
        own = {need.key for need in needs}
        for looks in itertools.count():
            look = functools.partial(self.llm.engine.compile_ahead, needs, looks == 0)
            under_way = await self._call(look)
            if under_way is None:
                return
            if not under_way:  # a request's step is next, and a round has to begin
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            ended, tell = _signal(asyncio.get_running_loop())
            for future in under_way.values():
                future.add_done_callback(tell)
            await ended.wait()
            for key, future in under_way.items():
                if future.done() and key in own:
                    future.result()

    async def retain(self, prompt: Prompt, compression: CompressionConfig | None = None) -> int:
        """Prefill, compress and retain a prompt, as `LLM.retain`; requests go on meanwhile."""
        return await self._call(lambda: self.llm.retain(prompt, compression))

    async def save_prefix(
        self,
        path: str | os.PathLike[str],
        prompt: Prompt,
        compression: CompressionConfig | None = None,
    ) -> int:
        """`retain` a prompt, and write what is left of it to a file, as `LLM.save_prefix`."""
        return await self._call(lambda: self.llm.save_prefix(path, prompt, compression))

    async def load_prefix(
        self, path: str | os.PathLike[str], compression: CompressionConfig | None = None
    ) -> int:
        """Retain what `save_prefix` wrote, as `LLM.load_prefix`; requests go on meanwhile."""
        worker = await self._call(lambda: without_state(self.llm.worker))
        prefix = await asyncio.to_thread(retaining.read, self.llm, worker, path, compression)
        await self._compile([*needs_of_file(worker, prefix.held)])
        return await self._call(lambda: retaining.put(self.llm, prefix))

    async def aclose(self, drain: bool = False) -> None:
        """End the thread; nothing can be added any more. May be called again.

        Args:
            drain: wait until all requests have ended by themselves. By default they are aborted:
                their readers get a last output with what there is. To drain for a limited time,
                call it in `asyncio.timeout`, and then again without `drain`.

        Raises:
            UserError: this is another event loop.
        """
        loop = self._own_loop()
        if self._driver.ident is None:
            self._driver.closing = "closed"
            if self.llm.engine.agreement is not None:
                self.llm.engine.agreement.end()
            return
        ended, tell = _signal(loop)
        self._driver.close("drain" if drain else "abort", tell)
        await ended.wait()
        self._driver.join()

    def lose(self, reason: str) -> None:
        """Its process ends, for the reason: whoever waits for an output gets an error. From any
        thread."""
        self.llm.recovery.dead = self.llm.dead or f"dead: {reason}"
        self._driver.close_mailboxes()

    async def _call[T](self, function: Callable[[], T]) -> T:
        self._begin()
        return await asyncio.wrap_future(self._driver.call(function))

    def _mailbox(self) -> tuple[Mailbox, Callable[[RequestOutput], None]]:
        """A mailbox for some requests, and what brings their outputs there."""
        mailbox = Mailbox(self._begin())
        return mailbox, functools.partial(self._driver.post.put, mailbox)

    def watch(self, mailbox: Mailbox) -> None:
        """There is a mailbox with requests of its own."""
        self._driver.watch(mailbox)

    def abandon(self, requests: Iterable[Request | RequestOutput]) -> None:
        """End requests whose reader has gone. From any thread."""
        if self._driver.closing != "closed":
            self.llm.abandon(requests)
            self._driver.look()

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        """The loop that runs, if it is the one that this engine belongs to."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise UserError("AsyncLLM is used outside of an event loop: use LLM there") from None
        self._loop = self._loop or loop
        if loop is not self._loop:
            raise UserError("AsyncLLM is used in another event loop: make one for each loop")
        return loop

    def _begin(self) -> asyncio.AbstractEventLoop:
        """The loop; the thread runs."""
        loop = self._own_loop()
        if self._driver.closing != "no":
            raise UserError("the engine is closed: make another AsyncLLM")
        if self._driver.ident is None:
            _DRIVERS.add(self._driver)
            self._driver.start()
        return loop


def _signal(loop: asyncio.AbstractEventLoop) -> tuple[asyncio.Event, Callable[..., None]]:
    """An event of a loop, and what sets it from any thread."""
    event = asyncio.Event()

    def tell(*_: object) -> None:
        with contextlib.suppress(RuntimeError):  # a loop that is closed waits for nothing
            loop.call_soon_threadsafe(event.set)

    return event, tell


class AsyncOutputs(AsyncIterator[RequestOutput]):
    """The outputs of some requests as they come, those of one request merged while they wait.

    A task that is cancelled while it waits for one ends the requests, and so does whoever closes
    the iterator or drops it.
    """

    def __init__(self, front: AsyncLLM, mailbox: Mailbox, asked: Sequence[Request | RequestOutput]):
        self._front, self._mailbox = front, mailbox
        self._running = {r.id if isinstance(r, Request) else r.request_id: r for r in asked}
        self.request_ids = list(self._running)
        """In the order of the prompts."""
        for one in asked:
            if not isinstance(one, Request):
                mailbox.put(one)
        front.watch(mailbox)

    async def __anext__(self) -> RequestOutput:
        output = await self.next_within(None)
        assert output is not None
        return output

    async def next_within(self, silence: float | None) -> RequestOutput | None:
        """The next output; None if none came for so many seconds (None: however long it takes).

        Raises:
            StopAsyncIteration: all requests have ended.
            UserError: the engine's thread has ended, or this is another event loop.
        """
        if asyncio.get_running_loop() is not self._mailbox.loop:
            raise UserError("outputs of AsyncLLM are read in another event loop: read them in its")
        if not self._running:
            raise StopAsyncIteration
        try:
            output = await self._mailbox.take(silence, lambda: not self._running)
        except BaseException:
            self.close()
            raise
        if output is not None and output.finished:
            self._running.pop(output.request_id, None)
        if output is None and not self._running:
            raise StopAsyncIteration
        return output

    @property
    def running(self) -> bool:
        """Whether there is more to come."""
        return bool(self._running)

    def close(self) -> None:
        """End those of the requests that still run; their outputs are dropped."""
        self._end()
        self._mailbox.wake_soon()  # whoever waits for one

    def _end(self) -> None:
        running, self._running = self._running, {}
        if running:
            self._front.abandon(running.values())
            self._mailbox.clear()

    async def aclose(self) -> None:
        """`close`, for `contextlib.aclosing`."""
        self.close()

    def __enter__(self) -> "AsyncOutputs":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self):
        # Once the interpreter ends, what ending needs may be gone before this is.
        if not sys.is_finalizing():
            self._end()
