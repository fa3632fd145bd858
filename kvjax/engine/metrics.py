"""What an operator asks of an engine, as a dict and as Prometheus text."""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvjax.engine.beside import Beside
from kvjax.engine.request import RequestStats
from kvjax.engine.scheduler import Scheduler
from kvjax.engine.worker import Worker

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
PHASES = ("prefill", "probe", "compress", "decode", "compile", "host")
"""What the seconds of an engine's rounds went to; host is what the others leave."""


class EngineMetrics:
    """Counters, gauges and histograms of one engine, in a registry of their own."""

    def __init__(self, num_blocks: int):
        self.registry = registry = CollectorRegistry()

        def counter(name: str, help_: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"kvjax_{name}", help_, labels, registry=registry)

        def gauge(name: str, help_: str) -> Gauge:
            return Gauge(f"kvjax_{name}", help_, registry=registry)

        def histogram(name: str, help_: str) -> Histogram:
            return Histogram(f"kvjax_{name}", help_, registry=registry, buckets=_SECONDS)

        self.requests = counter("requests", "Requests accepted")
        self.refused = counter("requests_refused", "Requests refused when they came")
        self._ended = counter("requests_ended", "Requests ended, by reason", ("reason",))
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens prefilled, again included")
        self._continued = counter("prefix_hits", "Prompts that went on from a shared prefix")
        self._cached_tokens = counter("prefix_tokens", "Prompt tokens that shared prefixes held")
        self._probe_tokens = counter("probe_tokens", "Tokens run behind prompts to score them")
        self._output_tokens = counter("output_tokens", "Tokens generated")
        self._evicted = counter("evicted_blocks", "Blocks evicted, or never written")
        self._compressions = counter("compressions", "Compressions of running sequences")
        self.preemptions = counter("preemptions", "Requests preempted")
        self.failures = counter("rounds_failed", "Rounds that failed for no request's reason")
        self._stalls = counter(
            "compile_stall_seconds", "Seconds of compilation while other requests waited"
        )
        self._stall_count = counter("compile_stalls", "Compilations that other requests waited for")
        self._seconds = counter("seconds", "Seconds, by phase; host is what is left", ("phase",))
        for phase in PHASES:
            self._seconds.labels(phase)
        self._rounds = counter("rounds", "Rounds of the engine")
        self._decode_steps = counter("decode_steps", "Decode steps")
        self._kvs_read = counter("kvs_read", "KVs that decode steps attended to")
        self._waiting = gauge("requests_waiting", "Requests in the queue")
        self._running = gauge("requests_running", "Requests that decode")
        self._largest = gauge("batch_largest", "Most sequences of a decode step so far")
        self._used = gauge("blocks_used", "Blocks in use")
        self._free = gauge("blocks_free", "Blocks free")
        self._peak = gauge("blocks_peak", "Most blocks in use so far")
        self._compiled = gauge("compiled_steps", "Steps compiled")
        self._compile_seconds = gauge("compile_seconds", "Seconds that rounds spent on compilation")
        self._beside = counter("background_compilations", "Compilations beside the rounds")
        self._beside_seconds = counter("background_compile_seconds", "Seconds that they took")
        self._beside_now = gauge("background_compilations_under_way", "Those under way")
        self._compile_waits = gauge("requests_compiling", "Requests that wait for a compilation")
        self._first = histogram("time_to_first_token_seconds", "Arrival to first token")
        self._each = histogram("time_per_output_token_seconds", "Between tokens after the first")
        self._whole = histogram("request_seconds", "Arrival to end")
        self._num_blocks = num_blocks
        self._free.set(num_blocks)
        self._largest_batch = self._peak_used = 0
        self._in_phases = 0.0

    def spent(self, phase: str, seconds: float) -> None:
        """So many seconds of this round went to a phase."""
        self._in_phases += seconds
        self._seconds.labels(phase).inc(seconds)

    def compiled(self, seconds: float, *, stalled: bool) -> None:
        """So many seconds of this round went to compilation."""
        self.spent("compile", seconds)
        if stalled:
            self._stalls.inc(seconds)
            self._stall_count.inc()

    def compiled_beside(self, beside: Beside) -> None:
        """Take in what was compiled beside the rounds."""
        seconds = beside.take_finished()
        self._beside.inc(len(seconds))
        self._beside_seconds.inc(sum(seconds))
        self._beside_now.set(beside.under_way)
        self._compile_waits.set(beside.waiting)

    @contextlib.contextmanager
    def round(self, clock: Callable[[], float]) -> Iterator[None]:
        """One round of the engine; what its phases leave is the host's."""
        start, self._in_phases = clock(), 0.0
        yield
        self._rounds.inc()
        self.spent("host", max(0.0, clock() - start - self._in_phases))

    def decoded(self, tokens: np.ndarray, kvs: np.ndarray, heads: int) -> None:
        """Decode steps that yielded `tokens` [n, G], −1 where a sequence did not run.

        Each sequence holds `kvs` [G] KVs over its `heads` heads at the end.
        """
        ran = tokens >= 0
        batch, steps = ran.sum(axis=1), ran.sum(axis=0)
        self._kvs_read.inc(int((steps * (kvs - heads * (steps - 1) / 2)).sum()))
        self._output_tokens.inc(int(batch.sum()))
        self._decode_steps.inc(int((batch > 0).sum()))
        self._largest_batch = max(self._largest_batch, int(batch.max(initial=0)))

    def prefilled(self, num_tokens: int) -> None:
        """A prompt of so many tokens was started; its first token is one more generated."""
        self._prompt_tokens.inc(num_tokens)
        self._output_tokens.inc()

    def continued(self, num_tokens: int) -> None:
        """A prompt went on from a shared prefix of so many tokens."""
        self._continued.inc()
        self._cached_tokens.inc(num_tokens)

    def probed(self, num_tokens: int) -> None:
        """So many tokens were run behind a prompt to see what they read of it."""
        self._probe_tokens.inc(num_tokens)

    def evicted(self, blocks: int) -> None:
        """A prompt was written with so many blocks fewer than it had whole."""
        self._evicted.inc(blocks)

    def compressed(self, sequences: int, blocks: int) -> None:
        """So many running sequences gave back so many blocks together."""
        self._compressions.inc(sequences)
        self._evicted.inc(blocks)

    def ended(self, reason: str | None, stats: RequestStats, num_tokens: int) -> None:
        """An accepted request ended with so many tokens."""
        self._ended.labels(reason).inc()
        if stats.time_to_first_token is not None:
            self._first.observe(stats.time_to_first_token)
        each = stats.time_per_output_token(num_tokens)
        if each is not None:
            self._each.observe(each)
        if stats.finished is not None:
            self._whole.observe(stats.finished - stats.arrival)

    def note_free(self, free: int) -> None:
        """So many blocks are free at this moment."""
        self._peak_used = max(self._peak_used, self._num_blocks - free)

    def observe(self, scheduler: Scheduler, worker: Worker) -> None:
        """Bring the gauges up to date."""
        free, used = scheduler.accounts.num_free, scheduler.accounts.num_used
        self.note_free(free)
        self._waiting.set(len(scheduler.waiting) + (scheduler.prefilling is not None))
        self._running.set(len(scheduler.running))
        self._largest.set(self._largest_batch)
        self._used.set(used)
        self._free.set(free)
        self._peak.set(self._peak_used)
        self._compiled.set(len(worker.compiled.seconds))
        self._compile_seconds.set(worker.compile_seconds)

    def as_dict(self) -> dict[str, float]:
        """Every sample by name; labels follow in braces as Prometheus writes them."""
        samples = {}
        for family in self.registry.collect():
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
                samples[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
        return samples

    def prometheus(self) -> str:
        """The text that a Prometheus server scrapes."""
        return generate_latest(self.registry).decode()
