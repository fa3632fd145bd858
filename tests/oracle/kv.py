"""One KV of one head, and what it costs to evict it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

UNWRITTEN = -1


@dataclass(frozen=True, eq=False)
class KV:
    """A key and a value [d] with the token position they came from and their eviction metric.

    `position` is -1 for a slot that was allocated and not yet written: its key and value are empty.
    """

    position: int
    k: np.ndarray = field(default_factory=lambda: np.zeros(0))
    v: np.ndarray = field(default_factory=lambda: np.zeros(0))
    metric: float = 0.0

    @property
    def written(self) -> bool:
        return self.position != UNWRITTEN

    def bits(self) -> tuple:
        """Everything that identifies this KV, with floats as bytes so that NaN equals itself."""
        if not self.written:
            return (UNWRITTEN,)
        metric = np.float32(self.metric).tobytes()
        return (self.position, self.k.tobytes(), self.v.tobytes(), metric)


def cost(kv: KV, seq_len: int, protected: int, sinks: int) -> float:
    """The metric, or infinity for what must stay.

    The last `protected` tokens are positions seq_len - protected … seq_len - 1, the sinks are
    positions 0 … sinks - 1; an unwritten slot has no KV to lose and is never chosen either.
    """
    if not kv.written or kv.position < sinks or kv.position >= seq_len - protected:
        return math.inf
    return float(kv.metric)
