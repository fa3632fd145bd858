"""What a user asks of compression: method, size, protection, triggers."""

import dataclasses

from kvjax.cache.budget import FLOOR_TOKENS, cache_cap
from kvjax.cache.evict import MAX_KVS_PER_STEP
from kvjax.cache.methods import Method, get_method
from kvjax.errors import UserError


@dataclasses.dataclass(frozen=True)
class CompressionConfig:
    """Compression settings of a request.

    Give either `rate` or `max_cache_tokens`; without both, nothing is evicted. The size of a
    sequence's cache is a cap on tokens' worth of KVs over all its layers and heads, fixed by the
    length of its prompt.
    """

    method: str = "shared-reads"
    rate: float | None = None
    """Compression rate: keep about 1/rate of the prompt's KVs, and never fewer than `floor`."""
    max_cache_tokens: int | None = None
    """The cap itself, in tokens."""
    floor: int = FLOOR_TOKENS
    """The least cap that a rate leads to, in tokens."""
    window: int | None = None
    """Overrides the method's observation window (and its protected window, if that is equal)."""
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
        get_method(self.method)
        if self.rate is not None and self.max_cache_tokens is not None:
            raise UserError(
                f"rate {self.rate} and max_cache_tokens {self.max_cache_tokens}: "
                "both set the size of the cache, give one of them"
            )
        if self.rate is not None:
            cache_cap(0, self.rate)
        for name in ("max_cache_tokens", "compress_every", "max_kvs_per_step", "window", "floor"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} {value}: give a number of at least 1")
        for name in ("protected", "sinks"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UserError(f"{name} {value}: give a number of at least 0")

    @property
    def resolved(self) -> Method:
        """The method with this configuration's overrides."""
        method = get_method(self.method)
        protected, observation = method.protected, method.observation
        if self.window is not None and observation is not None:
            if protected == observation.window:
                protected = self.window
            observation = dataclasses.replace(observation, window=self.window)
        return dataclasses.replace(
            method,
            observation=observation,
            protected=protected if self.protected is None else self.protected,
            protected_share=method.protected_share if self.protected is None else 0.0,
            sinks=method.sinks if self.sinks is None else self.sinks,
        )

    @property
    def sized(self) -> bool:
        """Whether there is a size to compress to: a method that evicts, and a rate or a cap."""
        return get_method(self.method).compresses and (
            self.rate is not None or self.max_cache_tokens is not None
        )

    def cap(self, prompt_len: int, block_size: int) -> int | None:
        """Cache tokens that a sequence with such a prompt may keep; None for all of them.

        Raises:
            UserError: the cap is smaller than what the method protects.
        """
        if not self.sized:
            return None
        method, cap = self.resolved, self.max_cache_tokens
        if self.rate is not None:
            cap = cache_cap(prompt_len, self.rate, block_size, self.floor)
        assert cap is not None
        kept = method.protected + method.sinks
        if cap < kept and prompt_len > cap:
            raise UserError(
                f"a cache of {cap} tokens is smaller than the {kept} tokens that are never evicted "
                f"({method.protected} newest, {method.sinks} oldest): raise the cap or protect less"
            )
        return cap
