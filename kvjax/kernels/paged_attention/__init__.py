"""Attention of one query per sequence over a paged cache with its own length for every KV head."""

import math

from jaxtyping import Array, Float, Int32

from kvjax.kernels.paged_attention import reference


def paged_attention(
    q: Float[Array, "S Hr d"],
    k: Float[Array, "N b d"],
    v: Float[Array, "N b d"],
    block_table: Int32[Array, "S H M"],
    context_len: Int32[Array, "S H"],
    *,
    scale: float | None = None,
    metric: Float[Array, "N b"] | None = None,
    return_metric: bool = False,
    implementation: str | None = None,
) -> Float[Array, "S Hr d"] | tuple[Float[Array, "S Hr d"], Float[Array, "N b"]]:
    """Attention over the KVs that each (sequence, KV head) holds in the pool.

    Args:
        q: one query per sequence and query head; query head i reads KV head i // r.
        k: pool of keys.
        v: pool of values.
        block_table: blocks of each head; entries from ⌈context_len / b⌉ on are not followed.
        context_len: KVs of each head; 0 gives an output of zeros.
        scale: factor of the logits, 1/√d by default.
        metric: pool of eviction metrics, float32; needed with `return_metric`.
        return_metric: also return the metrics with Σ p² over the query group added to each KV
            (KV-Compress, equation 20).
        implementation: "xla", or None to choose.

    Raises:
        ValueError: an argument does not fit; names it, what it got and what is wanted.
    """
    if implementation not in (None, "xla"):
        raise ValueError(f"implementation: got {implementation!r}, wanted 'xla' or None")
    if return_metric and metric is None:
        raise ValueError("metric: got None, wanted the pool of metrics for return_metric=True")
    if q.shape[1] % block_table.shape[1]:
        raise ValueError(
            f"q: got {q.shape[1]} query heads, wanted a multiple of {block_table.shape[1]} KV heads"
        )
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    out, new_metric = reference.paged_attention(
        q, k, v, block_table, context_len, scale=scale, metric=metric if return_metric else None
    )
    if new_metric is None:
        return out
    return out, new_metric
