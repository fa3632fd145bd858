"""The paged cache itself: what is kept of each KV, where, and in how many bytes.

Here belongs whatever reads, writes, moves or counts the bytes of keys and values: `CacheSpec` has
every formula, `KVPool` every access, and a `Codec` says what is stored of a row. Nothing here knows
why a KV stays or goes.
"""

from kvjax.cache.store.codec import Codec, Plain, Refined, Rounded, Windowed
from kvjax.cache.store.counting import running_count
from kvjax.cache.store.free import FreeBlocks
from kvjax.cache.store.grow import allocate
from kvjax.cache.store.invariants import check_invariants
from kvjax.cache.store.named import as_codec
from kvjax.cache.store.paged import (
    PagedCache,
    blocks_for,
    drop_blocks,
    free_blocks,
    init_cache,
    refined_blocks,
    release,
    valid_slots,
)
from kvjax.cache.store.pool import KVPool, gathered, move_rows, scattered, write_newest
from kvjax.cache.store.saved import restored, saved, typed
from kvjax.cache.store.scaled import Floats, Integers, Scaled
from kvjax.cache.store.shard import HeadShard, agreed, summed
from kvjax.cache.store.sharing import share, unshare, unshare_slots
from kvjax.cache.store.slots import put_slots, take_slots
from kvjax.cache.store.smooth import KeySmoothing
from kvjax.cache.store.spec import CacheSpec, Plane
from kvjax.cache.store.window import KVWindow
from kvjax.cache.store.write import append, begin_append, write_prompt

__all__ = [
    "CacheSpec",
    "Codec",
    "Floats",
    "FreeBlocks",
    "HeadShard",
    "Integers",
    "KeySmoothing",
    "KVPool",
    "KVWindow",
    "PagedCache",
    "Plain",
    "Plane",
    "Refined",
    "Rounded",
    "Scaled",
    "Windowed",
    "agreed",
    "allocate",
    "append",
    "as_codec",
    "begin_append",
    "blocks_for",
    "check_invariants",
    "drop_blocks",
    "free_blocks",
    "gathered",
    "init_cache",
    "move_rows",
    "put_slots",
    "refined_blocks",
    "release",
    "restored",
    "running_count",
    "scattered",
    "saved",
    "share",
    "summed",
    "take_slots",
    "typed",
    "unshare",
    "unshare_slots",
    "valid_slots",
    "write_newest",
    "write_prompt",
]
