"""How a compression method states itself: as data, so that any step can be compiled from it."""

import dataclasses

from kvjax.cache.metrics import GroupReduction


@dataclasses.dataclass(frozen=True)
class Observation:
    """Which attention a method looks at and how it becomes one metric per KV."""

    window: int | None
    """Last queries of the prompt that are observed; None for all of them."""
    power: int = 2
    """1 sums the attention, 2 its squares."""
    pool: int = 7
    """Width of the max-pooling over neighbouring keys, per query head; 1 for none."""
    group: GroupReduction = "sum"
    """How the query heads of a KV head are joined, after pooling."""
    excluded_distance: int = 0
    """A key–query pair counts only if they are at least so many tokens apart."""
    accumulate: bool = False
    """Whether decode steps add their squared attention to the metric."""

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(f"window: got {self.window}, wanted at least 1 or None")
        if self.power not in (1, 2):
            raise ValueError(f"power: got {self.power}, wanted 1 or 2")
        if self.pool < 1 or self.pool % 2 == 0:
            raise ValueError(f"pool: got {self.pool}, wanted an odd number of at least 1")
        if self.excluded_distance < 0:
            raise ValueError(f"excluded_distance: got {self.excluded_distance}, wanted at least 0")


@dataclasses.dataclass(frozen=True)
class Method:
    """A named rule for what a compressed cache keeps."""

    name: str
    summary: str
    observation: Observation | None
    """What it observes; None for a method that never evicts."""
    protected: int = 0
    """Newest token positions that are never evicted."""
    sinks: int = 0
    """Oldest token positions that are never evicted."""

    def __post_init__(self):
        for field in ("protected", "sinks"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field}: got {getattr(self, field)}, wanted at least 0")

    @property
    def compresses(self) -> bool:
        return self.observation is not None
