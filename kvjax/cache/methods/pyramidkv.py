"""PyramidKV (Cai et al. 2024): SnapKV's scores, and less cache from layer to layer.

With B = C − window tokens on average, the first layer keeps 2·B − ⌊B/β⌋, the last ⌊B/β⌋, the ones
between a linear schedule, each with its window on top; β = 20. Prompts below 2·B tokens get a
uniform split. The authors' code floors the step between layers, which keeps more than the cap: up
to 27 % more at C = 128 and 80 layers. `pyramidkv-faithful` does so too, and holds more memory than
the others at the same cap; `pyramidkv-exact` keeps the schedule on its real line and the cap.
"""

import dataclasses

from kvjax.cache.methods.base import Allocation, Method
from kvjax.cache.methods.snapkv import METHODS as SNAPKV

METHODS: tuple[Method, ...] = tuple(
    dataclasses.replace(
        SNAPKV[0],
        name=f"pyramidkv-{name}",
        summary=f"SnapKV's scores, linearly fewer blocks from layer to layer, {name} budgets",
        allocation=Allocation("pyramid", "uniform", exact=name == "exact"),
    )
    for name in ("exact", "faithful")
)
