"""TOVA (Oren et al. 2024): the attention of the newest query alone, the same tokens in all heads.

The mean over the heads of a layer decides; the newest token stays. Theirs drops one token per step;
here whole blocks go whenever the sequence is compressed, by the last step's attention.
"""

from kvjax.cache.methods.base import Allocation, Method, Observation

METHODS = (
    Method(
        "tova",
        "attention of the newest query, shared by the heads of a layer",
        Observation(window=1, power=1, pool=1, group="mean", accumulate=True, decode_decay=0.0),
        protected=1,
        allocation=Allocation("uniform", "uniform"),
        shared=True,
        runs="both",
        evidence="U",
    ),
)
