"""The engine: continuous batching over one paged cache.

Each `step` schedules, runs and postprocesses: a chunk of a waiting prompt, a visit of decode
steps for all running sequences, and, while the device works, the text of the visit before.
"""

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.cache import CompressionConfig
from kvjax.cache.methods import METHODS, Method
from kvjax.engine.config import EngineConfig
from kvjax.engine.memory import MemoryPlan, plan_memory
from kvjax.engine.metrics import EngineMetrics
from kvjax.engine.request import Request, RequestOutput, RequestStats, TokenLogprobs
from kvjax.engine.sampling import MAX_LOGPROBS, SamplingParams
from kvjax.engine.scheduler import Scheduler
from kvjax.engine.text import RequestText
from kvjax.engine.visits import StartReport, TokenScores, VisitReport
from kvjax.engine.worker import PromptJob, Worker, decode_rule
from kvjax.errors import UserError
from kvjax.models import LoadedModel, load_model

Prompt = str | Sequence[int] | np.ndarray


class LLM:
    """A model that serves many requests at once from one compressed cache.

    Example:
      >>> llm = LLM("smollm2-135m", CompressionConfig(rate=8))
      >>> llm.generate(["The capital of France is"], SamplingParams(max_tokens=2))[0].text
      ' Paris.'
    """

    def __init__(
        self,
        model: LoadedModel | str,
        compression: CompressionConfig | None = None,
        config: EngineConfig | None = None,
        *,
        cache_dtype: jax.typing.DTypeLike | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Plan the memory and make an empty cache.

        Args:
            model: a loaded model, or the name of one.
            compression: settings of requests that bring none; by default nothing is evicted.
            config: sizes.
            cache_dtype: of the pool; by default that of the weights.
            clock: seconds, for statistics.

        Raises:
            UserError: what is asked for does not fit the device's memory, with the numbers.
        """
        self.model = load_model(model) if isinstance(model, str) else model
        self.compression = compression or CompressionConfig()
        self.config = config or EngineConfig()
        self.max_len = self.config.max_len or self.model.config.max_position_embeddings
        weights_dtype = jax.tree.leaves(self.model.params)[0].dtype
        self.plan: MemoryPlan = plan_memory(
            self.model, self.config, self.max_len, cache_dtype or weights_dtype
        )
        self.worker = Worker(
            self.model.config,
            self.model.params,
            self.config,
            num_blocks=self.plan.num_blocks,
            max_len=self.max_len,
            dtype=self.plan.cache_dtype,
            eos_ids=sorted(self.model.tokenizer.eos_ids),
        )
        self.scheduler = Scheduler(
            self.config.max_batch,
            self.plan.num_blocks,
            self.config.prefill_scratch,
            self.config.prefill_chunk,
        )
        self.metrics = EngineMetrics(self.plan.num_blocks)
        self.clock = clock
        self._heads = self.model.config.num_layers * self.model.config.num_kv_heads
        self._order = itertools.count()
        self._texts: dict[str, tuple[Request, RequestText]] = {}
        """Requests with something still to be told to their callers, by id."""
        self._job: PromptJob | None = None
        self._starts: list[tuple[PromptJob, StartReport]] = []
        self._compressed_in_vain = False
        self._on_cpu = jax.default_backend() == "cpu"

    def warm_up(self, prompt_lens: Sequence[int], logprobs: bool = False) -> None:
        """Compile what prompts of these lengths need, with the engine's own compression settings.

        Without it each step compiles when it is first needed, while requests wait.
        """
        for length in prompt_lens:
            prompt = np.zeros(length, np.int32)
            sampling = SamplingParams(max_tokens=max(1, min(2, self.max_len - length)))
            request = self._checked(prompt, sampling, self.compression, "warm-up", -1)
            self.worker.warm_up(request, MAX_LOGPROBS if logprobs else None)

    def memory(self) -> dict[str, int]:
        """Bytes: the plan's parts, and what the device says is in use, at most so far, and there.

        Devices that do not tell (CPUs) have the plan's parts alone.
        """
        plan = dataclasses.asdict(self.plan)
        parts = ("weights", "pool", "tables", "scratch", "workspace", "limit")
        found = {name: plan[name] for name in parts} | {"planned": self.plan.total}
        told = jax.devices()[0].memory_stats() or {}
        names = ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")
        return found | {name: int(told[name]) for name in names if name in told}

    # Requests

    def add_request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        compression: CompressionConfig | None = None,
        *,
        request_id: str | None = None,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> str:
        """Queue a request; others may be running.

        Args:
            prompt: a text, or token ids.
            sampling: how its tokens are chosen.
            compression: its cache's settings; by default those of the engine.
            request_id: a name that no other unfinished request has; made up by default.
            on_output: called with each of its outputs. If it raises, the request ends.

        Returns:
            The request's id.

        Raises:
            UserError: the request can never be served; says why, and what would do.
        """
        order = next(self._order)
        name = f"request-{order}" if request_id is None else request_id
        if name in self._texts:
            raise UserError(f"request id {name!r} is in use: give another")
        request = self._checked(
            prompt, sampling or SamplingParams(), compression or self.compression, name, order
        )
        request.on_output = on_output
        request.stats.arrival = self.clock()
        self.scheduler.add(request)
        tokenizer = self.model.tokenizer if request.sampling.detokenize else None
        self._texts[name] = request, RequestText(tokenizer, request.sampling.stop)
        self.metrics.requests.inc()
        return name

    def _checked(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        compression: CompressionConfig,
        name: str,
        order: int,
    ) -> Request:
        """The request, if it can be served."""
        tokenizer, vocab = self.model.tokenizer, self.model.config.vocab_size
        if isinstance(prompt, str):
            prompt = tokenizer.encode(prompt, add_bos=tokenizer.adds_bos)
        tokens = np.asarray(prompt)
        if tokens.size == 0:
            raise UserError("the prompt is empty: give at least one token")
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise UserError(f"the prompt is {type(prompt).__name__}: give a text or token ids")
        wrong = tokens[(tokens < 0) | (tokens >= vocab)]
        if wrong.size:
            raise UserError(f"token id {wrong[0]} of the prompt: give ids from 0 to {vocab - 1}")
        if len(tokens) + sampling.max_tokens > self.max_len:
            raise UserError(
                f"the prompt has {len(tokens)} tokens and {sampling.max_tokens} may follow, but "
                f"the limit is {self.max_len}: shorten the prompt or ask for fewer tokens"
            )
        budget = Request.budget_of(
            self.model.config, compression, len(tokens), self.config.block_size
        )
        method = compression.resolved if budget is not None else METHODS["full"]
        request = Request(
            name, order, tokens.astype(np.int32), sampling, compression, method, budget,
            self._heads, self.config.block_size,
        )  # fmt: skip
        self._check_method(request)
        needs = request.blocks_to_finish(self.scheduler.chunk_in_pool(request))
        if needs > self.plan.num_blocks:
            size = -(-needs // self._heads) * self.config.block_size
            raise UserError(
                f"the request needs {needs} blocks and the pool has {self.plan.num_blocks}: give "
                f"a pool of {size} tokens, a higher rate, or fewer tokens"
            )
        return request

    def _check_method(self, request: Request) -> None:
        method, window = request.method, None
        if method.observation is not None:
            window = method.observation.window
        if window is not None and self.config.prefill_chunk < 2 * window:
            raise UserError(
                f"window {window} of {method.name}: give at most half the prefill_chunk of "
                f"{self.config.prefill_chunk} tokens"
            )
        rule = decode_rule(method)
        for other in self.scheduler:
            if rule is not None and decode_rule(other.method) not in (None, rule):
                raise UserError(
                    f"method {method.name} observes decode steps in another way than "
                    f"{other.method.name}, which is running: wait for it, or use two engines"
                )

    def abort(self, request_id: str) -> None:
        """End a request; what it has generated is kept in its last output.

        Raises:
            UserError: there is no unfinished request of that id.
        """
        request, _ = self._texts.get(request_id, (None, None))
        if request is None or request.finish_reason is not None:
            raise UserError(f"request id {request_id!r}: there is no unfinished request of that id")
        request.finish_reason = "abort"

    def has_unfinished(self) -> bool:
        """Whether there is anything left to do or to tell."""
        return bool(self._texts)

    # Batches

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        compression: CompressionConfig | Sequence[CompressionConfig] | None = None,
        *,
        on_step: Callable[[int], None] | None = None,
    ) -> list[RequestOutput]:
        """Run some prompts to their ends, together with whatever else is queued.

        Args:
            prompts: texts or token ids.
            sampling: settings for all of them, or one for each.
            compression: likewise.
            on_step: called after each step with the number of prompts that have ended.

        Returns:
            The last output of each, in order. A prompt that cannot be served has an `error`.

        Raises:
            UserError: there are no prompts, or not as many settings as prompts.
        """
        ended: dict[str, RequestOutput] = {}

        def note(output: RequestOutput) -> None:
            if output.finished:
                ended[output.request_id] = output

        names = self._add_all(prompts, sampling, compression, note)
        missing = {name for name in names if isinstance(name, str)}
        try:
            while missing - ended.keys():
                self.step()
                if on_step is not None:
                    on_step(len(names) - len(missing - ended.keys()))
        finally:
            self._abort_all(missing - ended.keys())
        return [ended[name] if isinstance(name, str) else name for name in names]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        compression: CompressionConfig | Sequence[CompressionConfig] | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """The outputs of some prompts as they come. Several streams share the engine.

        Closing the iterator ends its requests and no others. Arguments and errors as for
        `generate`; one prompt may stand alone.
        """
        if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int | np.integer)):
            prompts = [prompts]  # type: ignore[list-item]
        queue: deque[RequestOutput] = deque()
        names = self._add_all(prompts, sampling, compression, queue.append)  # type: ignore[arg-type]

        def outputs() -> Generator[RequestOutput, None, None]:
            running = {name for name in names if isinstance(name, str)}
            try:
                yield from (name for name in names if not isinstance(name, str))
                while running:
                    self.step()
                    while queue:
                        output = queue.popleft()
                        if output.finished:
                            running.discard(output.request_id)
                        yield output
            finally:
                self._abort_all(running)

        return outputs()

    def _abort_all(self, names: Iterable[str]) -> None:
        """End those of some requests that still run; their caller has gone."""
        for name in names:
            request, _ = self._texts.get(name, (None, None))
            if request is not None and request.finish_reason is None:
                request.on_output = None
                self.abort(name)

    def _add_all(self, prompts, sampling, compression, on_output) -> list[str | RequestOutput]:
        """The id of each prompt's request, or its output where it was refused."""
        if len(prompts) == 0:
            raise UserError("there are no prompts: give at least one")

        def per_prompt(settings, name):
            if settings is None or not isinstance(settings, Sequence):
                return [settings] * len(prompts)
            if len(settings) != len(prompts):
                raise UserError(
                    f"{len(settings)} {name} for {len(prompts)} prompts: give one, or one for each"
                )
            return list(settings)

        added: list[str | RequestOutput] = []
        rows = zip(
            prompts, per_prompt(sampling, "sampling"), per_prompt(compression, "compression")
        )
        for number, (prompt, one_sampling, one_compression) in enumerate(rows):
            try:
                name = self.add_request(prompt, one_sampling, one_compression, on_output=on_output)
                added.append(name)
            except UserError as error:
                self.metrics.ended("error")
                added.append(refused(f"prompt {number}", str(error)))
        return added

    # The loop

    def step(self) -> list[RequestOutput]:
        """One round: schedule, run, postprocess. Returns the outputs of the round before."""
        with self.metrics.round(self.clock):
            self._sweep()
            self._prefill()
            visited, report = self._visit()
            outputs = self._tell()
            self._collect(visited, report)
            self.metrics.observe(self.scheduler, self.worker)
        return outputs

    def _sweep(self) -> bool:
        """Take out what has ended, and empty its slots. Returns whether there was any."""
        slots = []
        for request in [r for r in self.scheduler if r.finish_reason is not None]:
            if self._job is not None and self._job.request is request:
                self._job = None
            slot = self.scheduler.leave(request)
            if slot is not None:
                slots.append(slot)
        if slots:
            self.worker.empty(slots)
        return bool(slots)

    def _prefill(self) -> None:
        """Run a chunk's worth of prompts, and start those that are through."""
        room = self.config.prefill_chunk
        while True:
            if self._job is None:
                request = self.scheduler.begin_next()
                if request is None:
                    return
                self._job = self.worker.begin(request)
                if request.stats.admitted is None:
                    request.stats.admitted = self.clock()
            job = self._job
            size = job.next_chunk
            if size > room and room < self.config.prefill_chunk:
                return
            if size:
                room -= size
                with self.metrics.phase("prefill", self.clock):
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
        held = np.asarray(self.worker.cache.context_len[request.slot])
        request.owned = int((-(-held // self.config.block_size)).sum())
        request.longest = int(held.max())
        self.scheduler.free = self.worker.free_blocks()
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
        if self._on_cpu:
            # There a dispatch waits for its inputs anyway; this way the time has the right name.
            with self.metrics.phase("prefill", self.clock):
                jax.block_until_ready(job.scores)
        with self.metrics.phase("compress", self.clock):
            report = self.worker.start(job, request.slot, self._num_top([request]))
        self._starts.append((job, report))
        self._job = None
        self.scheduler.started(request)
        if not job.in_pool:
            request.owned = request.blocks_to_admit()
            request.longest = request.length
            self.scheduler.free -= request.owned

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
        waits = self._job is not None or (
            self.scheduler.waiting and self.scheduler.fits(self.scheduler.waiting[0])
        )
        # A prompt in the queue would only wait longer for its first token.
        limit = 1 if waits else self.config.steps_per_visit
        for request in every:
            limit = min(
                limit, (request.compression.compress_every or 0) - request.since_compression
            )
        observing = [r.method for r in running if decode_rule(r.method)]
        with self.metrics.phase("decode", self.clock):
            report = self.worker.visit(
                [r.slot for r in running if r.slot is not None],
                max(1, limit),
                observing[0] if observing else METHODS["full"],
                self._num_top(running),
            )
        return running, report

    @staticmethod
    def _num_top(requests: Sequence[Request]) -> int | None:
        """Likeliest tokens to report: few values, as each is compiled."""
        wanted = [r.sampling.logprobs for r in requests if r.sampling.logprobs is not None]
        if not wanted:
            return None
        return MAX_LOGPROBS if max(wanted) else 0

    def _tell(self) -> list[RequestOutput]:
        """Outputs of all requests that have something new."""
        outputs = []
        for name, (request, text) in list(self._texts.items()):
            if not text.has_news(request):
                continue
            output = text.tell(request, self.clock())
            outputs.append(output)
            if output.finished:
                self._texts.pop(name, None)
                self.metrics.ended(output.finish_reason, request.stats, len(request.tokens))
            if request.on_output is None:
                continue
            try:
                request.on_output(output)
            except Exception as error:
                # Whoever raises ends its own request; the others go on.
                request.on_output = None
                if request.finish_reason is None:
                    request.finish_reason = "error"
                    request.error = f"on_output raised {type(error).__name__}: {error}"
        return outputs

    # What the device reports

    def _collect(self, visited: list[Request], report: VisitReport | None) -> None:
        """Wait for the device and take in what it reports."""
        starts, self._starts = self._starts, []
        if report is None:
            return
        if starts:
            with self.metrics.phase("prefill", self.clock):
                jax.block_until_ready([job.scores for job, _ in starts])
            with self.metrics.phase("compress", self.clock):
                jax.block_until_ready([started.ok for _, started in starts])
        with self.metrics.phase("decode", self.clock):
            told, visit = jax.device_get(([started for _, started in starts], report))
        now = self.clock()
        self.scheduler.free = int(visit.free)
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
                    self._ended(request)
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
                request.finish_reason = "pool"
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
            if wanted is None or scores is None:
                continue
            ids, values = scores.top_ids[step, column], scores.top[step, column]
            top = tuple((int(i), float(x)) for i, x in zip(ids[:wanted], values[:wanted]))
            logprob = float(scores.chosen[step, column])
            request.logprobs.append(TokenLogprobs(token, logprob, top))
        request.since_compression += int((tokens >= 0).sum())

    def _ended(self, request: Request) -> None:
        """Why the device stopped it."""
        last = request.tokens[-1] if request.tokens else -1
        eos = last in self.model.tokenizer.eos_ids and not request.sampling.ignore_eos
        request.finish_reason = "eos" if eos else "length"

    # Making room

    def _compress(self, requests: Sequence[Request]) -> int:
        """Compress some requests to their budgets; returns the blocks they gave back."""
        groups: dict[tuple[Method, int], list[Request]] = {}
        for request in requests:
            most = request.compression.max_kvs_per_step
            groups.setdefault((request.method, most), []).append(request)
        total = 0
        with self.metrics.phase("compress", self.clock):
            for (method, most), group in groups.items():
                freed = self.worker.compress(
                    [r.slot for r in group if r.slot is not None],
                    [r.budget for r in group if r.budget is not None],
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
        request = self.scheduler.newest()
        if request is None:
            return
        if sum(1 for r in self.scheduler if r.owned) == 1:
            request.finish_reason = "pool"
            self._sweep()
        else:
            self._give_way(request)

    def _give_way(self, request: Request) -> None:
        """Preempt: the request's blocks are freed, and it comes again with all its tokens."""
        if self._job is not None and self._job.request is request:
            self._job = None
        slot = self.scheduler.leave(request)
        if slot is not None:
            self.worker.empty([slot])
        request.stats.preemptions += 1
        self.metrics.preemptions.inc()
        self.scheduler.add(request)


def refused(name: str, error: str) -> RequestOutput:
    """The output of a prompt that no request was made of."""
    empty = np.zeros(0, np.int32)
    return RequestOutput(name, empty, (), "", "", "error", error, None, RequestStats())
