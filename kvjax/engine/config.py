"""Sizes of an engine."""

import dataclasses

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
    block_size: int = 16
    prefill_chunk: int = 2048
    """Prompt tokens between two visits of decode steps: running sequences wait no longer."""
    prefill_scratch: int = 8192
    """Prompts up to so many tokens are compressed as a whole, from a scratch beside the pool;
    longer ones chunk by chunk, in the pool."""
    steps_per_visit: int = 8
    """Tokens that the device generates before the host looks, while no prompt waits."""
    pool_tokens: int | None = None
    """Size of the pool in tokens' worth of KVs (one per layer and head)."""
    pool_bytes: int | None = None
    """Size of the pool in bytes, metadata included."""
    memory_fraction: float = 0.9
    """Share of the device's memory that weights, pool and scratch take together."""

    def __post_init__(self):
        for name in ("max_batch", "block_size", "prefill_chunk", "steps_per_visit"):
            self._check(name)
        for name in ("max_len", "pool_tokens", "pool_bytes"):
            if getattr(self, name) is not None:
                self._check(name)
        if self.block_size & (self.block_size - 1):
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
        if not 0 < self.memory_fraction <= 1:
            raise UserError(
                f"memory_fraction {self.memory_fraction}: give a number above 0 and at most 1"
            )

    def _check(self, name: str) -> None:
        if getattr(self, name) < 1:
            raise UserError(f"{name} {getattr(self, name)}: give a whole number of at least 1")
