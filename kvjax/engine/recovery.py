"""What becomes of a round that fails or is interrupted, and of an engine that cannot go on.

What belongs to a request ends that request, and the round goes on (`Engine.fail`). Where it belongs
to none, or the round was interrupted in the middle, the device may be ahead of what the host knows:
everything that runs comes again from the queue with the tokens that it has. Where the state on the
device is lost, the engine is `dead` until it is `reset`. Where there are several processes, none
knows what became of a step in the others: all of them end.
"""

import logging

from kvjax.engine.engine import Engine
from kvjax.engine.interrupts import held, released
from kvjax.errors import in_one_line

log = logging.getLogger(__name__)

MOST_FAILURES = 3
"""Rounds that fail in a row, for no request's reason, before the engine gives up."""


class Recovery:
    """Runs the rounds of an engine, such that whatever happens is told and nothing is wrong."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.dead: str | None = None
        """Why nothing runs any more; None while all is well."""
        self._under_way = False
        """Whether a round has begun and not come to its end."""
        self._failures = 0

    def step(self) -> None:
        """One round.

        Its outputs (those of the round before) are in `outbox.emitted` and, where nobody is called
        with them, in `intake`.
        """
        engine, outbox = self.engine, self.engine.outbox
        with held():
            if self._under_way:
                # The last one left by an interruption, and not where that does no harm.
                self._resume()
            outbox.emitted, outbox.interruption, released.interrupted = [], None, False
            engine.owner.in_round = self._under_way = True
            try:
                if self.dead is None:
                    engine.step()
                    self._failures = 0
            except Exception as error:
                self._failed(error)
            except BaseException:
                # What was let through has left nothing half done, but others may have done it.
                self._under_way = not released.interrupted or engine.agreement is not None
                raise
            finally:
                engine.owner.in_round = False
            if self.dead is not None:
                self._bury()
            self._under_way = False
        if outbox.interruption is not None:
            raise outbox.interruption

    def reset(self) -> None:
        """Make a new cache and go on. Open requests end with an error and the tokens they have."""
        self.die("reset() was called")
        self.engine.worker.reset()
        self.dead, self._under_way, self._failures = None, False, 0

    def die(self, reason: str) -> None:
        """Stop for good: open requests end with the reason and the tokens they have."""
        self._die(reason)
        self._bury()

    def _failed(self, error: Exception) -> None:
        """A round failed for a reason that belongs to no request."""
        log.error("a round failed", exc_info=error)
        self._failures += 1
        self.engine.metrics.failures.inc()
        if (agreement := self.engine.agreement) is not None:
            agreement.processes.end_together(f"a round failed ({in_one_line(error)})")
        if not self.engine.worker.alive():
            self._die(f"the device's state is lost ({in_one_line(error)})")
        elif self._failures >= MOST_FAILURES:
            self._die(f"{self._failures} rounds failed, the last one of {in_one_line(error)}")
        else:
            self._resume()

    def _resume(self) -> None:
        """Begin again with the tokens that the host knows of: all that run come from the queue."""
        engine = self.engine
        if engine.agreement is not None:
            engine.agreement.processes.end_together("a round was interrupted")
        if not engine.worker.alive():
            return self._die("the device's state was lost when a step was interrupted")
        log.warning("a round was left half way: all running requests are prefilled again")
        try:
            engine.worker.empty(range(engine.config.num_rows))
            engine.begin_again()
        except Exception as error:
            log.error("cannot go on", exc_info=error)
            self._die(in_one_line(error))

    def _die(self, reason: str) -> None:
        """Nothing can run any more: every open request ends with the reason."""
        self.dead = f"dead: {reason}"
        log.critical("%s; reset() makes a new cache", self.dead)
        self.engine.begin_again()

    def _bury(self) -> None:
        """Tell everybody."""
        engine = self.engine
        for request, _ in engine.intake.take_all():
            engine.end(request, "error", self.dead)
        engine.scheduler.restart([])
        engine.outbox.emit()
        engine.observe()
