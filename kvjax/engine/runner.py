"""Runs a model over a paged cache: plans the pool, compiles the steps, prefills and decodes.

A `Runner` owns the device state of a fixed number of sequence slots. It does not schedule: which
prompt goes to which slot, and when, is its caller's business.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.cache import (
    CompressionConfig,
    PagedCache,
    budget_blocks,
    free_blocks,
    init_cache,
    release,
)
from kvjax.engine import steps
from kvjax.engine.sampling import SamplingParams, init_sampling, sample, set_sampling
from kvjax.errors import UserError
from kvjax.models.config import LlamaConfig

NO_BUDGET = 2**31 - 1
"""Blocks to keep where nothing is to be evicted."""

PROMPT_BUCKET = 256
"""Prompts are padded to a multiple of this many tokens, so that few shapes are compiled."""


@dataclasses.dataclass(frozen=True)
class RunnerConfig:
    """Sizes of a runner, all static."""

    num_slots: int = 1
    max_len: int = 8192
    """Most tokens of a sequence, prompt and generated."""
    block_size: int = 16
    prefill_chunk: int = 8192
    """Longer prompts run in chunks of so many tokens, compressed in between."""
    steps_per_visit: int = 8
    """Tokens that the device generates before the host looks."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise UserError(f"{field.name} {value}: give a whole number of at least 1")
        if self.block_size & (self.block_size - 1):
            raise UserError(f"block_size {self.block_size}: give a power of two")


def plan_blocks(
    model: LlamaConfig,
    config: RunnerConfig,
    compression: CompressionConfig,
    prompt_len: int,
    max_tokens: int,
) -> int:
    """Blocks that one sequence can need at most while it runs.

    A prompt that is compressed on its way in needs its budget alone; one that runs in chunks needs
    the budget and the chunk. While decoding, every head can grow by the generated tokens, or by
    those between two compressions.
    """
    b = config.block_size
    heads = model.num_layers * model.num_kv_heads
    whole = heads * -(-(prompt_len + max_tokens) // b)
    cap = compression.cap(prompt_len, b)
    if cap is None or not compression.on_prefill:
        return whole
    growth = max_tokens
    if compression.compress_every is not None:
        growth = min(growth, compression.compress_every)
    if prompt_len > config.prefill_chunk:
        growth = max(growth, config.prefill_chunk)
    # One more block per head: what it holds need not end with a full one.
    return min(whole, budget_blocks(cap, *_heads(model), b) + heads * (-(-growth // b) + 1))


def _heads(model: LlamaConfig) -> tuple[int, int]:
    return model.num_layers, model.num_kv_heads


@dataclasses.dataclass
class PrefillResult:
    """What a prompt's prefill did. Counts are of one sequence; seconds leave compilation out."""

    token: int
    """The first generated token."""
    kvs_before: int
    blocks_before: int
    kvs_after: int
    blocks_after: int
    kept: np.ndarray
    """KVs that each head kept, [L, H]."""
    shortfall: int
    """Blocks over the budget that could not be evicted."""
    prefill_seconds: float
    compress_seconds: float


class Runner:
    """Device state of `config.num_slots` sequences and the compiled steps over it."""

    def __init__(
        self,
        model: LlamaConfig,
        params: nnx.State,
        config: RunnerConfig,
        compression: CompressionConfig,
        *,
        num_blocks: int,
        cache_dtype: jax.typing.DTypeLike = jnp.float32,
        eos_ids: tuple[int, ...] = (),
    ):
        self.model, self.params, self.config = model, params, config
        self.compression, self.method = compression, compression.resolved
        window = self.method.observation.window if self.method.observation else None
        if window is not None and config.prefill_chunk < 2 * window:
            raise UserError(
                f"prefill_chunk {config.prefill_chunk}: give at least {2 * window}, "
                f"twice the observation window of {self.method.name}"
            )
        self.eos_ids = jnp.asarray(eos_ids or (-1,), jnp.int32)
        self.compile_seconds = 0.0
        self.peak_blocks = 0
        self.cache: PagedCache = init_cache(
            num_slots=config.num_slots,
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            num_blocks=num_blocks,
            max_blocks_per_head=-(-config.max_len // config.block_size),
            block_size=config.block_size,
            dtype=cache_dtype,
        )
        slots = config.num_slots
        self.state = steps.DecodeState(
            token=jnp.zeros(slots, jnp.int32),
            active=jnp.zeros(slots, bool),
            remaining=jnp.zeros(slots, jnp.int32),
            stop_at_eos=jnp.ones(slots, bool),
            sampling=init_sampling(slots),
        )
        self._caps: dict[int, int] = {}
        self._compiled: dict[Any, Callable] = {}

    def _step(self, name: str, fn: Callable, *args, donate: tuple[int, ...] = ()) -> Callable:
        """`fn` compiled for these arguments, once per name; adds to `compile_seconds`."""
        if name not in self._compiled:
            start = time.perf_counter()
            self._compiled[name] = jax.jit(fn, donate_argnums=donate).lower(*args).compile()
            self.compile_seconds += time.perf_counter() - start
        return self._compiled[name]

    def _chunks(self, length: int) -> list[int]:
        """Tokens of each prefill step: as even as can be, so that every chunk fills a window."""
        parts = -(-length // self.config.prefill_chunk)
        return [length * (i + 1) // parts - length * i // parts for i in range(parts)]

    def _bucket(self, length: int) -> int:
        """Tokens that the prefill steps of such a prompt are compiled for."""
        size = max(self._chunks(length))
        return min(-(-size // PROMPT_BUCKET) * PROMPT_BUCKET, self.config.prefill_chunk)

    def warm_up(self, prompt_len: int) -> None:
        """Compile everything that a prompt of this length and its decoding need."""
        bucket = self._bucket(prompt_len)
        tokens = np.zeros(bucket, np.int32)
        if prompt_len > self.config.prefill_chunk:
            self._chunk_step(bucket)
        else:
            prompt = jax.eval_shape(self._prefill_fn(), self.params, tokens, np.int32(0))[0]
            self._prefill_step(bucket)
            evicts = self.compression.on_prefill and self.compression.sized
            self._admit_step(prompt, bucket, evicts)
        self._compress_step()
        self._decode_step()
        self._first_step()

    def _prefill_fn(self) -> Callable:
        return functools.partial(steps.prefill, self.model, self.method)

    def _prefill_step(self, bucket: int) -> Callable:
        tokens = np.zeros(bucket, np.int32)
        return self._step(f"prefill {bucket}", self._prefill_fn(), self.params, tokens, np.int32(0))

    def _admit_step(self, prompt: steps.PromptKV, bucket: int, evicts: bool) -> Callable:
        zero = np.int32(0)
        if not evicts:
            args = (self.cache, zero, prompt)
            return self._step(f"admit whole {bucket}", steps.admit_whole, *args, donate=(0,))
        fn = functools.partial(steps.admit, method=self.method)
        return self._step(f"admit {bucket}", fn, self.cache, zero, prompt, zero, donate=(0,))

    def _chunk_step(self, bucket: int) -> Callable:
        fn = functools.partial(steps.prefill_chunk, self.model, self.method)
        zero, tokens = np.int32(0), np.zeros(bucket, np.int32)
        args = (self.params, self.cache, zero, tokens, zero)
        return self._step(f"chunk {bucket}", fn, *args, donate=(1,))

    def _compress_step(self) -> Callable:
        fn = functools.partial(
            steps.compress_slots,
            method=self.method,
            max_kvs_per_step=self.compression.max_kvs_per_step,
        )
        slots = np.zeros(self.config.num_slots, np.int32)
        return self._step("compress", fn, self.cache, slots, slots, donate=(0,))

    def _decode_step(self) -> Callable:
        fn = functools.partial(
            steps.decode_steps, self.model, self.method, self.config.steps_per_visit
        )
        args = (self.params, self.cache, self.state, self.eos_ids)
        return self._step("decode", fn, *args, donate=(1, 2))

    def _first_step(self) -> Callable:
        scores = np.zeros((1, self.model.vocab_size), np.float32)
        return self._step("first", sample, scores, init_sampling(1), np.zeros(1, np.int32))

    def prefill(
        self,
        slot: int,
        tokens: np.ndarray,
        sampling: SamplingParams,
        on_progress: Callable[[int], None] | None = None,
    ) -> PrefillResult:
        """Run a prompt, put what it keeps into an empty slot, and choose the first token.

        Args:
            slot: an empty sequence slot.
            tokens: token ids of the prompt.
            sampling: settings of the request.
            on_progress: called with the number of tokens done, after each chunk.

        Raises:
            UserError: the prompt is empty or too long, or the pool is too small for it (the slot
                is left empty then).
            ValueError: the slot is not empty.
        """
        if int(self.cache.seq_len[slot]):
            raise ValueError(f"slot: got {slot}, which holds a sequence; wanted an empty one")
        tokens = np.asarray(tokens, np.int32)
        length = len(tokens)
        if length == 0:
            raise UserError("the prompt is empty: give at least one token")
        if length >= self.config.max_len:
            raise UserError(
                f"the prompt has {length} tokens and the limit is {self.config.max_len}, "
                "generated ones included: shorten it or raise the limit"
            )
        cap = self.compression.cap(length, self.config.block_size)
        whole = self.model.num_layers * self.model.num_kv_heads
        budget = NO_BUDGET
        if cap is not None:
            budget = budget_blocks(cap, *_heads(self.model), self.config.block_size)
            self._caps[slot] = budget
        keep = budget if self.compression.on_prefill else NO_BUDGET
        if length > self.config.prefill_chunk:
            result = self._prefill_in_chunks(slot, tokens, keep, on_progress)
        else:
            result = self._prefill_at_once(slot, tokens, keep)
        scores, shortfall, seconds, compress_seconds = result
        state = set_sampling(init_sampling(1), 0, sampling)
        token = int(self._first_step()(scores[None], state, np.full(1, length, np.int32))[0])
        self._start(slot, token, sampling)
        kvs, blocks = self.held(slot)
        return PrefillResult(
            token=token,
            kvs_before=whole * length,
            blocks_before=whole * -(-length // self.config.block_size),
            kvs_after=kvs,
            blocks_after=blocks,
            kept=self.kept_per_layer_head(slot),
            shortfall=shortfall,
            prefill_seconds=seconds,
            compress_seconds=compress_seconds,
        )

    def _start(self, slot: int, token: int, sampling: SamplingParams) -> None:
        ended = token in np.asarray(self.eos_ids) and not sampling.ignore_eos
        state = self.state
        self.state = dataclasses.replace(
            state,
            token=state.token.at[slot].set(token),
            active=state.active.at[slot].set(not ended and sampling.max_tokens > 1),
            remaining=state.remaining.at[slot].set(sampling.max_tokens - 1),
            stop_at_eos=state.stop_at_eos.at[slot].set(not sampling.ignore_eos),
            sampling=set_sampling(state.sampling, slot, sampling),
        )

    def _too_small(self, slot: int, needed: int) -> UserError:
        """Empties the slot again and says what would do."""
        self.finish(slot)
        heads = self.model.num_layers * self.model.num_kv_heads
        tokens = -(-needed // heads) * self.config.block_size
        return UserError(
            f"the pool of {self.cache.num_blocks} blocks is too small for this prompt: it needs "
            f"{needed} blocks, a pool of {tokens} tokens"
        )

    def _prefill_at_once(self, slot: int, tokens: np.ndarray, keep: int):
        length, b = len(tokens), self.config.block_size
        bucket = self._bucket(length)
        padded = np.zeros(bucket, np.int32)
        padded[:length] = tokens
        run = self._prefill_step(bucket)
        start = time.perf_counter()
        prompt, scores = jax.block_until_ready(run(self.params, padded, np.int32(length)))
        seconds = time.perf_counter() - start
        evicts, shortfall = keep != NO_BUDGET, 0
        write = self._admit_step(prompt, bucket, evicts)
        start = time.perf_counter()
        if evicts:
            self.cache, report, ok = write(self.cache, np.int32(slot), prompt, np.int32(keep))
            shortfall = int(report.shortfall[0])
        else:
            self.cache, ok = write(self.cache, np.int32(slot), prompt)
        if not ok:
            whole = self.model.num_layers * self.model.num_kv_heads * -(-length // b)
            raise self._too_small(slot, min(keep, whole))
        compress_seconds = time.perf_counter() - start
        self._note_peak()
        return scores, shortfall, seconds, compress_seconds

    def _prefill_in_chunks(self, slot: int, tokens: np.ndarray, keep: int, on_progress):
        bucket, done = self._bucket(len(tokens)), 0
        run = self._chunk_step(bucket)
        seconds = compress_seconds = 0.0
        shortfall, scores = 0, jnp.zeros(0)
        for size in self._chunks(len(tokens)):
            chunk = tokens[done : done + size]
            padded = np.zeros(bucket, np.int32)
            padded[: len(chunk)] = chunk
            start = time.perf_counter()
            self.cache, scores, ok = run(
                self.params, self.cache, np.int32(slot), padded, np.int32(len(chunk))
            )
            if not jax.block_until_ready(ok):
                heads = self.model.num_layers * self.model.num_kv_heads
                held = self.held(slot)[1]
                needed = held + heads * (-(-len(chunk) // self.config.block_size) + 1)
                raise self._too_small(slot, needed)
            self._note_peak()
            seconds += time.perf_counter() - start
            start = time.perf_counter()
            if keep != NO_BUDGET:
                shortfall = self.compress([slot], [keep])[1][0]
            compress_seconds += time.perf_counter() - start
            done += size
            if on_progress is not None:
                on_progress(done)
        return scores, shortfall, seconds, compress_seconds

    def compress(self, slots: list[int], keep_blocks: list[int]) -> tuple[list[int], list[int]]:
        """Compress some slots to so many blocks each; returns blocks freed and shortfalls."""
        padded = np.full(self.config.num_slots, self.config.num_slots, np.int32)
        keep = np.zeros_like(padded)
        padded[: len(slots)], keep[: len(slots)] = slots, keep_blocks
        self.cache, report = self._compress_step()(self.cache, padded, keep)
        freed, shortfall = np.asarray(report.freed), np.asarray(report.shortfall)
        return freed[: len(slots)].tolist(), shortfall[: len(slots)].tolist()

    def compress_running(self) -> int:
        """Compress every running sequence that has a cap to its cap; returns blocks freed."""
        active = np.asarray(self.state.active)
        slots = [slot for slot in self._caps if active[slot]]
        if not slots or not self.method.compresses:
            return 0
        return sum(self.compress(slots, [self._caps[slot] for slot in slots])[0])

    def decode(self) -> tuple[np.ndarray, bool]:
        """Up to `steps_per_visit` tokens for every active slot.

        Returns:
            Tokens [n, S], −1 where a slot did not run, and whether the blocks sufficed. If they did
            not, nothing is lost: make room and call again.
        """
        run = self._decode_step()
        self.cache, self.state, tokens, ok = run(self.params, self.cache, self.state, self.eos_ids)
        out = np.asarray(tokens)
        self._note_peak()
        return out, bool(ok)

    def finish(self, slot: int) -> None:
        """Empty a slot: all its blocks are free afterwards."""
        mark = np.zeros(self.config.num_slots, bool)
        mark[slot] = True
        self.cache = self._step("release", release, self.cache, mark, donate=(0,))(self.cache, mark)
        self.state = dataclasses.replace(self.state, active=self.state.active.at[slot].set(False))
        self._caps.pop(slot, None)

    def kept_per_layer_head(self, slot: int) -> np.ndarray:
        """KVs that each head of a slot holds, [L, H]."""
        return np.asarray(self.cache.context_len[slot])

    def held(self, slot: int) -> tuple[int, int]:
        """KVs and blocks that a slot holds over all its heads."""
        kept = self.kept_per_layer_head(slot)
        return int(kept.sum()), int((-(-kept // self.config.block_size)).sum())

    def _note_peak(self) -> None:
        used = self.cache.num_blocks - int(free_blocks(self.cache))
        self.peak_blocks = max(self.peak_blocks, used)
