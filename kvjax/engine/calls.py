"""What the engine's steps are called with.

Steps are compiled for a few sizes (prompt chunks, sequences that decode, widths of block tables). A
call says which of them it is, by a key, and with what; `worker.py` runs it.
"""

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.cache import CacheSpec, PagedCache, init_cache
from kvjax.cache.policy import DecodeRule, Method, Observer
from kvjax.cache.policy.merge import PROMPT_QUERY
from kvjax.checks import INT32_MAX
from kvjax.engine import decode, prefill
from kvjax.engine.compilation import CompiledSteps, StepCall, StepKey, bucket, sizes_upto
from kvjax.engine.config import EngineConfig
from kvjax.engine.insert import Start
from kvjax.engine.job import PromptJob
from kvjax.engine.parallel import Parallel
from kvjax.engine.probe import Bench
from kvjax.engine.probing import Probing
from kvjax.engine.request import Request
from kvjax.engine.sampling import MAX_LOGPROBS, effort_of, sampling_row
from kvjax.engine.smoothing import smoothing_for
from kvjax.engine.steps import ON_ONE_DEVICE
from kvjax.engine.tables import Tables
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import activation_dtype
from kvjax.models.rope import rope_artefacts

NO_BUDGET = INT32_MAX  # blocks to keep where nothing is to be evicted


class Calls:
    """Calls of steps over the device state of `config.max_batch` sequences.

    Args:
        model: the model.
        params: its parameters.
        config: of the engine.
        spec: of the cache.
        num_blocks: of the pool, over all devices.
        max_len: tokens of a sequence at most.
        eos_ids: tokens that end a sequence.
        artefacts: arrays that were measured of the model, by name.
        parallel: how it is spread over devices; None on one.
        bench: what probes are made of; None where no method runs any.
        draft: says what may come behind some tokens, so many at most; without one the model itself.
    """

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
        parallel: Parallel | None = None,
        bench: Bench | None = None,
        draft: Callable[[np.ndarray, int], Sequence[int]] | None = None,
    ):
        self.model, self.params, self.config, self.parallel = model, params, config, parallel
        self._steps = ON_ONE_DEVICE if parallel is None else parallel.steps(params)
        self.eos_ids = jnp.asarray(tuple(eos_ids) or (-1,), jnp.int32)
        self.artefacts = {**(artefacts or {}), **rope_artefacts(model)}
        """Arrays by name, for methods that read them: calibrated ones, and RoPE's frequencies."""
        self.planes = tuple(plane.name for plane in spec.planes)
        self.compiled = CompiledSteps()
        num_heads, new, self.shard_heads = spec.num_kv_heads, init_cache, [spec.heads]
        """KV heads of each shard, over all layers."""
        if parallel is not None:
            num_heads, new = parallel.dealing.places, parallel.new_cache
            self.shard_heads = parallel.dealing.heads_of_shards.tolist()
            self.eos_ids = parallel.same(self.eos_ids)
            self.artefacts = parallel.artefacts(self.artefacts)
        self.probing = Probing(
            model, params, self.eos_ids, self._steps, config.prefill_chunk, parallel, bench, draft
        )
        self.num_shards = len(self.shard_heads)
        self.shard_blocks = num_blocks // self.num_shards
        """Blocks of each shard."""
        self._new_cache = functools.partial(
            new,
            num_slots=config.num_rows,
            num_layers=spec.num_layers,
            num_kv_heads=num_heads,
            head_dim=spec.head_dim,
            num_blocks=self.shard_blocks,
            max_blocks_per_head=spec.blocks_per_head(max_len),
            block_size=spec.block_size,
            codec=spec.codec,
            planes=spec.planes,
            sharing=config.sharing,
            smoothing=smoothing_for(model, params, spec.codec, parallel),
        )
        # Steps one behind the other are of the same slots, which are sent once.
        self._numbers = functools.lru_cache(16)(_int32s) if parallel is None else parallel.numbers
        self.cache: PagedCache
        self.cache, self.state = self._new_cache(), self._new_state()
        self.decodes_once = jax.default_backend() == "gpu"
        """Whether decode steps are compiled one by one, without a loop, at whose turns and branches
        the host of a GPU waits for it."""
        self.decode_tables = Tables.of(
            self.cache.max_blocks, spec.block_size, config.max_batch, self.shard_blocks,
            max(self.shard_heads),
        )  # fmt: skip
        """Sizes of decode steps."""
        # Compressions are rare: fewer sizes, so that fewer are compiled.
        self.compress_tables = self.decode_tables.of_widths(1, 4).of_sizes(1, 4)
        """Sizes of compressions."""
        if jax.default_backend() != "cpu":
            # A decode step reads all weights whatever the batch, so rows without a sequence cost
            # little, and compiling for one more size costs much.
            self.decode_tables = self.decode_tables.of_sizes(64, 4)
            self.compress_tables = self.decode_tables.of_widths(16, 8).of_sizes(config.max_batch, 1)

    def _new_state(self) -> decode.SlotState:
        return self._everywhere(decode.init_slots(self.config.num_rows))

    def _everywhere(self, tree: Any) -> Any:
        return tree if self.parallel is None else self.parallel.same(tree)

    def _call(self, key: StepKey, args: tuple[Any, ...]) -> StepCall:
        return StepCall(key, self._steps[key.step], args)

    @property
    def fits(self) -> jax.ShapeDtypeStruct:
        """Whether there was room, before it is known."""
        where = None if self.parallel is None else self.parallel.everywhere
        return jax.ShapeDtypeStruct((), bool, sharding=where)

    def kept_call(self, table: np.ndarray, owned: int) -> StepCall:
        """Token positions of what a slot's heads hold, of so many blocks at most."""
        # Few widths, as each is compiled.
        most = self.cache.max_blocks
        holding = (n for n in sizes_upto(most, 1, 2) if n >= min(owned, most))
        key = self.compiled.fitting(StepKey("kept", sizes=(n,)) for n in holding)
        args = (self.cache.position, table[..., : key.sizes[0]])
        return self._call(key, args)

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
        method = request.method
        probes = self.probing.probes(method.scorer, tokens)
        retains = plan is not None
        job = PromptJob(request, tokens, [], in_pool, retains=retains, probes=probes)
        whole = method.observer.query_heads or method.pruner is not None
        if (whole or self.probing.drafts_first(job)) and not in_pool:
            # What each query head sees is measured of whole prompts only, and so is what goes on
            # from layer to layer.
            chunk = self.config.prefill_scratch
        job.chunks = _even(length, chunk)
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
        chunks = _even(len(tokens) - start, self.config.prefill_chunk)
        return PromptJob(
            request, tokens, chunks, True, start, start, retains,
            logits=logits, fits=self._everywhere(jnp.bool_(True)),
        )  # fmt: skip

    def bucket(self, sizes: Iterable[int]) -> int:
        """Tokens that steps for chunks of some sizes are compiled for."""
        return bucket(sizes, self.config.prefill_chunk)

    def _observer(self, job: PromptJob) -> Observer:
        observer = job.request.method.observer
        whole = len(job.chunks) == 1 and not job.in_pool
        return observer if whole else observer.without_query_heads

    def scratch_maker(self, job: PromptJob) -> Callable[[], prefill.PromptKV]:
        """What makes room for all chunks of a job."""
        room = len(job.chunks) * self.bucket(job.chunks)
        dtype = activation_dtype(self.params)
        if self.parallel is not None:
            return self.parallel.prompt_maker(self._observer(job), room, dtype)
        return functools.partial(prefill.empty_prompt, self.model, self._observer(job), room, dtype)

    def chunk_call(self, job: PromptJob) -> StepCall:
        """The next chunk of a job."""
        size, bucket, observer = job.next_chunk, self.bucket(job.chunks), self._observer(job)
        tokens = np.zeros(bucket, np.int32)
        tokens[:size] = job.tokens[job.done : job.done + size]
        length = np.int32(size)
        common = (self.model, observer, self.params, self.artefacts)
        if job.in_pool:
            key = StepKey("prefill in pool", observer, (bucket,))
            slot = np.int32(job.request.slot or 0)
            return self._call(key, (*common, self.cache, slot, tokens, length))
        if (pruner := job.request.method.pruner) is not None:
            key = StepKey("prefill narrowing", (observer, pruner), (bucket,))
            return self._call(key, (*common[:2], pruner, *common[2:], tokens, length))
        if len(job.chunks) == 1:
            key = StepKey("prefill", observer, (bucket,))
            return self._call(key, (*common, tokens, length))
        key = StepKey("prefill in scratch", observer, (bucket, len(job.chunks) * bucket))
        last = np.bool_(job.done + size == sum(job.chunks))
        return self._call(key, (*common, job.prompt, tokens, length, last))

    def place_call(self, request: Request, prompt: Any, slot: int, keep: int | None) -> StepCall:
        method = request.method.eviction if request.compressed_first else None
        seen = request.method.observer
        # Of a prompt that is kept whole, what is beside its metrics is an argument all the same.
        whole = seen.planes, seen.queries, seen.query_heads
        parts = whole if method is None else method.parts
        # What layers lack is an argument more.
        narrowed = (1,) * (request.method.pruner is not None)
        key = StepKey("place", parts, (prompt.k.shape[1], *narrowed))
        most = np.int32(NO_BUDGET if method is None or keep is None else keep)
        args = (method, self.artefacts, self.cache, prompt, most, np.int32(slot))
        return self._call(key, args)

    def share_call(self, source: int, target: int) -> StepCall:
        return self._call(StepKey("share"), (self.cache, np.int32(source), np.int32(target)))

    def restore_call(self, row: int, held: Mapping[str, np.ndarray]) -> StepCall:
        key = StepKey("restore", sizes=(len(held["metric"]),))
        return self._call(key, (self.cache, np.int32(row), dict(held)))

    def start_call(
        self, request: Request, slot: int, logits: Any, fits: Any, num_top: int | None
    ) -> StepCall:
        new = self._start(request, slot, logits)
        # As of single decode steps, which the host does not wait for either.
        effort = effort_of([request.sampling]) if self.decodes_once else None
        args = (num_top, effort, self.cache, self.state, new, self.eos_ids, fits)
        sizes = () if effort is None else (effort,)
        return self._call(StepKey("start", sizes=sizes, num_top=num_top), args)

    def _start(self, request: Request, slot: int, logits: Any) -> Start:
        return Start(
            np.int32(slot),  # type: ignore[arg-type]
            logits,
            np.int32(request.remaining),  # type: ignore[arg-type]
            np.bool_(not request.sampling.ignore_eos),  # type: ignore[arg-type]
            np.bool_(request.method.decode is not None),  # type: ignore[arg-type]
            sampling_row(request.sampling),
        )

    def grown(self, longest: int) -> int:
        """KVs that a head holds at most once decode steps have run, of so many that were last
        reported: a step may have been held back since."""
        return longest + 2 * self.config.decode_steps_per_sync

    def once_key(
        self,
        count: int,
        longest: int,
        rule: Hashable,
        num_top: int | None,
        effort: int,
        exact: bool = False,
    ) -> StepKey:
        """A single decode step for so many sequences, whose heads hold so many KVs at most."""
        keys = (
            StepKey("decode once", rule, (*size, effort), num_top)
            for size in self.decode_tables.holding(count, longest)
        )
        return self.compiled.fitting(keys, exact)

    def once_call(
        self,
        slots: Sequence[int],
        longest: int,
        rule: DecodeRule | None,
        num_top: int | None,
        effort: int,
        exact: bool = False,
    ) -> StepCall:
        """A single decode step."""

        key = self.once_key(len(slots), longest, rule, num_top, effort, exact)
        group, columns, _ = key.sizes
        static = (self.model, rule, self.config.decode_steps_per_sync, num_top, columns, effort)
        rows = self._rows(slots, group)
        args = (self.params, self.cache, self.state, rows, self.eos_ids, self.artefacts)
        return self._call(key, (*static, *args))

    def decode_key(
        self, count: int, longest: int, rule: Hashable, num_top: int | None, exact: bool = False
    ) -> StepKey:
        """The step for so many sequences, whose heads hold so many KVs at most."""
        keys = (
            StepKey("decode", rule, size, num_top)
            for size in self.decode_tables.holding(count, longest)
        )
        return self.compiled.fitting(keys, exact)

    def decode_call(
        self,
        slots: Sequence[int],
        longest: int,
        limit: int,
        rule: DecodeRule | None,
        num_top: int | None,
        exact: bool = False,
    ) -> StepCall:
        key = self.decode_key(len(slots), longest, rule, num_top, exact)
        group, columns = key.sizes
        num_steps = self.config.decode_steps_per_sync
        most: Any = np.int32(min(limit, num_steps))
        if self.parallel is not None:
            most = self.parallel.numbers(int(most))
        args = (
            self.model, rule, num_steps, num_top, columns, self.params, self.cache, self.state,
            self._rows(slots, group), most, self.eos_ids, self.artefacts,
        )  # fmt: skip
        return self._call(key, args)

    def _rows(self, slots: Sequence[int], group: int) -> jax.Array:
        """`_padded` for a decode step, on each device."""
        return self._numbers(tuple(self._padded(slots, group).tolist()))

    def compress_call(
        self,
        slots: Sequence[int],
        keep: Sequence[int],
        protected: Sequence[int],
        method: Method,
        most: int,
        longest: int,
        exact: bool = False,
        queries: Any = None,
    ) -> StepCall:
        method, artefacts, rows = method.eviction, self.artefacts, 0
        if queries is not None:
            artefacts, rows = {**artefacts, PROMPT_QUERY: queries}, queries.shape[2]
        keys = (
            StepKey("compress", method.parts, (*size, most, rows))
            for size in self.compress_tables.holding(len(slots), longest)
        )
        key = self.compiled.fitting(keys, exact)
        group, columns, *_ = key.sizes
        keeps, stay = np.zeros((2, group), np.int32)
        keeps[: len(keep)], stay[: len(protected)] = keep, protected
        args = (
            most, columns, method, artefacts, self.cache, self._padded(slots, group),
            keeps, stay,
        )  # fmt: skip
        return self._call(key, args)

    def empty_call(self, slots: Sequence[int]) -> StepCall:
        marked = np.zeros(self.config.num_rows, bool)
        marked[list(slots)] = True
        return self._call(StepKey("empty"), (self.cache, self.state, marked))

    def _padded(self, slots: Sequence[int], group: int) -> np.ndarray:
        """The slots, and one out of range for the rest."""
        padded = np.full(group, self.config.num_rows, np.int32)
        padded[: len(slots)] = slots
        return padded


def _int32s(numbers: Sequence[int]) -> jax.Array:
    return jnp.asarray(numbers, jnp.int32)


def _even(length: int, most: int) -> list[int]:
    """A length in chunks of so much at most, as even as can be, so that the last one fills an
    observation window."""
    parts = -(-length // most)
    return [length * (i + 1) // parts - length * i // parts for i in range(parts)]


def num_top(requests: Sequence[Request]) -> int | None:
    """Likeliest tokens to report: few values, as each is compiled."""
    wanted = [r.sampling.logprobs for r in requests if r.sampling.logprobs is not None]
    if not wanted:
        return None
    return MAX_LOGPROBS if max(wanted) else 0
