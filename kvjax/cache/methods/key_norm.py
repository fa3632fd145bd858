"""Key norm (Devoto et al. 2024): the KVs whose keys have the lowest L2 norm stay.

Needs no attention: the metric is minus the norm, given to each KV when it is written. The paper's
exemption of the first two layers is not applied.
"""

from kvjax.cache.methods.base import Allocation, Method, Observation

METHODS = (
    Method(
        "key-norm",
        "the keys of lowest L2 norm",
        Observation(window=None, source="key-norm", pool=1),
        allocation=Allocation("uniform", "uniform"),
        query_aware=False,
        runs="both",
        evidence="U",
    ),
)
