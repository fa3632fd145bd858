"""Device code. Knows arrays only: no cache, no model."""

from kvjax.kernels.choice import explain
from kvjax.kernels.paged_attention import paged_attention, plan_paged_attention
from kvjax.kernels.prefill_attention import Prefix, prefill_attention
from kvjax.kernels.window_metrics import window_metrics

__all__ = [
    "Prefix",
    "explain",
    "paged_attention",
    "plan_paged_attention",
    "prefill_attention",
    "window_metrics",
]
