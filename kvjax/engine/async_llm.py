"""An engine for asyncio: one thread owns the device, tasks add requests and wait for their outputs.

Everything here is used from the tasks of one event loop. The thread (`Driver`) steps while there is
anything to do and sleeps otherwise; what it has to say reaches the loop through a `Mailbox`, in
which the outputs of one request are merged while they wait, so that a slow reader holds up nobody
and loses nothing.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Literal

import jax

from kvjax.cache import Codec, CompressionConfig
from kvjax.cache.calibration import Calibration
from kvjax.engine.config import EngineConfig
from kvjax.engine.llm import LLM
from kvjax.engine.metrics import EngineMetrics
from kvjax.engine.prompts import Prompt
from kvjax.engine.request import RequestOutput
from kvjax.engine.sampling import SamplingParams
from kvjax.errors import UserError, in_one_line
from kvjax.models import LoadedModel

log = logging.getLogger(__name__)

DEADLINES_SECONDS = 0.1
"""While nothing happens, deadlines are looked at so often."""

Closing = Literal["no", "drain", "abort", "closed"]


class Mailbox:
    """Outputs on their way from the thread to the loop, at most one per request."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._lock = threading.Lock()
        self._outputs: dict[str, RequestOutput] = {}
        self._news = asyncio.Event()
        self._closed = False

    def put(self, output: RequestOutput) -> None:
        """Leave an output, after what waits of the same request. From any thread."""
        with self._lock:
            first = not self._outputs
            before = self._outputs.pop(output.request_id, None)
            self._outputs[output.request_id] = before.then(output) if before else output
        if first:
            self.loop.call_soon_threadsafe(self._news.set)

    def close(self) -> None:
        """Nothing more will come. From any thread."""
        self._closed = True
        with contextlib.suppress(RuntimeError):  # a loop that is closed waits for nothing
            self.loop.call_soon_threadsafe(self._news.set)

    async def take(self) -> RequestOutput | None:
        """The output that has waited longest; None if there will be none."""
        while True:
            with self._lock:
                if self._outputs:
                    return self._outputs.pop(next(iter(self._outputs)))
                if self._closed:
                    return None
                self._news.clear()
            await self._news.wait()

    def clear(self) -> None:
        with self._lock:
            self._outputs.clear()


class Driver(threading.Thread):
    """The thread that owns the device: it steps while there is anything to do."""

    def __init__(self, llm: LLM):
        super().__init__(name="kvjax engine", daemon=True)
        self._llm = llm
        self._wake = threading.Condition()
        self._calls: deque[tuple[Callable[[], Any], concurrent.futures.Future]] = deque()
        self._mailboxes: weakref.WeakSet[Mailbox] = weakref.WeakSet()
        self._when_ended: list[Callable[[], None]] = []
        self.closing: Closing = "no"
        self._news = False
        """Whether anything has happened since the last round began."""
        llm.engine.compile_beside(self.look)

    def watch(self, mailbox: Mailbox) -> None:
        """Close a mailbox when this thread ends, and see what it was made for."""
        with self._wake:
            self._mailboxes.add(mailbox)
            self._notify()
            if self.closing != "closed":
                return
        mailbox.close()

    def look(self) -> None:
        """There may be something to do. From any thread."""
        with self._wake:
            self._notify()

    def _notify(self) -> None:
        self._news = True
        self._wake.notify()

    def call[T](self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Have the thread call a function between two rounds. From any thread."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._wake:
            if self.closing != "no":
                raise UserError("the engine is closed")
            self._calls.append((function, future))
            self._notify()
        return future

    def close(self, closing: Closing, when_ended: Callable[[], None] | None = None) -> None:
        """Have the thread end: once all requests have ended, or at once. From any thread."""
        with self._wake:
            if self.closing != "closed":
                self.closing = closing
                self._when_ended += [when_ended] if when_ended else []
                self._notify()
                return
        if when_ended is not None:
            when_ended()

    def run(self) -> None:
        try:
            while self._wait():
                self._turn()
        except BaseException as error:  # of an engine that cannot even die
            log.critical("the engine's thread ends", exc_info=error)
        finally:
            with self._wake:
                self.closing = "closed"
            for mailbox in list(self._mailboxes):
                mailbox.close()
            for _, future in self._calls:
                future.cancel()
            for when_ended in self._when_ended:
                when_ended()

    def _wait(self) -> bool:
        """Sleep until there is something to do; False when there will be nothing any more."""
        with self._wake:
            self._wake.wait_for(
                lambda: self._calls or self._llm.has_unfinished() or self.closing != "no"
            )
            if self._llm.engine.only_compiles:
                # Deadlines pass without a word.
                self._wake.wait_for(lambda: self._news, DEADLINES_SECONDS)
            self._news = False
            return bool(self._calls) or self._llm.has_unfinished()

    def _turn(self) -> None:
        """Calls that wait, and a round."""
        while self._calls:
            function, future = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
        if self.closing == "abort":
            for name in list(self._llm.engine.intake.open):
                with contextlib.suppress(UserError):
                    self._llm.abort(name)
        try:
            if self._llm.has_unfinished():
                self._llm.step()
        except BaseException as error:
            log.error("a step failed", exc_info=error)
            self._llm.recovery.die(f"a step failed ({in_one_line(error)})")


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
        loop = self._begin()
        mailbox = Mailbox(loop)
        name = self.llm.add_request(
            prompt,
            sampling,
            compression,
            request_id=request_id,
            on_output=mailbox.put,
            deadline=deadline,
            report_kept=report_kept,
        )
        return AsyncOutputs(self, mailbox, [name])

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
        loop = self._begin()
        mailbox = Mailbox(loop)
        names: list[str | RequestOutput] = []
        try:
            self.llm.add_all(names, prompts, sampling, compression, mailbox.put)
        except BaseException:
            self.llm.abandon(names)
            raise
        return AsyncOutputs(self, mailbox, names)

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
        """Compile what prompts of these lengths need, as `LLM.warm_up`; requests wait meanwhile."""
        await self._call(lambda: self.llm.warm_up(prompt_lens, logprobs, compression))

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
        """Retain what `save_prefix` wrote, as `LLM.load_prefix`; requests wait while it is read."""
        return await self._call(lambda: self.llm.load_prefix(path, compression))

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
            return
        ended = asyncio.Event()

        def when_ended() -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(ended.set)

        self._driver.close("drain" if drain else "abort", when_ended)
        await ended.wait()
        self._driver.join()

    async def _call[T](self, function: Callable[[], T]) -> T:
        self._begin()
        return await asyncio.wrap_future(self._driver.call(function))

    def watch(self, mailbox: Mailbox) -> None:
        """There is a mailbox with requests of its own."""
        self._driver.watch(mailbox)

    def abandon(self, request_ids: Iterable[str]) -> None:
        """End requests whose reader has gone. From any thread."""
        if self._driver.closing != "closed":
            self.llm.abandon(request_ids)
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


class AsyncOutputs(AsyncIterator[RequestOutput]):
    """The outputs of some requests as they come, those of one request merged while they wait.

    A task that is cancelled while it waits for one ends the requests, and so does whoever closes
    the iterator or drops it.
    """

    _running: frozenset[str] = frozenset()

    def __init__(self, front: AsyncLLM, mailbox: Mailbox, names: Sequence[str | RequestOutput]):
        self._front, self._mailbox = front, mailbox
        self.request_ids = [n if isinstance(n, str) else n.request_id for n in names]
        """In the order of the prompts."""
        self._running = frozenset(self.request_ids)
        for name in names:
            if not isinstance(name, str):
                mailbox.put(name)
        front.watch(mailbox)

    async def __anext__(self) -> RequestOutput:
        if asyncio.get_running_loop() is not self._mailbox.loop:
            raise UserError("outputs of AsyncLLM are read in another event loop: read them in its")
        if not self._running:
            raise StopAsyncIteration
        try:
            output = await self._mailbox.take()
        except BaseException:
            self.close()
            raise
        if output is None:
            self._running = frozenset()
            raise UserError("the engine's thread has ended: make another AsyncLLM")
        if output.finished:
            self._running -= {output.request_id}
        return output

    def close(self) -> None:
        """End those of the requests that still run; their outputs are dropped."""
        running, self._running = self._running, frozenset()
        if running:
            self._front.abandon(running)
            self._mailbox.clear()

    async def aclose(self) -> None:
        """`close`, for `contextlib.aclosing`."""
        self.close()

    def __enter__(self) -> "AsyncOutputs":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self):
        self.close()
