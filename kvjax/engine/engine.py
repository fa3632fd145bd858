"""The loop of continuous batching: each `step` schedules, runs and emits.

A chunk of a waiting prompt, decode steps for all running sequences, and, while the device works,
the text of the round before.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import cast

import jax

from kvjax.cache.policy import DecodeRule, Method
from kvjax.engine.accounts import KEPT_FOR_CODES, KEPT_FREE
from kvjax.engine.agreement import Agreement, Ending
from kvjax.engine.beside import Beside
from kvjax.engine.calls import num_top
from kvjax.engine.compilation import StepKey
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
from kvjax.engine.decode import DecodeReport
from kvjax.engine.intake import Intake, Owner
from kvjax.engine.job import PromptJob
from kvjax.engine.keeping import Keeper
from kvjax.engine.metrics import EngineMetrics
from kvjax.engine.needs import Need
from kvjax.engine.outbox import Outbox
from kvjax.engine.phases import Phases
from kvjax.engine.reports import Reports
from kvjax.engine.request import FinishReason, Request
from kvjax.engine.sampling import effort_of
from kvjax.engine.scheduler import Scheduler
from kvjax.engine.text import RequestText
from kvjax.engine.worker import Worker
from kvjax.errors import in_one_line
from kvjax.models.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Engine:
    """Requests on their way from the queue to their last token.

    One thread steps (`owner`); everything but `intake` is its own. The scheduler decides, the
    engine carries it out and tells the scheduler what the device reports.
    """

    def __init__(
        self,
        config: EngineConfig,
        worker: Worker,
        tokenizer: Tokenizer,
        clock: Callable[[], float],
    ):
        self.config, self.worker, self.tokenizer, self.clock = config, worker, tokenizer, clock
        shards = [worker.shard_blocks] * worker.num_shards
        kept_free = KEPT_FOR_CODES if worker.cache.kv.fine is not None else KEPT_FREE
        self.scheduler = Scheduler(config, shards, worker.shard_heads, kept_free)
        self.metrics = EngineMetrics(sum(shards))
        self.intake, self.owner = Intake(config.max_waiting, config.max_batch), Owner()
        self.keeper = Keeper(config, worker, self.scheduler)
        self.outbox = Outbox(self.intake, self.metrics, clock)
        self.phase = Phases(clock, worker, self.metrics, self.intake)
        self.reports = Reports(
            worker, self.scheduler, self.outbox, self.metrics, self.phase,
            eos_ids=tokenizer.eos_ids, run=self._run, end=self.end, emit=self._emit,
        )  # fmt: skip
        self._chunk: jax.Array | None = None
        """What the last chunk of a prompt gives that was dispatched before those decode steps."""
        self._on_cpu = jax.default_backend() == "cpu"
        self.runs_ahead = not self._on_cpu
        """Whether a round's chunk is dispatched before the decode steps of the round before have
        reported. On CPUs a dispatch waits, and so would their tokens."""
        self.beside: Beside | None = None
        """Where steps are compiled while others run."""
        self.agreement: Agreement | None = None
        """What other processes of this engine are told, or say; None where there are none."""

    def compile_beside(self, on_done: Callable[[], None]) -> None:
        """From now on requests wait in the queue for steps that have to be compiled, and others
        go on; `on_done` is called by a thread when one is there."""
        self.beside = Beside(self.worker, on_done)
        self.scheduler.ready = self.beside.ready

    @property
    def only_compiles(self) -> bool:
        """Whether rounds have nothing to do until a step is compiled or somebody comes or goes."""
        idle = self._alone and not self.outbox.pending
        return idle and self.beside is not None and self.beside.under_way > 0

    def compile_ahead(
        self, needs: Sequence[Need], first: bool = True
    ) -> dict[StepKey, Future[float]] | None:
        """`Beside.ahead`, between two rounds."""
        assert self.beside is not None
        found = self.beside.ahead(needs, self._alone, bool(self.scheduler.waiting), first)
        self.metrics.compiled_beside(self.beside)
        self.observe()
        return found

    @property
    def _alone(self) -> bool:
        """Whether compilations hold up nobody."""
        return not self.scheduler.running and self.scheduler.prefilling is None

    def add(self, request: Request) -> None:
        """Queue a request; others may be running. From any thread.

        Raises:
            UserError: it cannot be taken now, as `Intake.add` says.
        """
        request.stats.arrival = self.clock()
        self.intake.add(request, self._text_of(request))
        self.metrics.requests.inc()

    def take_over(self, request: Request) -> None:
        """Have a request that another process was given; it is new in this round."""
        request.stats.arrival = self.clock()
        self.intake.open[request.id] = request, self._text_of(request)
        self.metrics.requests.inc()

    def _text_of(self, request: Request) -> RequestText:
        sampling = request.sampling
        tokenizer = self.tokenizer if sampling.detokenize else None
        return RequestText(tokenizer, sampling.stop, bool(sampling.goes_on))

    def end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request; the scheduler takes it out and its caller is told."""
        if request.finish_reason is None:
            request.finish_reason, request.error = reason, error
            self.outbox.note(request)
            self.scheduler.end(request)

    def fail(self, request: Request, error: Exception) -> None:
        """End a request because of an exception that belongs to it, and to no other.

        Raises:
            Exception: the same, where it took the device's state with it.
        """
        if self.agreement is not None or not self.worker.alive():
            # Where there are other processes, nobody knows whether it is theirs, too.
            raise error
        log.error("request %r ends", request.id, exc_info=error)
        self.end(request, "error", in_one_line(error))

    def step(self) -> None:
        """One round: schedule, run, emit; then take in what the device reports."""
        with self.metrics.round(self.clock):
            self._take_in()
            if not self.scheduler.only_decodes:
                self.reports.collect_held(alone=True)
            with self._compiling():
                self._run(self.scheduler.round())
                chunk, self._chunk = self._chunk, None
                if self.runs_ahead:
                    self._run(self.scheduler.ahead())
            self.reports.collect_held()
            self._emit()
            # What other processes do of a round is the same only where all of it is known.
            hold = self.runs_ahead and self.agreement is None and self.scheduler.only_decodes
            self.reports.collect(chunk, hold)
            self.observe()

    def observe(self) -> None:
        """Bring the gauges up to date: after a round, and after what changes the cache without."""
        self.metrics.observe(self.scheduler, self.worker)

    def compress(self, request: Request, blocks: int) -> int:
        """Compress a running request to so many blocks, between two rounds.

        Returns the blocks that it gave back.
        """
        self.reports.collect_held(alone=True)
        before = self.scheduler.accounts.num_free
        self._compress([request], blocks)
        return self.scheduler.accounts.num_free - before

    def begin_again(self) -> None:
        """Forget what runs on the device: all requests wait, with the tokens that they have."""
        self.reports.forget()
        self._chunk = None
        waiting = []
        for request, text in self.intake.take_all():
            if request.sampling.logprobs is not None:
                del request.tokens[len(request.logprobs) :]
            text.restart()
            self.outbox.note(request)
            if request.remaining <= 0 or self.reports.at_eos(request):
                self.reports.stopped(request)
            if request.finish_reason is None:
                if request.slot is not None:
                    self._count_preemption(request)
                waiting.append(request)
        self.scheduler.restart(waiting)

    def _take_in(self) -> None:
        """What has come from other threads, and whose time is up."""
        # New ones last: whoever is aborted or late is known to the scheduler then.
        ends = list(self._endings())
        new = self.intake.take_new()
        if self.agreement is not None:
            new, ends = self.agreement.agree(new, ends)
        for request in new:
            self.scheduler.add(request)
        for request, reason, error in ends:
            if reason == "deadline":
                log.warning("request %r ends: its deadline has passed", request.id)
            self.end(request, reason, error)

    def _endings(self) -> Iterator[Ending]:
        """Who ends in this round, for a reason that comes from outside."""
        for request in self.intake.take_aborted():
            yield request, "abort", None
        for request, error in self.intake.take_failed():
            yield request, "error", error
        for request in self.intake.take_late(self.clock()):
            yield request, "deadline", None

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[None]:
        """A round's decisions, and what is compiled for them and after them."""
        if self.beside is None:
            yield
            return
        scheduler = self.scheduler
        self.beside.begin_round(self._alone)
        yield
        for request, error in self.beside.take_lost():
            self.fail(request, error)
        self.beside.end_round(bool(scheduler.waiting))
        self.metrics.compiled_beside(self.beside)

    def _emit(self) -> None:
        """The text of the round before, while the device works."""
        for request in self.outbox.emit():
            self.scheduler.end(request)

    # What was decided

    def _run(self, decisions: Iterable[Decision]) -> None:
        """Carry out what the scheduler decides, one by one."""
        for decision in decisions:
            match decision:
                case Remove(slots):
                    self.keeper.retain_ended(slots)
                    self._empty(slots)
                case Forget(prefix):
                    self.keeper.forget(prefix)
                case Begin(request) | Chunk(request) | Retain(request) | Insert(request):
                    try:
                        self._prefill(decision)
                    except Exception as error:
                        self.fail(request, error)
                case Compress(requests):
                    self._compress(requests)
                case Decode():
                    with self.phase("decode"):
                        for part in self._decoded_together(decision):
                            self.reports.loops += self._decode(part)
                case Preempt(request):
                    self._preempt(request)
                case End(request, reason):
                    self.end(request, reason)

    def _empty(self, slots: Sequence[int]) -> None:
        """Free what some slots hold."""
        self.worker.empty(slots)
        if self.config.sharing:
            # Others may hold the same blocks.
            self.scheduler.accounts.emptied(slots, self.worker.free_blocks())

    def _prefill(self, decision: Begin | Chunk | Retain | Insert) -> None:
        """Take the prompt that is being prefilled further."""
        request = decision.request
        if isinstance(decision, Begin):
            self.scheduler.job = job = self.worker.begin(request)
            request.held = job.done
            request.measured = min(request.length, request.method.measured or request.length)
            if request.stats.admitted is None:
                request.stats.admitted, request.stats.cached_tokens = self.clock(), job.done
            self._continue(request)
            return
        job = cast(PromptJob, self.scheduler.job)
        if isinstance(decision, Insert):
            self._insert(job)
            return
        if isinstance(decision, Retain):
            self._retain(job)
            return
        phase = "probe" if job.probing else "prefill"
        with self.phase(phase):
            self.worker.advance(job)
        self._chunk = job.logits
        if phase == "probe":
            self.metrics.probed(decision.size)
        if job.in_pool and self._settle_chunk(job, decision.size) and decision.compress:
            most = job.budget if job.retains else request.budget
            self._compress([request], most, job.queries)
            held = int(self.scheduler.accounts.owned[request.slot].sum())
            job.shortfall = max(0, held - (most or 0))

    def _continue(self, request: Request) -> None:
        """Let a request's slot hold what it continues."""
        if request.plan is None or (match := request.plan.match) is None:
            return
        assert request.slot is not None
        self.worker.share(match.row, request.slot)
        self.scheduler.note_continued(request.slot, match)
        self.metrics.continued(len(match.tokens))

    def _retain(self, job: PromptJob) -> None:
        """Retain what is left of the tokens that have run, and go on behind them."""
        request = job.request
        assert request.slot is not None
        if not job.in_pool:
            with self.phase("compress"):
                fitted = bool(self.worker.place(job, request.slot))
                held = self.worker.on_host(self.worker.cache.context_len[request.slot])
            if not fitted:
                freed = int(self.worker.on_host(job.freed))
                stays = request.blocks_whole(len(job.tokens)) - freed
                self.scheduler.note_unplaced(request, stays, self.worker.free_blocks())
                return
            self.scheduler.note_chunk(held, self.worker.free_blocks(), True)
            self.metrics.evicted(int(self.worker.on_host(job.freed)))
        self.keeper.hold(request, job.tokens, request.slot, job.logits)
        self.scheduler.job = self.worker.go_on(
            request, request.all_tokens, len(job.tokens), job.logits
        )

    def _settle_chunk(self, job: PromptJob, size: int) -> bool:
        """What became of a chunk in the pool. Returns whether it is there; if not it runs again."""
        with self.phase("prefill"):
            held = self.worker.on_host(self.worker.cache.context_len[job.request.slot])
        free, fitted = self.worker.free_blocks(), bool(job.fits)
        # A chunk is in the pool whole before it is compressed.
        self.metrics.note_free(int(free.sum()))
        self.scheduler.note_chunk(held, free, fitted)
        if not fitted:
            job.done -= size
        return fitted

    def _insert(self, job: PromptJob) -> None:
        """Put a prompt into its slot. What became of it is known after the decode steps."""
        request = job.request
        assert request.slot is not None
        # On CPUs a dispatch waits for its inputs anyway; this way the time has the right name.
        wait = jax.block_until_ready if self._on_cpu else lambda x: x
        with self.phase("prefill"):
            wait(job.logits)
        if request.method.probed and job.prompt is not None:
            with self.phase("probe"):
                wait(job.prompt.scores)
        with self.phase("compress"):
            report = wait(self.worker.insert(job, request.slot, num_top([request])))
        self.reports.starts.append((job, report))

    def _decoded_together(self, decode: Decode) -> Iterator[Decode]:
        """Decode steps by who takes part in one."""
        for part in self.worker.decode_tables.parts(self._longest(decode.requests)):
            some = dataclasses.replace(decode, requests=tuple(decode.requests[i] for i in part))
            if self.beside is None:
                yield some
            else:
                yield from self.beside.decode_parts(some, max(self._longest(some.requests)))

    def _longest(self, requests: Sequence[Request]) -> list[int]:
        """KVs that a head of each may hold once decode steps have run."""
        held = self.scheduler.accounts.longest
        return [self.worker.grown(int(held[r.slot])) for r in requests if r.slot is not None]

    def _decode(self, decode: Decode) -> list[tuple[Decode, list[DecodeReport]]]:
        """Decode some requests together; one by one where that raises, to see whose fault it is."""
        requests = decode.requests
        # Single steps are all dispatched before anybody knows that nothing is left to do.
        most = max(1, *(r.remaining for r in requests))
        try:
            reports = self.worker.decode(
                [r.slot for r in requests if r.slot is not None],
                min(decode.steps, most),
                cast(DecodeRule | None, decode.rule),
                num_top(requests),
                max(self._longest(requests)),
                effort_of([r.sampling for r in requests]),
            )
        except Exception as error:
            alone = len(requests) == 1 or self.agreement is not None
            if alone or not self.worker.alive():
                self.fail(requests[0], error)
                return []
            log.warning("a decode step of %d requests failed; each runs alone now", len(requests))
            ones = [Decode((request,), decode.steps, decode.rule) for request in requests]
            return [loop for one in ones for loop in self._decode(one)]
        return [(decode, reports)]

    def _compress(
        self,
        requests: Sequence[Request],
        keep: int | None = None,
        queries: jax.Array | None = None,
    ) -> None:
        """Compress some requests to their budgets, or to so many blocks each. `queries` are the
        prompt's of the only one."""
        longest, total = self.scheduler.accounts.longest, 0
        with self.phase("compress"):
            for method, most, group in self._compressed_together(requests):
                slots = [r.slot for r in group if r.slot is not None]
                freed = self.worker.compress(
                    slots,
                    [r.budget if keep is None else keep for r in group if r.budget is not None],
                    [r.unmeasured for r in group],
                    method,
                    most,
                    int(longest[slots].max()),
                    queries,
                )
                freed = self.worker.on_host(freed)
                for request, blocks in zip(group, freed.reshape(len(freed), -1)):
                    self.scheduler.note_compressed(request, blocks)
                    if request in self.scheduler.running:
                        request.stats.blocks_evicted_decoding += int(blocks.sum())
                    total += int(blocks.sum())
        if self.config.sharing:
            # What others hold too is not free, and what they hold was copied.
            self.scheduler.accounts.free[:] = self.worker.free_blocks()
        self.metrics.compressed(len(requests), total)

    def _compressed_together(
        self, requests: Sequence[Request]
    ) -> Iterator[tuple[Method, int, Sequence[Request]]]:
        groups: dict[tuple[Method, int], list[Request]] = {}
        for request in requests:
            most = request.compression.max_kvs_per_step
            groups.setdefault((request.method, most), []).append(request)
        held = self.scheduler.accounts.longest
        for (method, most), group in groups.items():
            of_group = [int(held[request.slot]) for request in group]
            for places in self.worker.compress_tables.parts(of_group):
                some, longest = [group[i] for i in places], max(of_group[i] for i in places)
                parts: list[Sequence[Request]] = [some]
                if self.beside is not None:
                    parts = self.beside.compress_parts(some, method, most, longest)
                for part in parts:
                    yield method, most, part

    def _preempt(self, request: Request) -> None:
        """Free what a request holds; the scheduler puts it back into the queue."""
        log.info("request %r is preempted: no blocks are free", request.id)
        if request.slot is not None:
            self._empty([request.slot])
        self._count_preemption(request)

    def _count_preemption(self, request: Request) -> None:
        request.stats.preemptions += 1
        self.metrics.preemptions.inc()
