"""The thread that owns the device for an event loop, and how its outputs reach the loop."""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Literal

from kvjax.engine.llm import LLM
from kvjax.engine.request import RequestOutput
from kvjax.errors import UserError, in_one_line

log = logging.getLogger(__name__)

DEADLINES_SECONDS = 0.1
"""While nothing happens, deadlines are looked at so often."""
APART_SECONDS = 0.005
GATHER_SECONDS = 0.05
"""A first round of requests that come together waits for them: until none has come for so long, and
at most so long. One that missed it would run behind the others to the end, in rounds of its own."""

Closing = Literal["no", "drain", "abort", "closed"]


class Mailbox:
    """Outputs on their way from the thread to the loop, at most one per request."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        # Dropped iterators empty theirs wherever the collector finds them, also in here.
        self._lock = threading.RLock()
        self._outputs: dict[str, RequestOutput] = {}
        self._news = asyncio.Event()
        self._closed = False

    def put(self, output: RequestOutput) -> bool:
        """Leave an output, after what waits of the same request; nobody is woken. From any thread.

        Returns:
            Whether it is the only one here.
        """
        with self._lock:
            first = not self._outputs
            before = self._outputs.pop(output.request_id, None)
            self._outputs[output.request_id] = before.then(output) if before else output
        return first

    def wake(self) -> None:
        """Have the reader look, if one waits. From the loop's thread."""
        self._news.set()

    def close(self) -> None:
        """Nothing more will come. From any thread."""
        self._closed = True
        self.wake_soon()

    def wake_soon(self) -> None:
        """`wake`, from any thread."""
        with contextlib.suppress(RuntimeError):  # a loop that is closed waits for nothing
            self.loop.call_soon_threadsafe(self.wake)

    async def take(
        self, silence: float | None = None, over: Callable[[], bool] = lambda: False
    ) -> RequestOutput | None:
        """The output that has waited longest; None if none came for `silence` seconds, or where
        none is here and it is `over`.

        Raises:
            UserError: there will be none any more.
        """
        until, timer = None if silence is None else self.loop.time() + silence, None
        try:
            while True:
                with self._lock:
                    if self._outputs:
                        return self._outputs.pop(next(iter(self._outputs)))
                    if self._closed:
                        raise UserError("the engine's thread has ended: make another AsyncLLM")
                    if over():
                        return None
                    self._news.clear()
                if until is not None:
                    if self.loop.time() >= until:
                        return None
                    timer = timer or self.loop.call_at(until, self.wake)
                await self._news.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def clear(self) -> None:
        """Drop what is here."""
        with self._lock:
            self._outputs.clear()


class Post:
    """Brings outputs to mailboxes, and wakes the readers of all that a round has put there by one
    call of the loop: each call costs a system call and takes the interpreter from the engine.

    The engine's thread uses it.
    """

    def __init__(self) -> None:
        self._full: list[Mailbox] = []
        """Mailboxes whose readers have to be woken."""

    def put(self, mailbox: Mailbox, output: RequestOutput) -> None:
        """Leave an output in a mailbox.

        Raises:
            RuntimeError: its loop is closed; nobody will read it.
        """
        if mailbox.loop.is_closed():
            raise RuntimeError("the event loop is closed")
        if mailbox.put(output):
            self._full.append(mailbox)

    def deliver(self) -> None:
        """Wake the readers."""
        full, self._full = self._full, []
        if full:
            with contextlib.suppress(RuntimeError):  # of a loop that was closed just now
                full[0].loop.call_soon_threadsafe(_wake, full)


def _wake(mailboxes: Iterable[Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.wake()


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
        self.post = Post()
        llm.engine.outbox.on_emitted = self.post.deliver
        if llm.engine.agreement is None:
            # Which steps are there decides what runs, and it would not be the same everywhere.
            llm.engine.compile_beside(self.look)

    def watch(self, mailbox: Mailbox) -> None:
        """Close a mailbox when this thread ends, and see what it was made for."""
        with self._wake:
            self._mailboxes.add(mailbox)
            self._notify()
            if self.closing != "closed":
                return
        mailbox.close()

    def close_mailboxes(self) -> None:
        """Nothing more will come, for anybody. From any thread."""
        for mailbox in list(self._mailboxes):
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
                when_ended = None
        if closing == "abort":
            # Not by the thread: a call that is under way there may wait for them.
            for name in list(self._llm.engine.intake.open):
                with contextlib.suppress(UserError):
                    self._llm.abort(name)
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
            self.close_mailboxes()
            if self._llm.engine.agreement is not None:
                self._llm.engine.agreement.end()
            for _, future in self._calls:
                future.cancel()
            for when_ended in self._when_ended:
                when_ended()

    def _wait(self) -> bool:
        """Sleep until there is something to do; False when there will be nothing any more."""
        with self._wake:
            if not self._awaited():
                self._wake.wait_for(self._awaited)
                self._gather()
            if self._llm.engine.only_compiles:
                # Deadlines pass without a word.
                self._wake.wait_for(lambda: self._news, DEADLINES_SECONDS)
            self._news = False
            return bool(self._calls) or self._llm.has_unfinished()

    def _awaited(self) -> bool:
        """Whether there is something to do, or the thread has to end."""
        return bool(self._calls) or self._llm.has_unfinished() or self.closing != "no"

    def _gather(self) -> None:
        """Wait for those that come with the first one. Calls wait for nobody."""
        until = time.monotonic() + GATHER_SECONDS
        while not self._calls and self.closing == "no":
            self._news = False
            apart = min(APART_SECONDS, until - time.monotonic())
            if apart <= 0 or not self._wake.wait_for(lambda: self._news, apart):
                return

    def _turn(self) -> None:
        """Calls that wait, and a round."""
        # Who calls again at once waits for the round.
        for _ in range(len(self._calls)):
            function, future = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    if self.closing == "abort":
                        raise UserError("the engine is closed")
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
        try:
            if self._llm.has_unfinished():
                self._llm.step()
        except BaseException as error:
            log.error("a step failed", exc_info=error)
            self._llm.recovery.die(f"a step failed ({in_one_line(error)})")
