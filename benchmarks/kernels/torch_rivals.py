"""What `python -m benchmarks.kernels` times in torch: the rivals that read the same bytes there."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.kernels.cases import Case

GRAPH = 8
"""Calls of a graph."""


def _seconds(run: Callable[[], Any], turns: int) -> float:
    """Seconds per call, by the device's own clock: one by one or as a graph, whichever is less."""
    import torch  # type: ignore[import-not-found]

    def timed(calls: Callable[[], Any], count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            calls()
        start.record()
        for _ in range(count):
            calls()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / count

    # Of one by one the host's part may be the longer one.
    alone = timed(run, turns)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH):
            run()
    return min(alone, timed(graph.replay, -(-turns // GRAPH)) / GRAPH)


def sdpa_seconds(case: Case, turns: int) -> float:
    """torch's scaled_dot_product_attention over a dense cache of the same bytes."""
    import torch  # type: ignore[import-not-found]
    import torch.nn.functional as F  # type: ignore[import-not-found]

    make = functools.partial(torch.randn, device="cuda", dtype=getattr(torch, case.dtype))
    shape = (case.seqs, case.heads, case.mean, case.head_dim)
    k, v = make(shape), make(shape)
    q = make((case.seqs, case.heads * case.group, 1, case.head_dim))
    seconds = _seconds(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), turns)
    del k, v, q
    torch.cuda.empty_cache()
    return seconds


def flashinfer_seconds(case: Case, turns: int) -> float:
    """FlashInfer's paged decode, (sequence × KV head) folded into its batch, pages shuffled."""
    import flashinfer  # type: ignore[import-not-found]
    import torch  # type: ignore[import-not-found]

    dtype = getattr(torch, case.dtype)
    lengths = case.lengths().reshape(-1)
    pages = -(-lengths // case.block_size)
    starts = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
    order = np.random.default_rng(0).permutation(int(starts[-1])).astype(np.int32)
    last = (lengths - (pages - 1) * case.block_size).astype(np.int32)
    on_device = functools.partial(torch.as_tensor, device="cuda")
    pool = (int(starts[-1]), 2, case.block_size, 1, case.head_dim)
    cache = torch.randn(pool, device="cuda", dtype=dtype)
    q = torch.randn((len(lengths), case.group, case.head_dim), device="cuda", dtype=dtype)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(256 << 20, dtype=torch.uint8, device="cuda"), "NHD", use_tensor_cores=True
    )
    wrapper.plan(
        on_device(starts),
        on_device(order),
        on_device(last),
        case.group,
        1,
        case.head_dim,
        case.block_size,
        q_data_type=dtype,
        kv_data_type=dtype,
    )
    seconds = _seconds(lambda: wrapper.run(q, cache), turns)
    del cache, q, wrapper
    torch.cuda.empty_cache()
    return seconds
