"""A random choice of KVs in each head, the same in every run: what a method has to beat."""

from kvjax.cache.methods.base import Allocation, Method, Observation

METHODS = (
    Method(
        "random",
        "a seeded random choice in each head",
        Observation(window=None, source="random", pool=1),
        allocation=Allocation("uniform", "uniform"),
        query_aware=False,
        runs="both",
    ),
)
