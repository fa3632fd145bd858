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

from kvjax.cache import CacheSpec, Method, get_method, release
from kvjax.cache.calibration import lacking
from kvjax.cache.policy import Observer, Scores
from kvjax.engine.dense import dense_pass
from kvjax.engine.draft import Draft
from kvjax.engine.narrowing import prefill_narrowing
from kvjax.engine.parallel import SAME
from kvjax.engine.prefill import PromptKV
from kvjax.engine.spread import DENSE, Spread, by_heads
from kvjax.eval import passes, told
from kvjax.eval.cuts import Cut
from kvjax.eval.probing import Probes
from kvjax.eval.prompt_rows import PromptRows
from kvjax.eval.rows import Row, TokenRow, tokenise
from kvjax.eval.scorers import needs_answer
from kvjax.eval.sizes import EvaluatorConfig, Variant, cache_spec, head_room, padded_size
from kvjax.models import LoadedModel
from kvjax.models.rope import rope_artefacts


class Evaluator:
    """A loaded model and what was compiled for it."""

    cut: type[Cut] = Cut
    """What compresses a row."""

    def __init__(
        self,
        model: LoadedModel,
        config: EvaluatorConfig,
        artefacts: Mapping[str, jax.Array] | None = None,
        draft: Draft | None = None,
    ):
        self.model, self.config = model, config
        self.spread = Spread(model)
        self.artefacts = self.spread.artefacts(
            {**(artefacts or {}), **rope_artefacts(model.config)}
        )
        """Arrays by name, for methods that read them: calibrated ones, and RoPE's frequencies."""
        self.of_weights = functools.cache(lambda codec: codec.from_weights(model))
        self.spec = cache_spec(model, config.block_size)
        self.probing = Probes(model, self.spread, draft)
        self.compile_seconds = 0.0
        self.limit = config.context_length or model.config.max_position_embeddings
        self._compiled: dict[Any, Callable] = {}
        self._cache_of: tuple[tuple[int, str | None], Any] | None = None
        eos = tuple(model.tokenizer.eos_ids) or (-1,)
        self._eos_ids = jnp.asarray(eos, jnp.int32)

    @property
    def heads(self) -> int:
        return self.spec.heads

    def asked(self, row: Row) -> Row:
        """The row with answers of no more tokens than the configuration allows."""
        most = self.config.max_new_tokens
        if most is None or most >= row.max_new_tokens:
            return row
        return dataclasses.replace(row, max_new_tokens=most)

    def tokenise(self, row: Row) -> TokenRow:
        """The row's tokens; see `kvjax.eval.rows.tokenise`."""
        tokenizer, size = self.model.tokenizer, self.model.config.vocab_size
        return tokenise(self.asked(row), tokenizer, self.limit, self.config.max_target, size)

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
            codec = variant.prompt_codec
            for array in codec.calibrated if codec else ():
                if array not in self.artefacts:
                    raise lacking(str(variant.cache_dtype), array)
        for name in dict.fromkeys(v.method for variants in jobs.values() for v in variants):
            self.spread.check_method(get_method(name))
            for array in get_method(name).artefacts:
                if array not in self.artefacts:
                    raise lacking(f"method {name}", array)
        codecs = [v.prompt_codec for variants in jobs.values() for v in variants]
        run = RowRun(self, row, tokens, any(codec and codec.peaks for codec in codecs))
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


class RowRun:
    """One row: its dense pass, and what follows from it."""

    def __init__(self, evaluator: Evaluator, row: Row, tokens: TokenRow, peaks: bool = False):
        """
        Args:
            evaluator: what it runs on.
            row: the prompt.
            tokens: its tokens.
            peaks: whether a codec reads `DensePass.peak`.
        """
        row = evaluator.asked(row)
        self.evaluator, self.row = evaluator, row
        self.model = evaluator.model
        if row.metric == "own":
            tokens = dataclasses.replace(tokens, target=_own_answer(evaluator, row, tokens))
        self.tokens, self.answers = tokens, tokens.answers
        self.prompt, self.target = tokens.prompt, tokens.target
        self.generates = evaluator.config.answers and needs_answer(row.metric)
        config = evaluator.config
        self.new_tokens = row.max_new_tokens if self.generates else 0
        # A continuation has no question to answer; of a summary as much is looked at as is scored.
        room = evaluator.limit - self.answers[-1].opened
        free = row.max_new_tokens if row.metric == "own" else config.free_tokens
        self.free_tokens = 0 if row.metric == "nll" or not config.free_tokens else min(free, room)
        # Target tokens that count.
        self.scored = told.scored_tokens(self.answers)
        self.num_target = padded_size(len(self.scored), 8)
        everything = np.concatenate([self.prompt, self.target[:-1]])
        self.size = padded_size(len(everything), 128)
        padded = np.zeros(self.size, np.int32)
        padded[: len(everything)] = everything
        self.everything = everything
        at = np.minimum(self.predicted, len(everything) - 1).astype(np.int32)
        fn = functools.partial(dense_pass, evaluator.spread.config, peaks=peaks)
        self.dense, self.prefill_seconds = evaluator._timed(
            ("dense", peaks), fn, self.model.params, padded, at, out=DENSE
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
        room = padded_size(max(1, len(chunk)), 8)
        growth = max(fed + self.new_tokens, self.answers[-1].opened - cut + self.free_tokens)
        most = head_room(self.size, growth, self.evaluator.config.block_size)
        cuts = self.evaluator.cut(self, cut, chunk, fed, room, growth)
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
        if method.probed:
            if method.scorer not in self.metrics:
                evaluator, prompt = self.evaluator, self.prompt[:cut]
                self.metrics[method.scorer] = evaluator.probing.scores(
                    evaluator._timed, method, self.dense, prompt
                )
            scores, seconds = self.metrics[method.scorer]
            if method.observer.queries is None:
                return scores, seconds
            seen, took = self._observed(method.observer, cut)
            return dataclasses.replace(scores, queries=seen.queries), seconds + took
        return self._observed(method.observer, cut)

    def own_prefill(self, method: Method, cut: int) -> tuple[PromptKV, Any, float, float]:
        """What a method that prunes, or attends sparsely, has of the prompt in its own prefill, the
        logits behind it, and the seconds of that and of a draft; once per rule."""
        evaluator, key = self.evaluator, (method.observer, method.pruner)
        if method.pruner is None:
            key = "sparse", method.scorer
            if key not in self.metrics:
                given = evaluator._timed, method, self.dense, self.prompt[:cut]
                *found, drafting = evaluator.probing.sparse(*given)
                self.metrics[key] = found, drafting
            (prompt, logits, seconds), drafting = self.metrics[key]
            return prompt, logits, seconds, drafting
        if key not in self.metrics:
            padded = np.zeros(padded_size(cut, 128), np.int32)
            padded[:cut] = self.everything[:cut]
            fn = functools.partial(prefill_narrowing, evaluator.spread.config, *key)
            args = (self.model.params, evaluator.artefacts, padded, np.int32(cut))
            self.metrics[key] = evaluator._timed(("narrowing", key), fn, *args)
        (prompt, logits), seconds = self.metrics[key]
        return prompt, logits, seconds, 0.0

    def _observed(self, observer: Observer, cut: int) -> tuple[Scores, float]:
        """`metric` of what prefill alone tells."""
        if observer not in self.metrics:
            fn = functools.partial(passes.observe, observer)
            args = (self.dense, np.int32(cut), self.evaluator.artefacts)
            self.metrics[observer] = self.evaluator._timed(
                ("observe", observer), fn, *args, out=by_heads(1)
            )
        return self.metrics[observer]


def _own_answer(evaluator: Evaluator, row: Row, tokens: TokenRow) -> np.ndarray:
    """What the full cache says behind a prompt: at most `max_new_tokens`, greedily."""
    # Nobody looks at this target; it is as long as the answer may be, so that shapes are the same.
    most = min(row.max_new_tokens, evaluator.limit - len(tokens.prompt))
    target = np.repeat(tokens.prompt[-1:], most)
    asked = dataclasses.replace(row, metric="nll", target="?")
    run = RowRun(evaluator, asked, dataclasses.replace(tokens, target=target))
    end = len(run.prompt)
    cut = Cut(run, end, run.everything[end:end], 0, padded_size(1, 8), most)
    room = head_room(run.size, most, evaluator.config.block_size)
    cache, _, _ = cut.admit(evaluator.empty_cache(room), [Variant("full", 1.0)])
    first = np.full(evaluator.config.num_slots, run.full_top[0])
    cache, said, _ = cut._decode(cache, None, first, 1, 0, most)
    evaluator.keep_cache(evaluator.emptied(cache, np.ones(evaluator.config.num_slots, bool)))
    return np.asarray(said[0][:most], np.int32)
