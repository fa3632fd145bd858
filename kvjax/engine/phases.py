"""Where the time of rounds goes."""

import contextlib
import logging
from collections.abc import Callable, Iterator

from kvjax.engine.intake import Intake
from kvjax.engine.metrics import EngineMetrics
from kvjax.engine.worker import Worker

log = logging.getLogger(__name__)


class Phases:
    """Counts the seconds of a phase, waiting for the device included and compilation apart."""

    def __init__(
        self,
        clock: Callable[[], float],
        worker: Worker,
        metrics: EngineMetrics,
        intake: Intake,
    ):
        self.clock, self.worker, self.metrics, self.intake = clock, worker, metrics, intake

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start, compiled = self.clock(), self.worker.compile_seconds
        yield
        seconds, compiled = self.clock() - start, self.worker.compile_seconds - compiled
        self.metrics.spent(name, max(0.0, seconds - compiled))
        if compiled:
            waiting = len(self.intake.open) - 1
            log.info("compiled for %.1f s (%s); %d other requests waited", compiled, name, waiting)
            self.metrics.compiled(compiled, stalled=waiting > 0)
