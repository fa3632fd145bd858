"""What each method keeps of a prompt.

`KEEPS[name]` takes a `Prompt` and gives the token positions that each (layer, KV head) keeps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.oracle.narrowing import keeps_narrowing, of_newest
from tests.oracle.question_free import (
    calibrated,
    centred,
    centred_row,
    compactor,
    expected_attention,
    keydiff,
    predicted,
    predicted_or_claimed,
    semantic,
    surrogate,
)
from tests.oracle.representatives import crush, k_means, pivots_last, without_like
from tests.oracle.scores import (
    Prompt,
    Scores,
    by_policy,
    forgetting,
    global_local,
    h2o_rows,
    h2o_scores,
    hit_again,
    kvc_rows,
    kvc_scores,
    low_key_norm,
    mean_of_last,
    newest_query,
    often_important,
    per_query,
    random_scores,
    recency,
    shared_reads,
    snapkv_rows,
    snapkv_scores,
    unread,
    wide_pool,
    window_scores,
)
from tests.oracle.selection import (
    Kept,
    ada_heads,
    entropy,
    error_layers,
    geometric_layers,
    gini,
    keeps,
    keeps_by_need,
    keeps_cheapest_by_layer,
    keeps_cheapest_of_layer,
    keeps_globally,
    keeps_shared,
    keeps_whole_heads,
    layers_by,
    pyramid_layers,
)

SNAPKV = snapkv_scores(8, 7, "max", group_first=True)
SNAPKV_W32 = snapkv_scores(32, 7, "max", group_first=True)
BLIND = keeps_globally(predicted, protected=1, protected_share=1 / 8, protected_more=1 / 8, sinks=2)

KEEPS: dict[str, Callable[[Prompt], Kept]] = {
    "full": lambda p: {name: list(range(p.length)) for name in p.names},
    "random": keeps(random_scores),
    "streaming-llm": keeps(recency, sinks=4),
    "key-norm": keeps(low_key_norm),
    "h2o": keeps(h2o_scores, protected=8),
    "h2o-decode": keeps(h2o_scores, protected_share=0.5),
    "snapkv": keeps(SNAPKV, protected=8),
    "snapkv-w32": keeps(SNAPKV_W32, protected=32),
    "snapkv-w32-avg5": keeps(snapkv_scores(32, 5, "avg", group_first=False), protected=32),
    "snapkv-w64-avg5": keeps(snapkv_scores(64, 5, "avg", group_first=False), protected=64),
    "pyramidkv-exact": keeps(SNAPKV, protected=8, layers_of=pyramid_layers(exact=True)),
    "pyramidkv-faithful": keeps(SNAPKV, protected=8, layers_of=pyramid_layers(exact=False)),
    "pyramidkv-geometric": keeps(SNAPKV, protected=8, layers_of=geometric_layers),
    "pyramidkv-entropy": keeps(SNAPKV, protected=8, layers_of=layers_by(SNAPKV, entropy)),
    "pyramidkv-gini": keeps(SNAPKV, protected=8, layers_of=layers_by(SNAPKV, gini)),
    "fastgen": keeps_by_need(by_policy, protected=8),
    "ada-snapkv": keeps(SNAPKV_W32, protected=32, heads_of=ada_heads(0.2, 32)),
    "ada-snapkv-a50": keeps(SNAPKV_W32, protected=32, heads_of=ada_heads(0.5, 32)),
    "ada-pyramidkv": keeps(
        SNAPKV_W32,
        protected=32,
        layers_of=pyramid_layers(exact=True, short=True),
        heads_of=ada_heads(0.2, 32),
    ),
    "ada-snapkv-kvpress": keeps_cheapest_of_layer(
        snapkv_scores(64, 5, "avg", group_first=False), protected=64, safe=0.2
    ),
    "paged-h2o": keeps_shared(h2o_scores, protected=32, sinks=32, page=32),
    "paged-h2o-openvino": keeps_shared(per_query(h2o_scores), protected=128, sinks=32, page=32),
    "scissorhands": keeps(often_important, protected=10),
    "lazyeviction": keeps(hit_again, protected=175),
    "windowkv": keeps_shared(window_scores(32), protected=32),
    "windowkv-average": keeps_shared(window_scores(16, best=8), protected=16),
    "tova": keeps_shared(newest_query, protected=1),
    "pyramidinfer": keeps_narrowing,
    "compresskv": keeps_shared(semantic, protected=8, layers_of=error_layers),
    "a2sf": keeps(forgetting(0.95), protected=16),
    "a2sf-f20": keeps(forgetting(0.2), protected=16),
    "kvzap-linear": keeps_globally(surrogate("linear"), protected=8, sinks=4),
    "kvzap-mlp": keeps_globally(surrogate("mlp"), protected=8, sinks=4),
    "predicted-reads": keeps_globally(predicted_or_claimed, protected=8, sinks=4),
    "predicted-reads-blind": BLIND,
    "matched:predicted-reads-blind": BLIND,
    "matched:kv-compress": keeps_globally(kvc_scores(8, 2, 7), protected=8),
    "keydiff": keeps(keydiff),
    "expected-attention": keeps(expected_attention, sinks=4),
    "compactor": keeps(compactor, protected=4, sinks=8),
    "kvzip": keeps_globally(unread, protected=1, sinks=4),
    "kvzip-plus": keeps_globally(unread, protected=1, sinks=4),
    "speckv": keeps(unread, protected=33),
    "speckv-sparse": keeps(unread, protected=33),
    "speckv-sparse-256": keeps(unread, protected=33),
    "epicache": keeps_cheapest_by_layer(unread, protected=1, sinks=4),
    "r-kv": keeps(mean_of_last, protected=8, choose=without_like()),
    "duo-heads": keeps_whole_heads(
        recency, lambda p: calibrated(p.layers, p.heads, 8)["head_budget"], protected=28, sinks=4
    ),
    "razor-attention": keeps_whole_heads(
        recency,
        lambda p: calibrated(p.layers, p.heads, 8)["retrieval_head"],
        protected_share=0.625,
        sinks=4,
    ),
    "triattention": keeps(centred),
    "kvmerger": keeps(h2o_scores, protected=8, choose=pivots_last()),
    "ems": keeps(global_local, protected=8),
    "kmeans:snapkv": keeps(SNAPKV, protected=8, choose=k_means()),
    "wide-pool": keeps_globally(wide_pool, protected=4),
    "shared-reads": keeps_globally(shared_reads, protected=2),
    "kv-compress": keeps_globally(kvc_scores(8, 2, 7), protected=8),
    "kv-compress-w8-l1": keeps_globally(kvc_scores(8, 1, 7), protected=8),
    "kv-compress-w32-l2": keeps_globally(kvc_scores(32, 2, 7), protected=32),
    "kv-compress-w32-l1": keeps_globally(kvc_scores(32, 1, 7), protected=32),
    "kv-compress-full-l2": keeps_globally(kvc_scores(None, 2, 1, distance=10), protected=32),
    "kv-compress-continual": keeps_globally(kvc_scores(32, 2, 7), protected=32),
}

KEEPS_OF_SHORT = {
    "paged-h2o-openvino": (
        16,
        keeps_shared(per_query(h2o_scores), protected=16, sinks=32, page=32),
    ),
    "lazyeviction": (24, keeps(hit_again, protected=24)),
}
"""Of methods that protect more than a short prompt has: how few of its newest tokens they do here,
and what is kept then."""


def _crushed(*, query_heads: bool) -> dict[str, Callable[[Prompt], Kept]]:
    """The KVCrush methods, with a bit for each query head or for each KV head."""

    def rows(of):
        return of if query_heads else None

    paged = {"protected": 32, "sinks": 32, "page": 32}
    return {
        "kvcrush:h2o": keeps(h2o_scores, protected=8, choose=crush(rows(h2o_rows))),
        "kvcrush-mean:h2o": keeps(
            h2o_scores, protected=8, choose=crush(rows(h2o_rows), anchor="mean")
        ),
        "kvcrush-alternating:h2o": keeps(
            h2o_scores, protected=8, choose=crush(rows(h2o_rows), anchor="alternating")
        ),
        "kvcrush:snapkv": keeps(SNAPKV, protected=8, choose=crush(rows(snapkv_rows))),
        "kvcrush-chunk8:snapkv": keeps(
            SNAPKV, protected=8, choose=crush(rows(snapkv_rows), unit=8)
        ),
        "kvcrush:pyramidkv-exact": keeps(
            SNAPKV,
            protected=8,
            layers_of=pyramid_layers(exact=True),
            choose=crush(rows(snapkv_rows)),
        ),
        "kvcrush-page32:paged-h2o": keeps_shared(
            h2o_scores, **paged, choose=crush(rows(h2o_rows), unit=32)
        ),
        "kvcrush-openvino-page32:paged-h2o": keeps_shared(
            h2o_scores, **paged, choose=crush(None, unit=32, openvino=True)
        ),
        "kvcrush-mean:kv-compress": keeps_globally(
            kvc_scores(8, 2, 7), protected=8, choose=crush(rows(kvc_rows), anchor="mean")
        ),
        "kvcrush-alternating-75:key-norm": keeps(
            low_key_norm, choose=crush(None, anchor="alternating", share=0.75)
        ),
    }


KEEPS |= _crushed(query_heads=True)
KEEPS_IN_POOL = KEEPS | _crushed(query_heads=False)
"""What a method keeps of a prompt that lies in the pool, where KV heads have one metric each."""

FULL_L2 = kvc_scores(None, 2, 1, distance=10)
SCORES: dict[str, Callable[[Prompt], Scores]] = {
    "random": random_scores,
    "streaming-llm": recency,
    "key-norm": low_key_norm,
    "h2o": h2o_scores,
    "h2o-decode": h2o_scores,
    "kvmerger": h2o_scores,
    "ems": global_local,
    "paged-h2o": h2o_scores,
    "paged-h2o-openvino": h2o_scores,
    "snapkv": SNAPKV,
    "snapkv-w32": SNAPKV_W32,
    "snapkv-w32-avg5": snapkv_scores(32, 5, "avg", group_first=False),
    "snapkv-w64-avg5": snapkv_scores(64, 5, "avg", group_first=False),
    "pyramidkv-exact": SNAPKV,
    "pyramidkv-faithful": SNAPKV,
    "pyramidkv-geometric": SNAPKV,
    "pyramidkv-entropy": SNAPKV,
    "pyramidkv-gini": SNAPKV,
    "fastgen": by_policy,
    "ada-snapkv": SNAPKV_W32,
    "ada-snapkv-a50": SNAPKV_W32,
    "ada-pyramidkv": SNAPKV_W32,
    "ada-snapkv-kvpress": snapkv_scores(64, 5, "avg", group_first=False),
    "scissorhands": often_important,
    "lazyeviction": hit_again,
    "windowkv": window_scores(32),
    "windowkv-average": window_scores(16, best=8),
    "tova": newest_query,
    "pyramidinfer": of_newest,
    "compresskv": semantic,
    "a2sf": forgetting(0.95),
    "a2sf-f20": forgetting(0.2),
    "kvzap-linear": surrogate("linear"),
    "kvzap-mlp": surrogate("mlp"),
    "predicted-reads": predicted,
    "predicted-reads-blind": predicted,
    "matched:predicted-reads-blind": predicted,
    "matched:kv-compress": kvc_scores(8, 2, 7),
    "keydiff": keydiff,
    "expected-attention": expected_attention,
    "compactor": compactor,
    "duo-heads": recency,
    "razor-attention": recency,
    "kvzip": unread,
    "kvzip-plus": unread,
    "speckv": unread,
    "speckv-sparse": unread,
    "speckv-sparse-256": unread,
    "epicache": unread,
    "r-kv": mean_of_last,
    "triattention": centred,
    "wide-pool": wide_pool,
    "shared-reads": shared_reads,
    "kv-compress": kvc_scores(8, 2, 7),
    "kv-compress-w8-l1": kvc_scores(8, 1, 7),
    "kv-compress-w32-l2": kvc_scores(32, 2, 7),
    "kv-compress-w32-l1": kvc_scores(32, 1, 7),
    "kv-compress-full-l2": FULL_L2,
    "kv-compress-continual": kvc_scores(32, 2, 7),
}
"""The metrics that a prompt's KVs come into the pool with; NaN where that decides nothing. What
pages, ages and shared choices make of them, they make when something is evicted."""
RESCORED: dict[str, Callable[..., np.ndarray]] = {"triattention": centred_row}
"""Methods whose metrics are computed anew when something goes: of a layer, a head, its keys, their
positions and the time."""
