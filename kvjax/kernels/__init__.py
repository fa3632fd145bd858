"""Device code: paged attention, prefill attention, metrics of a window, moves, for each backend.

Here belongs what is written for a device or chosen by it, and its reference. It knows arrays only:
no cache, no model.
"""

from kvjax.kernels.choice import explain
from kvjax.kernels.encoded import Encoded, Half, HalfNumbers
from kvjax.kernels.match_attention import match_attention
from kvjax.kernels.matmul import matmul
from kvjax.kernels.move_kvs import move_kvs
from kvjax.kernels.paged_attention import (
    ExactKVs,
    append_and_attend,
    paged_attention,
    plan_paged_attention,
)
from kvjax.kernels.prefill_attention import (
    Prefix,
    prefill_attention,
    prefill_attention_with_log_sum,
    prefill_attention_with_received,
)
from kvjax.kernels.sparse_attention import BLOCK as SPARSE_BLOCK
from kvjax.kernels.sparse_attention import sparse_prefill_attention
from kvjax.kernels.window_metrics import hit_intervals, window_metrics

__all__ = [
    "SPARSE_BLOCK",
    "Encoded",
    "ExactKVs",
    "Half",
    "HalfNumbers",
    "Prefix",
    "append_and_attend",
    "explain",
    "hit_intervals",
    "match_attention",
    "matmul",
    "move_kvs",
    "paged_attention",
    "plan_paged_attention",
    "prefill_attention",
    "prefill_attention_with_log_sum",
    "prefill_attention_with_received",
    "sparse_prefill_attention",
    "window_metrics",
]
