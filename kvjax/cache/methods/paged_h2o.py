"""Paged H2O: whole pages of tokens, the same in all heads of a layer, by accumulated attention.

The base method of KVCrush's serving experiments and of OpenVINO GenAI: the scores of a page of 32
tokens are added, and the lowest pages between a start and a recent area go. `paged-h2o` protects
one page at either end; `paged-h2o-openvino` has OpenVINO's areas, 32 and 128 tokens, and its
default score, the sum divided by how many queries could see the token. Here cached tokens are
compared by their metrics of the prompt (one choice) or of all steps so far (each compression).
"""

from kvjax.cache.methods.base import Allocation, Method, Observation


def _paged(name: str, recent: int, *, per_age: bool) -> Method:
    return Method(
        name,
        f"pages of 32 tokens by accumulated attention{' per query' if per_age else ''}",
        Observation(window=None, power=1, pool=1, accumulate=True),
        protected=recent,
        sinks=32,
        allocation=Allocation("uniform", "uniform"),
        unit=32,
        shared=True,
        per_age=per_age,
        query_aware=False,
        runs="both",
        evidence="C",
    )


METHODS = (
    _paged("paged-h2o", 32, per_age=False),
    _paged("paged-h2o-openvino", 128, per_age=True),
)
