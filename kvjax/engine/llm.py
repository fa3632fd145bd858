"""The front of the engine: prompts become requests, and their outputs come back."""

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence

import jax
import numpy as np

from kvjax.cache import CompressionConfig
from kvjax.cache.methods import METHODS
from kvjax.engine.config import EngineConfig
from kvjax.engine.engine import Engine
from kvjax.engine.memory import MemoryPlan, plan_memory
from kvjax.engine.request import Request, RequestOutput, RequestStats
from kvjax.engine.sampling import MAX_LOGPROBS, SamplingParams
from kvjax.engine.worker import Worker, decode_rule
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
        self.engine = Engine(self.config, self.worker, self.model.tokenizer, clock)
        self.scheduler, self.metrics = self.engine.scheduler, self.engine.metrics
        self._order = itertools.count()

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
        if name in self.engine.requests:
            raise UserError(f"request id {name!r} is in use: give another")
        request = self._checked(
            prompt, sampling or SamplingParams(), compression or self.compression, name, order
        )
        request.on_output = on_output
        self.engine.add(request)
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
            self.plan.heads, self.config.block_size,
        )  # fmt: skip
        self._check_method(request)
        needs = request.blocks_to_finish(self.scheduler.chunk_in_pool(request))
        if needs > self.plan.num_blocks:
            size = -(-needs // self.plan.heads) * self.config.block_size
            raise UserError(
                f"the request needs {needs} blocks and the pool has {self.plan.num_blocks}: give "
                f"a pool of {size} tokens, a higher rate, or fewer tokens"
            )
        return request

    def _check_method(self, request: Request) -> None:
        method, window = request.method, None
        if method.observation is not None:
            window = method.observation.window
        in_parts = request.length + request.remaining > self.config.prefill_chunk
        if window is not None and in_parts and self.config.prefill_chunk < 2 * window:
            raise UserError(
                f"window {window} of {method.name}: give at most half the prefill_chunk of "
                f"{self.config.prefill_chunk} tokens"
            )
        rule = decode_rule(method)
        for other in self.engine.methods:
            if rule is not None and decode_rule(other) not in (None, rule):
                raise UserError(
                    f"method {method.name} observes decode steps in another way than "
                    f"{other.name}, which is running: wait for it, or use two engines"
                )

    def abort(self, request_id: str) -> None:
        """End a request; what it has generated is kept in its last output.

        Raises:
            UserError: there is no unfinished request of that id.
        """
        request, _ = self.engine.requests.get(request_id, (None, None))
        if request is None or request.finish_reason is not None:
            raise UserError(f"request id {request_id!r}: there is no unfinished request of that id")
        self.engine.end(request, "abort")

    def has_unfinished(self) -> bool:
        """Whether there is anything left to do or to tell."""
        return bool(self.engine.requests)

    def prefilled(self, request_id: str) -> int:
        """Tokens that have run of a prompt that is being prefilled; 0 for any other request."""
        job = self.engine.job
        return job.done if job is not None and job.request.id == request_id else 0

    def step(self) -> list[RequestOutput]:
        """One round: schedule, run, postprocess. Returns the outputs of the round before."""
        return self.engine.step()

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
            request, _ = self.engine.requests.get(name, (None, None))
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


def refused(name: str, error: str) -> RequestOutput:
    """The output of a prompt that no request was made of."""
    empty = np.zeros(0, np.int32)
    return RequestOutput(name, empty, (), "", "", "error", error, None, RequestStats())
