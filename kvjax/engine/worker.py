"""The device's side of the engine: cache, slot states and the compiled steps over them.

Every call only dispatches work; what it returns lies on the device. Steps are compiled for a few
sizes (prompt chunks, sequences in a visit, widths of block tables), each when it is first needed.
"""

import dataclasses
import functools
import time
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.cache import PagedCache, free_blocks, init_cache
from kvjax.cache.methods import METHODS, Method
from kvjax.engine import steps, visits
from kvjax.engine.config import EngineConfig
from kvjax.engine.interrupts import released
from kvjax.engine.request import Request
from kvjax.engine.sampling import MAX_LOGPROBS, sampling_row
from kvjax.engine.visits import StartReport, VisitReport
from kvjax.models.config import LlamaConfig

# Engines of equal sizes share what is compiled here.
_PREFILL = jax.jit(steps.prefill, static_argnums=(0, 1))
_PART = jax.jit(visits.prefill_part, static_argnums=(0, 1), donate_argnums=3)
_CHUNK = jax.jit(steps.prefill_chunk, static_argnums=(0, 1), donate_argnums=3)
_START = jax.jit(visits.start_slot, static_argnums=0, donate_argnums=2)
_ADMIT = jax.jit(visits.admit, static_argnums=(0, 1), donate_argnums=(2, 3))
_VISIT = jax.jit(visits.decode_visit, static_argnums=(0, 1, 2, 3), donate_argnums=(5, 6))
_COMPRESS = jax.jit(visits.compress_some, static_argnums=(0, 1, 2), donate_argnums=3)
_EMPTY = jax.jit(visits.empty, donate_argnums=(0, 1))

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
    prompt: steps.PromptKV | None = None
    scores: jax.Array | None = None
    fits: jax.Array | None = None
    """Whether the pool had room for the last chunk; only with `in_pool`."""

    @property
    def next_chunk(self) -> int:
        """Tokens of the next chunk; 0 once all have run."""
        sums = np.cumsum([0, *self.chunks])
        at = int(np.searchsorted(sums, self.done))
        return self.chunks[at] if at < len(self.chunks) else 0


class Worker:
    """Device state of `config.max_batch` sequences and the compiled steps over it."""

    def __init__(
        self,
        model: LlamaConfig,
        params: nnx.State,
        config: EngineConfig,
        *,
        num_blocks: int,
        max_len: int,
        dtype: jax.typing.DTypeLike,
        eos_ids: Sequence[int] = (),
    ):
        self.model, self.params, self.config = model, params, config
        self.eos_ids = jnp.asarray(tuple(eos_ids) or (-1,), jnp.int32)
        self.compilations: dict[Hashable, float] = {}
        """Seconds that each compiled step took to compile."""
        self._new_cache = functools.partial(
            init_cache,
            num_slots=config.max_batch,
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            num_blocks=num_blocks,
            max_blocks_per_head=-(-max_len // config.block_size),
            block_size=config.block_size,
            dtype=dtype,
        )
        self.cache: PagedCache = self._new_cache()
        self.state = visits.init_slots(config.max_batch)
        slots, width = config.max_batch, self.cache.max_blocks
        if jax.default_backend() == "cpu":
            self.visit_sizes = sizes_upto(slots, 1, 2)
            # Compressions are rare: fewer sizes, so that fewer are compiled.
            self.compress_sizes, self.compress_widths = (
                sizes_upto(n, 1, 4) for n in (slots, width)
            )
        else:
            # A decode step reads all weights whatever the batch, so rows without a sequence cost
            # little, and compiling for one more size costs much.
            self.visit_sizes = sizes_upto(slots, 64, 4)
            self.compress_sizes, self.compress_widths = (slots,), sizes_upto(width, 16, 8)

    def _run(self, key: Hashable, step: Any, *args: Any) -> Any:
        """`step(*args)`, compiled at the first call of each key with a note of the time."""
        if key not in self.compilations:
            start = time.perf_counter()
            # What is compiled here is what the call below finds.
            with released():
                step.lower(*args).compile()
            self.compilations[key] = time.perf_counter() - start
        return step(*args)

    def reset(self) -> None:
        """An empty cache and no running sequence; what compiled steps there are stay."""
        # Never two pools at once.
        self.cache = self.state = None  # type: ignore[assignment]
        self.cache, self.state = self._new_cache(), visits.init_slots(self.config.max_batch)

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
        return sum(self.compilations.values())

    def free_blocks(self) -> int:
        """Blocks of the pool that nobody owns (waits for the device)."""
        return int(free_blocks(self.cache))

    def begin(self, request: Request) -> PromptJob:
        """A job for a request's prompt, or for all its tokens after a preemption."""
        tokens = request.all_tokens
        length, chunk = len(tokens), self.config.prefill_chunk
        in_pool = length > self.config.prefill_scratch
        if request.method.votes and not in_pool:
            # What each query head sees is measured of whole prompts only.
            chunk = self.config.prefill_scratch
        parts = -(-length // chunk)
        # As even as can be, so that the last chunk fills an observation window.
        chunks = [length * (i + 1) // parts - length * i // parts for i in range(parts)]
        return PromptJob(request, tokens, chunks, in_pool)

    def chunk_bucket(self, job: PromptJob) -> int:
        """Tokens that the steps of a job are compiled for."""
        chunk = self.config.prefill_chunk
        grain = min(chunk, max(GRAIN, chunk // 16))
        return -(-max(job.chunks) // grain) * grain

    def advance(self, job: PromptJob) -> None:
        """Run the next chunk of a job."""
        size, method, bucket = job.next_chunk, job.request.method, self.chunk_bucket(job)
        tokens = np.zeros(bucket, np.int32)
        tokens[:size] = job.tokens[job.done : job.done + size]
        length = np.int32(size)
        if job.in_pool:
            slot = np.int32(job.request.slot or 0)
            self.cache, job.scores, job.fits = self._run(
                ("chunk", method, bucket),
                _CHUNK, self.model, method, self.params, self.cache, slot, tokens, length,
            )  # fmt: skip
        elif len(job.chunks) == 1:
            # Takes long and nothing is lost with it.
            with released():
                job.prompt, job.scores = self._run(
                    ("prefill", method, bucket),
                    _PREFILL, self.model, method, self.params, tokens, length,
                )  # fmt: skip
        else:
            room = len(job.chunks) * bucket
            if job.prompt is None:
                dtype = jax.tree.leaves(self.params)[0].dtype
                job.prompt = visits.empty_prompt(self.model, room, dtype)
            job.prompt, job.scores = self._run(
                ("part", method, bucket, room),
                _PART, self.model, method, self.params, job.prompt, tokens, length,
            )  # fmt: skip
        job.done += size

    def start(self, job: PromptJob, slot: int, num_top: int | None) -> StartReport:
        """Put what a finished job keeps into an empty slot, and let it decode."""
        request, cache = job.request, self.cache
        assert job.scores is not None
        start = visits.Start(
            np.int32(request.remaining),  # type: ignore[arg-type]
            np.bool_(not request.sampling.ignore_eos),  # type: ignore[arg-type]
            np.bool_(decode_rule(request.method) is not None),  # type: ignore[arg-type]
            sampling_row(request.sampling),
        )
        if job.in_pool:
            self.state, report = self._run(
                ("start", num_top),
                _START, num_top, cache, self.state, np.int32(slot), job.scores, start,
                self.eos_ids, job.fits,
            )  # fmt: skip
            return report
        whole = not request.compressed_first
        keep = NO_BUDGET if whole else request.budget
        assert keep is not None
        assert job.prompt is not None
        method = None if whole else request.method
        room = job.prompt.k.shape[1]
        self.cache, self.state, report = self._run(
            ("admit", method, room, num_top),
            _ADMIT, method, num_top, cache, self.state, np.int32(slot), job.prompt,
            np.int32(keep), job.scores, start, self.eos_ids,
        )  # fmt: skip
        return report

    def visit(
        self, slots: Sequence[int], limit: int, method: Method, num_top: int | None
    ) -> VisitReport:
        """Up to `limit` tokens for every active one of `slots`; rows beyond them are padding."""
        group = fitting(len(slots), self.visit_sizes)
        num_steps = self.config.steps_per_visit
        self.cache, self.state, report = self._run(
            ("visit", method, group, num_top),
            _VISIT, self.model, method, num_steps, num_top, self.params, self.cache, self.state,
            self._padded(slots, group), np.int32(min(limit, num_steps)), self.eos_ids,
        )  # fmt: skip
        return report

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
        columns = fitting(-(-longest // self.config.block_size), self.compress_widths)
        keeps, stay = np.zeros((2, group), np.int32)
        keeps[: len(keep)], stay[: len(protected)] = keep, protected
        self.cache, freed = self._run(
            ("compress", method, most, columns, group),
            _COMPRESS, method, most, columns, self.cache, self._padded(slots, group), keeps, stay,
        )  # fmt: skip
        return freed

    def empty(self, slots: Sequence[int]) -> None:
        """Free everything that `slots` hold."""
        marked = np.zeros(self.config.max_batch, bool)
        marked[list(slots)] = True
        self.cache, self.state = self._run("empty", _EMPTY, self.cache, self.state, marked)

    def warm_up(self, request: Request, num_top: int | None = None) -> None:
        """Compile every step that requests like this one need, by running each on nothing."""
        outside = self.config.max_batch
        job = self.begin(request)
        if not job.in_pool:
            while job.next_chunk:
                self.advance(job)
            # A slot that does not exist refuses the prompt.
            self.start(job, outside, num_top)
        method = request.method if decode_rule(request.method) else METHODS["full"]
        for group in self.visit_sizes:
            self.visit([outside] * group, 0, method, num_top)
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
        padded = np.full(group, self.config.max_batch, np.int32)
        padded[: len(slots)] = slots
        return padded


def decode_rule(method: Method) -> tuple | None:
    """What decode steps do to the metrics of a method's sequences; None for nothing.

    Sequences of one rule share a compiled step.
    """
    seen = method.observation
    if seen is None or not (seen.accumulate or seen.intrinsic):
        return None
    if seen.intrinsic:
        return seen.source, seen.seed
    return seen.power, seen.decode_decay


def num_top(requests: Sequence[Request]) -> int | None:
    """Likeliest tokens to report: few values, as each is compiled."""
    wanted = [r.sampling.logprobs for r in requests if r.sampling.logprobs is not None]
    if not wanted:
        return None
    return MAX_LOGPROBS if max(wanted) else 0
