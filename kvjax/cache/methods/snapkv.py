"""SnapKV (Li et al. 2024): attention of the last queries, pooled over neighbouring keys.

The window itself is kept and takes no part in pooling. Four settings are in use and differ in
window / pooling width / kind: `snapkv` is 8 / 7 / max, that of the PyramidKV runner, which the
KV-Compress paper follows; `snapkv-w32` is 32 / 7 / max, the authors' LongBench configuration;
`snapkv-w64-avg5` is 64 / 5 / avg, the default of their class; `snapkv-w32-avg5` is what that
default was at first. Query heads are averaged before pooling, as the first two do with grouped
queries; the class default follows kvpress, which pools first.
"""

import dataclasses
from typing import ClassVar

from kvjax.cache.policy.allocate import ByLayer
from kvjax.cache.policy.attention import pooled, received, window_start
from kvjax.cache.policy.checks import check_attention, check_one_of
from kvjax.cache.policy.method import AttentionScorer, Method
from kvjax.cache.policy.pooling import PoolKind, reduce_group
from kvjax.cache.policy.score import Artefacts, LayerView, Scores
from kvjax.checks import check_flag


@dataclasses.dataclass(frozen=True)
class SnapKV(AttentionScorer):
    """Mean attention over the group, pooled over the keys before the window."""

    over_gaps: ClassVar[bool] = True

    window: int | None = 8
    """Last queries that are observed; None for all."""
    pool: int = 7
    pool_kind: PoolKind = "max"
    group_first: bool = True
    """Whether query heads are averaged before pooling; otherwise each is pooled by itself."""

    def __post_init__(self):
        check_attention(self)
        check_one_of("pool_kind", self.pool_kind, PoolKind)
        check_flag("group_first", self.group_first)

    def score(self, view: LayerView, artefacts: Artefacts) -> Scores:
        given = received(view, self.window)

        def joined(rows):
            before = window_start(view, self.window)
            return pooled(view, rows, self.pool, self.pool_kind, before=before)

        heads = joined(given)
        if self.group_first:
            return Scores(joined(reduce_group(given, "mean")[:, None])[:, 0], query_heads=heads)
        return Scores(reduce_group(heads, "mean"), query_heads=heads)


def _snapkv(name: str, window: int, pool: int, kind: PoolKind, *, group_first: bool) -> Method:
    return Method(
        name,
        f"attention of the last {window} queries, {kind}-pooled over {pool} keys",
        SnapKV(window, pool, kind, group_first),
        allocator=ByLayer(),
        protected=window,
        evidence="C",
    )


METHODS = (
    _snapkv("snapkv", 8, 7, "max", group_first=True),
    _snapkv("snapkv-w32", 32, 7, "max", group_first=True),
    _snapkv("snapkv-w32-avg5", 32, 5, "avg", group_first=False),
    _snapkv("snapkv-w64-avg5", 64, 5, "avg", group_first=False),
)
