"""An independent model of the compressed cache: plain NumPy and Python, slow and obvious.

It is written from the KV-Compress paper (equations 6-20, algorithm 1), not from kvjax, and keeps
every head's cache as a list of KVs in logical order. The tests compare kvjax with it.
"""

from tests.oracle.attention import attend, causal_attention, softmax
from tests.oracle.audit import audit
from tests.oracle.budget import budget_blocks, cache_cap, evictions_needed, rate_blocks
from tests.oracle.cache import OracleCache
from tests.oracle.eviction import (
    Choice,
    brute_force_cost,
    cheapest_blocks,
    eviction_count,
    eviction_order,
    move_cache,
    paper_prices,
    prices,
)
from tests.oracle.kv import KV, cost
from tests.oracle.metrics import decode_metric, full_metric, max_pool, prefill_metric, window_metric

__all__ = [
    "KV",
    "Choice",
    "OracleCache",
    "attend",
    "audit",
    "brute_force_cost",
    "budget_blocks",
    "cache_cap",
    "causal_attention",
    "cheapest_blocks",
    "cost",
    "decode_metric",
    "eviction_count",
    "eviction_order",
    "evictions_needed",
    "full_metric",
    "max_pool",
    "move_cache",
    "paper_prices",
    "prefill_metric",
    "prices",
    "rate_blocks",
    "softmax",
    "window_metric",
]
