"""KV-Compress (Rehg 2024): squared attention, evicted block by block over all layers and heads.

Section 4.3 and 5.1. Names say the observation window and the norm: w8-L2 sums the squared
attention of the last 8 queries. Pooling 7 and protected = window as in the authors' runs; the
full-window variant leaves out the 10 queries after each key, does not pool and protects 32.
"""

from kvjax.cache.methods.base import Method, Observation


def _windowed(name: str, window: int, power: int, **observation) -> Method:
    norm = "squared attention" if power == 2 else "attention"
    return Method(
        name,
        f"{norm} of the last {window} queries, global block budget"
        + (", decode steps add to it" if observation.get("accumulate") else ""),
        Observation(window=window, power=power, **observation),
        protected=window,
        runs="both" if observation.get("accumulate") else "prefill",
        evidence="C",
    )


METHODS = (
    _windowed("kv-compress", 8, 2),
    _windowed("kv-compress-w8-l1", 8, 1),
    _windowed("kv-compress-w32-l2", 32, 2),
    _windowed("kv-compress-w32-l1", 32, 1),
    Method(
        "kv-compress-full-l2",
        "squared attention of every query at least 10 tokens later, global block budget",
        Observation(window=None, power=2, pool=1, excluded_distance=10),
        protected=32,
        query_aware=False,
        evidence="C",
    ),
    _windowed("kv-compress-continual", 32, 2, accumulate=True),
)
