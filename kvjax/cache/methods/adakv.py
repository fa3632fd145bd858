"""Ada-KV (Feng et al. 2024): heads of a layer share a budget by where the layer's attention is.

In each layer the H · base largest scores over all heads are counted per head, base = C − window; a
head gets round((1 − α) · count + ⌊α · base⌋) tokens and its window. Scores are SnapKV's 32 / 7 /
max, query heads averaged first, as in the authors' runs. α is 0.2 in their scripts and 0.5 in their
README. `ada-pyramidkv` splits PyramidKV's layer budgets so. What kvpress calls Ada-KV is another
rule: ⌊α · n⌋ KVs of each head are safe, of the rest the lowest of the layer go.
"""

import dataclasses

from kvjax.cache.methods.base import Allocation, Method
from kvjax.cache.methods.snapkv import METHODS as SNAPKV

_W32, _KVPRESS = SNAPKV[1], SNAPKV[3]

METHODS: tuple[Method, ...] = (
    *(
        dataclasses.replace(
            _W32,
            name=name,
            summary=f"SnapKV's scores, heads share their layer's budget, α {floor}",
            allocation=Allocation("uniform", "ada", floor=floor),
        )
        for name, floor in (("ada-snapkv", 0.2), ("ada-snapkv-a50", 0.5))
    ),
    dataclasses.replace(
        _W32,
        name="ada-pyramidkv",
        summary="PyramidKV's layer budgets, shared by the heads of a layer, α 0.2",
        allocation=Allocation("pyramid", "ada", floor=0.2),
    ),
    dataclasses.replace(
        _KVPRESS,
        name="ada-snapkv-kvpress",
        summary="SnapKV's scores, the cheapest blocks of each layer, a fifth of each head safe",
        allocation=Allocation("uniform", "cheapest", floor=0.2),
    ),
)
