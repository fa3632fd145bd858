"""Scissorhands (Liu et al. 2023): what was important often will be important again.

Over the last 400 queries it counts how often a KV gets less than an even share of a query's
attention; the KVs that are most often so unimportant go, the newest 10 stay. Here this is one
choice after the prompt, each head keeps as much, and counts of the query heads are averaged. The
original repeats it while decoding and gives later layers more cache by weights that its paper does
not list. Known from a third party's code (cold-compress) only.
"""

from kvjax.cache.methods.base import Allocation, Method, Observation

METHODS = (
    Method(
        "scissorhands",
        "how many of the last 400 queries gave a KV an even share or more",
        Observation(window=400, power=1, pool=1, group="mean", statistic="hits"),
        protected=10,
        allocation=Allocation("uniform", "uniform"),
        query_aware=False,
        evidence="R",
    ),
)
