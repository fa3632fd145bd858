"""What an evaluation is asked for and how large things become: variants, blocks, padding, slots."""

import dataclasses
import math
import statistics
from collections.abc import Sequence

import jax

from kvjax.cache import CacheSpec, as_codec, budget_blocks, cache_cap, rate_blocks
from kvjax.checks import check_whole
from kvjax.engine.calls import NO_BUDGET
from kvjax.errors import UserError
from kvjax.eval.prompt_codecs import PROMPT_CODECS, PromptCodec
from kvjax.eval.prompt_codecs.base import ModelShape
from kvjax.models import LoadedModel
from kvjax.models.decoder import activation_dtype

MOST_BLOCK = 2**12
"""KVs of the largest block."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A method at a compression rate, and what keys and values are stored in."""

    method: str
    rate: float
    cache_dtype: str | None = None
    """As of `kvjax.cache.as_codec`, or a name of `PROMPT_CODECS`; None stores what is computed."""
    cap: int | None = None
    """Tokens' worth of KVs that are kept of every prompt, instead of a rate, which is 1 then."""

    @property
    def label(self) -> str:
        """What results call the method."""
        name = self.method if self.cap is None else f"{self.method} at {self.cap} tokens"
        return name if self.cache_dtype is None else f"{name} in {self.cache_dtype}"

    @property
    def prompt_codec(self) -> PromptCodec | None:
        """What stores the prompt as a whole, if anything does."""
        return None if self.cache_dtype is None else PROMPT_CODECS.get(self.cache_dtype)

    def check(self, devices: int = 1) -> None:
        """Refuse what stores a prompt as a whole where it cannot.

        Raises:
            UserError: a method evicts KVs of it, or its heads lie on several devices.
        """
        if self.prompt_codec is None:
            return
        if self.method != "full":
            raise UserError(
                f"{self.cache_dtype} stores all KVs of a prompt, and {self.method} leaves some "
                "out: give --methods full"
            )
        if devices > 1:
            raise UserError(
                f"{self.cache_dtype} looks at all heads of a prompt, which {devices} devices "
                "share: give --tensor-parallel 1"
            )

    def held_bytes(self, spec: CacheSpec, model: ModelShape, tokens: int, blocks: int) -> int:
        """Bytes that are held of a prompt, with the numbers beside each KV.

        Args:
            spec: of the cache.
            model: whose KVs it holds.
            tokens: of the prompt.
            blocks: that are held of them, over all heads, those with finer codes included.
        """
        codec = self.prompt_codec
        if codec is None:
            return blocks * spec.block_bytes + spec.window_bytes
        return codec.stored_bytes(model, tokens) + spec.heads * tokens * spec.number_bytes


@dataclasses.dataclass(frozen=True)
class EvaluatorConfig:
    """Sizes of an evaluation."""

    block_size: int = 16
    num_slots: int = 16
    """Variants of one prompt that run side by side."""
    floor: int = 0
    """Tokens' worth of KVs that every rate keeps at least."""
    rates_as_caps: bool = False
    """Whether a rate is a cap in whole blocks of every head, as in KV-Compress (`cache_cap`)."""
    context_length: int | None = None
    """Most tokens of a prompt and its answer, instead of the model's own limit."""
    max_target: int = 128
    """Tokens of a target that are teacher-forced."""
    max_new_tokens: int | None = None
    """Most tokens of a generated answer, if less than the task's own number."""
    answers: bool = True
    """Whether answers are generated for tasks whose metric needs them."""
    free_tokens: int = 32
    """Most tokens of a greedy answer that is given no beginning; 0 for no such answer."""

    def __post_init__(self):
        check_whole("block_size", self.block_size, 1, MOST_BLOCK)
        for name in ("num_slots", "max_target"):
            check_whole(name, getattr(self, name), 1)
        for name in ("floor", "free_tokens"):
            check_whole(name, getattr(self, name), 0)
        for name in ("context_length", "max_new_tokens"):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value, 1)


def padded_size(size: int, least: int) -> int:
    """The padded size of so many tokens: at most a quarter more, and few different ones."""
    step = max(least, 2 ** max(0, size.bit_length() - 3))
    return -(-size // step) * step


def head_room(prompt: int, growth: int, block_size: int) -> int:
    """Tokens that a head has room for, in whole blocks, where the full cache of `prompt` tokens
    grows by so many. What is held of the prompt need not end with a full block."""
    blocks = -(-prompt // block_size) + -(-padded_size(max(1, growth), 64) // block_size)
    return (blocks + 1) * block_size


def kept_blocks(variant: Variant, length: int, heads: int, config: EvaluatorConfig) -> int:
    """Blocks that a variant may keep of a prompt of `length` tokens, over all its heads.

    Raises:
        UserError: the rate or the cap is out of range.
    """
    b, cap = config.block_size, variant.cap
    if cap is None and variant.rate == 1:
        return NO_BUDGET
    if cap is None and config.rates_as_caps:
        cap = cache_cap(length, variant.rate, b, config.floor)
    if cap is None:
        return rate_blocks(length, variant.rate, heads, b, config.floor)
    return budget_blocks(cap, 1, heads, b)


def least_kept(variants: Sequence[Variant], lengths: Sequence[int], floor: int = 0) -> float:
    """The fewest tokens' worth of KVs that any variant keeps of a usual prompt, one of the median
    of these lengths; infinity where none evicts."""
    usual = statistics.median(lengths)
    kept = (
        max(floor, usual / variant.rate) if variant.cap is None else variant.cap
        for variant in variants
        if variant.cap is not None or variant.rate > 1
    )
    return min(kept, default=math.inf)


def cache_spec(
    model: LoadedModel, block_size: int = 16, cache_dtype: str | None = None
) -> CacheSpec:
    """What a cache keeps of a model's KVs: as they are computed, or in another type.

    What was stored as a whole prompt lies in the cache as it was restored.

    Raises:
        UserError: no codec stores that, or not with the model's head dimension.
    """
    cache_dtype = None if cache_dtype in PROMPT_CODECS else cache_dtype
    codec = as_codec(cache_dtype, activation_dtype(model.params))
    return CacheSpec.of(model.config, codec, block_size)


def slots_for(model: LoadedModel, length: int) -> int:
    """Variants of a prompt of so many tokens to run side by side: 16 on a CPU.

    Elsewhere as many as half of a device's free memory holds a third of the full cache of, 8 to 64.
    """
    stats = jax.devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    if not stats or "bytes_limit" not in stats:
        return 16
    free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    shards = 1 if model.split is None else model.split.dealing.shards
    sequence = length * cache_spec(model).token_bytes / shards
    return max(8, min(64, int(free / 2 / (sequence / 3))))
