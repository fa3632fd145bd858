"""H2O (Zhang et al. 2023): heavy hitters, the tokens that received the most attention so far.

`h2o` is the baseline of the KV-Compress and PyramidKV papers: one choice after the prompt, by the
column sums of the whole causal attention matrix, beside the last 8 tokens. `h2o-decode` is the
authors' own system (`modify_llama.py`): decode steps go on adding, half of the cache is for the
newest tokens, and the choice is made again and again. Here it is made whenever the sequence is
compressed (`compress_every`) and in whole blocks, where theirs drops one KV in every step. The
query heads of a KV head are added; the authors' models have one query head per KV head.
"""

from kvjax.cache.methods.base import Allocation, Method, Observation

_UNIFORM = Allocation("uniform", "uniform")

METHODS = (
    Method(
        "h2o",
        "attention received from all queries of the prompt",
        Observation(window=None, power=1, pool=1),
        protected=8,
        allocation=_UNIFORM,
        query_aware=False,
        evidence="C",
    ),
    Method(
        "h2o-decode",
        "attention received from all queries so far; half of the cache for the newest tokens",
        Observation(window=None, power=1, pool=1, accumulate=True),
        protected_share=0.5,
        allocation=_UNIFORM,
        query_aware=False,
        runs="both",
        evidence="C",
    ),
)
