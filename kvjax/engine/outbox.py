"""What is emitted, and to whom: the outputs of a round, to callbacks or to wait for `step`."""

import logging
from collections.abc import Callable

from kvjax.engine.intake import Intake
from kvjax.engine.metrics import EngineMetrics
from kvjax.engine.request import Request, RequestOutput
from kvjax.errors import in_one_line

log = logging.getLogger(__name__)


class Outbox:
    """Requests with something new."""

    def __init__(self, intake: Intake, metrics: EngineMetrics, clock: Callable[[], float]):
        self._intake, self._metrics, self._clock = intake, metrics, clock
        self._news: dict[str, None] = {}
        """Ids of requests with tokens or an end that has not been emitted, in order."""
        self.emitted: list[RequestOutput] = []
        """Outputs of this round that a callback has had, or that nobody waits for."""
        self.on_emitted: Callable[[], None] = lambda: None
        """Called once for all outputs of a round, after the callbacks."""
        self.interruption: BaseException | None = None
        """What interrupted a callback of this round, to be raised when the round has ended."""

    @property
    def pending(self) -> bool:
        """Whether anybody has something new that has not been emitted."""
        return bool(self._news)

    def note(self, request: Request) -> None:
        """A request has new tokens, or an end."""
        self._news[request.id] = None

    def emit(self) -> list[Request]:
        """The outputs of all requests that have something new.

        Returns:
            Requests that ended by it and still run on the device.
        """
        stopped = []
        names, self._news = self._news, {}
        for name in names:
            request, text = self._intake.open[name]
            ended = request.finish_reason is not None
            try:
                output = text.emit(request, self._clock())
            except Exception as error:
                log.error("the text of request %r ends", name, exc_info=error)
                request.finish_reason, request.error = "error", in_one_line(error)
                output = text.output(request, self._clock())
            if output.finished:
                self._intake.close(request)
                self._metrics.ended(output.finish_reason, request.stats, len(request.tokens))
            try:
                self._deliver(request, output)
            except Exception as error:
                # Whoever raises ends its own request; the others go on.
                log.warning("on_output of request %r raised", name, exc_info=error)
                request.on_output = None
                if request.finish_reason is None:
                    self._intake.fail(request, f"on_output raised {type(error).__name__}: {error}")
            except BaseException as error:
                self.interruption = self.interruption or error
            if not ended and request.finish_reason is not None:
                stopped.append(request)
        self.on_emitted()
        return stopped

    def _deliver(self, request: Request, output: RequestOutput) -> None:
        if request.waits:
            self._intake.keep(output)
            return
        self.emitted.append(output)
        # Another thread may abandon the request meanwhile.
        if (on_output := request.on_output) is not None:
            on_output(output)
