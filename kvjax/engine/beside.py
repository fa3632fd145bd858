"""Compilation beside the rounds: who needs a new step waits for it in the queue, and nobody else.

A request begins once every step that it can need is there for one sequence at a time
(`needs_of`). What batches of more would need is compiled when there is nothing more urgent; until
then they run in parts. One step is compiled at a time while others run, in a thread: XLA lets go of
the interpreter while it compiles, but tracing does not, so rounds slow down for that long.
"""

import functools
import logging
import os
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

import jax

from kvjax.cache.policy import DecodeRule, Method
from kvjax.engine.calls import num_top
from kvjax.engine.compilation import StepCall, StepKey
from kvjax.engine.decisions import Decode
from kvjax.engine.needs import Need, needs_of, of_shapes, without_state
from kvjax.engine.request import Request
from kvjax.engine.sampling import effort_of
from kvjax.engine.tables import Tables
from kvjax.engine.worker import Worker

log = logging.getLogger(__name__)


class Beside:
    """The steps that are compiled beside an engine's rounds; the engine's thread uses it."""

    def __init__(self, worker: Worker, on_done: Callable[[], None]):
        """Have a worker take what is compiled already.

        Args:
            worker: the engine's.
            on_done: called by another thread when a compilation has ended.
        """
        self._worker, self._compiled, self._on_done = worker, worker.compiled, on_done
        self._compiled.flexible = True
        # Compilers for GPUs time kernels on the device: one at a time there.
        self._cores = (os.cpu_count() or 1) if jax.default_backend() == "cpu" else 1
        self._threads = ThreadPoolExecutor(self._cores, "kvjax compiler")
        self._at_once = self._cores
        self._known: dict[str, tuple[object, tuple[Need, ...]]] = {}
        """What requests need that were asked about in the last round, by id."""
        self._asked: dict[str, tuple[object, tuple[Need, ...]]] = {}
        """Those of this round."""
        self._wanted: dict[StepKey, Need] = {}
        """What this round's batches would have used."""
        self._doomed: dict[str, Exception] = {}
        """Why a step is missing for which a request has waited, by the request's id."""
        self._hopeless: set[StepKey] = set()
        """What batches would have used and could not be compiled."""
        self._failed: dict[StepKey, Future[float]] = {}
        """The last compilations of steps that failed."""
        self._lost: dict[str, Request] = {}
        self.waiting = 0
        """Requests that wait for steps, as far as it is known: those behind one that could begin
        have not been asked."""
        self._finished: list[float] = []

    @property
    def under_way(self) -> int:
        """Compilations that have begun and not ended."""
        return len(self._compiled.under_way)

    def take_finished(self) -> list[float]:
        """What the compilations took that have ended since the last call, in seconds."""
        finished, self._finished = self._finished, []
        return finished

    def begin_round(self, alone: bool) -> None:
        """See what has ended; while others run, one step is compiled at a time."""
        self._at_once = self._cores if alone else 1
        if self._asked:
            self._known = self._asked
            self._doomed = {n: e for n, e in self._doomed.items() if n in self._known}
        self._asked, self._wanted = {}, {}
        self._take_ended()

    def _take_ended(self) -> None:
        for key, future in list(self._compiled.under_way.items()):
            if future.done():
                del self._compiled.under_way[key]
                try:
                    self._finished.append(future.result())
                except Exception as error:
                    self._failed[key] = future
                    self._note_failure(key, error)

    def _note_failure(self, key: StepKey, error: Exception) -> None:
        log.error("a %s step does not compile", key.step, exc_info=error)
        self._hopeless.add(key)
        for name, (_, needs) in self._known.items():
            if any(need.key == key for need in needs):
                self._doomed[name] = error

    def ahead(
        self, needs: Sequence[Need], alone: bool, queued: bool, first: bool
    ) -> dict[StepKey, Future[float]] | None:
        """Have steps compiled before any request needs them; to be called again and again.

        Requests that wait for steps come first.

        Args:
            needs: the steps.
            alone: whether no request runs.
            queued: whether any request waits.
            first: whether it is the first call; what failed before it is tried again.

        Returns:
            The compilations under way, whoever needs them, and those of these steps that have
            failed; None once all of these are there.
        """
        self._at_once = self._cores if alone else 1
        self._take_ended()
        told = [self._failed.pop(need.key, None) for need in needs]
        failed = {
            need.key: future
            for need, future in zip(needs, told)
            if future is not None and not first
        }
        missing = self._missing(needs)
        if not failed and not (queued and self.waiting):
            for need in missing:
                self._start(need)
        return {**self._compiled.under_way, **failed} if missing else None

    def ready(self, request: Request) -> bool:
        """Whether a request can begin; if not, what it lacks is compiled."""
        # An id may be another request's later.
        at = request.order, request.length, request.plan
        known = self._asked.get(request.id) or self._known.get(request.id)
        if known is None or known[0] != at:
            try:
                known = at, tuple(needs_of(self._worker, request))
            except Exception as error:  # it would not run, either
                known, self._doomed[request.id] = (at, ()), error
        self._asked[request.id] = known
        if request.id in self._doomed:
            self._lost[request.id] = request
            return False
        missing = self._missing(known[1])
        for need in missing:
            self._start(need)
        return not missing

    def _missing(self, needs: Iterable[Need]) -> list[Need]:
        return [need for need in needs if need.key not in self._compiled.seconds]

    def take_lost(self) -> list[tuple[Request, Exception]]:
        """Requests that cannot run, and why; for who comes later it is tried again."""
        lost, self._lost = self._lost, {}
        return [(request, self._doomed.pop(name)) for name, request in lost.items()]

    def end_round(self, queued: bool) -> None:
        """Compile what would have been of use in this round, where nobody waits for a step.

        Args:
            queued: whether any request waits.
        """
        if self._asked or not queued:
            self.waiting = sum(bool(self._missing(needs)) for _, needs in self._asked.values())
        for key, need in self._wanted.items():
            if not self.waiting and not self.under_way and key not in self._hopeless:
                self._start(need)

    def _start(self, need: Need) -> None:
        under_way = self._compiled.under_way
        if need.key not in under_way and len(under_way) < self._at_once:
            under_way[need.key] = future = self._threads.submit(self._compile, need)
            future.add_done_callback(lambda _: self._on_done())

    def _compile(self, need: Need) -> float:
        start = time.perf_counter()
        self._compiled.add(need.call())
        return time.perf_counter() - start

    # Batches for which there is no step

    def decode_parts(self, decode: Decode, longest: int) -> list[Decode]:
        """Decode steps of the same requests that are compiled, larger ones where there are; no head
        of theirs holds more than `longest` KVs afterwards."""
        worker, rule = self._worker, cast(DecodeRule | None, decode.rule)
        count, top = len(decode.requests), num_top(decode.requests)
        slots = [worker.config.num_rows] * count
        if worker.decodes_once:
            effort = effort_of([request.sampling for request in decode.requests])
            once = worker.once_key(count, longest, rule, top, effort, exact=True)
            if once not in self._compiled.seconds:
                whole = without_state(worker)
                self._want(
                    once, lambda: whole.once_call(slots, longest, rule, top, effort, exact=True)
                )
        # What is wider is compiled before they need it, for as many as may take part then.
        tables = worker.decode_tables
        later = slots[: tables.rows(tables.width_of(2 * longest))]
        for some, kvs in ((slots, longest), (later, 2 * longest)):
            key = worker.decode_key(len(some), kvs, rule, top, exact=True)
            if key not in self._compiled.seconds:
                twin, given = without_state(worker), (some, kvs, 1, rule, top)
                self._want(key, functools.partial(twin.decode_call, *given, exact=True))
        if self._can_decode(count, longest, rule, top):
            return [decode]
        groups: dict[tuple, list[Request]] = {}
        for request in decode.requests:
            groups.setdefault((request.rule, num_top([request])), []).append(request)
        return [
            Decode(tuple(part), decode.steps, rule)
            for (rule, top), group in groups.items()
            for part in _parts(
                group,
                tables,
                longest,
                lambda n, rule=rule, top=top: self._can_decode(n, longest, rule, top),
            )
        ]

    def _can_decode(self, count: int, longest: int, rule: Hashable, top: int | None) -> bool:
        return self._worker.decode_key(count, longest, rule, top) in self._compiled.seconds

    def compress_parts(
        self, requests: Sequence[Request], method: Method, most: int, longest: int
    ) -> list[Sequence[Request]]:
        """Requests by how many of them a compression that is compiled takes."""
        worker = without_state(self._worker)

        def call(count: int, exact: bool = False) -> StepCall:
            some = [worker.config.num_rows] * count
            return worker.compress_call(some, some, some, method, most, longest, exact)

        self._want(call(len(requests), exact=True).key, lambda: call(len(requests), exact=True))
        return _parts(
            requests,
            worker.compress_tables,
            longest,
            lambda n: call(n).key in self._compiled.seconds,
        )

    def _want(self, key: StepKey, call: Callable[[], StepCall]) -> None:
        if key not in self._compiled.seconds:
            self._wanted[key] = Need(key, lambda: of_shapes(call()))


def _parts(
    requests: Sequence[Request], tables: Tables, longest: int, can: Callable[[int], bool]
) -> list[Sequence[Request]]:
    """Some requests in as few parts as can be; whole where nothing is compiled."""
    if can(len(requests)):
        return [requests]
    sizes = sorted({size for size, _ in tables.holding(1, longest)})
    size = next((size for size in reversed(sizes) if size < len(requests) and can(size)), None)
    if size is None:
        return [requests]
    return [requests[i : i + size] for i in range(0, len(requests), size)]
