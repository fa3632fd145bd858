"""Runs one prompt under many (method, rate) variants that share its prefill.

For every row: one dense pass over prompt and target; one metric per distinct observation and cut;
then batches of variants, each a sequence slot of one paged cache: survivors written, the rest of
the prompt and the target fed in one chunk, an answer decoded greedily from where the assistant's
turn opens, and another one behind the answer's given beginning where the task wants one.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import CacheSpec, Method, get_method, release, write_prompt
from kvjax.engine.decode import init_slots
from kvjax.engine.dense import dense_pass
from kvjax.engine.parallel import SAME
from kvjax.engine.spread import DENSE, Spread, by_heads
from kvjax.engine.worker import NO_BUDGET
from kvjax.errors import UserError
from kvjax.eval import passes, told
from kvjax.eval.prompt_rows import PromptRows
from kvjax.eval.repetition import Repetition
from kvjax.eval.rows import Row, TokenRow, tokenise
from kvjax.eval.scorers import needs_answer
from kvjax.eval.sizes import EvaluatorConfig, Variant, bucket, cache_spec, kept_blocks
from kvjax.models import LoadedModel
from kvjax.models.rope import rope_artefacts

STEPS_AT_ONCE = 8
"""Tokens decoded before the host looks for stop texts."""


class Evaluator:
    """A loaded model and what was compiled for it."""

    def __init__(
        self,
        model: LoadedModel,
        config: EvaluatorConfig,
        artefacts: Mapping[str, jax.Array] | None = None,
    ):
        self.model, self.config = model, config
        self.spread = Spread(model)
        self.artefacts = self.spread.artefacts(
            {**(artefacts or {}), **rope_artefacts(model.config)}
        )
        """Arrays by name, for methods that read them: calibrated ones, and RoPE's frequencies."""
        self.of_weights = functools.cache(lambda codec: codec.from_weights(model))
        self.spec = cache_spec(model, config.block_size)
        self.repetition = Repetition(model, self.spread)
        self.compile_seconds = 0.0
        self.limit = config.context_length or model.config.max_position_embeddings
        self._compiled: dict[Any, Callable] = {}
        self._cache_of: tuple[tuple[int, str | None], Any] | None = None
        eos = tuple(model.tokenizer.eos_ids) or (-1,)
        self._eos_ids = jnp.asarray(eos, jnp.int32)

    @property
    def heads(self) -> int:
        return self.spec.heads

    def tokenise(self, row: Row) -> TokenRow:
        """The row's tokens; see `kvjax.eval.rows.tokenise`."""
        most = self.config.max_new_tokens
        if most is not None and most < row.max_new_tokens:
            row = dataclasses.replace(row, max_new_tokens=most)
        return tokenise(row, self.model.tokenizer, self.limit, self.config.max_target)

    def _run(
        self, key: Any, fn: Callable, *args, out: Any = SAME, donate: tuple[int, ...] = ()
    ) -> Any:
        """Call `fn` as compiled for these shapes; compiling counts apart from every other time.

        On several devices what it returns lies as `out` says.
        """
        leaves, tree = jax.tree.flatten(args)
        shapes = tree, *((np.shape(x), str(jnp.result_type(x))) for x in leaves)
        if (key, shapes) not in self._compiled:
            start = time.perf_counter()
            specs = self.spread.specs(args)
            step = self.spread.jitted(fn, specs, out, donate_argnums=donate)
            self._compiled[key, shapes] = step.lower(*args).compile()
            self.compile_seconds += time.perf_counter() - start
        return self._compiled[key, shapes](*args)

    def _timed(self, key: Any, fn: Callable, *args, **how: Any) -> Any:
        """`_run`, and the seconds it took without compiling."""
        before, start = self.compile_seconds, time.perf_counter()
        found = jax.block_until_ready(self._run(key, fn, *args, **how))
        return found, time.perf_counter() - start - (self.compile_seconds - before)

    def emptied(self, cache, slots: np.ndarray):
        """The cache without what the marked slots held."""
        return self._run("release", release, cache, slots, out=self.spread.cache_spec, donate=(0,))

    def evaluate(
        self, row: Row, tokens: TokenRow, jobs: Mapping[str, Sequence[Variant]]
    ) -> Iterator[list[dict[str, Any]]]:
        """Results of a row, a batch of variants at a time.

        Args:
            row: the prompt.
            tokens: its tokens.
            jobs: the variants wanted under each protocol.

        Yields:
            One dictionary per (protocol, variant), ready for `json.dumps`.

        Raises:
            UserError: a variant does not fit a pool of its own, needs a calibration, or cannot run
                on several devices or with its type.
        """
        for variant in dict.fromkeys(v for variants in jobs.values() for v in variants):
            variant.check(self.spread.devices)
        for name in dict.fromkeys(v.method for variants in jobs.values() for v in variants):
            self.spread.check_method(get_method(name))
            for array in get_method(name).artefacts:
                if array not in self.artefacts:
                    raise UserError(
                        f"method {name} reads the calibrated array {array}: give a calibration "
                        "that has it"
                    )
        run = _RowRun(self, row, tokens)
        cuts: dict[int, list[str]] = {}
        for protocol in jobs:
            cuts.setdefault(tokens.cut(protocol), []).append(protocol)
        for cut, protocols in cuts.items():
            # Where a row has nothing between two cuts, their protocols are one and the same.
            wanted = {variant: None for name in protocols for variant in jobs[name]}
            for batch in run.at_cut(cut, list(wanted)):
                yield [
                    {**result, "protocol": protocol}
                    for protocol in protocols
                    for variant, result in batch
                    if variant in jobs[protocol]
                ]

    def spec_in(self, cache_dtype: str | None) -> CacheSpec:
        """What a cache keeps of each KV that is stored in a type."""
        return cache_spec(self.model, self.config.block_size, cache_dtype)

    def empty_cache(self, tokens_per_head: int, cache_dtype: str | None = None):
        """An empty cache of the evaluator's slots, kept until another size or type is asked for."""
        config, spec = self.config, self.spec_in(cache_dtype)
        width = spec.blocks_per_head(tokens_per_head)
        if self._cache_of is None or self._cache_of[0] != (width, cache_dtype):
            self._cache_of = None
            sequences = max(1, -(-config.num_slots // 3))
            cache = self.spread.new_cache(
                sequences * int(max(self.spread.shard_heads)) * width,
                num_slots=config.num_slots,
                head_dim=spec.head_dim,
                max_blocks_per_head=width,
                block_size=spec.block_size,
                codec=spec.codec,
            )
            return cache
        cache, self._cache_of = self._cache_of[1], None
        return cache

    def keep_cache(self, cache, cache_dtype: str | None = None) -> None:
        """Hand an empty cache back for the next prompt."""
        self._cache_of = (cache.max_blocks, cache_dtype), cache


class _RowRun:
    """One row: its dense pass, and what follows from it."""

    def __init__(self, evaluator: Evaluator, row: Row, tokens: TokenRow):
        self.evaluator, self.row = evaluator, row
        self.model = evaluator.model
        if row.metric == "own":
            tokens = dataclasses.replace(tokens, target=_own_answer(evaluator, row, tokens))
        self.tokens, self.answers = tokens, tokens.answers
        self.prompt, self.target = tokens.prompt, tokens.target
        self.generates = evaluator.config.answers and needs_answer(row.metric)
        config = evaluator.config
        self.new_tokens = 0
        if self.generates:
            self.new_tokens = min(row.max_new_tokens, config.max_new_tokens or row.max_new_tokens)
        # A continuation has no question to answer; of a summary as much is looked at as is scored.
        room = evaluator.limit - self.answers[-1].opened
        free = row.max_new_tokens if row.metric == "own" else config.free_tokens
        self.free_tokens = 0 if row.metric == "nll" or not config.free_tokens else min(free, room)
        # Target tokens that count.
        self.scored = told.scored_tokens(self.answers)
        self.num_target = bucket(len(self.scored), 8)
        everything = np.concatenate([self.prompt, self.target[:-1]])
        self.size = bucket(len(everything), 128)
        padded = np.zeros(self.size, np.int32)
        padded[: len(everything)] = everything
        self.everything = everything
        at = np.minimum(self.predicted, len(everything) - 1).astype(np.int32)
        fn = functools.partial(dense_pass, evaluator.spread.config)
        self.dense, self.prefill_seconds = evaluator._timed(
            "dense", fn, self.model.params, padded, at, out=DENSE
        )
        self.full_top = np.asarray(jnp.argmax(self.dense.logits, axis=-1))
        self.metrics: dict[Any, tuple[Any, float]] = {}
        self.rows = PromptRows(
            evaluator._timed, evaluator.of_weights, self.dense, evaluator.artefacts
        )

    @property
    def predicted(self) -> np.ndarray:
        """Tokens whose next one counts, padded, then those where answers of its own begin."""
        counts = np.pad(self.scored, (0, self.num_target - len(self.scored)), mode="edge")
        opened = [answer.opened for answer in self.answers]
        return np.concatenate([len(self.prompt) + counts, opened]) - 1

    def at_cut(
        self, cut: int, variants: Sequence[Variant]
    ) -> Iterator[list[tuple[Variant, dict[str, Any]]]]:
        """Results of the variants for the prompt compressed after `cut` tokens."""
        chunk = self.everything[cut:]
        fed = len(self.prompt) - cut
        room = bucket(max(1, len(chunk)), 8)
        growth = max(fed + self.new_tokens, self.answers[-1].opened - cut + self.free_tokens)
        # A block more: what a head holds of the prompt need not end with a full one.
        spare = self.evaluator.config.block_size
        most = self.size + bucket(max(1, growth), 64) + spare
        cuts = _Cut(self, cut, chunk, fed, room, growth)
        for stored in dict.fromkeys(variant.cache_dtype for variant in variants):
            cache = self.evaluator.empty_cache(most, stored)
            # Slots of a like size side by side: those that hold little come in larger batches.
            pending = [variant for variant in variants if variant.cache_dtype == stored]
            pending.sort(key=lambda v: (v.rate, -(v.cap or float("inf")), v.method))
            while pending:
                cache, batch, pending = cuts.admit(cache, pending)
                cache, results = cuts.score(cache, batch)
                yield results
            self.evaluator.keep_cache(cache, stored)
        self.metrics.clear()

    def metric(self, method: Method, cut: int) -> tuple[Any, float]:
        """The scores of the prompt's KVs and the seconds it took, once per observer."""
        if method.repeats:
            if method.scorer not in self.metrics:
                evaluator, prompt = self.evaluator, self.prompt[:cut]
                self.metrics[method.scorer] = evaluator.repetition.scores(
                    evaluator._timed, method, self.dense, prompt
                )
            return self.metrics[method.scorer]
        observer = method.observer
        if observer not in self.metrics:
            fn = functools.partial(passes.observe, observer)
            args = (self.dense, np.int32(cut), self.evaluator.artefacts)
            self.metrics[observer] = self.evaluator._timed(
                ("observe", observer), fn, *args, out=by_heads(1)
            )
        return self.metrics[observer]


@dataclasses.dataclass
class _Admitted:
    """A variant in a slot."""

    variant: Variant
    select_seconds: float
    shortfall: int


@dataclasses.dataclass
class _Cut:
    """A row compressed after `cut` tokens; `chunk` follows, `fed` of it before the target."""

    run: _RowRun
    cut: int
    chunk: np.ndarray
    fed: int
    room: int
    """Tokens that the pass over the chunk is compiled for."""
    growth: int
    """Tokens that may be written after the cut."""

    @property
    def free_fed(self) -> list[int]:
        """Tokens fed before each answer without a given beginning.

        None where there is none, also because its beginning is in the compressed part already.
        """
        fed = [answer.opened - self.cut for answer in self.run.answers]
        return fed if self.run.free_tokens and fed[0] >= 0 else []

    @functools.cached_property
    def mass(self):
        """Attention that the chunk pays to the prompt's KVs; see `attention_mass`."""
        fn = functools.partial(passes.attention_mass, self.room)
        dense = self.run.dense
        args = (dense.q, dense.k, np.int32(self.cut), np.int32(len(self.chunk)))
        return self.run.evaluator._run(("mass", self.room), fn, *args, out=by_heads(1))

    def admit(self, cache, pending: list[Variant]):
        """Fill the slots; returns the cache, what is in them, and what is still pending."""
        run, config = self.run, self.run.evaluator.config
        heads, b = run.evaluator.spread.shard_heads, config.block_size
        reserve = heads * (-(-self.growth // b) + 1) if self.growth else 0 * heads
        batch: list[_Admitted] = []
        while pending and len(batch) < config.num_slots:
            variant = pending[0]
            slot = len(batch)
            cache, admitted = self._admit(cache, slot, variant)
            free = np.asarray(cache.free.count)
            enough = admitted is not None and (free >= reserve * (slot + 1)).all()
            if not enough:
                cache = run.evaluator.emptied(cache, np.arange(config.num_slots) == slot)
                if not batch:
                    raise UserError(
                        f"{variant.method} at rate {variant.rate:g} needs more than the pool of "
                        f"{cache.num_blocks} blocks for {run.row.id}: give a larger --batch"
                    )
                break
            assert admitted is not None
            batch.append(admitted)
            pending = pending[1:]
        return cache, batch, pending

    def _admit(self, cache, slot: int, variant: Variant):
        run, evaluator = self.run, self.run.evaluator
        method, config = get_method(variant.method), evaluator.config
        scores, seconds = run.metric(method, self.cut)
        k, v, restoring = run.rows.of(variant, self.cut)
        cut, at = np.int32(self.cut), np.int32(slot)
        keep = kept_blocks(variant, self.cut, evaluator.heads, config)
        shortfall, written = 0, evaluator.spread.cache_spec
        if keep == NO_BUDGET or not method.compresses:
            args = (cache, at, k, v, scores.metric, cut)
            (cache, ok), took = evaluator._timed(
                "write", write_prompt, *args, out=(written, SAME), donate=(0,)
            )
        else:
            chooses = method.eviction
            args = (cache, at, k, v, scores, cut, np.int32(keep), chooses, evaluator.artefacts)
            (cache, short, ok), took = evaluator._timed(
                ("write survivors", chooses.parts), passes.write_kept, *args,
                out=(written, SAME, SAME), donate=(0,),
            )  # fmt: skip
            shortfall = int(short)
        if not ok:
            return cache, None
        return cache, _Admitted(variant, seconds + restoring + took, shortfall)

    def score(self, cache, batch: list[_Admitted]):
        """Feed, teacher-force, decode; returns the emptied cache and the results."""
        run, evaluator = self.run, self.run.evaluator
        model, slots = run.model, evaluator.config.num_slots
        count = len(self.chunk)
        args, out = (cache, self.mass), (SAME, by_heads(2))
        found = evaluator._run("recall", passes.attention_recall, *args, out=out)
        recall, kept = evaluator.spread.on_host(found)
        kept = kept.swapaxes(0, 1)

        tokens = np.zeros(self.room, np.int32)
        tokens[:count] = self.chunk
        # What comes before the chunk is the dense pass's own.
        before = run.predicted < self.cut
        at = np.clip(run.predicted - self.cut, 0, self.room - 1).astype(np.int32)
        target = np.zeros(len(at), np.int32)
        target[: len(run.scored)] = run.target[run.scored]
        args = (model.params, cache, tokens, np.int32(self.cut), at, target, run.dense.logits)
        fn = functools.partial(passes.teacher_force, evaluator.spread.config)
        teacher, seconds = evaluator._timed("teacher", fn, *args, out=passes.TEACHER)
        top = np.where(before, run.full_top, np.asarray(teacher.top))
        cache, answers, decode_seconds = self._answers(cache, batch, teacher, top)
        cache = evaluator.emptied(cache, np.ones(slots, bool))
        nll, kl = np.asarray(teacher.nll), np.asarray(teacher.kl)
        shared = {"score": seconds / len(batch), "decode": decode_seconds / len(batch)}
        results = []
        for slot, admitted in enumerate(batch):
            result = self._result(admitted, kept[slot], recall[slot], shared)
            result |= told.forced(
                run.answers, target[: len(run.scored)], top[slot], run.full_top, nll[slot], kl[slot]
            )
            said = answers[self.fed][slot][: run.new_tokens] if run.generates else None
            result |= told.answered(run.row, model.tokenizer, result["em"], said)
            said = [answers[fed][slot][: run.free_tokens] for fed in self.free_fed]
            result |= told.freely(run.row, model.tokenizer, said)
            results.append((admitted.variant, result))
        return cache, results

    def _result(self, admitted: _Admitted, kept, recall, shared) -> dict[str, Any]:
        run, b = self.run, self.run.evaluator.config.block_size
        row, heads = run.row, run.evaluator.heads
        spec = run.evaluator.spec_in(admitted.variant.cache_dtype)
        blocks = int((-(-kept // b)).sum())
        return {
            "id": row.id,
            "task": row.task,
            "length": row.length,
            "depth": row.depth,
            "method": admitted.variant.label,
            "rate": admitted.variant.rate,
            "prompt_tokens": len(run.prompt),
            "compressed_tokens": self.cut,
            "target_tokens": len(run.target),
            "removed_tokens": run.tokens.removed,
            "kvs_full": heads * self.cut,
            "kvs": int(kept.sum()),
            "blocks": blocks,
            "bytes_full": run.evaluator.spec.full_bytes(self.cut),
            "bytes": admitted.variant.held_bytes(spec, self.cut, blocks),
            "shortfall": admitted.shortfall,
            "recall": told.rounded(recall.mean()) if len(self.chunk) else None,
            "recall_by_layer": [told.rounded(share) for share in recall]
            if len(self.chunk)
            else None,
            "kept": kept.tolist(),
            "seconds": {
                "prefill": told.rounded(run.prefill_seconds),
                "select": told.rounded(admitted.select_seconds),
                **{name: told.rounded(value) for name, value in shared.items()},
            },
        }

    def _answers(self, cache, batch: list[_Admitted], teacher, top: np.ndarray):
        """Greedy answers by tokens fed before them and by slot, and the seconds they took."""
        run = self.run
        wanted: dict[int, tuple[int, np.ndarray]] = {}
        for number, fed in enumerate(self.free_fed):
            wanted[fed] = run.free_tokens, top[:, run.num_target + number]
        if run.generates:
            # Where nothing of the answer is given, one stream serves both.
            longest = max(run.new_tokens, wanted.get(self.fed, (0,))[0])
            wanted[self.fed] = longest, top[:, 0]
        answers, total = {}, 0.0
        for number, (fed, (most, first)) in enumerate(wanted.items()):
            if number:
                cache = self._again(cache, batch)
            cache, streams, seconds = self._decode(cache, teacher, first, len(batch), fed, most)
            answers[fed], total = dict(enumerate(streams)), total + seconds
        return cache, answers, total

    def _again(self, cache, batch: list[_Admitted]):
        """The slots as they were before anything was fed or decoded."""
        evaluator = self.run.evaluator
        cache = evaluator.emptied(cache, np.ones(evaluator.config.num_slots, bool))
        for slot, admitted in enumerate(batch):
            cache, same = self._admit(cache, slot, admitted.variant)
            assert same is not None
        return cache

    def _decode(self, cache, teacher, first: np.ndarray, used: int, fed: int, most: int):
        """At most `most` tokens greedily in the first `used` slots, `fed` before the first one."""
        run, evaluator = self.run, self.run.evaluator
        slots = evaluator.config.num_slots
        active = np.arange(slots) < used
        if fed:
            args = (cache, teacher.k, teacher.v, np.int32(fed), active)
            out = evaluator.spread.cache_spec, SAME
            cache, ok = evaluator._run("fed", passes.write_fed, *args, out=out, donate=(0,))
            assert bool(ok)
        eos = set(run.model.tokenizer.eos_ids)
        answers = [[int(token)] for token in first[:used]]
        active[:used] = [answer[0] not in eos for answer in answers]
        if most < 2:
            active[:] = False
        state = dataclasses.replace(
            init_slots(slots),
            token=jnp.asarray(first, jnp.int32),
            active=jnp.asarray(active),
            remaining=jnp.full(slots, most - 1, jnp.int32),
        )
        every, limit = jnp.arange(slots, dtype=jnp.int32), np.int32(STEPS_AT_ONCE)
        fn = functools.partial(passes.decode_some, evaluator.spread.config, STEPS_AT_ONCE)
        out = evaluator.spread.cache_spec, SAME, SAME, SAME, SAME
        total = 0.0
        while active.any():
            args = (run.model.params, cache, state, every, limit, evaluator._eos_ids)
            (cache, state, tokens, goes_on, ok), seconds = evaluator._timed(
                "decode", fn, *args, out=out, donate=(1, 2)
            )
            assert bool(ok)
            total += seconds
            for slot, stream in enumerate(np.asarray(tokens).T[:used]):
                answers[slot] += [int(token) for token in stream if token >= 0]
            active = np.array(goes_on)
            for slot in np.flatnonzero(active):
                active[slot] = not self._stopped(answers[slot])
            state = dataclasses.replace(state, active=jnp.asarray(active))
        return cache, answers, total

    def _stopped(self, tokens: list[int]) -> bool:
        text = self.run.model.tokenizer.decode(tokens)
        # A stop text at the very beginning is passed over, as by `finish_answer`.
        return any(stop in text.lstrip("\n") for stop in self.run.row.stop)


def _own_answer(evaluator: Evaluator, row: Row, tokens: TokenRow) -> np.ndarray:
    """What the full cache says behind a prompt: at most `max_new_tokens`, greedily."""
    # Nobody looks at this target; it is as long as the answer may be, so that shapes are the same.
    most = min(row.max_new_tokens, evaluator.limit - len(tokens.prompt))
    target = np.repeat(tokens.prompt[-1:], most)
    asked = dataclasses.replace(row, metric="nll", target="?")
    run = _RowRun(evaluator, asked, dataclasses.replace(tokens, target=target))
    end = len(run.prompt)
    cut = _Cut(run, end, run.everything[end:end], 0, bucket(1, 8), most)
    room = run.size + bucket(most, 64) + evaluator.config.block_size
    cache, _, _ = cut.admit(evaluator.empty_cache(room), [Variant("full", 1.0)])
    first = np.full(evaluator.config.num_slots, run.full_top[0])
    cache, said, _ = cut._decode(cache, None, first, 1, 0, most)
    evaluator.keep_cache(evaluator.emptied(cache, np.ones(evaluator.config.num_slots, bool)))
    return np.asarray(said[0][:most], np.int32)
