"""Whoever decides, and whichever device it counts first, decides the same.

Several schedulers are told the same of several devices, each in an order of its own.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np

from kvjax.cache import CompressionConfig
from kvjax.cache.methods import METHODS
from kvjax.engine.config import EngineConfig
from kvjax.engine.decisions import (
    Begin,
    Chunk,
    Compress,
    Decision,
    Decode,
    End,
    Insert,
    Preempt,
    Remove,
)
from kvjax.engine.request import Request
from kvjax.engine.sampling import SamplingParams
from kvjax.engine.scheduler import Scheduler
from tests.engine.scheduled import Prompt

STEPS, BLOCK, LAYERS, PLACES = 4, 4, 3, 4
HEADS = np.array([12, 10, 11])
BLOCKS = [110, 84, 101]
SHARDS = len(HEADS)
SIZES = EngineConfig(
    max_batch=5, block_size=BLOCK, prefill_chunk=32, prefill_scratch=48, decode_steps_per_sync=STEPS
)


def request_of(order: int, rng: np.random.Generator) -> Request:
    cap = int(rng.choice([8, 12, 20])) if rng.random() < 0.7 else None
    compression = CompressionConfig(
        max_cache_tokens=cap,
        compress_every=6 if rng.random() < 0.3 else None,
        before_preemption=rng.random() < 0.7,
    )
    heads, length = int(HEADS.sum()), int(rng.integers(1, 70 if cap else 24))
    budget = None if cap is None else heads * cap // BLOCK
    sampling = SamplingParams(max_tokens=int(rng.integers(1, 12)))
    return Request(
        str(order), order, np.zeros(length, np.int32), sampling, compression, METHODS["full"],
        budget, heads, BLOCK, (None, "a", "b")[rng.integers(3)],
    )  # fmt: skip


class Devices:
    """Carries out what all schedulers decide, and tells each of them what came of it.

    Heads of a device hold as many KVs as each other, those of another device more or fewer.
    """

    def __init__(self, rng: np.random.Generator):
        self.rng, self.seen = rng, set[str]()
        self.orders = [np.roll(np.arange(SHARDS), -n) for n in range(SHARDS)]
        self.schedulers = [
            Scheduler(SIZES, np.array(BLOCKS)[at].tolist(), HEADS[at].tolist())
            for at in self.orders
        ]
        self.held = np.zeros((SIZES.max_batch, SHARDS), int)
        """KVs of a head in each slot, by device."""
        self.loops: list[list[Decode]] = []
        self.decided = 0

    def owned(self, held: np.ndarray | None = None) -> np.ndarray:
        return HEADS * -(-(self.held if held is None else held) // BLOCK)

    @property
    def free(self) -> np.ndarray:
        return np.array(BLOCKS) - self.owned().sum(0)

    def each(self) -> Any:
        return zip(self.schedulers, self.orders)

    def add(self, request: Request) -> None:
        for scheduler in self.schedulers:
            scheduler.add(dataclasses.replace(request, tokens=[]))

    def run(self, *decisions: Any) -> None:
        for made in itertools.zip_longest(*decisions):
            first, *others = map(told, made)
            assert others == [first] * len(others)
            self.decided += 1
            self.seen.add(first[0])
            getattr(self, first[0].lower())(made)

    def remove(self, made: tuple[Remove, ...]) -> None:
        self.held[list(made[0].slots)] = 0

    def begin(self, made: tuple[Begin, ...]) -> None:
        for scheduler, decision in zip(self.schedulers, made):
            length = decision.request.length
            scheduler.job = Prompt(length, length > SIZES.prefill_scratch)

    def chunk(self, made: tuple[Chunk, ...]) -> None:
        slot, size, job = made[0].request.slot, made[0].size, self.schedulers[0].job
        assert job is not None
        if not job.in_pool:
            for scheduler in self.schedulers:
                scheduler.job.done += size  # type: ignore[union-attr, misc]
            return
        grown = self.held.copy()
        grown[slot] += size
        fitted = bool((self.owned(grown).sum(0) <= BLOCKS).all())
        if fitted:
            self.held = grown
        assert slot is not None
        # By place: a device with fewer heads has empty ones.
        place = np.arange(LAYERS * PLACES).reshape(LAYERS, PLACES)
        by_place = np.where(place[:, None] < HEADS[:, None], self.held[slot][:, None], 0)
        for scheduler, at in self.each():
            scheduler.job.done += size * fitted  # type: ignore[union-attr, misc]
            scheduler.note_chunk(by_place[:, at].reshape(LAYERS, -1), self.free[at], fitted)
        if fitted and made[0].compress:
            self.compress(tuple(Compress((one.request,)) for one in made))

    def insert(self, made: tuple[Insert, ...]) -> None:
        request, job = made[0].request, self.schedulers[0].job
        assert job is not None
        if not job.in_pool:
            before = self.held.copy()
            self.held[request.slot] = self.cut(request, job.done)
            if (self.free < 0).any():
                # More had to stay on one of them than there was room for.
                self.held = before
                self.refused(made)
                return
        for decision in made:
            self.note_token(decision.request)

    def refused(self, made: tuple[Insert, ...]) -> None:
        for scheduler, decision in zip(self.schedulers, made):
            # It is known after the round, when it runs already.
            scheduler.prefilling = scheduler.job = None
            scheduler.running.append(decision.request)
        self.run(*(s.refuse(one.request, 0) for s, one in zip(self.schedulers, made)))
        for scheduler, at in self.each():
            scheduler.accounts.free[:] = self.free[at]

    def note_token(self, request: Request) -> None:
        request.tokens.append(0)
        request.since_compression += 1
        if request.remaining == 0:
            self.stop(request, "length")

    def cut(self, request: Request, held: Any) -> np.ndarray:
        """What a head of each device keeps: its budget is that of all together."""
        if not request.compressed_first or request.budget is None:
            return np.broadcast_to(held, SHARDS)
        cap = request.budget // request.heads * BLOCK
        return np.minimum(held, np.maximum(1, cap + self.rng.integers(-4, 5, SHARDS)))

    def compress(self, made: tuple[Compress, ...]) -> None:
        for requests in zip(*(one.requests for one in made)):
            slot = requests[0].slot
            before = self.owned()[slot]
            self.held[slot] = self.cut(requests[0], self.held[slot])
            given = before - self.owned()[slot]
            for (scheduler, at), request in zip(self.each(), requests):
                scheduler.note_compressed(request, given[at])

    def decode(self, made: tuple[Decode, ...]) -> None:
        self.loops.append(list(made))

    def preempt(self, made: tuple[Preempt, ...]) -> None:
        self.held[made[0].request.slot] = 0

    def end(self, made: tuple[End, ...]) -> None:
        for decision in made:
            self.stop(decision.request, decision.reason)

    def stop(self, request: Request, reason: Any) -> None:
        if request.finish_reason is None:
            request.finish_reason = reason
            next(s for s in self.schedulers if any(r is request for r in s)).end(request)

    def round(self) -> None:
        self.loops = []
        self.run(*(scheduler.round() for scheduler in self.schedulers))
        short, tokens = [], 0
        for loop in self.loops:
            for _ in range(loop[0].steps):
                active = [n for n, r in enumerate(loop[0].requests) if r.remaining > 0]
                grown = self.held.copy()
                slots = [loop[0].requests[n].slot for n in active]
                grown[np.array(slots, int)] += 1
                if (self.owned(grown).sum(0) > BLOCKS).any():
                    short.append(loop)
                    break
                self.held, tokens = grown, tokens + len(active)
                for decision, n in itertools.product(loop, active):
                    decision.requests[n].tokens.append(0)
                    decision.requests[n].since_compression += 1
        if not self.loops:
            return
        for place, (scheduler, at) in enumerate(self.each()):
            scheduler.accounts.free[:] = self.free[at]
            for loop in self.loops:
                here = [r for r in loop[place].requests if r.slot is not None]
                slots = [r.slot for r in here if r.slot is not None]
                held = self.held[slots]
                coming = np.array([[min(r.remaining, STEPS)] for r in here])
                growth = self.owned(held + coming) - self.owned(held)
                owned = self.owned(held)
                scheduler.accounts.report(slots, owned[:, at], held.max(1), growth[:, at])
                for request in here:
                    if request.remaining <= 0:
                        self.stop(request, "length")
        self.run(
            *(
                scheduler.settle([loop[place] for loop in short], progress=tokens > 0)
                for place, scheduler in enumerate(self.schedulers)
            )
        )
        for scheduler, at in self.each():
            np.testing.assert_array_equal(scheduler.accounts.free, self.free[at])


def told(decision: Decision) -> tuple[Any, ...]:
    """A decision, with requests by name."""
    assert decision is not None
    parts = [getattr(decision, field.name) for field in dataclasses.fields(decision)]

    def plain(part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(map(plain, part))
        return part.id if isinstance(part, Request) else part

    return (type(decision).__name__, *map(plain, parts))


def test_all_decide_the_same_whichever_device_they_count_first():
    rng = np.random.default_rng(11)
    devices, came = Devices(rng), 0
    while devices.decided < 4_000:
        if len(devices.schedulers[0].waiting) < 6 and rng.random() < 0.5:
            devices.add(request_of(came, rng))
            came += 1
        if rng.random() < 0.05 and (running := list(devices.schedulers[0].running)):
            name = running[rng.integers(len(running))].id
            for scheduler in devices.schedulers:
                devices.stop(next(r for r in scheduler if r.id == name), "abort")
        devices.round()
    kinds = {"Remove", "Begin", "Chunk", "Insert", "Compress", "Decode", "Preempt", "End"}
    assert devices.seen == kinds
