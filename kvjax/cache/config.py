"""What a user asks of compression: method, size, protection, triggers."""

import dataclasses
from collections.abc import Container

from kvjax.cache.budget import FLOOR_TOKENS, budget_blocks, rate_blocks, usual_block
from kvjax.cache.evict import MAX_KVS_PER_STEP
from kvjax.cache.methods import Method, get_method
from kvjax.cache.policy.checks import MOST_WINDOW
from kvjax.cache.store import CacheSpec
from kvjax.checks import INT32_MAX, check_flag, check_number, check_text, check_whole
from kvjax.errors import UserError

AUTO = "auto"
"""The method of an engine's own choice."""
CALIBRATED, UNCALIBRATED = "matched:predicted-reads-blind", "snapkv"
"""What that is for a model whose calibration is there, and for any other: what finds most of what a
chat request asks for, with a calibration and without (docs/results.md)."""
SIZES = ("rate", "max_cache_tokens", "budget_bytes")
"""What sets the size of a cache, one at a time."""
USUAL_RATE = 8.0
"""Of commands and servers, where neither a rate nor a size is asked for."""
MOST_BYTES = 1 << 50
MOST_KVS_PER_STEP = 100_000_000
"""Most that `max_kvs_per_step` may be: some GiB of temporaries."""


@dataclasses.dataclass(frozen=True)
class CompressionConfig:
    """Compression settings of a request.

    Give one of `rate`, `max_cache_tokens` and `budget_bytes`; without any, nothing is evicted. The
    size of a sequence's cache is a cap on tokens' worth of KVs over all its layers and heads, fixed
    by the length of its prompt.

    Raises:
        UserError: a value has the wrong type or is out of range; one line that names it.
    """

    method: str | Method = AUTO
    """A name, as `get_method` takes it, or a method of your own. "auto": of an engine, `CALIBRATED`
    where a calibration of its model is there, else `UNCALIBRATED`; of a request, the engine's if
    that evicts."""
    rate: float | None = None
    """Compression rate, from 1 on: as many blocks of all heads are kept as hold at most 1/rate of
    the prompt's KVs, but those of `floor` tokens and a block of each head at least: short prompts
    at high rates keep more than asked, see `reached_rate`. A rate of 1 evicts nothing, also while
    decoding."""
    max_cache_tokens: int | None = None
    """The cap itself, in tokens; rounded up to whole blocks."""
    budget_bytes: int | None = None
    """The cap in bytes of the pool, of keys and values as they are stored with all numbers beside
    them; rounded down to whole blocks of every head. An engine makes `max_cache_tokens` of it."""
    floor: int = FLOOR_TOKENS
    """The least cap that a rate leads to, in tokens (128, as in KV-Compress); rounded up to whole
    blocks. Without effect on the other two."""
    window: int | None = None
    """Overrides the method's observation window (and its protected window, if that is equal); of
    one that evicts and has none it is refused."""
    protected: int | None = None
    """Overrides how many of the newest tokens are never evicted."""
    sinks: int | None = None
    """Overrides how many of the oldest tokens are never evicted."""
    on_prefill: bool = True
    """Compress each prompt before it is decoded."""
    compress_every: int | None = None
    """Compress running sequences after every so many decode steps."""
    before_preemption: bool = True
    """Compress running sequences when a step finds too few free blocks."""
    max_kvs_per_step: int = MAX_KVS_PER_STEP
    """KVs sorted at once; more are split."""

    def __post_init__(self):
        as_method(self.method)
        if self.rate is not None:
            rate = check_number("rate", self.rate, 1)
            # As given where it is a plain number; it is compared and hashed.
            if type(self.rate) not in (int, float):
                object.__setattr__(self, "rate", rate)
        ranges = {
            "max_cache_tokens": (1, INT32_MAX),
            "budget_bytes": (1, MOST_BYTES),
            "floor": (1, INT32_MAX),
            "window": (1, MOST_WINDOW),
            "protected": (0, INT32_MAX),
            "sinks": (0, INT32_MAX),
            "compress_every": (1, INT32_MAX),
            "max_kvs_per_step": (1, MOST_KVS_PER_STEP),
        }
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if value is not None or name in ("floor", "max_kvs_per_step"):
                object.__setattr__(self, name, check_whole(name, value, least, most))
        for name in ("on_prefill", "before_preemption"):
            check_flag(name, getattr(self, name))
        sizes = [name for name in SIZES if getattr(self, name) is not None]
        if len(sizes) > 1:
            one, other = sizes[:2]
            raise UserError(
                f"{one} {getattr(self, one)} and {other} {getattr(self, other)}: "
                "both set the size of the cache, give one of them"
            )
        if self.window is not None and not takes_window(method := as_method(self.method)):
            raise UserError(
                f"window {self.window}: method {method.name} observes no window: leave one of them "
                "out"
            )

    def in_tokens(self, spec: CacheSpec) -> "CompressionConfig":
        """The same with `max_cache_tokens` for `budget_bytes`, in a cache of this shape and codec.

        Raises:
            UserError: the bytes do not hold a block for each head.
        """
        if self.budget_bytes is None:
            return self
        least = spec.heads * spec.block_bytes
        tokens = self.budget_bytes // least * spec.block_size
        if not tokens:
            raise UserError(
                f"budget_bytes {self.budget_bytes}: a block of {spec.block_size} KVs in "
                f"{spec.codec.name} for each of {spec.heads} heads takes {least}; give that or more"
            )
        return dataclasses.replace(self, budget_bytes=None, max_cache_tokens=tokens)

    def chosen(self, usual: str | Method) -> "CompressionConfig":
        """The same with `usual` for "auto"."""
        return dataclasses.replace(self, method=usual) if self.method == AUTO else self

    @property
    def resolved(self) -> Method:
        """The method with this configuration's overrides."""
        method = as_method(self.method)
        protected, scorer = method.protected, method.scorer
        if self.window is not None and hasattr(scorer, "with_window"):
            if protected == scorer.window:  # type: ignore[union-attr]
                protected = self.window
            scorer = scorer.with_window(self.window)  # type: ignore[union-attr]
        return dataclasses.replace(
            method,
            scorer=scorer,
            protected=protected if self.protected is None else self.protected,
            protected_share=method.protected_share if self.protected is None else 0.0,
            protected_more=method.protected_more if self.protected is None else 0.0,
            sinks=method.sinks if self.sinks is None else self.sinks,
        )

    @property
    def sized(self) -> bool:
        """Whether there is a size to compress to: a method that evicts, and a rate above 1 or a
        cap."""
        given = self.max_cache_tokens is not None or self.budget_bytes is not None
        sized = given or (self.rate is not None and self.rate > 1)
        return sized and as_method(self.method).compresses

    def block_size(self, token_bytes: int | None = None) -> int:
        """KVs of a block that suit the smallest cache it leads to.

        Args:
            token_bytes: that a token takes, for a size in bytes.

        Raises:
            ValueError: the size is in bytes, and `token_bytes` is not given.
        """
        if not self.sized:
            return usual_block(None)
        if self.budget_bytes is None:
            return usual_block(self.floor if self.rate is not None else self.max_cache_tokens)
        if token_bytes is None:
            raise ValueError(f"budget_bytes {self.budget_bytes}: blocks follow from token_bytes")
        return usual_block(self.budget_bytes / token_bytes)

    def cap(self, prompt_len: int, block_size: int) -> int | None:
        """Cache tokens that a sequence with such a prompt may keep; None for all of them.

        Raises:
            UserError: the cap is smaller than what the method protects.
            ValueError: it is in bytes; see `in_tokens`.
        """
        if not self.sized:
            return None
        if self.budget_bytes is not None:
            raise ValueError(
                f"budget_bytes {self.budget_bytes}: tokens follow from in_tokens(spec)"
            )
        method, cap = self.resolved, self.max_cache_tokens
        if self.rate is not None:
            cap = max(self.floor, block_size, int(prompt_len / self.rate))
        assert cap is not None
        kept = method.protected + method.sinks
        if cap < kept and prompt_len > cap:
            raise UserError(
                f"a cache of {cap} tokens is smaller than the {kept} tokens that are never evicted "
                f"({method.protected} newest, {method.sinks} oldest): raise the cap or protect less"
            )
        return cap

    def blocks(self, prompt_len: int, heads: int, block_size: int) -> int | None:
        """Blocks that a sequence with such a prompt may keep, over all its heads; None for all.

        Args:
            prompt_len: tokens of the prompt.
            heads: KV heads of all layers.
            block_size: KVs of a block.

        Raises:
            UserError: the cap is smaller than what the method protects.
            ValueError: it is in bytes; see `in_tokens`.
        """
        cap = self.cap(prompt_len, block_size)
        if cap is None:
            return None
        if self.rate is not None:
            return rate_blocks(prompt_len, self.rate, heads, block_size, self.floor)
        return budget_blocks(cap, 1, heads, block_size)

    def reached_rate(self, prompt_len: int, heads: int, block_size: int) -> float:
        """The rate that a prompt of this length gets: its KVs over those that the budget's blocks
        hold; 1.0 where nothing of it is evicted.

        It is below `rate` where the floor holds, or a block of each head. What cannot be evicted,
        and a method that overruns its cap (`Allocator.overruns`), make the cache larger still.

        Raises:
            UserError: the cap is smaller than what the method protects.
        """
        blocks = self.blocks(prompt_len, heads, block_size)
        if blocks is None:
            return 1.0
        return max(1.0, prompt_len * heads / (blocks * block_size))


def usual_method(calibrated: Container[str]) -> str:
    """The name of the method of an engine that has these calibrated arrays."""
    there = all(name in calibrated for name in get_method(CALIBRATED).calibrated)
    return CALIBRATED if there else UNCALIBRATED


def takes_window(method: Method) -> bool:
    """Whether a method has an observation window to override, or evicts nothing: then its settings
    are without effect, as all that evict are."""
    scorer = method.scorer
    if scorer is None:
        return True
    return hasattr(scorer, "with_window") and getattr(scorer, "window", None) != 0


def as_method(method: str | Method) -> Method:
    """A method, or the one of that name; "auto" without an engine is `UNCALIBRATED`.

    Raises:
        UserError: it is neither.
    """
    if isinstance(method, Method):
        return method
    if method == AUTO:
        method = UNCALIBRATED
    return get_method(check_text("method", method, "the name of a method"))
