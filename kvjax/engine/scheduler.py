"""What a round does, decided on the host from queues and accounts alone: no device is known here.

First come, first served: nobody overtakes the first request in the queue, however small, so that
none starves; but who waits for a step to be compiled (`ready`) holds up nobody. A prompt is let in
when its compressed size and the growth of those that run fit into the free blocks. Under pressure
the newest request is preempted, and keeps its place in the queue and everything it has generated.

`round`, `settle` and the like yield decisions in order. Each has to be carried out, and what came
of it noted here, before the next is asked for, since that may depend on it.
"""

import bisect
import functools
import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from kvjax.engine.accounts import KEPT_FREE, Accounts
from kvjax.engine.config import EngineConfig
from kvjax.engine.decisions import (
    Begin,
    Chunk,
    Compress,
    Decision,
    Decode,
    End,
    Forget,
    Insert,
    Preempt,
    Remove,
    Retain,
)
from kvjax.engine.prefixes import Plan, Prefix, Prefixes
from kvjax.engine.request import Request


class Job(Protocol):
    """A prompt on its way through the model, as far as the scheduler looks at it."""

    @property
    def in_pool(self) -> bool:
        """Whether its chunks go to its slot at once."""
        ...

    @property
    def retains(self) -> bool:
        """Whether what has run is retained once all of it has."""
        ...

    @property
    def done(self) -> int:
        """Tokens that have run."""
        ...

    @property
    def next_chunk(self) -> int:
        """Tokens of the next chunk; 0 once all have run."""
        ...


class Scheduler:
    """Queues of requests, free slots, and the accounts of blocks."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: Sequence[int],
        heads: Sequence[int] | None = None,
        kept_free: int = KEPT_FREE,
    ):
        self._config = config
        self._new_accounts = functools.partial(
            Accounts, config.num_rows, tuple(num_blocks), heads, kept_free
        )
        self.waiting: list[Request] = []
        """In the order they came."""
        self.prefilling: Request | None = None
        self.running: list[Request] = []
        """In the order they were admitted."""
        self.ready: Callable[[Request], bool] = lambda request: True
        """Whether a request can begin, as far as steps have to be compiled for it."""
        self.restart([])

    def restart(self, waiting: Iterable[Request]) -> None:
        """Nothing holds slots or blocks any more, and these wait, in the order they came."""
        waiting = sorted(waiting, key=lambda r: r.order)
        for request in (*self, *waiting):
            request.give_back()
        self.waiting, self.prefilling, self.running = waiting, None, []
        self.job: Job | None = None
        """How far the prefilling request is; None before it has begun."""
        self.accounts = self._new_accounts()
        self._slots = list(range(self._config.max_batch))
        rows = range(self._config.max_batch, self._config.num_rows)
        self.prefixes = Prefixes(rows, self._config.share_grain)
        self._ended: list[Request] = []
        """Ended, and not yet removed."""
        self._ahead = 0
        """Tokens that ran ahead of the next round, of which they are a part."""
        self._planned: tuple[object, int] = None, 0
        """The queue that has plans, and how many of it: each is compared with all others."""
        self._chunk_fitted = True
        self._compressed_in_vain = False
        self._short: tuple[Hashable, ...] = ()
        """The rule of the decode steps that found no blocks last."""

    def __iter__(self) -> Iterator[Request]:
        """Every request that has not left, in no particular order."""
        yield from self.waiting
        if self.prefilling is not None:
            yield self.prefilling
        yield from self.running

    @property
    def only_decodes(self) -> bool:
        """Whether rounds decode and nothing else: then they may be decided a step behind."""
        quiet = not self.waiting and self.prefilling is None
        return quiet and all(r.compression.compress_every is None for r in self.running)

    # What comes, and what is known of it

    def add(self, request: Request) -> None:
        """Queue a request, new or preempted, at the place of its arrival."""
        bisect.insort(self.waiting, request, key=lambda r: r.order)
        self._planned = None, 0  # it may have more tokens than when it was here before

    def end(self, request: Request) -> None:
        """A request has ended: the next decisions remove it."""
        self._ended.append(request)

    def note_chunk(self, held: np.ndarray, free: np.ndarray | int, fitted: bool) -> None:
        """What became of a chunk in the pool.

        Args:
            held: KVs of each head of its slot, [L, H].
            free: blocks that nobody owns, of each shard.
            fitted: whether it is there; if not, it runs again.
        """
        assert self.prefilling is not None
        owned = self.accounts.by_shard(-(-held // self.prefilling.block_size))
        self.accounts.report([_slot_of(self.prefilling)], owned, held.max(keepdims=True))
        self.accounts.free[:] = free
        self._chunk_fitted = fitted

    def note_compressed(self, request: Request, blocks: np.ndarray | int) -> None:
        """A request was compressed and gave back so many blocks, of each shard."""
        self.accounts.give_back(_slot_of(request), blocks)
        request.since_compression = 0

    def note_unplaced(self, request: Request, blocks: int, free: np.ndarray | int) -> None:
        """What was to be retained of a prompt, so many blocks, found no room; it comes again when
        there is room for as many."""
        request.unevictable = max(0, blocks - (request.budget or 0))
        self.accounts.free[:] = free
        self._chunk_fitted = False

    def note_continued(self, slot: int, match: Prefix) -> None:
        """A slot holds what a prefix does, until more is reported of it."""
        self.accounts.longest[slot] = len(match.tokens)
        self.prefixes.continued(match)

    def note_forgotten(self, prefix: Prefix, free: np.ndarray | int) -> None:
        """A prefix was given up; so many blocks are free now."""
        self.prefixes.remove(prefix)
        self.accounts.free[:] = free

    def leave(self, request: Request) -> int | None:
        """Take a request out, wherever it is. Returns the slot that it had, if any.

        Its blocks count as free from now on.
        """
        if request in self.waiting:
            self.waiting.remove(request)
        elif request is self.prefilling:
            self.prefilling = self.job = None
        elif request in self.running:
            self.running.remove(request)
        slot = request.give_back()
        if slot is not None:
            self.accounts.empty(slot)
            heapq.heappush(self._slots, slot)
        return slot

    # Decisions

    def round(self) -> Iterator[Decision]:
        """A round: those that have ended leave, a chunk's worth of prompts, decode steps for all.

        `settle` gives what is left to decide once the device has reported.
        """
        yield from self.remove_finished()
        yield from self._prefill()
        yield from self._decode()

    def ahead(self) -> Iterator[Decision]:
        """The next round's chunk, where it can run before this round's decode steps have reported:
        the device has work then while the host takes that in.

        What it finds in the pool depends on the report, so chunks in the pool wait for it.
        """
        request, job = self.prefilling, self.job
        if not self.running or request is None or request.finish_reason is not None:
            return
        if job is not None and not job.in_pool and (size := job.next_chunk):
            self._ahead = size
            yield Chunk(request, size, compress=False)

    def settle(self, short: Sequence[Decode], progress: bool) -> Iterator[Decision]:
        """After the device's report: those that have ended leave, and blocks that lack are freed.

        Args:
            short: the decode steps that ended early because blocks ran out.
            progress: whether any request has new tokens.
        """
        self._short = tuple(decode.rule for decode in short[:1])
        # Where a sequence has just ended, its blocks may be all that was missing.
        ended = any(request.slot is not None for request in self._ended)
        yield from self.remove_finished()
        if short and not ended:
            yield from self._make_room(progress)
        if not short:
            self._compressed_in_vain = False

    def remove_finished(self) -> Iterator[Decision]:
        """Those that have ended leave; their slots are emptied first."""
        slots = [request.slot for request in self._ended if request.slot is not None]
        if slots:
            yield Remove(tuple(slots))
        ended, self._ended = self._ended, []
        for request in ended:
            self.leave(request)

    def refuse(self, request: Request, freed: int) -> Iterator[Decision]:
        """A prompt did not fit into the pool, although so many of its blocks were evicted.

        More had to stay than the budget says: it comes again when there is room for that.
        """
        self.accounts.owned[_slot_of(request)] = 0
        retained = bool(self.prefixes)
        yield from self._forget()
        stays = request.blocks_whole(request.length) - freed
        request.unevictable = max(0, stays - (request.budget or 0))
        if len(self.running) == 1 and not retained:
            yield End(request, "pool")
        else:
            yield from self._preempt(request)

    # Prompts

    def chunk_in_pool(self, request: Request, more: int = 0) -> int:
        """Tokens of a chunk that its prefill puts into the pool before it is compressed, also when
        it has so many more tokens."""
        most = self._config.prefill_chunk
        if request.length + more > self._config.prefill_scratch:
            return most
        if request.plan is None:
            return 0
        plan = request.plan
        # What continues nothing runs in the scratch, as far as it is retained.
        first = 0 if plan.match is None else plan.until - plan.start
        return min(most, max(request.length - plan.until, first))

    def fits(self, request: Request) -> bool:
        """Whether a request can begin, or go on to its slot, beside those that run."""
        # With nobody else there is nothing to wait for. Else a little stays free, lest the newest
        # be let in and preempted in turns; and all of it while decode steps find too few, which may
        # need more than their growth: copies of blocks that they share.
        room = not self._short and self.accounts.have(self._needed(request))
        return room or not self.running

    def _needed(self, request: Request) -> int:
        """Blocks that must be free before a request begins, or goes on to its slot."""
        need = request.blocks_to_admit(self.chunk_in_pool(request))
        plan = request.plan
        if plan is not None and not request.compressed_first:
            # Full blocks of what it continues are nobody's to write to.
            need -= request.heads * (plan.start // request.block_size)
        return need

    def begin_next(self) -> Request | None:
        """Take the first request that is ready from the queue, with a slot of its own, if there is
        room."""
        if self.prefilling is not None or not self._slots:
            return None
        request = self._next()
        if request is None or not self.fits(request):
            return None
        self.waiting.remove(request)
        self.prefilling, request.slot = request, heapq.heappop(self._slots)
        return request

    def _next(self) -> Request | None:
        """The first request in the queue whose compiled steps are there."""
        queue = tuple(self.waiting), tuple(self.prefixes)
        known = self._planned[1] if self._planned[0] == queue else 0
        for number, request in enumerate(self.waiting, 1):
            if number > known:
                request.plan, self._planned = self._plan(request), (queue, number)
            if self.ready(request):
                return request
        return None

    def inserted(self, request: Request, in_pool: bool = False) -> None:
        """The prompt of the prefilling request is in its slot, or was there all along."""
        self.prefilling = self.job = None
        # The prompt's own token comes of no decode step.
        request.since_compression = -1
        self.running.append(request)
        if not in_pool:
            blocks = request.blocks_to_admit()
            self.accounts.take(_slot_of(request), blocks, request.length)

    def _prefill(self) -> Iterator[Decision]:
        """A chunk's worth of prompts, and into their slots with those that are through.

        One that fails is ended meanwhile; it leaves, and the next begins.
        """
        most = self._config.prefill_chunk
        room, self._ahead = most - self._ahead, 0
        while True:
            yield from self._give_way()
            request = self.prefilling or self.begin_next()
            if request is None:
                return
            if self.job is None:
                yield Begin(request)
            used = 0
            if (job := self.job) is not None and request.finish_reason is None:
                used = job.next_chunk
                if used > room and room < most:
                    return
                if used:
                    self._chunk_fitted = True
                    yield Chunk(request, used, job.in_pool and request.compressed_first)
                    if not self._chunk_fitted:
                        yield from self._make_room(progress=False, prompt=request)
                        return
                elif not (job.in_pool or self.fits(request)):
                    return
                through = request.finish_reason is None and not job.next_chunk
                if through and job.retains and (job.in_pool or self.fits(request)):
                    self._chunk_fitted = True
                    yield Retain(request)
                    if not self._chunk_fitted:
                        yield from self._make_room(progress=False, prompt=request)
                        return
                elif through and (job.in_pool or self.fits(request)):
                    yield Insert(request)
                    if request.finish_reason is None:
                        self.inserted(request, job.in_pool)
            if request.finish_reason is None:
                room -= used
            else:
                yield from self.remove_finished()

    # Prefixes

    def _plan(self, request: Request) -> Plan | None:
        """How a request's prompt runs where it shares; None for as any other."""
        if request.sharing is None:
            return None
        same = (r for r in self.waiting if r is not request and r.sharing == request.sharing)
        request.plan = plan = self.prefixes.plan(
            request.sharing, request.all_tokens, request.shared_tokens, (r.prompt for r in same)
        )
        if plan is None or not request.fits_at(plan.until):
            return None
        # With its chunks in the pool it needs more blocks than without.
        return plan if self.accounts.could_hold(self._needed(request)) else None

    def _give_way(self) -> Iterator[Decision]:
        """Retained prefixes go until there is room for the prompt that is next to begin or to go
        to its slot; that which it continues only where nobody else could make room for it."""
        while self.prefixes:
            request = self.prefilling
            if request is None and self._slots:
                request = self._next()
            if request is None or self.accounts.have(self._needed(request)):
                return
            # One whose KVs lie in the pool already has what it needs.
            job = self.job
            if self.prefilling is not None and (job is None or job.in_pool or job.next_chunk):
                return
            plan = request.plan
            match = None if plan is None or not self.running else plan.match
            oldest = self.prefixes.oldest(besides=match)
            if oldest is None:
                return
            yield Forget(oldest)

    def _forget(self) -> Iterator[Decision]:
        """Retained prefixes go until blocks are free that were not."""
        free = self.accounts.num_free
        while (oldest := self.prefixes.oldest()) is not None:
            yield Forget(oldest)
            if self.accounts.num_free > free:
                return

    # Decode steps

    def _decode(self) -> Iterator[Decision]:
        """Compress who is due, and decode everything that runs."""
        every = [r for r in self.running if r.compression.compress_every is not None]
        due = [r for r in every if _until_compression(r) <= 0]
        if sized := tuple(r for r in due if r.budget is not None):
            yield Compress(sized)
        for request in due:
            request.since_compression = 0
        if not self.running:
            return
        # A prompt in the queue would only wait longer for its first token.
        first = None if self.job is not None else self._next()
        waits = self.job is not None or (first is not None and self.fits(first))
        steps = 1 if waits else self._config.decode_steps_per_sync
        steps = max(1, min([steps, *map(_until_compression, every)]))
        groups = self._by_rule()
        for rule in self._short:
            # Whoever found no blocks goes on alone, lest others take what is freed for it.
            groups = {rule: groups[rule]} if rule in groups else groups
        for rule, requests in groups.items():
            yield Decode(tuple(requests), steps, rule)

    def _by_rule(self) -> dict[Hashable, list[Request]]:
        """Running requests by what decode steps do to their metrics, the oldest one's rule first.

        Where that is nothing they decode with the first of the others, unless they may share
        blocks: kernels that keep logits for metrics have room for as many as the pool has KVs.
        """
        in_order = sorted(self.running, key=lambda r: r.order)
        first = next((r.rule for r in in_order if r.rule is not None), None)

        def rule_of(request: Request) -> Hashable:
            joins = request.rule is None and request.sharing is None
            return first if joins else request.rule

        groups: dict[Hashable, list[Request]] = {rule_of(request): [] for request in in_order}
        for request in self.running:
            groups[rule_of(request)].append(request)
        return groups

    # Making room

    def holders(self) -> list[Request]:
        """Every request that holds blocks."""
        inside = self.running if self.prefilling is None else [self.prefilling, *self.running]
        return [r for r in inside if self.accounts.owned[_slot_of(r)].any()]

    def _make_room(self, progress: bool, prompt: Request | None = None) -> Iterator[Decision]:
        """Blocks ran out: compress, and only where that does not help preempt the newest.

        Args:
            progress: whether any request has new tokens.
            prompt: the request whose prompt has found too few, if that is what has.
        """
        free, retained = self.accounts.num_free, bool(self.prefixes)
        yield from self._forget()
        if retained:
            # Even where no block came free: what shared one with it needs no copy of that any more.
            return
        owned = self.accounts.owned.sum(-1)
        over = tuple(
            request
            for request in self.running
            if request.budget is not None
            and request.compression.before_preemption
            and owned[_slot_of(request)] > request.budget
        )
        if over and (progress or not self._compressed_in_vain):
            # What is freed now may still not be enough for a single step of all.
            self._compressed_in_vain = True
            yield Compress(over)
            if self.accounts.num_free > free:
                return
        self._compressed_in_vain = False
        holders = self.holders()
        if prompt is not None and prompt not in holders:
            # It holds none yet, and all the same nobody older gives way to it.
            holders.append(prompt)
        if not holders:
            return
        newest = max(holders, key=lambda r: r.order)
        if len(holders) == 1:
            yield End(newest, "pool")
            yield from self.remove_finished()
        else:
            yield from self._preempt(newest)

    def _preempt(self, request: Request) -> Iterator[Decision]:
        yield Preempt(request)
        self.leave(request)
        self.add(request)


def _slot_of(request: Request | None) -> int:
    assert request is not None
    assert request.slot is not None
    return request.slot


def _until_compression(request: Request) -> int:
    """Decode steps of a request before it is compressed on its interval."""
    return (request.compression.compress_every or 0) - max(0, request.since_compression)
