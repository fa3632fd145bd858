"""A device made of numbers alone, which does as a scheduler decides."""

import dataclasses

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

HEADS, BLOCK, STEPS = 6, 4, 4
SIZES = EngineConfig(
    max_batch=4, block_size=BLOCK, prefill_chunk=32, prefill_scratch=64, decode_steps_per_sync=STEPS
)


def request_of(
    order: int,
    length: int = 20,
    cap: int | None = None,
    max_tokens: int = 10,
    rule: str | None = None,
    **settings,
) -> Request:
    compression = CompressionConfig(max_cache_tokens=cap, **settings)
    budget = None if cap is None else HEADS * cap // BLOCK
    return Request(
        str(order), order, np.zeros(length, np.int32), SamplingParams(max_tokens=max_tokens),
        compression, METHODS["full"], budget, HEADS, BLOCK, rule,
    )  # fmt: skip


@dataclasses.dataclass
class Prompt:
    """A prompt on its way, in chunks of 32."""

    length: int
    in_pool: bool
    done: int = 0
    retains: bool = False

    @property
    def next_chunk(self) -> int:
        return min(32, self.length - self.done)


class Device:
    """Does as it is told, as the engine would, with every head of a sequence alike."""

    def __init__(self, num_blocks: int, config: EngineConfig = SIZES, ahead: bool = False):
        self.num_blocks, self.config, self.ahead = num_blocks, config, ahead
        self.scheduler = Scheduler(config, [num_blocks])
        self.kvs = np.zeros(config.max_batch, int)
        self.log: list[Decision] = []
        self.ended: list[Request] = []
        self.loops: list[Decode] = []

    def owned(self, kvs=None) -> np.ndarray:
        return HEADS * -(-(self.kvs if kvs is None else kvs) // BLOCK)

    @property
    def free(self) -> int:
        return int(self.num_blocks - self.owned().sum())

    def run(self, decisions) -> None:
        for decision in decisions:
            self.log.append(decision)
            getattr(self, type(decision).__name__.lower())(decision)

    def remove(self, decision: Remove) -> None:
        self.kvs[list(decision.slots)] = 0

    def begin(self, decision: Begin) -> None:
        length = decision.request.length
        self.scheduler.job = Prompt(length, length > self.config.prefill_scratch)

    def chunk(self, decision: Chunk) -> None:
        job, slot = self.scheduler.job, decision.request.slot
        assert isinstance(job, Prompt)
        assert decision.size == job.next_chunk
        if not job.in_pool:
            job.done += decision.size
            return
        held = self.kvs[slot] + decision.size
        fitted = bool(self.free >= self.owned(held) - self.owned()[slot])
        if fitted:
            self.kvs[slot], job.done = held, job.done + decision.size
        self.scheduler.note_chunk(np.full((3, 2), self.kvs[slot]), self.free, fitted)
        if fitted and decision.compress:
            self.compress(Compress((decision.request,)))

    def insert(self, decision: Insert) -> None:
        request, job = decision.request, self.scheduler.job
        assert job is not None
        assert job.next_chunk == 0
        if not job.in_pool:
            self.kvs[request.slot] = self.kept(request) if request.compressed_first else job.done
        request.tokens.append(0)
        request.since_compression += 1
        if request.remaining == 0:
            self.stop(request, "length")

    @staticmethod
    def kept(request: Request) -> int:
        cap = request.length if request.budget is None else request.budget // HEADS * BLOCK
        return min(cap, request.length)

    def compress(self, decision: Compress) -> None:
        for request in decision.requests:
            assert request.budget is not None
            before = self.owned()[request.slot]
            cap = request.budget // HEADS * BLOCK
            self.kvs[request.slot] = min(self.kvs[request.slot], cap)
            self.scheduler.note_compressed(request, int(before - self.owned()[request.slot]))

    def decode(self, decision: Decode) -> None:
        self.loops.append(decision)

    def preempt(self, decision: Preempt) -> None:
        self.kvs[decision.request.slot] = 0

    def end(self, decision: End) -> None:
        self.stop(decision.request, decision.reason)

    def stop(self, request: Request, reason) -> None:
        request.finish_reason = reason
        self.ended.append(request)
        self.scheduler.end(request)

    def round(self) -> list[Decision]:
        """A round of the engine; returns what was decided."""
        self.log, self.loops = [], []
        self.run(self.scheduler.round())
        if self.ahead:
            self.run(self.scheduler.ahead())
        short, tokens = [], 0
        for decode in self.loops:
            for _ in range(decode.steps):
                active = [r for r in decode.requests if r.remaining > 0]
                grown = self.kvs.copy()
                grown[[r.slot for r in active if r.slot is not None]] += 1
                if self.owned(grown).sum() > self.num_blocks:
                    short.append(decode)
                    break
                self.kvs, tokens = grown, tokens + len(active)
                for request in active:
                    request.tokens.append(0)
                    request.since_compression += 1
        if not self.loops:
            return self.log
        self.scheduler.accounts.free[:] = self.free
        for decode in self.loops:
            slots = [r.slot for r in decode.requests if r.slot is not None]
            kvs = self.kvs[slots]
            coming = np.array([min(r.remaining, STEPS) for r in decode.requests])
            growth = self.owned(kvs + coming) - self.owned(kvs)
            self.scheduler.accounts.report(slots, self.owned(kvs), kvs, growth)
            for request in decode.requests:
                if request.remaining == 0 and request.finish_reason is None:
                    self.stop(request, "length")
        self.run(self.scheduler.settle(short, progress=tokens > 0))
        assert self.scheduler.accounts.num_free == self.free
        return self.log

    def rounds(self, most: int = 500) -> None:
        """Rounds until nothing is left."""
        for _ in range(most):
            if not list(self.scheduler):
                assert self.free == self.num_blocks
                return
            self.round()
        raise AssertionError("requests are left")
