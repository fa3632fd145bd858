"""One request on its way through the engine, and what its caller sees of it."""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Literal

import numpy as np

from kvjax.cache import CompressionConfig
from kvjax.cache.policy import Method
from kvjax.engine.decode import LogProbs
from kvjax.engine.prefixes import Plan
from kvjax.engine.sampling import SamplingParams
from kvjax.errors import UserError

FinishReason = Literal["eos", "stop", "length", "abort", "deadline", "pool", "error"]


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one position, before temperature and filters."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens, descending."""


@dataclasses.dataclass(eq=False)
class RequestStats:
    """Times in seconds on the engine's clock, and what happened to the cache."""

    arrival: float = 0.0
    admitted: float | None = None
    """When its first prefill began."""
    first_token: float | None = None
    finished: float | None = None
    preemptions: int = 0
    blocks_before: int = 0
    """Blocks that the whole prompt would have taken."""
    blocks_after: int = 0
    """Blocks that it took once compressed."""
    kept: np.ndarray | None = None
    """KVs that each head held then, [L, H]."""
    kept_tokens: np.ndarray | None = None
    """Which tokens of the prompt each head held then, bool [L, H, T]; only where the request asked
    for it."""
    rate: float = 1.0
    """The compression rate that its settings lead to, tokens over tokens' worth of budget."""
    shortfall: int = 0
    """Blocks over the budget that could not be evicted."""
    blocks_evicted_decoding: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that were not prefilled when it first was, because a shared prefix or a
    scratch that was kept held them."""

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    def time_per_output_token(self, num_tokens: int) -> float | None:
        """Mean seconds between tokens after the first."""
        if self.finished is None or self.first_token is None or num_tokens < 2:
            return None
        return (self.finished - self.first_token) / (num_tokens - 1)


@dataclasses.dataclass(frozen=True, eq=False)
class RequestOutput:
    """What a request has yielded so far."""

    request_id: str
    prompt_token_ids: np.ndarray
    token_ids: tuple[int, ...]
    text: str
    new_text: str
    """The text since the request's last output."""
    finish_reason: FinishReason | None
    """None while it runs. "eos", "stop" (a stop text), "length" (max_tokens), "abort",
    "deadline", "pool" (blocks ran out and nothing could make room), "error"."""
    error: str | None
    logprobs: tuple[TokenLogprobs, ...] | None
    stats: RequestStats

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def then(self, later: "RequestOutput") -> "RequestOutput":
        """A later output of the same request, with the new text of both."""
        return dataclasses.replace(later, new_text=self.new_text + later.new_text)


@dataclasses.dataclass(eq=False)
class Request:
    """A request as the engine keeps it."""

    id: str
    order: int
    """Requests are served in this order."""
    prompt: np.ndarray
    sampling: SamplingParams
    compression: CompressionConfig
    method: Method
    budget: int | None
    """Blocks it may keep when it is compressed; None if it never is."""
    heads: int
    """Layers × KV heads."""
    block_size: int
    rule: Hashable | None = None
    """What decode steps do to its metrics; None for nothing. Those of one rule share a step."""
    on_output: Callable[[RequestOutput], None] | None = None
    waits: bool = True
    """Whether its outputs wait for a caller of `step`: nobody is called with them."""
    deadline: float | None = None
    """When it ends at the latest, on the engine's clock."""
    sharing: Hashable | None = None
    """What the KVs of its prompt depend on beside the tokens; None if it shares nothing."""
    shared_tokens: int | None = None
    """Tokens that others will begin with, where its caller knows."""
    plan: Plan | None = None
    """How its prompt runs, where it shares; made when it begins."""
    report_kept: bool = False
    """Whether its `stats.kept_tokens` are wanted, which costs a look at the device."""
    aborted: bool = False
    """It ends in the next round."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    stats: RequestStats = dataclasses.field(default_factory=RequestStats)
    slot: int | None = None
    since_compression: int = 0
    """Tokens generated since it was last compressed on its interval; −1 before its first."""
    measured: int = 0
    """Tokens of its last prefill, as far as its method has observed them."""
    held: int = 0
    """Tokens of its last prefill that did not run, as they were held from before."""
    unevictable: int = 0
    """Blocks over the budget that an attempt to admit it could not evict."""

    def give_back(self) -> int | None:
        """It holds no slot any more. Returns the one it had."""
        slot, self.slot = self.slot, None
        self.since_compression = 0
        return slot

    def note_tokens(self, tokens: np.ndarray, log_probs: LogProbs | None, column: int) -> bool:
        """Take in the tokens [n] of some decode steps; −1 where it did not run.

        Args:
            tokens: the tokens.
            log_probs: those of the whole batch, on the host.
            column: its own column of them.

        Returns:
            Whether there was any.
        """
        wanted = self.sampling.logprobs
        ran = np.flatnonzero(tokens >= 0)
        for step in ran:
            token = int(tokens[step])
            self.tokens.append(token)
            if wanted is None or log_probs is None:
                continue
            ids, values = log_probs.top_ids[step, column], log_probs.top[step, column]
            top = tuple((int(i), float(x)) for i, x in zip(ids[:wanted], values[:wanted]))
            self.logprobs.append(TokenLogprobs(token, float(log_probs.chosen[step, column]), top))
        self.since_compression += len(ran)
        return bool(len(ran))

    def budget_at(self, length: int) -> int | None:
        """Blocks that its first tokens may keep, so many of them, by its settings.

        Raises:
            UserError: that is less than what the method protects.
        """
        if self.budget is None:
            return None
        return self.compression.blocks(length, self.heads, self.block_size)

    def fits_at(self, length: int) -> bool:
        """Whether its first tokens, so many of them, can be compressed by its settings."""
        try:
            self.budget_at(length)
        except UserError:
            return False
        return True

    @property
    def all_tokens(self) -> np.ndarray:
        """What has to be prefilled: the prompt, and what was generated before a preemption."""
        return np.concatenate([self.prompt, np.asarray(self.tokens, np.int32)])

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def remaining(self) -> int:
        """Tokens it may still generate."""
        return self.sampling.max_tokens - len(self.tokens)

    @property
    def unmeasured(self) -> int:
        """Newest tokens that stay when it is compressed while it decodes: where the method
        measures prompts alone, what was generated has no metric. At most half of the cap."""
        if self.budget is None or self.method.runs == "both":
            return 0
        cap = self.budget // self.heads * self.block_size
        return min(max(0, self.length - self.measured), cap // 2)

    @property
    def compressed_first(self) -> bool:
        """Whether what it prefills is compressed before it decodes: its prompt, and what it comes
        back with after a preemption, of which it held no more before."""
        settings = self.compression
        back = bool(self.tokens) and self._compressed_later
        return self.budget is not None and (settings.on_prefill or back)

    @property
    def _compressed_later(self) -> bool:
        """Whether it is compressed while it decodes."""
        settings = self.compression
        return settings.before_preemption or settings.compress_every is not None

    def blocks_whole(self, num_tokens: int) -> int:
        """Blocks of so many tokens with nothing evicted."""
        return self.heads * -(-num_tokens // self.block_size)

    def blocks_to_admit(self, chunk_in_pool: int = 0) -> int:
        """Blocks that must be free before its prefill begins, room for its first decode
        steps included.

        Args:
            chunk_in_pool: tokens of a chunk, where its prompt is prefilled in the pool.
        """
        prompt = self.blocks_whole(self.length)
        room = self.heads
        if self.compressed_first:
            assert self.budget is not None
            room = max(room, self.blocks_whole(chunk_in_pool) + self.heads)
            prompt = min(prompt, self.budget + self.unevictable)
        return min(prompt + room, self.blocks_whole(self.length + self.remaining))

    def blocks_to_finish(self, chunk_in_pool: int = 0) -> int:
        """Blocks that it needs if everything is evicted that may be, also to come back after others
        had it preempted.

        Args:
            chunk_in_pool: tokens of a chunk, where it may be prefilled in the pool by its end.
        """
        to_admit = self.blocks_to_admit(chunk_in_pool)
        if self.budget is None:
            return self.blocks_whole(self.length + self.remaining)
        whole = self.blocks_whole(self.length + self.remaining)
        if self.compression.before_preemption:
            growth = 1
        elif self.compression.compress_every is not None:
            growth = min(self.compression.compress_every, self.remaining)
        else:
            growth = self.remaining
        start = self.budget
        if not self.compression.on_prefill:
            start = max(start, self.blocks_whole(self.length))
        grown = start + self.blocks_whole(growth) + self.heads
        if self.compression.on_prefill or self._compressed_later:
            back = self.budget + self.blocks_whole(chunk_in_pool) + self.heads
            grown = max(grown, back)
        return max(to_admit, min(whole, grown))
