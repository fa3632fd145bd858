"""Steps that are compiled before they are needed: what `LLM.warm_up` does, in parts."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.cache import CompressionConfig
from kvjax.checks import check_whole
from kvjax.engine.agreement import plain_compression
from kvjax.engine.checks import checked_request
from kvjax.engine.interrupts import held
from kvjax.engine.needs import decoded_ahead, however_drawn, needs_of, sharing
from kvjax.engine.request import Request
from kvjax.engine.sampling import MAX_LOGPROBS, SamplingParams, effort_of
from kvjax.engine.worker import Worker

if TYPE_CHECKING:
    from kvjax.engine.llm import LLM


def parts(
    llm: "LLM",
    prompt_lens: Sequence[int],
    logprobs: bool = False,
    compression: CompressionConfig | None = None,
) -> list[Callable[[], None]]:
    """`LLM.warm_up` in parts of one step or a few: to be called in order, with rounds in between.

    Raises:
        UserError: a length that the engine does not serve, or settings that no request may have.
    """
    asked: dict[str, Any] = {"prompt_lens": list(prompt_lens), "logprobs": logprobs}
    if llm.engine.agreement is not None:
        asked["compression"] = plain_compression(llm, compression)
    top, steps = MAX_LOGPROBS if logprobs else None, list[Callable[[], object]]()
    for request in like(llm, prompt_lens, logprobs, compression):
        steps += _steps(llm.worker, request, top)

    def run(part: int) -> None:
        with llm.engine.owner("warm_up"):
            llm.together("warm_up", **asked, part=part)
            with held():
                steps[part]()
                llm.engine.observe()

    return [functools.partial(run, part) for part in range(len(steps))]


def like(
    llm: "LLM",
    prompt_lens: Sequence[int],
    logprobs: bool,
    compression: CompressionConfig | None,
) -> list[Request]:
    """Requests with prompts of these lengths; none is queued."""
    found = []
    for length in prompt_lens:
        check_whole("prompt length", length, 1, llm.max_len)
        sampling = SamplingParams(
            max_tokens=max(1, min(2, llm.max_len - length)),
            logprobs=MAX_LOGPROBS if logprobs else None,
        )
        prompt, settings = np.zeros(length, np.int32), compression or llm.compression
        found.append(checked_request(llm, prompt, sampling, settings, "warm-up", -1))
    return found


def _steps(worker: Worker, request: Request, top: int | None) -> Iterator[Callable[[], object]]:
    """What compiles every step that requests like this one need (`needs_ahead`), by running each on
    nothing, in parts between which other steps may run.

    Args:
        worker: what has the steps.
        request: what such a request looks like.
        top: likeliest tokens that it reports (`num_top`).
    """
    outside = worker.config.num_rows

    def prompt() -> None:
        job = worker.begin(request)
        if not job.in_pool:
            while job.next_chunk:
                worker.advance(job)
            # A slot that does not exist refuses the prompt.
            worker.insert(job, outside, top)

    def others(one: Request) -> None:
        worker.compiled.compile([need.call() for need in needs_of(worker, one)])

    drawn = however_drawn(worker, request)
    yield prompt
    for group, longest in decoded_ahead(worker, request):
        # A loop may run for no steps; a single step is one.
        slots, limit = [outside] * group, int(worker.decodes_once)
        for one in drawn:
            given = slots, limit, request.method.decode, top, longest, effort_of([one.sampling])
            yield functools.partial(worker.decode, *given)
    if request.budget is not None:
        method, most = request.method, request.compression.max_kvs_per_step
        for group, width in worker.compress_tables.holding(1, 1):
            slots, longest = [outside] * group, width * worker.cache.block_size
            yield functools.partial(worker.compress, slots, slots, slots, method, most, longest)
    yield functools.partial(worker.empty, [])
    for one in (*sharing(worker, request), *drawn[1:]):
        yield functools.partial(others, one)
