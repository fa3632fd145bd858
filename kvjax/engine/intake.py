"""What passes between the thread that owns the device and everybody else.

Requests and aborts come from any thread and wait here for the next round; outputs that nobody was
called with wait here for whoever steps next. All else in the engine belongs to the thread that
steps.
"""

import contextlib
import heapq
import itertools
import threading
from collections.abc import Iterator

from kvjax.engine.interrupts import held
from kvjax.engine.request import Request, RequestOutput
from kvjax.engine.text import RequestText
from kvjax.errors import QueueFull, UserError


class Owner:
    """At most one thread steps at a time, and never from within a step."""

    def __init__(self):
        self._lock = threading.RLock()
        self._thread = ""
        self.in_round = False

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """For as long as it is open, only this thread steps.

        Raises:
            UserError: another thread does, or this one is inside a step.
        """
        if not self._lock.acquire(blocking=False):
            raise UserError(
                f"{what}: thread {self._thread!r} is using this engine; let one thread step, "
                "others may add and abort requests"
            )
        try:
            if self.in_round:
                raise UserError(
                    f"{what} was called inside a callback of this engine: callbacks may add and "
                    "abort requests, and no more"
                )
            self._thread = threading.current_thread().name
            yield
        finally:
            self._lock.release()


class Intake:
    """Open requests by id, in the order they came."""

    def __init__(self, max_waiting: int | None, max_batch: int):
        self._max_waiting, self._max_batch = max_waiting, max_batch
        self._lock = threading.RLock()
        self._new: list[Request] = []
        self._aborts: list[Request] = []
        self._failed: list[tuple[Request, str]] = []
        self._deadlines: list[tuple[float, int, Request]] = []
        self._numbers = itertools.count()
        self._outbox: dict[str, RequestOutput] = {}
        self.open: dict[str, tuple[Request, RequestText]] = {}
        """Those whose end has not been emitted, by id."""

    @property
    def most(self) -> int | None:
        """Requests that may be open: those in the queue, beside those that run."""
        return None if self._max_waiting is None else self._max_waiting + self._max_batch

    def new_id(self) -> str:
        """An id that no open request has."""
        with self._lock:
            return next(
                name
                for name in (f"request-{number}" for number in self._numbers)
                if name not in self.open and name not in self._outbox
            )

    def add(self, request: Request, text: RequestText) -> None:
        """Queue a request for the next round.

        Raises:
            QueueFull: as many run and wait as may.
            UserError: its id is in use.
        """
        with held(), self._lock:
            if request.id in self.open or request.id in self._outbox:
                raise UserError(f"request id {request.id!r} is in use: give another")
            # Those that slots are free for wait only until the next round.
            if self.most is not None and len(self.open) >= self.most:
                raise QueueFull(
                    f"{len(self.open)} requests run or wait, which is max_waiting "
                    f"{self._max_waiting} beside max_batch {self._max_batch}: come later"
                )
            self.open[request.id] = request, text
            self._new.append(request)
            if request.deadline is not None:
                heapq.heappush(self._deadlines, (request.deadline, request.order, request))

    def abort(self, request_id: str) -> None:
        """Have a request end in the next round.

        Raises:
            UserError: there is no unfinished request of that id.
        """
        with held(), self._lock:
            request, _ = self.open.get(request_id, (None, None))
            if request is None or request.finish_reason is not None or request.aborted:
                raise UserError(
                    f"request id {request_id!r}: there is no unfinished request of that id"
                )
            request.aborted = True
            self._aborts.append(request)

    def abandon(self, request: Request) -> None:
        """`abort` for a caller that has gone: nobody waits for its output. Never raises."""
        with held(), self._lock:
            request.on_output, request.waits = None, False
            # When it has ended, another one may have its id.
            if self.open.get(request.id, (None, None))[0] is request:
                with contextlib.suppress(UserError):
                    self.abort(request.id)

    def fail(self, request: Request, error: str) -> None:
        """Have a request end with an error in the next round."""
        with held(), self._lock:
            self._failed.append((request, error))

    def take_failed(self) -> list[tuple[Request, str]]:
        """Requests of `fail` that have not ended otherwise, and their errors."""
        with self._lock:
            failed, self._failed = self._failed, []
        return [(request, error) for request, error in failed if request.finish_reason is None]

    def take_new(self) -> list[Request]:
        """Requests that came since the last call."""
        with self._lock:
            new, self._new = self._new, []
            return new

    def take_aborted(self) -> list[Request]:
        """Requests that were aborted since the last call and have not ended otherwise."""
        with self._lock:
            aborted, self._aborts = self._aborts, []
        return [request for request in aborted if request.finish_reason is None]

    def take_late(self, now: float) -> list[Request]:
        """Requests whose deadline has passed."""
        late = []
        with self._lock:
            while self._deadlines and self._deadlines[0][0] <= now:
                request = heapq.heappop(self._deadlines)[-1]
                if request.finish_reason is None:
                    late.append(request)
        return late

    def close(self, request: Request) -> None:
        """A request's end is being emitted."""
        with self._lock:
            self.open.pop(request.id, None)
            if len(self._deadlines) > 2 * len(self.open) + 64:
                # Ended requests need not stay in memory until their deadlines.
                self._deadlines = [entry for entry in self._deadlines if entry[-1].id in self.open]
                heapq.heapify(self._deadlines)

    def take_all(self) -> list[tuple[Request, RequestText]]:
        """All open requests, in the order they came, those of `take_new` among them."""
        with self._lock:
            self._new = []
            return list(self.open.values())

    def keep(self, output: RequestOutput) -> None:
        """Keep an output for whoever steps next; one per request, with all its new text."""
        with self._lock:
            before = self._outbox.pop(output.request_id, None)
            self._outbox[output.request_id] = before.then(output) if before else output

    def take_outputs(self) -> list[RequestOutput]:
        """The outputs that wait."""
        with self._lock:
            outputs, self._outbox = self._outbox, {}
            return list(outputs.values())

    def __bool__(self) -> bool:
        """Whether there is anything left to do or to emit."""
        return bool(self.open or self._outbox)
