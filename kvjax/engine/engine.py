"""The loop of continuous batching: each `step` schedules, runs and postprocesses.

A chunk of a waiting prompt, a visit of decode steps for all running sequences, and, while the
device works, the text of the visit before.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.cache.methods import METHODS, Method
from kvjax.engine.config import EngineConfig
from kvjax.engine.intake import Intake, Owner
from kvjax.engine.interrupts import held, released
from kvjax.engine.metrics import EngineMetrics
from kvjax.engine.outbox import Outbox
from kvjax.engine.request import FinishReason, Request
from kvjax.engine.scheduler import Scheduler
from kvjax.engine.text import RequestText
from kvjax.engine.visits import StartReport, VisitReport
from kvjax.engine.worker import PromptJob, Worker, decode_rule, num_top
from kvjax.errors import in_one_line
from kvjax.models.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MOST_FAILURES = 3
"""Rounds that fail in a row, for no request's reason, before the engine gives up."""

Visit = tuple[list[Request], VisitReport]
"""Requests that decoded together, and what the device will tell of it."""


class Engine:
    """Requests on their way from the queue to their last token.

    One thread steps (`owner`); everything but `intake` is its own.

    What goes wrong in a round ends the request it belongs to. Where it belongs to none, or the
    round was interrupted in the middle, the device may be ahead of what the host knows: everything
    that runs comes again from the queue with the tokens that it has. Where the device's state is
    lost, the engine is `dead` until it is `reset`.
    """

    def __init__(
        self,
        config: EngineConfig,
        worker: Worker,
        tokenizer: Tokenizer,
        clock: Callable[[], float],
    ):
        self.config, self.worker, self.tokenizer, self.clock = config, worker, tokenizer, clock
        num_blocks = worker.cache.num_blocks
        self.scheduler = Scheduler(
            config.max_batch, num_blocks, config.prefill_scratch, config.prefill_chunk
        )
        self.metrics = EngineMetrics(num_blocks)
        self.intake, self.owner = Intake(config.max_waiting), Owner()
        self.outbox = Outbox(self.intake, self.metrics, clock)
        self.job: PromptJob | None = None
        """The prompt that is being prefilled."""
        self.dead: str | None = None
        """Why nothing runs any more; None while all is well."""
        self._under_way = False
        """Whether a round has begun and not come to its end."""
        self._failures = 0
        self._over: list[Request] = []
        """Ended, and not yet out of the scheduler."""
        self._starts: list[tuple[PromptJob, StartReport]] = []
        self._compressed_in_vain = False
        self._heads = worker.model.num_layers * worker.model.num_kv_heads
        self._on_cpu = jax.default_backend() == "cpu"

    def add(self, request: Request) -> None:
        """Queue a request; others may be running. From any thread.

        Raises:
            UserError: it cannot be taken now, as `Intake.add` says.
        """
        request.stats.arrival = self.clock()
        tokenizer = self.tokenizer if request.sampling.detokenize else None
        text = RequestText(tokenizer, request.sampling.stop)
        self.intake.add(request, text, len(self.scheduler.waiting))
        self.metrics.requests.inc()

    def end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request; the next round takes it out and tells its caller."""
        if request.finish_reason is None:
            request.finish_reason, request.error = reason, error
            self.outbox.note(request)
            self._over.append(request)

    def fail(self, request: Request, error: Exception) -> None:
        """End a request because of an exception that belongs to it, and to no other.

        Raises:
            Exception: the same, where it took the device's state with it.
        """
        if not self.worker.alive():
            raise error
        log.error("request %r ends", request.id, exc_info=error)
        self.end(request, "error", in_one_line(error))

    def step(self) -> None:
        """One round.

        Its outputs (those of the round before) are in `outbox.told` and, where nobody is called
        with them, in `intake`.
        """
        with held():
            if self._under_way:
                # The last one left by an interruption, and not where that does no harm.
                self._resume()
            self.outbox.told, released.interrupted = [], False
            self.owner.in_round = self._under_way = True
            interruption = None
            try:
                if self.dead is None:
                    interruption = self._round()
                    self._failures = 0
            except Exception as error:
                self._failed(error)
            except BaseException:
                # What was let through has left nothing half done.
                self._under_way = not released.interrupted
                raise
            finally:
                self.owner.in_round = False
            if self.dead is not None:
                interruption = self._bury() or interruption
            self._under_way = False
        if interruption is not None:
            raise interruption

    def _round(self) -> BaseException | None:
        """Schedule, run, postprocess. Returns what a callback was interrupted by, if one was."""
        with self.metrics.round(self.clock):
            self._take_in()
            self._sweep()
            self._prefill()
            visits = self._visit()
            stopped, interruption = self.outbox.tell()
            self._over += stopped
            self._collect(visits)
            self.metrics.observe(self.scheduler, self.worker)
        return interruption

    def _take_in(self) -> None:
        """What has come from other threads, and whose time is up."""
        for request in self.intake.take_new():
            self.scheduler.add(request)
        for request in self.intake.take_aborted():
            self.end(request, "abort")
        for request in self.intake.take_late(self.clock()):
            log.warning("request %r ends: its deadline has passed", request.id)
            self.end(request, "deadline")

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Time of a phase, waiting for the device included and compilation apart."""
        start, compiled = self.clock(), self.worker.compile_seconds
        yield
        seconds, compiled = self.clock() - start, self.worker.compile_seconds - compiled
        self.metrics.spent(name, max(0.0, seconds - compiled))
        if compiled:
            waiting = len(self.intake.open) - 1
            log.info("compiled for %.1f s (%s); %d other requests waited", compiled, name, waiting)
            self.metrics.compiled(compiled, stalled=waiting > 0)

    # When things go wrong

    def _failed(self, error: Exception) -> None:
        """A round failed for a reason that belongs to no request."""
        log.error("a round failed", exc_info=error)
        self._failures += 1
        self.metrics.failures.inc()
        if not self.worker.alive():
            self._die(f"the device's state is lost ({in_one_line(error)})")
        elif self._failures >= MOST_FAILURES:
            self._die(f"{self._failures} rounds failed, the last one of {in_one_line(error)}")
        else:
            self._resume()

    def _resume(self) -> None:
        """Begin again with the tokens that the host knows of: all that run come from the queue."""
        if not self.worker.alive():
            return self._die("the device's state was lost when a step was interrupted")
        log.warning("a round was left half way: all running requests are prefilled again")
        try:
            self.worker.empty(range(self.config.max_batch))
            self._begin_again()
        except Exception as error:
            log.error("cannot go on", exc_info=error)
            self._die(in_one_line(error))

    def _begin_again(self) -> None:
        self.job, self._starts = None, []
        self._compressed_in_vain = False
        waiting = []
        for request, text in self.intake.take_all():
            if request.sampling.logprobs is not None:
                del request.tokens[len(request.logprobs) :]
            text.restart()
            self.outbox.note(request)
            if request.remaining <= 0 or self._at_eos(request):
                self._stopped(request)
            if request.finish_reason is None:
                if request.slot is not None:
                    self._count_preemption(request)
                waiting.append(request)
        self.scheduler.restart(waiting)
        self._over = []

    def _die(self, reason: str) -> None:
        """Nothing can run any more: every open request ends with the reason."""
        self.dead = f"dead: {reason}"
        log.critical("%s; reset() makes a new cache", self.dead)
        self._begin_again()

    def _bury(self) -> BaseException | None:
        """Tell everybody; returns what a callback was interrupted by."""
        for request, _ in self.intake.take_all():
            self.end(request, "error", self.dead)
        self.scheduler.restart([])
        self._over = []
        return self.outbox.tell()[1]

    def reset(self) -> None:
        """Make a new cache and go on. Open requests end with an error and the tokens they have."""
        self._die("reset() was called")
        self._bury()
        self.worker.reset()
        self.dead, self._under_way, self._failures = None, False, 0

    # Leaving

    def _sweep(self) -> bool:
        """Take out what has ended, and empty its slots. Returns whether there was any."""
        slots = [request.slot for request in self._over if request.slot is not None]
        if slots:
            self.worker.empty(slots)
        over, self._over = self._over, []
        for request in over:
            self._take_out(request)
        return bool(slots)

    def _take_out(self, request: Request) -> None:
        """Take a request out of the scheduler; its slot is empty."""
        if self.job is not None and self.job.request is request:
            self.job = None
        self.scheduler.leave(request)

    # Prompts

    def _prefill(self) -> None:
        """Run a chunk's worth of prompts, and start those that are through."""
        room = self.config.prefill_chunk
        while room is not None:
            if self.job is None:
                request = self.scheduler.begin_next()
                if request is None:
                    return
            else:
                request = self.job.request
            try:
                room = self._advance(request, room)
            except Exception as error:
                self.fail(request, error)
                self._sweep()

    def _advance(self, request: Request, room: int) -> int | None:
        """Run the next chunk of a request's prompt, if it has at most `room` tokens.

        Returns the room that is left; None where nothing more can be prefilled in this round.
        """
        if self.job is None:
            self.job = self.worker.begin(request)
            request.measured = request.length
            if request.stats.admitted is None:
                request.stats.admitted = self.clock()
        job = self.job
        size = job.next_chunk
        if size > room and room < self.config.prefill_chunk:
            return None
        if size:
            room -= size
            with self._phase("prefill"):
                self.worker.advance(job)
            if job.in_pool and not self._settle_chunk(job, size):
                return None
        elif not self.scheduler.fits(request):
            return None
        if not job.next_chunk and (job.in_pool or self.scheduler.fits(request)):
            self._start(job)
        return room

    def _settle_chunk(self, job: PromptJob, size: int) -> bool:
        """After a chunk in the pool: compress, or make room and let it run again."""
        request = job.request
        assert request.slot is not None
        with self._phase("prefill"):
            held = np.asarray(self.worker.cache.context_len[request.slot])
        request.owned = int((-(-held // self.config.block_size)).sum())
        request.longest = int(held.max())
        self.scheduler.free = self.worker.free_blocks()
        # A chunk is in the pool whole before it is compressed.
        self.metrics.note_free(self.scheduler.free)
        if not bool(job.fits):
            job.done -= size
            self._make_room(progress=False)
            return False
        if request.compressed_first:
            self._compress([request])
        return True

    def _start(self, job: PromptJob) -> None:
        """Put a prompt into its slot. What became of it is known after the visit."""
        request = job.request
        assert request.slot is not None
        # On CPUs a dispatch waits for its inputs anyway; this way the time has the right name.
        wait = jax.block_until_ready if self._on_cpu else lambda x: x
        with self._phase("prefill"):
            wait(job.scores)
        with self._phase("compress"):
            report = wait(self.worker.start(job, request.slot, num_top([request])))
        self._starts.append((job, report))
        self.job = None
        self.scheduler.started(request)
        if not job.in_pool:
            request.owned = request.blocks_to_admit()
            request.longest = request.length
            self.scheduler.free -= request.owned

    # Decode steps

    def _visit(self) -> list[Visit]:
        """Dispatch decode steps for everything that runs."""
        running = list(self.scheduler.running)
        if not running:
            return []
        every = [r for r in running if r.compression.compress_every is not None]
        due = [r for r in every if r.since_compression >= (r.compression.compress_every or 0)]
        if due:
            self._compress([r for r in due if r.budget is not None])
            for request in due:
                request.since_compression = 0
        waits = self.job is not None or (
            self.scheduler.waiting and self.scheduler.fits(self.scheduler.waiting[0])
        )
        # A prompt in the queue would only wait longer for its first token.
        limit = 1 if waits else self.config.steps_per_visit
        for request in every:
            limit = min(
                limit, (request.compression.compress_every or 0) - request.since_compression
            )
        with self._phase("decode"):
            return self._dispatch(running, max(1, limit))

    def _dispatch(self, running: list[Request], limit: int) -> list[Visit]:
        """Decode some requests together; one by one where that raises, to see whose fault it is."""
        observing = [r.method for r in running if decode_rule(r.method)]
        try:
            report = self.worker.visit(
                [r.slot for r in running if r.slot is not None],
                limit,
                observing[0] if observing else METHODS["full"],
                num_top(running),
            )
        except Exception as error:
            if len(running) == 1 or not self.worker.alive():
                self.fail(running[0], error)
                return []
            log.warning("a decode step of %d requests failed; each runs alone now", len(running))
            return [visit for request in running for visit in self._dispatch([request], limit)]
        return [(running, report)]

    # What the device reports

    def _collect(self, visits: list[Visit]) -> None:
        """Wait for the device and take in what it reports."""
        if not visits:
            return
        starts, self._starts = self._starts, []
        if starts:
            with self._phase("prefill"):
                jax.block_until_ready([job.scores for job, _ in starts])
            with self._phase("compress"):
                jax.block_until_ready([started.ok for _, started in starts])
        with self._phase("decode"):
            told, reports = jax.device_get(
                ([started for _, started in starts], [report for _, report in visits])
            )
        now = self.clock()
        self.scheduler.free = int(reports[-1].free)
        # Before those that ended leave, and before anything is compressed.
        self.metrics.note_free(self.scheduler.free)
        for (job, _), started in zip(starts, told, strict=True):
            self._note_start(job.request, started, now)
        progress = False
        for (visited, _), report in zip(visits, reports, strict=True):
            for column, request in enumerate(visited):
                progress |= self._note_visit(request, report, column)
            self.metrics.visited(report.tokens, report.kvs, self._heads)
        ok = all(report.ok for report in reports)
        # Where a sequence has just ended, its blocks may be all that was missing.
        if not self._sweep() and not ok:
            self._make_room(progress)
        if ok:
            self._compressed_in_vain = False

    def _note_visit(self, request: Request, report: VisitReport, column: int) -> bool:
        """What a visit did to one request. Returns whether it has new tokens."""
        request.owned = int(report.owned[column])
        request.longest = int(report.longest[column])
        request.growth = int(report.growth[column])
        tokens = np.asarray(report.tokens)[:, column]
        if request.finish_reason is None and request.slot is not None:
            self._note_tokens(request, tokens, report.scores, column)
            if not report.active[column]:
                self._stopped(request)
        return bool((tokens >= 0).any())

    def _note_start(self, request: Request, started: Any, now: float) -> None:
        if not started.ok:
            # More had to stay than the budget says: it comes again when there is room for that.
            request.owned = 0
            stays = request.blocks_whole(request.length) - int(started.freed)
            request.unevictable = max(0, stays - (request.budget or 0))
            if len(self.scheduler.running) == 1:
                self.end(request, "pool")
            else:
                self._give_way(request)
            return
        stats = request.stats
        if stats.first_token is None:
            stats.first_token = now
            stats.blocks_before = request.blocks_whole(len(request.prompt))
            stats.blocks_after = int((-(-started.kept // self.config.block_size)).sum())
            stats.kept, stats.shortfall = started.kept, int(started.shortfall)
            stats.blocks_evicted_decoding = 0
        self.metrics.evicted(int(started.freed))
        self.metrics.prefilled(request.length)
        scores = None
        if started.scores is not None:
            scores = jax.tree.map(lambda x: x[None], started.scores)
        self._note_tokens(request, np.asarray([started.token]), scores, 0)

    def _note_tokens(self, request: Request, *report: Any) -> None:
        if request.note_tokens(*report):
            self.outbox.note(request)

    def _at_eos(self, request: Request) -> bool:
        last = request.tokens[-1] if request.tokens else -1
        return last in self.tokenizer.eos_ids and not request.sampling.ignore_eos

    def _stopped(self, request: Request) -> None:
        """Say why the device stopped it."""
        self.end(request, "eos" if self._at_eos(request) else "length")

    # Making room

    def _compress(self, requests: Sequence[Request]) -> int:
        """Compress some requests to their budgets; returns the blocks they gave back."""
        groups: dict[tuple[Method, int], list[Request]] = {}
        for request in requests:
            most = request.compression.max_kvs_per_step
            groups.setdefault((request.method, most), []).append(request)
        total = 0
        with self._phase("compress"):
            for (method, most), group in groups.items():
                freed = self.worker.compress(
                    [r.slot for r in group if r.slot is not None],
                    [r.budget for r in group if r.budget is not None],
                    [0 if decode_rule(method) else r.unmeasured for r in group],
                    method,
                    most,
                    max(r.longest for r in group),
                )
                for request, blocks in zip(group, np.asarray(freed).tolist()):
                    request.owned -= blocks
                    request.since_compression = 0
                    request.stats.blocks_evicted_decoding += blocks
                    total += blocks
        self.scheduler.free += total
        self.metrics.compressed(len(requests), total)
        return total

    def _make_room(self, progress: bool) -> None:
        """Blocks ran out: compress, and only where that does not help let the newest give way."""
        over = [
            request
            for request in self.scheduler.running
            if request.budget is not None
            and request.compression.before_preemption
            and request.owned > request.budget
        ]
        if over and (progress or not self._compressed_in_vain):
            # What is freed now may still not be enough for a single step of all.
            self._compressed_in_vain = True
            if self._compress(over):
                return
        self._compressed_in_vain = False
        holders = self.scheduler.holders()
        if not holders:
            return
        request = max(holders, key=lambda r: r.order)
        if len(holders) == 1:
            self.end(request, "pool")
            self._sweep()
        else:
            self._give_way(request)

    def _give_way(self, request: Request) -> None:
        """Preempt: the request's blocks are freed, and it comes again with all its tokens."""
        log.info("request %r is preempted: no blocks are free", request.id)
        if request.slot is not None:
            self.worker.empty([request.slot])
        self._take_out(request)
        self._count_preemption(request)
        self.scheduler.add(request)

    def _count_preemption(self, request: Request) -> None:
        request.stats.preemptions += 1
        self.metrics.preemptions.inc()
