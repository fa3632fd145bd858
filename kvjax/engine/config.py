"""Sizes of an engine."""

import dataclasses
from typing import Literal

from kvjax.cache import Method
from kvjax.cache.config import CompressionConfig, as_method
from kvjax.checks import INT32_MAX, check_number, check_whole, shown
from kvjax.errors import UserError


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes of an engine, all static.

    The pool is sized by one of `pool_tokens`, `pool_bytes` and `memory_fraction`.
    """

    max_batch: int = 64
    """Most sequences at once."""
    max_len: int | None = None
    """Most tokens of a sequence, prompt and generated; the model's limit by default."""
    block_size: int | None = None
    """KVs of a block, a power of two; by default 16, and 8 where the engine's own compression keeps
    so little that blocks of 16 are few (`CompressionConfig.block_size`)."""
    prefill_chunk: int = 2048
    """Prompt tokens between two loops of decode steps: running sequences wait no longer."""
    prefill_scratch: int = 8192
    """Prompts up to so many tokens are compressed as a whole, from a scratch beside the pool;
    longer ones chunk by chunk, in the pool."""
    decode_steps_per_sync: int = 8
    """Tokens that the device generates before the host looks, while no prompt waits."""
    pool_tokens: int | None = None
    """Size of the pool in tokens' worth of KVs (one per layer and head)."""
    pool_bytes: int | None = None
    """Size of the pool in bytes, metadata included."""
    memory_fraction: float = 0.9
    """Share of the device's memory that weights, pool and scratch take together."""

    max_waiting: int | None = None
    """Most requests in the queue, beside the `max_batch` that may run; more are refused. None for
    no limit."""
    share_prefix: Literal["never", "auto", "always"] = "never"
    """Whether prompts go on from what is left of others that they begin with (docs/design.md).
    "auto" leaves out methods that look at the question: what they keep of a text answers the
    question they saw, not the next one. "always" does not."""
    retained_prefixes: int = 16
    """Most prefixes that are held for later requests, where they are shared."""
    share_grain: int = 128
    """A prompt that may be shared is compressed once at a multiple of so many tokens, so many
    before its end at least, and what is left there is retained."""
    tensor_parallel: int = 1
    """Devices that the model and its cache are split over, by KV heads."""
    kv_replicas: int = 1
    """Devices that hold each KV head and share its query heads out, a divisor of `tensor_parallel`:
    what attention takes is split over more devices than there are KV heads, and the pool over fewer
    than there are devices."""
    methods: tuple[str | Method, ...] = ()
    """Methods that requests may bring beside the engine's own, where these keep further numbers
    per KV: the pool has room only for those that are asked for."""

    def __post_init__(self):
        limits = {
            "max_batch": (1, 2**16),
            "max_len": (1, INT32_MAX),
            "block_size": (1, 2**12),
            "prefill_chunk": (1, INT32_MAX),
            "prefill_scratch": (1, INT32_MAX),
            "decode_steps_per_sync": (1, 2**12),
            "pool_tokens": (1, 2**40),
            "pool_bytes": (1, 2**60),
            "max_waiting": (1, INT32_MAX),
            "retained_prefixes": (0, 2**16),
            "share_grain": (1, INT32_MAX),
            "tensor_parallel": (1, 2**16),
            "kv_replicas": (1, 2**16),
        }
        if self.share_prefix not in ("never", "auto", "always"):
            raise UserError(
                f"share_prefix {shown(self.share_prefix)}: give one of never, auto, always"
            )
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                check_whole(name, value, least, most)
        if not isinstance(self.methods, tuple):
            raise UserError(
                f"methods {shown(self.methods)}: give a tuple of methods or their names"
            )
        for method in self.methods:
            as_method(method)
        check_number("memory_fraction", self.memory_fraction, 0, 1, above=True)
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise UserError(f"block_size {self.block_size}: give a power of two")
        if self.prefill_scratch < self.prefill_chunk:
            raise UserError(
                f"prefill_scratch {self.prefill_scratch}: give at least {self.prefill_chunk}, "
                "one prefill_chunk"
            )
        if self.pool_tokens is not None and self.pool_bytes is not None:
            raise UserError(
                f"pool_tokens {self.pool_tokens} and pool_bytes {self.pool_bytes}: "
                "both set the size of the pool, give one of them"
            )

    def blocks_for(
        self, compression: CompressionConfig, token_bytes: int | None = None
    ) -> "EngineConfig":
        """The same with a block size, where none was given; arguments as of
        `CompressionConfig.block_size`."""
        if self.block_size is not None:
            return self
        return dataclasses.replace(self, block_size=compression.block_size(token_bytes))

    @property
    def sharing(self) -> bool:
        """Whether any prefix is shared."""
        return self.share_prefix != "never"

    @property
    def num_rows(self) -> int:
        """Rows of the cache: one for each sequence, and for each prefix that is retained."""
        return self.max_batch + (self.retained_prefixes if self.sharing else 0)


_OPTIONAL = ("max_len", "block_size", "pool_tokens", "pool_bytes", "max_waiting")
