"""A run in which much happens, and what an engine decided in it."""

import contextlib
from typing import Any

import numpy as np

from kvjax.cache import CompressionConfig
from kvjax.engine import LLM, EngineConfig, SamplingParams
from kvjax.engine.request import Request
from kvjax.errors import UserError

SIZES = EngineConfig(
    max_batch=2, max_len=56, block_size=4, prefill_chunk=32, prefill_scratch=32, pool_tokens=56,
    decode_steps_per_sync=2,
)  # fmt: skip
FULL = CompressionConfig(method="full")
"""Two of these do not fit: one is preempted."""


def recorded(llm: LLM) -> list[Any]:
    """Decisions of an engine's scheduler as they are carried out, and what became of requests."""
    log: list[Any] = []

    def plain(value):
        if isinstance(value, Request):
            return value.id
        return tuple(map(plain, value)) if isinstance(value, tuple) else value

    def noting(make):
        def decide(*args):
            for decision in make(*args):
                log.append((type(decision).__name__, *map(plain, vars(decision).values())))
                yield decision

        return decide

    scheduler: Any = llm.scheduler
    scheduler.round, scheduler.settle = noting(scheduler.round), noting(scheduler.settle)
    close = llm.engine.intake.close

    def closing(request):
        log.append((request.id, tuple(request.tokens), request.finish_reason, request.error))
        close(request)

    llm.engine.intake.close = closing  # type: ignore[method-assign]
    compress = llm.engine.compress

    def compressing(request, blocks):
        freed = compress(request, blocks)
        log.append(("compress", request.id, freed))
        return freed

    llm.engine.compress = compressing  # type: ignore[method-assign]
    return log


def lead(llm: LLM, seed: int, rounds: int) -> None:
    """Requests of all kinds for so many rounds, until the last has ended: late ones, aborted ones,
    some with callbacks that fail, some compressed on request."""
    rng = np.random.default_rng(seed)

    def raises(output):
        raise ValueError("nobody listens")

    open_ones, number = [], 0
    for _ in range(rounds):
        if rng.random() < 0.5 and len(llm.scheduler.waiting) < 8:
            sampling = SamplingParams(
                max_tokens=int(rng.integers(1, 12)), temperature=float(rng.integers(2)),
                seed=int(rng.integers(99)), ignore_eos=True, stop=("q", "zz"),
            )  # fmt: skip
            prompt = rng.integers(0, 256, rng.choice([20, 40])).astype(np.int32)
            kinds = (CompressionConfig(method="key-norm", rate=2, floor=8), None, FULL, None, FULL)
            open_ones.append(
                llm.add_request(
                    prompt, sampling, kinds[number % len(kinds)],
                    deadline=1e-9 if number % 7 == 6 else None,
                    on_output=raises if number % 5 == 4 else None,
                )
            )  # fmt: skip
            number += 1
        if open_ones and rng.random() < 0.15:
            with contextlib.suppress(UserError):  # it may have ended
                llm.abort(open_ones.pop())
        evicting = [r for r in llm.scheduler.running if r.budget is not None]
        if evicting and rng.random() < 0.3:
            with contextlib.suppress(UserError):  # it may have ended
                llm.compress(evicting[0].id, 2)
        llm.step()
    while llm.has_unfinished():
        llm.step()
