"""The old place of what now runs any family: `kvjax.models.decoder`."""

from kvjax.models.decoder import (
    abstract_params,
    forward,
    init_params,
    is_stacked,
    logical_axes,
    logits,
)
from kvjax.models.family import Attend

__all__ = [
    "Attend",
    "abstract_params",
    "forward",
    "init_params",
    "is_stacked",
    "logical_axes",
    "logits",
]
