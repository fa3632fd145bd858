"""One request from prompt to text: prefill, decode, compression on its triggers, stop strings."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np

from kvjax.engine.runner import PrefillResult, Runner
from kvjax.engine.sampling import SamplingParams
from kvjax.models.tokenizer import Tokenizer

FinishReason = Literal["eos", "stop", "length", "pool"]


class StopStrings:
    """Passes text on until one of some strings appears, and never a part of it."""

    def __init__(self, stop: Sequence[str]):
        self._stop = tuple(stop)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that can be shown now; nothing any more once a stop string was found."""
        if self.found:
            return ""
        self._held += text
        at = [self._held.find(stop) for stop in self._stop]
        if any(i >= 0 for i in at):
            self.found = True
            return self._held[: min(i for i in at if i >= 0)]
        hold = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._held)), hold, -1):
                if self._held.endswith(stop[:size]):
                    hold = size
                    break
        shown, self._held = (
            self._held[: len(self._held) - hold],
            self._held[len(self._held) - hold :],
        )
        return shown

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        shown, self._held = ("" if self.found else self._held), ""
        return shown


@dataclasses.dataclass
class Generation:
    """A request in one slot of a runner. Iterate over it for the text as it comes.

    Everything generated so far stays readable at any time, also after an interruption.
    """

    runner: Runner
    tokenizer: Tokenizer
    prompt: np.ndarray
    sampling: SamplingParams
    slot: int = 0
    on_prefill: Callable[[int], None] | None = None
    """Called with the number of prompt tokens done, after each chunk."""

    prefill: PrefillResult | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    decode_seconds: float = 0.0
    compress_seconds: float = 0.0
    blocks_evicted_decoding: int = 0

    def start(self) -> PrefillResult:
        """Run the prompt. Raises UserError if it does not fit; the slot is empty then."""
        self.prefill = self.runner.prefill(self.slot, self.prompt, self.sampling, self.on_prefill)
        self.compress_seconds = self.prefill.compress_seconds
        return self.prefill

    def __iter__(self) -> Iterator[str]:
        if self.prefill is None:
            self.start()
        assert self.prefill is not None
        decoder, stops = self.tokenizer.stream(), StopStrings(self.sampling.stop)
        for token in self._token_stream(self.prefill.token):
            self.tokens.append(token)
            is_eos = token in self.tokenizer.eos_ids and not self.sampling.ignore_eos
            piece = "" if is_eos else stops.push(decoder.push(token))
            self.text += piece
            if piece:
                yield piece
            if is_eos:
                self.finish_reason = "eos"
            elif stops.found:
                self.finish_reason = "stop"
            elif len(self.tokens) >= self.sampling.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        if self.finish_reason is None:
            self.finish_reason = "pool"
        rest = stops.push(decoder.flush()) + stops.flush()
        self.text += rest
        if rest:
            yield rest

    def _token_stream(self, first: int) -> Iterator[int]:
        """Tokens one by one; ends early when blocks run out and nothing can be evicted."""
        runner, every = self.runner, self.runner.compression.compress_every
        yield first
        since = 0
        while bool(np.asarray(runner.state.active)[self.slot]):
            start = time.perf_counter()
            out, ok = runner.decode()
            self.decode_seconds += time.perf_counter() - start
            new = [int(token) for token in out[:, self.slot] if token >= 0]
            yield from new
            since += len(new)
            due = every is not None and since >= every
            if not ok and not runner.compression.before_preemption and not due:
                return
            if due or not ok:
                start = time.perf_counter()
                freed = runner.compress_running()
                self.compress_seconds += time.perf_counter() - start
                self.blocks_evicted_decoding += freed
                since = 0
                if not ok and not freed:
                    return
