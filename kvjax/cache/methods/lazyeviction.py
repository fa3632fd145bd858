"""LazyEviction (Zhang et al. 2025): KVs whose last hit is old, measured by how far hits lie apart.

A hit is an attention above 10⁻⁴. With t the present, TS the last hit and MRI the longest interval
between two hits, KVs are ranked by 2σ(−(t − TS) / MRI) + 2σ(−1 / MRI); the newest 175 stay, about
the 80th percentile of the intervals. That the two terms are added, and the size kept, are not
confirmed; a KV without a hit counts as hit at its own position, intervals as at least 1. Here this
is one choice after the prompt. The original goes on while decoding, which would take two more
numbers per KV.
"""

from kvjax.cache.methods.base import Allocation, Method, Observation

METHODS = (
    Method(
        "lazyeviction",
        "how recently a KV was hit, by the longest time between its hits",
        Observation(window=None, power=1, pool=1, group="mean", statistic="recency"),
        protected=175,
        allocation=Allocation("uniform", "uniform"),
        query_aware=False,
        evidence="R",
    ),
)
