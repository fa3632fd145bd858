"""What was dispatched and has not reported yet, and what its reports do to requests."""

from collections.abc import Callable, Collection, Iterable, Sequence

import jax
import numpy as np

from kvjax.engine.decisions import Decision, Decode
from kvjax.engine.decode import DecodeReport, joined, needed
from kvjax.engine.insert import InsertReport
from kvjax.engine.job import PromptJob
from kvjax.engine.metrics import EngineMetrics
from kvjax.engine.outbox import Outbox
from kvjax.engine.phases import Phases
from kvjax.engine.request import FinishReason, Request
from kvjax.engine.scheduler import Scheduler
from kvjax.engine.worker import Worker


class Reports:
    """Prompts that were put into their slots and decode steps, until the device has said what came
    of them.

    Args:
        worker: the device.
        scheduler: what is told of them.
        outbox: where requests with new tokens are noted; `emit` brings them out.
        metrics: of the engine.
        phase: where waiting is counted.
        eos_ids: tokens that end a sequence.
        run: carries out what the scheduler decides on it.
        end: ends a request.
        emit: the texts that are noted, and what the scheduler learns of them.
    """

    def __init__(
        self,
        worker: Worker,
        scheduler: Scheduler,
        outbox: Outbox,
        metrics: EngineMetrics,
        phase: Phases,
        *,
        eos_ids: Collection[int],
        run: Callable[[Iterable[Decision]], None],
        end: Callable[[Request, FinishReason], None],
        emit: Callable[[], None],
    ):
        self.worker, self.scheduler, self.outbox = worker, scheduler, outbox
        self.metrics, self.phase, self.eos_ids = metrics, phase, frozenset(eos_ids)
        self._run, self._end, self._emit = run, end, emit
        self._heads = worker.model.num_layers * worker.model.num_kv_heads
        self.forget()

    def forget(self) -> None:
        """Nothing is awaited any more."""
        self.starts: list[tuple[PromptJob, InsertReport]] = []
        """Prompts that were put into their slots, and what the device will say of it."""
        self.loops: list[tuple[Decode, list[DecodeReport]]] = []
        """Decode steps that were dispatched, likewise."""
        self.held: list[tuple[Decode, list[DecodeReport]]] = []
        """The last of those before, which runs while the next ones are decided."""

    def collect(self, chunk: jax.Array | None, hold: bool) -> None:
        """Wait for the device and take in what it reports.

        Args:
            chunk: what runs before all that is awaited.
            hold: whether the device is to have work meanwhile: a last step may report later.
        """
        # Who has ended since its prompt went to its slot has had its last output.
        starts = [start for start in self.starts if start[0].request.finish_reason is None]
        if not self.loops:
            self.starts = starts
            return
        self.starts, (loops, self.loops) = [], (self.loops, [])
        if chunk is not None:
            with self.phase("prefill"):
                jax.block_until_ready(chunk)
        refused = self._collect_starts(starts) if starts else []
        if hold and not starts:
            loops, self.held = self._held_back(loops)
        reports = self._told(loops)
        self.scheduler.accounts.free[:] = reports[-1].free
        # Before those that ended leave, and before anything is compressed.
        self.metrics.note_free(self.scheduler.accounts.num_free)
        for request, freed in refused:
            self._run(self.scheduler.refuse(request, freed))
        progress = False
        for (decode, _), report in zip(loops, reports, strict=True):
            progress |= self._decoded(decode.requests, report)
        short = [decode for (decode, _), report in zip(loops, reports) if not report.ok]
        if short:
            self.collect_held()
        self._run(self.scheduler.settle(short, progress))

    def collect_held(self, *, alone: bool = False) -> None:
        """Take in what the device says of the step that was held back, if any was.

        Args:
            alone: whether the device has nothing to do behind it: blocks that it took are counted
                then, and otherwise with what reports next.
        """
        if not self.held:
            return
        loops, self.held = self.held, []
        for (decode, _), report in zip(loops, self._told(loops), strict=True):
            self._decoded(decode.requests, report)
        if alone:
            self.scheduler.accounts.free[:] = self.worker.free_blocks()

    def _told(self, loops: Sequence[tuple[Decode, list[DecodeReport]]]) -> list[DecodeReport]:
        """What the device says of decode steps (waits for it)."""
        with self.phase("decode"):
            told = self.worker.on_host([needed(reports) for _, reports in loops])
        return [joined(steps) for steps in told]

    def _held_back(self, loops: list[tuple[Decode, list[DecodeReport]]]) -> tuple[list, list]:
        """Decode steps without the last one, and that one, where the device would have nothing to
        do while this round's reports are taken in and the next round is decided."""
        (decode, reports), *others = loops
        last = all(r.remaining <= len(reports) for r in decode.requests)
        # Of a single sequence one report is worth as much as all steps behind it.
        if others or last or min(len(reports), len(decode.requests)) < 2:
            return loops, []
        return [(decode, reports[:-1])], [(decode, reports[-1:])]

    def _collect_starts(
        self, starts: Sequence[tuple[PromptJob, InsertReport]]
    ) -> list[tuple[Request, int]]:
        """First tokens are emitted while the decode steps behind them run.

        Returns the requests whose prompts found no room, and the blocks that were free.
        """
        with self.phase("prefill"):
            jax.block_until_ready([job.logits for job, _ in starts])
        if probed := [job.scores for job, _ in starts if job.request.method.probed]:
            with self.phase("probe"):
                jax.block_until_ready(probed)
        with self.phase("compress"):
            reports = self.worker.on_host([started for _, started in starts])
        now, refused = self.phase.clock(), []
        for (job, _), report in zip(starts, reports, strict=True):
            if report.ok:
                self._started(job.request, report, now)
            else:
                refused.append((job.request, int(report.freed)))
        self._emit()
        return refused

    def _started(self, request: Request, report: InsertReport, now: float) -> None:
        """A prompt is in its slot, and has its first token."""
        stats = request.stats
        if stats.first_token is None:
            stats.first_token = now
            stats.blocks_before = request.blocks_whole(len(request.prompt))
            kept = self.worker.by_head(report.kept)
            stats.blocks_after = int((-(-kept // request.block_size)).sum())
            stats.kept, stats.shortfall = kept, int(report.shortfall)
            stats.blocks_evicted_decoding = 0
            if request.report_kept and request.slot is not None:
                with self.phase("compress"):
                    stats.kept_tokens = self.worker.kept_tokens(request.slot, len(request.prompt))
        self.metrics.evicted(int(report.freed))
        self.metrics.prefilled(request.length - request.held)
        log_probs = None
        if report.log_probs is not None:
            log_probs = jax.tree.map(lambda x: x[None], report.log_probs)
        if request.note_tokens(np.asarray([report.token]), log_probs, 0):
            self.outbox.note(request)
        if not report.active:
            # Its decode steps may tell so much later, or never where it is preempted before.
            self.stopped(request)

    def _decoded(self, requests: Sequence[Request], report: DecodeReport) -> bool:
        """What decode steps did to some requests. Returns whether any has new tokens."""
        tokens = np.asarray(report.tokens)
        here = [column for column, request in enumerate(requests) if request.slot is not None]
        self.scheduler.accounts.report(
            [requests[column].slot or 0 for column in here],
            *(np.asarray(x)[here] for x in (report.owned, report.longest, report.growth)),
        )
        for column in here:
            request = requests[column]
            if request.finish_reason is None:
                if request.note_tokens(tokens[:, column], report.log_probs, column):
                    self.outbox.note(request)
                if not report.active[column]:
                    self.stopped(request)
        self.metrics.decoded(tokens, np.asarray(report.kvs), self._heads)
        return bool((tokens[:, : len(requests)] >= 0).any())

    def at_eos(self, request: Request) -> bool:
        """Whether its last token ends it."""
        last = request.tokens[-1] if request.tokens else -1
        return last in self.eos_ids and not request.sampling.ignore_eos

    def stopped(self, request: Request) -> None:
        """Say why the device stopped it."""
        self._end(request, "eos" if self.at_eos(request) else "length")
