"""The loop of continuous batching: each `step` schedules, runs and postprocesses.

A chunk of a waiting prompt, a visit of decode steps for all running sequences, and, while the
device works, the text of the visit before.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.cache.methods import METHODS, Method
from kvjax.engine.config import EngineConfig
from kvjax.engine.metrics import EngineMetrics
from kvjax.engine.request import FinishReason, Request, RequestOutput, TokenLogprobs
from kvjax.engine.sampling import MAX_LOGPROBS
from kvjax.engine.scheduler import Scheduler
from kvjax.engine.text import RequestText
from kvjax.engine.visits import StartReport, TokenScores, VisitReport
from kvjax.engine.worker import PromptJob, Worker, decode_rule
from kvjax.models.tokenizer import Tokenizer


class Engine:
    """Requests on their way from the queue to their last token."""

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
        self.requests: dict[str, tuple[Request, RequestText]] = {}
        """Those with something still to be told to their callers, by id."""
        self.methods: Counter[Method] = Counter()
        """How many of them have which method."""
        self.job: PromptJob | None = None
        """The prompt that is being prefilled."""
        self._news: dict[str, None] = {}
        """Ids of requests with tokens or an end that has not been told, in order."""
        self._over: list[Request] = []
        """Ended, and not yet out of the scheduler."""
        self._starts: list[tuple[PromptJob, StartReport]] = []
        self._compressed_in_vain = False
        self._heads = worker.model.num_layers * worker.model.num_kv_heads
        self._on_cpu = jax.default_backend() == "cpu"

    def add(self, request: Request) -> None:
        """Queue a request; others may be running."""
        request.stats.arrival = self.clock()
        self.scheduler.add(request)
        tokenizer = self.tokenizer if request.sampling.detokenize else None
        self.requests[request.id] = request, RequestText(tokenizer, request.sampling.stop)
        self.methods[request.method] += 1
        self.metrics.requests.inc()

    def end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request; the next round takes it out and tells its caller."""
        request.finish_reason, request.error = reason, error
        self._news[request.id] = None
        self._over.append(request)

    def step(self) -> list[RequestOutput]:
        """One round. Returns the outputs of the round before."""
        with self.metrics.round(self.clock):
            self._sweep()
            self._prefill()
            visited, report = self._visit()
            outputs = self._tell()
            self._collect(visited, report)
            self.metrics.observe(self.scheduler, self.worker)
        return outputs

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Time of a phase, waiting for the device included and compilation apart."""
        start, compiled = self.clock(), self.worker.compile_seconds
        yield
        seconds, compiled = self.clock() - start, self.worker.compile_seconds - compiled
        self.metrics.spent("compile", compiled)
        self.metrics.spent(name, max(0.0, seconds - compiled))

    def _sweep(self) -> bool:
        """Take out what has ended, and empty its slots. Returns whether there was any."""
        over, self._over = self._over, []
        slots = [slot for request in over if (slot := self._take_out(request)) is not None]
        if slots:
            self.worker.empty(slots)
        return bool(slots)

    def _take_out(self, request: Request) -> int | None:
        """Take a request out of the scheduler. Returns the slot that has to be emptied, if any."""
        if self.job is not None and self.job.request is request:
            self.job = None
        return self.scheduler.leave(request)

    # Prompts

    def _prefill(self) -> None:
        """Run a chunk's worth of prompts, and start those that are through."""
        room = self.config.prefill_chunk
        while True:
            if self.job is None:
                request = self.scheduler.begin_next()
                if request is None:
                    return
                self.job = self.worker.begin(request)
                request.measured = request.length
                if request.stats.admitted is None:
                    request.stats.admitted = self.clock()
            job = self.job
            size = job.next_chunk
            if size > room and room < self.config.prefill_chunk:
                return
            if size:
                room -= size
                with self._phase("prefill"):
                    self.worker.advance(job)
                if job.in_pool and not self._settle_chunk(job, size):
                    return
            elif not self.scheduler.fits(job.request):
                return
            if not job.next_chunk and (job.in_pool or self.scheduler.fits(job.request)):
                self._start(job)

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

    def _visit(self) -> tuple[list[Request], VisitReport | None]:
        """Dispatch decode steps for everything that runs."""
        running = list(self.scheduler.running)
        if not running:
            return running, None
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
        observing = [r.method for r in running if decode_rule(r.method)]
        with self._phase("decode"):
            report = self.worker.visit(
                [r.slot for r in running if r.slot is not None],
                max(1, limit),
                observing[0] if observing else METHODS["full"],
                num_top(running),
            )
        return running, report

    def _tell(self) -> list[RequestOutput]:
        """Outputs of all requests that have something new."""
        outputs = []
        names, self._news = self._news, {}
        for name in names:
            request, text = self.requests[name]
            ended = request.finish_reason is not None
            output = text.tell(request, self.clock())
            outputs.append(output)
            if output.finished:
                del self.requests[name]
                self.methods -= Counter([request.method])
                self.metrics.ended(output.finish_reason, request.stats, len(request.tokens))
                if not ended:
                    # A stop text was found in what it had generated.
                    self._over.append(request)
            if request.on_output is None:
                continue
            try:
                request.on_output(output)
            except Exception as error:
                # Whoever raises ends its own request; the others go on.
                request.on_output = None
                if request.finish_reason is None:
                    self.end(request, "error", f"on_output raised {type(error).__name__}: {error}")
        return outputs

    # What the device reports

    def _collect(self, visited: list[Request], report: VisitReport | None) -> None:
        """Wait for the device and take in what it reports."""
        starts, self._starts = self._starts, []
        if report is None:
            return
        if starts:
            with self._phase("prefill"):
                jax.block_until_ready([job.scores for job, _ in starts])
            with self._phase("compress"):
                jax.block_until_ready([started.ok for _, started in starts])
        with self._phase("decode"):
            told, visit = jax.device_get(([started for _, started in starts], report))
        now = self.clock()
        self.scheduler.free = int(visit.free)
        # Before those that ended leave, and before anything is compressed.
        self.metrics.note_free(self.scheduler.free)
        for (job, _), started in zip(starts, told, strict=True):
            self._note_start(job.request, started, now)
        progress = False
        for column, request in enumerate(visited):
            request.owned = int(visit.owned[column])
            request.longest = int(visit.longest[column])
            request.growth = int(visit.growth[column])
            tokens = visit.tokens[:, column]
            progress |= bool((tokens >= 0).any())
            if request.finish_reason is None and request.slot is not None:
                self._note_tokens(request, tokens, visit.scores, column)
                if not visit.active[column]:
                    self._stopped(request)
        self.metrics.visited(visit.tokens, visit.kvs, self._heads)
        # Where a sequence has just ended, its blocks may be all that was missing.
        if not self._sweep() and not visit.ok:
            self._make_room(progress)
        if visit.ok:
            self._compressed_in_vain = False

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

    def _note_tokens(
        self, request: Request, tokens: np.ndarray, scores: TokenScores | None, column: int
    ) -> None:
        wanted = request.sampling.logprobs
        for step in np.flatnonzero(tokens >= 0):
            token = int(tokens[step])
            request.tokens.append(token)
            self._news[request.id] = None
            if wanted is None or scores is None:
                continue
            ids, values = scores.top_ids[step, column], scores.top[step, column]
            top = tuple((int(i), float(x)) for i, x in zip(ids[:wanted], values[:wanted]))
            logprob = float(scores.chosen[step, column])
            request.logprobs.append(TokenLogprobs(token, logprob, top))
        request.since_compression += int((tokens >= 0).sum())

    def _stopped(self, request: Request) -> None:
        """Say why the device stopped it."""
        last = request.tokens[-1] if request.tokens else -1
        eos = last in self.tokenizer.eos_ids and not request.sampling.ignore_eos
        self.end(request, "eos" if eos else "length")

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
        slot = self._take_out(request)
        if slot is not None:
            self.worker.empty([slot])
        request.stats.preemptions += 1
        self.metrics.preemptions.inc()
        self.scheduler.add(request)


def num_top(requests: Sequence[Request]) -> int | None:
    """Likeliest tokens to report: few values, as each is compiled."""
    wanted = [r.sampling.logprobs for r in requests if r.sampling.logprobs is not None]
    if not wanted:
        return None
    return MAX_LOGPROBS if max(wanted) else 0
