"""Who runs: queues, slots and free blocks, in plain Python on the host.

First come, first served: nobody overtakes the first request in the queue, however small, so that
none starves. A prompt is let in when its compressed size and the growth of those that run fit
into the free blocks. Under pressure the newest request gives way, and keeps its place in the
queue and everything it has generated.
"""

import bisect
import heapq
from collections.abc import Iterable, Iterator

from kvjax.engine.request import Request


class Scheduler:
    """Queues of requests, free slots, and the number of free blocks as last reported."""

    def __init__(self, num_slots: int, num_blocks: int, scratch: int, chunk: int):
        self.num_blocks = num_blocks
        self.free = num_blocks
        self.waiting: list[Request] = []
        """In the order they came."""
        self.prefilling: Request | None = None
        self.running: list[Request] = []
        """In the order they were admitted."""
        self._scratch, self._chunk = scratch, chunk
        self._num_slots = num_slots
        self._slots = list(range(num_slots))

    def __iter__(self) -> Iterator[Request]:
        """Every request that has not ended, in no particular order."""
        yield from self.waiting
        if self.prefilling is not None:
            yield self.prefilling
        yield from self.running

    def chunk_in_pool(self, request: Request) -> int:
        """Tokens of a chunk that its prefill puts into the pool before it is compressed."""
        return self._chunk if request.length > self._scratch else 0

    def add(self, request: Request) -> None:
        """Queue a request, new or preempted, at the place of its arrival."""
        bisect.insort(self.waiting, request, key=lambda r: r.order)

    def fits(self, request: Request) -> bool:
        """Whether a request can begin, or go on to its slot, beside those that run."""
        growth = sum(r.growth for r in self.running)
        need = request.blocks_to_admit(self.chunk_in_pool(request))
        # With nobody else there is nothing to wait for. Else a little stays free, lest the newest
        # be let in and preempted in turns.
        return self.free >= need + growth + self.num_blocks // 100 or not self.running

    def begin_next(self) -> Request | None:
        """Take the first request from the queue, with a slot of its own, if there is room."""
        if self.prefilling is not None or not self.waiting or not self._slots:
            return None
        if not self.fits(self.waiting[0]):
            return None
        request = self.prefilling = self.waiting.pop(0)
        request.slot = heapq.heappop(self._slots)
        return request

    def started(self, request: Request) -> None:
        """The prompt of the prefilling request is in its slot."""
        self.prefilling = None
        self.running.append(request)

    def leave(self, request: Request) -> int | None:
        """Take a request out, wherever it is. Returns the slot that has to be emptied, if any.

        Its blocks count as free from now on.
        """
        if request in self.waiting:
            self.waiting.remove(request)
        elif request is self.prefilling:
            self.prefilling = None
        elif request in self.running:
            self.running.remove(request)
        self.free += request.owned
        slot = request.give_back()
        if slot is not None:
            heapq.heappush(self._slots, slot)
        return slot

    def restart(self, waiting: Iterable[Request]) -> None:
        """Nothing holds slots or blocks any more, and these wait, in the order they came."""
        for request in self:
            request.give_back()
        self.free = self.num_blocks
        self.waiting = sorted(waiting, key=lambda r: r.order)
        for request in self.waiting:
            request.give_back()
        self.prefilling, self.running = None, []
        self._slots = list(range(self._num_slots))

    def holders(self) -> list[Request]:
        """Every request that holds blocks."""
        inside = self.running if self.prefilling is None else [self.prefilling, *self.running]
        return [request for request in inside if request.owned]
