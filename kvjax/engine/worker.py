"""The device's side of the engine: cache, slot states and the compiled steps over them.

Every method only dispatches work, where it does not say that it waits; what it returns lies on the
device. Steps are compiled when they are first needed.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.cache.policy import DecodeRule, Method
from kvjax.engine.calls import Calls, num_top
from kvjax.engine.compilation import StepCall
from kvjax.engine.decode import DecodeReport
from kvjax.engine.insert import InsertReport
from kvjax.engine.interrupts import released
from kvjax.engine.job import PromptJob
from kvjax.engine.request import Request
from kvjax.engine.sampling import FILTERED


class Worker(Calls):
    """Runs steps, each on the cache and the slot states that the one before left."""

    kept: PromptJob | None = None
    """A prompt whose scratch is kept; see `keeping_scratch`."""
    _keeps = False

    @contextlib.contextmanager
    def keeping_scratch(self) -> Iterator[None]:
        """For as long as it is open, the scratch of a prompt that is probed stays until another one
        begins: the same prompt with other probes does not run again."""
        self._keeps = True
        try:
            yield
        finally:
            self._keeps, self.kept = False, None

    def begin(self, request: Request) -> PromptJob:
        """`Calls.begin`, behind the chunks that have run where their scratch is kept."""
        job, kept = super().begin(request), self.kept
        if job.in_pool:
            return job
        if (
            kept is not None
            and job.probes
            and np.array_equal(kept.tokens, job.tokens)
            and kept.request.method.observer == request.method.observer
        ):
            job.prompt, job.logits, job.done = kept.prompt, kept.logits, kept.done
        else:
            # Never two scratches at once.
            self.kept = None
        return job

    def reset(self) -> None:
        """An empty cache and no running sequence; what compiled steps there are stay."""
        self.kept = None
        # Never two pools at once.
        self.cache = self.state = None  # type: ignore[assignment]
        self.cache, self.state = self._new_cache(), self._new_state()

    def alive(self) -> bool:
        """Whether cache and slot states are still there: an error or an interruption in the middle
        of a step loses those that were donated to it."""
        try:
            # Arrays that were given away raise, and so do those of a step that failed.
            jax.block_until_ready((self.cache, self.state))
        except Exception:
            return False
        return self.cache is not None and self.state is not None

    @property
    def compile_seconds(self) -> float:
        """Seconds of compilation so far."""
        return self.compiled.waited

    def on_host(self, tree: Any) -> Any:
        """What arrays of the device hold (waits for it)."""
        return jax.device_get(tree) if self.parallel is None else self.parallel.on_host(tree)

    def free_blocks(self) -> np.ndarray:
        """Blocks of each device's pool that nobody owns (waits for the device)."""
        return np.asarray(self.on_host(self.cache.free.count))

    def by_head(self, x: Any) -> np.ndarray:
        """What lies by place [L, places, …] on the devices, by the model's heads [L, H, …]."""
        x = np.asarray(x)
        return x if self.parallel is None else self.parallel.dealing.by_head(x)

    def kept_tokens(self, slot: int, length: int) -> np.ndarray:
        """Which of its first `length` tokens each head of a slot holds, bool [L, H, length]
        (waits for the device)."""
        table = np.asarray(self.on_host(self.cache.block_table[slot]))
        owned = int((table < self.shard_blocks).sum(-1).max())
        found = self.compiled.run(self.kept_call(table, owned))
        positions = self.by_head(self.on_host(found))
        kept = np.zeros((*positions.shape[:-1], length), bool)
        held = (positions >= 0) & (positions < length)
        layer, head = np.nonzero(held)[:2]
        kept[layer, head, positions[held]] = True
        return kept

    def advance(self, job: PromptJob) -> None:
        """Run the next chunk of a job, or the next probe."""
        if job.probing:
            self._probe(job)
            return
        if self.probing.drafts_first(job):
            self._prefill_sparsely(job)
            return
        if not job.in_pool and len(job.chunks) > 1 and job.prompt is None:
            job.prompt = self.scratch_maker(job)()
        size, call = job.next_chunk, self.chunk_call(job)
        if job.in_pool:
            self.cache, job.logits, job.fits, job.queries = self.compiled.run(call)
        else:
            self._compile_ahead(job, call)
            # Whole prompts take long and nothing is lost with them.
            with released() if len(job.chunks) == 1 else contextlib.nullcontext():
                job.prompt, job.logits = self.compiled.run(call)
        job.done += size
        if self._keeps and job.probing:
            self.kept = dataclasses.replace(job)

    def _probe(self, job: PromptJob) -> None:
        """Run the next probe of a job, with what a draft says behind it."""
        prompt, said = job.prompt, None
        assert prompt is not None
        # Nothing of the prompt is lost with it.
        with released():
            if self.probing.drafts_itself(job):
                said = self.compiled.run(self.probing.draft_call(job, prompt))
            elif job.probes[0].drafted:
                said = self.probing.said(job)
            found = self.compiled.run(self.probing.call(job, prompt, said))
        if job.sparse is not None:
            job.prompt, job.logits = found
        else:
            scores = dataclasses.replace(prompt.scores, metric=found)
            job.prompt = dataclasses.replace(prompt, scores=scores)
        del job.probes[0]

    def _prefill_sparsely(self, job: PromptJob) -> None:
        """Run a job's prompt with what another model drafts behind it."""
        size = job.next_chunk
        with released():
            call = self.probing.call(job, None, self.probing.said(job))
            self._compile_ahead(job, call)
            job.prompt, job.logits = self.compiled.run(call)
        job.probes.clear()
        job.done += size

    def _compile_ahead(self, job: PromptJob, chunk: StepCall) -> None:
        """Compile what comes after a chunk that is new together with it."""
        # Compilers for GPUs time kernels on the device: one at a time there.
        if chunk.key in self.compiled.seconds or jax.default_backend() != "cpu":
            return
        request, top = job.request, num_top([job.request])
        prompt, logits = chunk.step.eval_shape(*chunk.args)  # type: ignore[attr-defined]
        further = [] if self.probing.drafts_first(job) else self.probing.calls(job, prompt)
        if further and job.sparse is not None:
            last = further[-1]
            prompt, logits = last.step.eval_shape(*last.args)  # type: ignore[attr-defined]
        if not job.retains:
            further.append(self.place_call(request, prompt, 0, request.budget))
            further.append(self.start_call(request, 0, logits, self.fits, top))
        # The longest first: they share the cores.
        self.compiled.compile(
            [
                self.decode_call([0], self.grown(request.length), 1, request.method.decode, top),
                *further,
                chunk,
                self.empty_call([]),
            ]
        )

    def place(self, job: PromptJob, slot: int) -> jax.Array:
        """Put what a finished job keeps into an empty slot, and leave it there. Returns whether
        there was room."""
        call = self.place_call(job.request, job.prompt, slot, job.budget)
        self.cache, job.freed, _, ok = self.compiled.run(call)
        return ok

    def share(self, source: int, target: int) -> None:
        """Let an empty row hold what another one holds."""
        self.cache, _ = self.compiled.run(self.share_call(source, target))

    def restore(self, row: int, held: Mapping[str, np.ndarray]) -> bool:
        """Let an empty row hold what was saved. Returns whether there was room."""
        self.cache, ok = self.compiled.run(self.restore_call(row, held))
        return bool(ok)

    def insert(self, job: PromptJob, slot: int, num_top: int | None) -> InsertReport:
        """Put what a finished job keeps into an empty slot, and let it decode."""
        request = job.request
        if job.fits is None:
            # An interruption may come before it starts: it is not placed again.
            assert job.prompt is not None
            call = self.place_call(request, job.prompt, slot, request.budget)
            self.cache, job.freed, job.shortfall, job.fits = self.compiled.run(call)
            job.scores, job.prompt = job.prompt.scores, None
        call = self.start_call(request, slot, job.logits, job.fits, num_top)
        self.state, report = self.compiled.run(call)
        return dataclasses.replace(report, freed=job.freed, shortfall=job.shortfall)

    def decode(
        self,
        slots: Sequence[int],
        limit: int,
        rule: DecodeRule | None,
        num_top: int | None,
        longest: int,
        effort: int = FILTERED,
    ) -> list[DecodeReport]:
        """Up to `limit` tokens for every active one of `slots`; rows beyond them are padding.

        Args:
            slots: sequence slots, as many as may take part (`decode_tables`).
            limit: tokens of each.
            rule: what steps do to the numbers of each KV.
            num_top: likeliest tokens to report.
            longest: no head of theirs holds more KVs afterwards.
            effort: what choosing a token takes of them.

        Returns:
            What will be told of them, of all steps at once or of one after the other.
        """
        once = limit > 0 and self.decodes_once
        if once and self.compiled.flexible:
            key = self.once_key(len(slots), longest, rule, num_top, effort)
            once = key in self.compiled.seconds
        reports = []
        for _ in range(limit if once else 1):
            if once:
                call = self.once_call(slots, longest, rule, num_top, effort)
            else:
                call = self.decode_call(slots, longest, limit, rule, num_top)
            try:
                self.cache, self.state, report = self.compiled.run(call)
            except Exception:
                if not reports:
                    raise
                # Steps before it count; whoever comes next is told.
                break
            reports.append(report)
        return reports

    def compress(
        self,
        slots: Sequence[int],
        keep: Sequence[int],
        protected: Sequence[int],
        method: Method,
        most: int,
        longest: int,
        queries: jax.Array | None = None,
    ) -> jax.Array:
        """Compress `slots` to `keep` blocks each; returns the blocks each gives back.

        Args:
            slots: sequence slots.
            keep: their budgets.
            protected: newest tokens of each that stay, if that is more than their method protects.
            method: their method.
            most: KVs sorted at once.
            longest: no head of theirs holds more KVs.
            queries: of a prompt on its way in, where it is the only one (`PromptJob.queries`).
        """
        call = self.compress_call(slots, keep, protected, method, most, longest, queries=queries)
        self.cache, freed = self.compiled.run(call)
        return freed

    def empty(self, slots: Sequence[int]) -> None:
        """Free everything that `slots` hold."""
        self.cache, self.state = self.compiled.run(self.empty_call(slots))
