"""SnapKV (Li et al. 2024): attention of the last queries, pooled over neighbouring keys.

The window itself is kept and takes no part in pooling. Four settings are in use and differ in
window / pooling width / kind: `snapkv` is 8 / 7 / max, that of the PyramidKV runner, which the
KV-Compress paper follows; `snapkv-w32` is 32 / 7 / max, the authors' LongBench configuration;
`snapkv-w64-avg5` is 64 / 5 / avg, the default of their class; `snapkv-w32-avg5` is what that
default was at first. Query heads are averaged before pooling, as the first two do with grouped
queries; the class default follows kvpress, which pools first.
"""

from kvjax.cache.methods.base import Allocation, Method, Observation


def _snapkv(name: str, window: int, pool: int, kind, *, group_first: bool) -> Method:
    return Method(
        name,
        f"attention of the last {window} queries, {kind}-pooled over {pool} keys",
        Observation(
            window=window,
            power=1,
            pool=pool,
            pool_kind=kind,
            pool_window=False,
            group="mean",
            group_first=group_first,
        ),
        protected=window,
        allocation=Allocation("uniform", "uniform"),
        evidence="C",
    )


METHODS = (
    _snapkv("snapkv", 8, 7, "max", group_first=True),
    _snapkv("snapkv-w32", 32, 7, "max", group_first=True),
    _snapkv("snapkv-w32-avg5", 32, 5, "avg", group_first=False),
    _snapkv("snapkv-w64-avg5", 64, 5, "avg", group_first=False),
)
