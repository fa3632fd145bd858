"""The paged per-head KV cache and everything that decides what it keeps.

Here belongs what works on any model's keys and values: the store, policies, methods, eviction and
moves, as pure functions on pytrees. Models, requests and files are not here; nothing above the
kernels is imported.
"""

from kvjax.cache.budget import budget_blocks, cache_cap, rate_blocks
from kvjax.cache.compress import CompressReport, compress, write_survivors
from kvjax.cache.config import CompressionConfig
from kvjax.cache.evict import (
    MAX_KVS_PER_STEP,
    EvictionSchedule,
    eviction_mask,
    schedule_evictions,
)
from kvjax.cache.methods import METHODS, get_method
from kvjax.cache.move import move_cache
from kvjax.cache.policy import Method, Scorer, Scores
from kvjax.cache.store import (
    CacheSpec,
    Codec,
    PagedCache,
    Plain,
    Plane,
    Rounded,
    allocate,
    append,
    as_codec,
    begin_append,
    blocks_for,
    check_invariants,
    free_blocks,
    init_cache,
    release,
    share,
    write_newest,
    write_prompt,
)

__all__ = [
    "MAX_KVS_PER_STEP",
    "METHODS",
    "CacheSpec",
    "Codec",
    "CompressReport",
    "CompressionConfig",
    "EvictionSchedule",
    "Method",
    "PagedCache",
    "Plain",
    "Plane",
    "Rounded",
    "Scorer",
    "Scores",
    "allocate",
    "append",
    "as_codec",
    "begin_append",
    "blocks_for",
    "budget_blocks",
    "cache_cap",
    "check_invariants",
    "compress",
    "eviction_mask",
    "free_blocks",
    "get_method",
    "init_cache",
    "move_cache",
    "rate_blocks",
    "release",
    "schedule_evictions",
    "share",
    "write_newest",
    "write_prompt",
    "write_survivors",
]
