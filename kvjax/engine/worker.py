"""The device's side of the engine: cache, slot states and the compiled steps over them.

Every call only dispatches work; what it returns lies on the device. Steps are compiled for a few
sizes (prompt chunks, sequences that decode, widths of block tables), each when it is first needed.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.cache import CacheSpec, PagedCache, free_blocks, init_cache, share
from kvjax.cache.policy import DecodeRule, Method, Scores
from kvjax.cache.store import restored
from kvjax.engine import decode, insert, prefill, reclaim, repeat
from kvjax.engine.compilation import CompiledSteps, StepCall, StepKey
from kvjax.engine.config import EngineConfig
from kvjax.engine.decode import DecodeReport
from kvjax.engine.insert import InsertReport, Start
from kvjax.engine.interrupts import released
from kvjax.engine.request import Request
from kvjax.engine.sampling import MAX_LOGPROBS, sampling_row
from kvjax.models.config import ModelConfig
from kvjax.models.rope import rope_artefacts

# Engines of equal sizes share what is compiled here.
_PREFILL = jax.jit(prefill.prefill, static_argnums=(0, 1))
_IN_SCRATCH = jax.jit(prefill.prefill_in_scratch, static_argnums=(0, 1), donate_argnums=4)
_IN_POOL = jax.jit(prefill.prefill_in_pool, static_argnums=(0, 1), donate_argnums=4)
_REPEAT = jax.jit(repeat.repeat_again, static_argnums=(0, 1))
_START = jax.jit(insert.start, static_argnums=0, donate_argnums=2)
_PLACE = jax.jit(insert.place, donate_argnums=2)
_SHARE = jax.jit(share, donate_argnums=0)
_RESTORE = jax.jit(restored, donate_argnums=0)
_INSERT = jax.jit(insert.insert, static_argnums=0, donate_argnums=(3, 4))
_DECODE = jax.jit(decode.decode, static_argnums=(0, 1, 2, 3), donate_argnums=(5, 6))
_COMPRESS = jax.jit(reclaim.compress_slots, static_argnums=(0, 1), donate_argnums=4)
_EMPTY = jax.jit(reclaim.empty, donate_argnums=(0, 1))
_POSITIONS = jax.jit(
    lambda position, table: (
        position.at[table].get(mode="fill", fill_value=-1).reshape(*table.shape[:2], -1)
    )
)

GRAIN = 128
"""Chunks are padded to a multiple of at least so many tokens, so that few shapes are compiled."""
NO_BUDGET = 2**31 - 1
"""Blocks to keep where nothing is to be evicted."""


def sizes_upto(most: int, first: int, factor: int) -> tuple[int, ...]:
    """first, first · factor, … below `most`, and `most` itself."""
    found = []
    while first < most:
        found.append(first)
        first *= factor
    return (*found, most)


def fitting(size: int, sizes: Sequence[int]) -> int:
    """The least of some ascending sizes that holds `size`; the last if none does."""
    return next((one for one in sizes if one >= size), sizes[-1])


@dataclasses.dataclass(eq=False)
class PromptJob:
    """A prompt on its way through the model, chunk by chunk."""

    request: Request
    tokens: np.ndarray
    chunks: list[int]
    in_pool: bool
    """Too long for the scratch: its chunks go to its slot at once, compressed in between."""
    done: int = 0
    start: int = 0
    """Tokens before the first chunk: its slot held them when it began."""
    retains: bool = False
    """Whether what has run is retained after the last chunk."""
    prompt: prefill.PromptKV | None = None
    logits: jax.Array | None = None
    """After the last chunk."""
    fits: jax.Array | None = None
    """Whether the pool had room for the last chunk; only with `in_pool`."""
    repetitions: list[np.ndarray] = dataclasses.field(default_factory=list)
    """What is still to run behind the prompt, for a method that has it repeated."""

    @property
    def repeating(self) -> bool:
        """Whether all chunks have run and the prompt is being repeated."""
        return self.done == len(self.tokens) and bool(self.repetitions)

    @property
    def budget(self) -> int | None:
        """Blocks that its tokens keep where they are retained."""
        return self.request.budget_at(len(self.tokens))

    @property
    def next_chunk(self) -> int:
        """Tokens of the next chunk, or of the next repetition; 0 once all have run."""
        if self.repeating:
            return len(self.repetitions[0])
        sums = np.cumsum([self.start, *self.chunks])
        at = int(np.searchsorted(sums, self.done))
        return self.chunks[at] if at < len(self.chunks) else 0


class Worker:
    """Device state of `config.max_batch` sequences and the compiled steps over it."""

    def __init__(
        self,
        model: ModelConfig,
        params: nnx.State,
        config: EngineConfig,
        *,
        spec: CacheSpec,
        num_blocks: int,
        max_len: int,
        eos_ids: Sequence[int] = (),
        artefacts: Mapping[str, jax.Array] | None = None,
    ):
        self.model, self.params, self.config = model, params, config
        self.eos_ids = jnp.asarray(tuple(eos_ids) or (-1,), jnp.int32)
        self.artefacts = {**(artefacts or {}), **rope_artefacts(model)}
        """Arrays by name, for methods that read them: calibrated ones, and RoPE's frequencies."""
        self.repeat_request: Sequence[int] = ()
        """Tokens that ask the model to repeat a prompt, for methods that have it repeated."""
        self._repeat_artefacts: dict[str, jax.Array] | None = None
        self.planes = tuple(plane.name for plane in spec.planes)
        """Further numbers per KV that the pool has room for."""
        self.compiled = CompiledSteps()
        self._new_cache = functools.partial(
            init_cache,
            num_slots=config.num_rows,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            num_blocks=num_blocks,
            max_blocks_per_head=spec.blocks_per_head(max_len),
            block_size=spec.block_size,
            codec=spec.codec,
            planes=spec.planes,
            sharing=config.sharing,
        )
        self.cache: PagedCache = self._new_cache()
        self.state = decode.init_slots(config.num_rows)
        slots, width = config.max_batch, self.cache.max_blocks
        if jax.default_backend() == "cpu":
            self.decode_sizes = sizes_upto(slots, 1, 2)
            # Compressions are rare: fewer sizes, so that fewer are compiled.
            self.compress_sizes, self.compress_widths = (
                sizes_upto(n, 1, 4) for n in (slots, width)
            )
        else:
            # A decode step reads all weights whatever the batch, so rows without a sequence cost
            # little, and compiling for one more size costs much.
            self.decode_sizes = sizes_upto(slots, 64, 4)
            self.compress_sizes, self.compress_widths = (slots,), sizes_upto(width, 16, 8)

    def reset(self) -> None:
        """An empty cache and no running sequence; what compiled steps there are stay."""
        # Never two pools at once.
        self.cache = self.state = None  # type: ignore[assignment]
        self.cache, self.state = self._new_cache(), decode.init_slots(self.config.num_rows)

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

    def free_blocks(self) -> int:
        """Blocks of the pool that nobody owns (waits for the device)."""
        return int(free_blocks(self.cache))

    def kept_tokens(self, slot: int, length: int) -> np.ndarray:
        """Which of its first `length` tokens each head of a slot holds, bool [L, H, length]
        (waits for the device)."""
        table = np.asarray(self.cache.block_table[slot])
        owned = int((table < self.cache.num_blocks).sum(-1).max())
        # Few widths, as each is compiled.
        width = min(table.shape[-1], 1 << max(0, owned - 1).bit_length())
        call = StepCall(
            StepKey("kept", sizes=(width,)), _POSITIONS, (self.cache.position, table[..., :width])
        )
        positions = np.asarray(self.compiled.run(call))
        kept = np.zeros((*table.shape[:-1], length), bool)
        held = (positions >= 0) & (positions < length)
        layer, head = np.nonzero(held)[:2]
        kept[layer, head, positions[held]] = True
        return kept

    def begin(self, request: Request) -> PromptJob:
        """A job for a request's prompt, or for all its tokens after a preemption.

        Where it shares, for those after what it continues, as far as they are retained.
        """
        plan, tokens = request.plan, request.all_tokens
        if plan is not None:
            tokens = tokens[: plan.until]
            if plan.match is not None:
                return self.go_on(request, tokens, plan.start, plan.match.logits, plan.retains)
        length, chunk = len(tokens), self.config.prefill_chunk
        in_pool = length > self.config.prefill_scratch
        if request.method.observer.query_heads and not in_pool:
            # What each query head sees is measured of whole prompts only.
            chunk = self.config.prefill_scratch
        parts = -(-length // chunk)
        # As even as can be, so that the last chunk fills an observation window.
        chunks = [length * (i + 1) // parts - length * i // parts for i in range(parts)]
        job = PromptJob(request, tokens, chunks, in_pool, retains=plan is not None)
        if request.method.repeats:
            size = min(repeat.CHUNK, self.config.prefill_chunk)
            job.repetitions = repeat.repetitions(self.repeat_request, tokens, size)
        return job

    def go_on(
        self,
        request: Request,
        tokens: np.ndarray,
        start: int,
        logits: jax.Array | None,
        retains: bool = False,
    ) -> PromptJob:
        """A job for tokens behind those that a slot holds, in the pool.

        Args:
            request: the request.
            tokens: all tokens of the job, the held ones among them.
            start: how many its slot holds.
            logits: after these.
            retains: whether they are retained when all have run.
        """
        length = len(tokens) - start
        parts = -(-length // self.config.prefill_chunk)
        chunks = [length * (i + 1) // parts - length * i // parts for i in range(parts)]
        return PromptJob(
            request, tokens, chunks, True, start, start, retains,
            logits=logits, fits=jnp.bool_(True),
        )  # fmt: skip

    def bucket(self, sizes: Iterable[int]) -> int:
        """Tokens that steps for chunks of some sizes are compiled for."""
        chunk = self.config.prefill_chunk
        grain = min(chunk, max(GRAIN, chunk // 16))
        return -(-max(sizes) // grain) * grain

    def advance(self, job: PromptJob) -> None:
        """Run the next chunk of a job, or the next repetition."""
        if job.repeating:
            assert job.prompt is not None
            call = self._repeat_call(job, job.prompt)
            # Nothing of the prompt is lost with it.
            with released():
                metric = self.compiled.run(call)
            job.prompt = dataclasses.replace(job.prompt, scores=Scores(metric))
            del job.repetitions[0]
            return
        size, call = job.next_chunk, self._chunk_call(job)
        if job.in_pool:
            self.cache, job.logits, job.fits = self.compiled.run(call)
        else:
            self._compile_ahead(job, call)
            # Whole prompts take long and nothing is lost with them.
            with released() if len(job.chunks) == 1 else contextlib.nullcontext():
                job.prompt, job.logits = self.compiled.run(call)
        job.done += size

    def _chunk_call(self, job: PromptJob) -> StepCall:
        size, bucket = job.next_chunk, self.bucket(job.chunks)
        observer = job.request.method.observer
        if job.in_pool or len(job.chunks) > 1:
            observer = observer.without_query_heads
        tokens = np.zeros(bucket, np.int32)
        tokens[:size] = job.tokens[job.done : job.done + size]
        length = np.int32(size)
        common = (self.model, observer, self.params, self.artefacts)
        if job.in_pool:
            key = StepKey("prefill in pool", observer, (bucket,))
            slot = np.int32(job.request.slot or 0)
            return StepCall(key, _IN_POOL, (*common, self.cache, slot, tokens, length))
        if len(job.chunks) == 1:
            key = StepKey("prefill", observer, (bucket,))
            return StepCall(key, _PREFILL, (*common, tokens, length))
        room = len(job.chunks) * bucket
        if job.prompt is None:
            dtype = jax.tree.leaves(self.params)[0].dtype
            job.prompt = prefill.empty_prompt(self.model, observer, room, dtype)
        key = StepKey("prefill in scratch", observer, (bucket, room))
        return StepCall(key, _IN_SCRATCH, (*common, job.prompt, tokens, length))

    def _repeat_call(self, job: PromptJob, prompt: Any) -> StepCall:
        scorer = repeat.scorer_behind(job.request.method.scorer, self.repeat_request)
        if scorer.artefacts and self._repeat_artefacts is None:
            self._repeat_artefacts = repeat.repeat_artefacts(self.model, self.params)
        artefacts = self._repeat_artefacts if scorer.artefacts else {}
        part, bucket = job.repetitions[0], self.bucket(map(len, job.repetitions))
        tokens = np.zeros(bucket, np.int32)
        tokens[: len(part)] = part
        key = StepKey("repeat", scorer, (bucket, prompt.k.shape[1]))
        args = (self.model, scorer, self.params, artefacts, prompt, tokens, np.int32(len(part)))
        return StepCall(key, _REPEAT, args)

    def _compile_ahead(self, job: PromptJob, chunk: StepCall) -> None:
        """Compile what comes after a chunk that is new together with it."""
        # Compilers for GPUs time kernels on the device: one at a time there.
        if chunk.key in self.compiled.seconds or jax.default_backend() != "cpu":
            return
        request, top = job.request, num_top([job.request])
        prompt, logits = chunk.step.eval_shape(*chunk.args)  # type: ignore[attr-defined]
        further = [self._repeat_call(job, prompt)] if job.repetitions else []
        if not job.retains:
            further.append(self._insert_call(request, prompt, logits, 0, top))
        self.compiled.compile(
            [
                chunk,
                *further,
                self._decode_call([0], 1, request.method.decode, top),
                self._empty_call([]),
            ]
        )

    def place(self, job: PromptJob, slot: int) -> jax.Array:
        """Put what a finished job keeps into an empty slot, and leave it there. Returns whether
        there was room."""
        assert job.prompt is not None
        request, keep = job.request, job.budget
        method = request.method.eviction if request.compressed_first else None
        parts = None if method is None else method.parts
        key = StepKey("place", parts, (job.prompt.k.shape[1],))
        keep = np.int32(NO_BUDGET if method is None or keep is None else keep)
        args = (method, self.artefacts, self.cache, job.prompt, keep, np.int32(slot))
        self.cache, _, _, ok = self.compiled.run(StepCall(key, _PLACE, args))
        return ok

    def share(self, source: int, target: int) -> None:
        """Let an empty row hold what another one holds."""
        args = (self.cache, np.int32(source), np.int32(target))
        self.cache, _ = self.compiled.run(StepCall(StepKey("share"), _SHARE, args))

    def restore(self, row: int, held: Mapping[str, np.ndarray]) -> bool:
        """Let an empty row hold what was saved. Returns whether there was room."""
        key = StepKey("restore", sizes=(len(held["metric"]),))
        args = (self.cache, np.int32(row), dict(held))
        self.cache, ok = self.compiled.run(StepCall(key, _RESTORE, args))
        return bool(ok)

    def insert(self, job: PromptJob, slot: int, num_top: int | None) -> InsertReport:
        """Put what a finished job keeps into an empty slot, and let it decode."""
        if job.in_pool:
            assert job.fits is not None
            new, key = self._start(job.request, slot, job.logits), StepKey("start", num_top=num_top)
            args = (num_top, self.cache, self.state, new, self.eos_ids, job.fits)
            self.state, report = self.compiled.run(StepCall(key, _START, args))
        else:
            call = self._insert_call(job.request, job.prompt, job.logits, slot, num_top)
            self.cache, self.state, report = self.compiled.run(call)
        return report

    def _start(self, request: Request, slot: int, logits: Any) -> Start:
        return Start(
            np.int32(slot),  # type: ignore[arg-type]
            logits,
            np.int32(request.remaining),  # type: ignore[arg-type]
            np.bool_(not request.sampling.ignore_eos),  # type: ignore[arg-type]
            np.bool_(request.method.decode is not None),  # type: ignore[arg-type]
            sampling_row(request.sampling),
        )

    def _insert_call(
        self, request: Request, prompt: Any, logits: Any, slot: int, num_top: int | None
    ) -> StepCall:
        whole = not request.compressed_first
        keep = NO_BUDGET if whole else request.budget
        assert keep is not None
        method = None if whole else request.method.eviction
        parts = None if method is None else method.parts
        args = (
            num_top, method, self.artefacts, self.cache, self.state, prompt, np.int32(keep),
            self._start(request, slot, logits), self.eos_ids,
        )  # fmt: skip
        return StepCall(StepKey("insert", parts, (prompt.k.shape[1],), num_top), _INSERT, args)

    def decode(
        self, slots: Sequence[int], limit: int, rule: DecodeRule | None, num_top: int | None
    ) -> DecodeReport:
        """Up to `limit` tokens for every active one of `slots`; rows beyond them are padding."""
        call = self._decode_call(slots, limit, rule, num_top)
        self.cache, self.state, report = self.compiled.run(call)
        return report

    def _decode_call(
        self, slots: Sequence[int], limit: int, rule: DecodeRule | None, num_top: int | None
    ) -> StepCall:
        group = fitting(len(slots), self.decode_sizes)
        num_steps = self.config.decode_steps_per_sync
        most = np.int32(min(limit, num_steps))
        args = (
            self.model, rule, num_steps, num_top, self.params, self.cache, self.state,
            self._padded(slots, group), most, self.eos_ids, self.artefacts,
        )  # fmt: skip
        return StepCall(StepKey("decode", rule, (group,), num_top), _DECODE, args)

    def compress(
        self,
        slots: Sequence[int],
        keep: Sequence[int],
        protected: Sequence[int],
        method: Method,
        most: int,
        longest: int,
    ) -> jax.Array:
        """Compress `slots` to `keep` blocks each; returns the blocks each gives back.

        Args:
            slots: sequence slots.
            keep: their budgets.
            protected: newest tokens of each that stay, if that is more than their method protects.
            method: their method.
            most: KVs sorted at once.
            longest: no head of theirs holds more KVs.
        """
        group = fitting(len(slots), self.compress_sizes)
        method = method.eviction
        columns = fitting(-(-longest // self.config.block_size), self.compress_widths)
        keeps, stay = np.zeros((2, group), np.int32)
        keeps[: len(keep)], stay[: len(protected)] = keep, protected
        key, padded = StepKey("compress", method.parts, (most, columns, group)), self._padded
        args = (
            most,
            columns,
            method,
            self.artefacts,
            self.cache,
            padded(slots, group),
            keeps,
            stay,
        )
        self.cache, freed = self.compiled.run(StepCall(key, _COMPRESS, args))
        return freed

    def empty(self, slots: Sequence[int]) -> None:
        """Free everything that `slots` hold."""
        self.cache, self.state = self.compiled.run(self._empty_call(slots))

    def _empty_call(self, slots: Sequence[int]) -> StepCall:
        marked = np.zeros(self.config.num_rows, bool)
        marked[list(slots)] = True
        return StepCall(StepKey("empty"), _EMPTY, (self.cache, self.state, marked))

    def warm_up(self, request: Request, num_top: int | None = None) -> None:
        """Compile every step that requests like this one need, by running each on nothing."""
        outside = self.config.num_rows
        job = self.begin(request)
        if not job.in_pool:
            while job.next_chunk:
                self.advance(job)
            # A slot that does not exist refuses the prompt.
            self.insert(job, outside, num_top)
        for group in self.decode_sizes:
            self.decode([outside] * group, 0, request.method.decode, num_top)
        if request.budget is not None:
            most = request.compression.max_kvs_per_step
            for group in self.compress_sizes:
                for width in self.compress_widths:
                    longest = width * self.config.block_size
                    slots = [outside] * group
                    self.compress(slots, slots, slots, request.method, most, longest)
        self.empty([])

    def _padded(self, slots: Sequence[int], group: int) -> np.ndarray:
        """The slots, and one out of range for the rest."""
        padded = np.full(group, self.config.num_rows, np.int32)
        padded[: len(slots)] = slots
        return padded


def num_top(requests: Sequence[Request]) -> int | None:
    """Likeliest tokens to report: few values, as each is compiled."""
    wanted = [r.sampling.logprobs for r in requests if r.sampling.logprobs is not None]
    if not wanted:
        return None
    return MAX_LOGPROBS if max(wanted) else 0
