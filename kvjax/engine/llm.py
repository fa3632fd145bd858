"""The front of the engine: prompts become requests, and their outputs come back."""

import dataclasses
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.cache import Codec, CompressionConfig, Method
from kvjax.cache.calibration import Calibration
from kvjax.checks import INT32_MAX, check_flag, check_number, check_text, check_whole, shown
from kvjax.engine import episodes, processes, retaining, warming
from kvjax.engine.agreement import Agreement, agreed_settings, plain_compression
from kvjax.engine.building import build
from kvjax.engine.checks import checked_request
from kvjax.engine.config import EngineConfig
from kvjax.engine.engine import Engine
from kvjax.engine.episodes import EpisodeCaches
from kvjax.engine.interrupts import held
from kvjax.engine.prompts import Prompt, as_batch
from kvjax.engine.recovery import Recovery
from kvjax.engine.request import Request, RequestOutput
from kvjax.engine.sampling import SamplingParams
from kvjax.engine.stream import OutputStream, refused
from kvjax.engine.tell import tell_rate
from kvjax.errors import UserError
from kvjax.models import LoadedModel

log = logging.getLogger(__name__)


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
        cache_dtype: Codec | jax.typing.DTypeLike | None = None,
        calibration: Calibration | str | os.PathLike[str] | None = "auto",
        draft: "LLM | None" = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Plan the memory and make an empty cache.

        Args:
            model: a loaded model, or the name of one.
            compression: settings of requests that bring none; by default nothing is evicted.
            config: sizes.
            cache_dtype: what keys and values are stored in, or a codec that stores them (a
                `kvjax.cache.Codec`); by default the dtype of the weights.
            calibration: arrays for methods that read them, or the file that holds them. "auto" uses
                that of this package or of the user's cache, and makes it, once per model, if there
                is none and a method that was named reads one; "none" never does.
            draft: an engine, of a smaller model with the same tokenizer, that drafts for methods
                that look ahead (`speckv`, `speckv-sparse`); by default the model drafts for itself.
                Nobody else may use it.
            clock: seconds, for statistics.

        Raises:
            UserError: what is asked for does not fit the device's memory, with the numbers; no
                codec stores that dtype; the calibration is no such file, or of another model; the
                draft has another tokenizer.
        """
        built = build(model, compression, config, cache_dtype, calibration, draft)
        self.model, self.draft, self.worker = built.model, built.draft, built.worker
        self.compression, self.usual = built.compression, built.usual
        self.config, self.max_len, self.plan = built.config, built.max_len, built.plan
        self.engine = Engine(self.config, self.worker, self.model.tokenizer, clock)
        self.recovery = Recovery(self.engine)
        self.scheduler, self.metrics = self.engine.scheduler, self.engine.metrics
        if (together := processes.current()) is not None:
            together.compare(agreed_settings(self, built.calibration))
            self.engine.agreement = Agreement(self, together)
            self.worker.compiled.meet = together.meet
        self._order = itertools.count()
        self.warned: set[float] = set()
        """Rates whose shortfall has been told of."""

    @property
    def dead(self) -> str | None:
        """Why this engine has stopped for good, or None. See `reset`."""
        return self.recovery.dead

    def check_lives(self) -> None:
        """Raise `UserError` where the engine has stopped for good."""
        if self.dead is not None:
            raise UserError(f"the engine is {self.dead}; call reset()")

    def reset(self) -> None:
        """Make a new cache and go on, after the engine died or at any other time.

        Requests that are open end with an error; what they have generated is in their outputs.

        Raises:
            UserError: another thread is using the engine, or this is a callback.
        """
        with self.engine.owner("reset"), held():
            self.together("reset")
            self.recovery.reset()

    def warm_up(
        self,
        prompt_lens: Sequence[int],
        logprobs: bool = False,
        compression: CompressionConfig | None = None,
        part: int | None = None,
    ) -> None:
        """Compile what prompts of these lengths need, by default with the engine's own compression
        settings.

        Without it each step compiles when it is first needed, while requests wait.

        Args:
            prompt_lens: tokens of the prompts.
            logprobs: whether requests will ask for log-probabilities.
            compression: settings of their caches.
            part: only this one of `kvjax.engine.warming.parts`; None for all of them.
        """
        parts = warming.parts(self, prompt_lens, logprobs, compression)
        for run in parts if part is None else parts[part : part + 1]:
            run()

    def check_offers(self, method: str | Method) -> None:
        """Refuse a method that no request could bring.

        Raises:
            UserError: there is none of that name, or the engine lacks what it needs.
        """
        asked, one = CompressionConfig(method=method, rate=2), SamplingParams(max_tokens=1)
        self.check(np.zeros(1, np.int32), one, asked)

    def check(
        self, prompt: Prompt, sampling: SamplingParams, compression: CompressionConfig
    ) -> None:
        """Refuse a request that could never be served; nothing is queued. From any thread.

        Raises:
            UserError: says why, and what would do.
        """
        checked_request(self, prompt, sampling, compression, "check", -1)

    def memory(self) -> dict[str, int]:
        """Bytes: the plan's parts, and what the device says is in use, at most so far, and there.

        Devices that do not tell (CPUs) have the plan's parts alone.
        """
        plan = dataclasses.asdict(self.plan)
        parts = ("weights", "pool", "tables", "scratch", "workspace", "limit")
        found = {name: plan[name] for name in parts} | {"planned": self.plan.total}
        told = jax.local_devices()[0].memory_stats() or {}
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
        deadline: float | None = None,
        report_kept: bool = False,
    ) -> str:
        """Queue a request; others may be running. May be called from any thread.

        Args:
            prompt: a text, or token ids.
            sampling: how its tokens are chosen.
            compression: its cache's settings; by default those of the engine.
            request_id: a name that no other unfinished request has; made up by default.
            on_output: called with each of its outputs, by the thread that steps. If it raises, the
                request ends. Without it, outputs wait until somebody calls `step`.
            deadline: seconds from now after which it ends with what it has.
            report_kept: have `stats.kept_tokens` say which tokens of the prompt each head kept.

        Returns:
            The request's id.

        Raises:
            UserError: the request can never be served; says why, and what would do.
        """
        return self.enqueue(
            prompt,
            sampling,
            compression,
            request_id=request_id,
            on_output=on_output,
            deadline=deadline,
            report_kept=report_kept,
        ).id

    def enqueue(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        compression: CompressionConfig | None = None,
        *,
        request_id: str | None = None,
        on_output: Callable[[RequestOutput], None] | None = None,
        deadline: float | None = None,
        shared: int | None = None,
        report_kept: bool = False,
    ) -> Request:
        """The request that was queued, as `add_request` says; of its prompt, so many tokens as
        `shared` says are retained for others."""
        try:
            self.check_lives()
            if request_id is None:
                request_id = self.engine.intake.new_id()
            check_text("request_id", request_id)
            if on_output is not None and not callable(on_output):
                raise UserError(f"on_output {shown(on_output)}: give a function")
            sampling = SamplingParams() if sampling is None else sampling
            compression = self.compression if compression is None else compression
            request = checked_request(
                self, prompt, sampling, compression, request_id, next(self._order)
            )
            if deadline is not None:
                check_number("deadline", deadline, 0, above=True)
                request.deadline = self.engine.clock() + deadline
            request.on_output, request.waits = on_output, on_output is None
            if shared is not None:
                request.shared_tokens = shared
            request.report_kept = check_flag("report_kept", report_kept)
            if self.engine.agreement is not None:
                plain_compression(self, request.compression)
            # Where warnings are errors, nothing is queued.
            tell_rate(request, self.warned)
            self.engine.add(request)
        except UserError as error:
            self.metrics.refused.inc()
            log.info("request %s is refused: %s", shown(request_id), error)
            raise
        return request

    def abort(self, request_id: str) -> None:
        """End a request; what it has generated is kept in its last output, of the next round.

        May be called from any thread.

        Raises:
            UserError: there is no unfinished request of that id.
        """
        self.engine.intake.abort(request_id)

    def compress(self, request_id: str, blocks: int) -> int:
        """Compress a request now, while it decodes, by its own method.

        Its budget stays what it was. What its method protects is kept, even if that is more.

        Args:
            request_id: a request that decodes; its settings give its cache a size.
            blocks: what it may keep, over all layers and heads.

        Returns:
            The blocks that it gave back.

        Raises:
            UserError: there is no such request, or nothing of it can be evicted; another thread is
                using the engine, or this is a callback.
        """
        check_whole("blocks", blocks, 0, INT32_MAX)
        with self.engine.owner("compress"), held():
            running = {request.id: request for request in self.scheduler.running}
            request = running.get(request_id)
            if request is None:
                raise UserError(f"request id {request_id!r}: no request of that id decodes")
            if request.budget is None:
                raise UserError(
                    f"request id {request_id!r}: its settings evict nothing; give it a rate or "
                    "max_cache_tokens"
                )
            self.together("compress", request_id=request_id, blocks=blocks)
            freed = self.engine.compress(request, blocks)
            self.engine.observe()
            return freed

    # Prefixes; docs/design.md says who continues them

    def retain(self, prompt: Prompt, compression: CompressionConfig | None = None) -> int:
        """Prefill and compress a prompt, and retain what is left of it for those that begin with
        it: a document before its questions. Returns its tokens.

        Raises:
            UserError: it cannot be served or retained, or nothing is shared with these settings.
        """
        return len(retaining.retain(self, prompt, compression).tokens)

    def episodes(
        self,
        prompt: Prompt,
        compression: CompressionConfig | None = None,
        *,
        number: int | None = None,
    ) -> EpisodeCaches:
        """Retain a prompt once for each of its episodes, for questions that choose among them
        (EpiCache; `kvjax.engine.episodes`). The prompt is prefilled once.

        Each cache has the budget of one: so many of them hold as many budgets.

        Args:
            prompt: a text, or token ids.
            compression: settings of each cache, of the method `epicache`; by default the engine's.
            number: how many episodes; by default as many as the method says, 4. They are fewer
                where parts of the prompt are alike.

        Raises:
            UserError: the prompt is empty or has fewer segments than episodes; the method has no
                episodes, or evicts nothing; several devices; nothing is shared with these settings;
                the pool has no room. Nothing of the prompt is retained then.
        """
        return episodes.prepare(self, prompt, compression, number)

    def save_prefix(
        self,
        path: str | os.PathLike[str],
        prompt: Prompt,
        compression: CompressionConfig | None = None,
    ) -> int:
        """`retain` a prompt, and write what is left of it to a file (safetensors)."""
        return retaining.save(self, path, prompt, compression)

    def load_prefix(
        self, path: str | os.PathLike[str], compression: CompressionConfig | None = None
    ) -> int:
        """Retain what `save_prefix` wrote. Returns its tokens.

        Raises:
            UserError: it is no such file, or of another model or other settings, or has no room;
                the engine is dead.
        """
        return retaining.put(self, retaining.read(self, self.worker, path, compression))

    def forget_prefixes(self) -> None:
        """Give back the blocks of all prefixes that are retained."""
        with self.engine.owner("forget_prefixes"), held():
            self.together("forget_prefixes")
            self.engine.keeper.forget_all()
            self.engine.observe()

    def follow(self) -> None:
        """Do what the first of several processes does with its engine, until that ends.

        Raises:
            UserError: there are no other processes, or this is the first one.
        """
        agreement = self.engine.agreement
        if agreement is None or agreement.processes.leads:
            raise UserError("follow() is for all processes of an engine but the first one")
        agreement.follow()

    def together(self, what: str, **given: Any) -> None:
        """Where there are other processes: all of them do this next."""
        if self.engine.agreement is not None:
            self.engine.agreement.together(what, **given)

    def has_unfinished(self) -> bool:
        """Whether there is anything left to do or to emit."""
        return bool(self.engine.intake)

    def prefilled(self, request_id: str) -> int:
        """Tokens that have run of a prompt that is being prefilled; 0 for any other request."""
        request, job = self.scheduler.prefilling, self.scheduler.job
        return job.done if job and request and request.id == request_id else 0

    def step(self) -> list[RequestOutput]:
        """One round: schedule, run, emit.

        Returns:
            Outputs of the round before, those that callbacks have had among them, and what was left
            of requests without a callback by `generate` and `stream`.

        Raises:
            UserError: another thread is using the engine, or this is a callback.
        """
        with self.engine.owner("step"):
            self.recovery.step()
            return self.engine.intake.take_outputs() + self.engine.outbox.emitted

    # Batches

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        compression: CompressionConfig | Sequence[CompressionConfig] | None = None,
        *,
        on_step: Callable[[int], None] | None = None,
    ) -> list[RequestOutput]:
        """Run some prompts to their ends, together with whatever else is queued.

        Args:
            prompts: texts or token ids; one prompt may stand alone.
            sampling: settings for all of them, or one for each.
            compression: likewise.
            on_step: called after each step with the number of prompts that have ended.

        Returns:
            The last output of each, in order. A prompt that cannot be served has an `error`.

        Raises:
            UserError: there are no prompts, or not as many settings as prompts; another thread is
                using the engine, or this is a callback.
        """
        ended: dict[str, RequestOutput] = {}

        def note(output: RequestOutput) -> None:
            if output.finished:
                ended[output.request_id] = output

        asked: list[Request | RequestOutput] = []
        with self.engine.owner("generate"):
            try:
                with held():
                    self.add_all(asked, prompts, sampling, compression, note)
                added = {one.id for one in asked if isinstance(one, Request)}
                while not added <= ended.keys():
                    self.recovery.step()
                    if on_step is not None:
                        on_step(len(asked) - len(added - ended.keys()))
            finally:
                self.abandon(asked)
        return [ended[one.id] if isinstance(one, Request) else one for one in asked]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        compression: CompressionConfig | Sequence[CompressionConfig] | None = None,
    ) -> OutputStream:
        """The outputs of some prompts as they come. Several streams share the engine.

        Closing the iterator ends its requests and no others. Arguments and errors as for
        `generate`.
        """
        return OutputStream(self, prompts, sampling, compression)

    def abandon(self, requests: Iterable[Request | RequestOutput]) -> None:
        """End those of some requests that still run; their caller has gone."""
        with held():
            for request in requests:
                if isinstance(request, Request):
                    self.engine.intake.abandon(request)

    def add_all(
        self,
        asked: list[Request | RequestOutput],
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        compression: CompressionConfig | Sequence[CompressionConfig] | None,
        on_output: Callable[[RequestOutput], None],
    ) -> None:
        """Append each prompt's request to `asked`, or its output where it was refused."""
        prompts = as_batch(prompts)
        if len(prompts) == 0:
            raise UserError("there are no prompts: give at least one")

        def per_prompt(settings: Any, name: str) -> list[Any]:
            if not isinstance(settings, list | tuple):
                return [settings] * len(prompts)
            if len(settings) != len(prompts):
                raise UserError(
                    f"{len(settings)} {name} for {len(prompts)} prompts: give one, or one for each"
                )
            return list(settings)

        rows = zip(
            prompts, per_prompt(sampling, "sampling"), per_prompt(compression, "compression")
        )
        for number, (prompt, one_sampling, one_compression) in enumerate(rows):
            try:
                asked.append(
                    self.enqueue(prompt, one_sampling, one_compression, on_output=on_output)
                )
            except UserError as error:
                asked.append(refused(f"prompt {number}", str(error)))
