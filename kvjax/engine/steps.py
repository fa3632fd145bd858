"""The jitted steps of an engine, on one device."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import Array, Int32

from kvjax.cache import share
from kvjax.cache.store import gathered, restored
from kvjax.engine import decode, insert, narrowing, prefill, probe, reclaim, sparse
from kvjax.engine.compilation import Step, StepName


def positions_of(
    position: Int32[Array, "N b"], table: Int32[Array, "L H M"]
) -> Int32[Array, "L H T"]:
    """Token position of each KV that some heads hold, −1 for none."""
    return gathered(position, table, -1).reshape(*table.shape[:2], -1)


@dataclasses.dataclass(frozen=True)
class StepFunction:
    """A pure function that is a step, and how it is compiled."""

    call: Callable[..., Any]
    num_static: int = 0
    """Its first arguments, so many, are static."""
    donated: tuple[int, ...] = ()
    """Positions of arguments that it may write to."""

    def jitted(self, call: Callable[..., Any] | None = None, **options: Any) -> Step:
        """The step, or another function of the same arguments, jitted as this one is."""
        return Step(
            call or self.call,
            static_argnums=tuple(range(self.num_static)),
            donate_argnums=self.donated,
            **options,
        )


FUNCTIONS: Mapping[StepName, StepFunction] = {
    "prefill": StepFunction(prefill.prefill, 2),
    "prefill narrowing": StepFunction(narrowing.prefill_narrowing, 3),
    "prefill sparse": StepFunction(sparse.prefill_sparse, 2),
    "prefill in scratch": StepFunction(prefill.prefill_in_scratch, 2, (4,)),
    "prefill in pool": StepFunction(prefill.prefill_in_pool, 2, (4,)),
    "draft": StepFunction(probe.draft, 2),
    "probe": StepFunction(probe.probe_again, 2),
    "start": StepFunction(insert.start, 2, (3,)),
    "place": StepFunction(insert.place, 0, (2,)),
    "share": StepFunction(share, 0, (0,)),
    "restore": StepFunction(restored, 0, (0,)),
    "decode": StepFunction(decode.decode, 5, (6, 7)),
    "decode once": StepFunction(decode.decode_once, 6, (7, 8)),
    "compress": StepFunction(reclaim.compress_slots, 2, (4,)),
    "empty": StepFunction(reclaim.empty, 0, (0, 1)),
    "kept": StepFunction(positions_of),
}
ON_ONE_DEVICE: Mapping[StepName, Callable[..., Any]] = {
    name: function.jitted() for name, function in FUNCTIONS.items()
}
"""Engines of equal sizes share what is compiled here."""
