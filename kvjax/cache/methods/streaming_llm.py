"""StreamingLLM (Xiao et al. 2023): the first 4 tokens and the most recent ones.

The rule of the authors' `kv_cache.py`. Keys keep their original positions here, as in the papers'
runs; the authors' own system numbers them anew inside the cache.
"""

from kvjax.cache.methods.base import Allocation, Method, Observation

METHODS = (
    Method(
        "streaming-llm",
        "the first 4 tokens and the newest ones",
        Observation(window=None, source="position", pool=1),
        sinks=4,
        allocation=Allocation("uniform", "uniform"),
        query_aware=False,
        runs="both",
        evidence="C",
    ),
)
