"""A prompt that is compressed after some of its tokens: what each variant makes of the rest."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from kvjax.cache import get_method, write_prompt
from kvjax.engine.calls import NO_BUDGET
from kvjax.engine.decode import init_slots
from kvjax.engine.insert import place
from kvjax.engine.parallel import SAME
from kvjax.engine.spread import by_heads
from kvjax.errors import UserError
from kvjax.eval import passes, told
from kvjax.eval.sizes import Variant, kept_blocks

if TYPE_CHECKING:
    from kvjax.eval.evaluator import RowRun

STEPS_AT_ONCE = 8
"""Tokens decoded before the host looks for stop texts."""


@dataclasses.dataclass
class _Admitted:
    """A variant in a slot."""

    variant: Variant
    select_seconds: float
    shortfall: int
    prefill_seconds: float
    logits: Any = None
    """Behind the prompt, where its prefill is not the dense pass."""


@dataclasses.dataclass
class Cut:
    """A row compressed after `cut` tokens; `chunk` follows, `fed` of it before the target."""

    run: "RowRun"
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
            if batch and cache.kv.fine is not None:
                # What is compared is what each holds in a pool that has room for finer codes, too:
                # one that came in vain would have taken those of others.
                keep = kept_blocks(variant, self.cut, run.evaluator.heads, config)
                most = 2 * np.minimum(heads * -(-self.cut // b), keep)
                if (_vacant(cache) < most + reserve * (slot + 1)).any():
                    break
            cache, admitted = self._admit(cache, slot, variant)
            enough = admitted is not None and (_vacant(cache) >= reserve * (slot + 1)).all()
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
        keep = kept_blocks(variant, self.cut, evaluator.heads, config)
        sparse = method.sparse is not None and method.sparse.applies(self.cut)
        if method.pruner is not None or (sparse and keep != NO_BUDGET):
            return self._admit_own(cache, slot, variant)
        scores, seconds = run.metric(method, self.cut)
        k, v, restoring = run.rows.of(variant, self.cut)
        cut, at = np.int32(self.cut), np.int32(slot)
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
        took += seconds + restoring
        return cache, _Admitted(variant, took, shortfall, run.prefill_seconds)

    def _admit_own(self, cache, slot: int, variant: Variant):
        """A variant that prunes, or attends sparsely: of what its own prefill has."""
        run, evaluator = self.run, self.run.evaluator
        method, config = get_method(variant.method), evaluator.config
        prompt, logits, seconds, drafting = run.own_prefill(method, self.cut)
        keep = kept_blocks(variant, self.cut, evaluator.heads, config)
        chooses = method.eviction if keep != NO_BUDGET and method.compresses else None
        args = (chooses, evaluator.artefacts, cache, prompt, np.int32(keep), np.int32(slot))
        (cache, _, short, ok), took = evaluator._timed(
            ("place", None if chooses is None else chooses.parts), place, *args,
            out=(evaluator.spread.cache_spec, SAME, SAME, SAME), donate=(2,),
        )  # fmt: skip
        if not ok:
            return cache, None
        return cache, _Admitted(variant, took + drafting, int(short), seconds, logits)

    def score(self, cache, batch: list[_Admitted]):
        """Feed, teacher-force, decode; returns the emptied cache and the results."""
        run, evaluator = self.run, self.run.evaluator
        model, slots = run.model, evaluator.config.num_slots
        count = len(self.chunk)
        args, out = (cache, self.mass), (SAME, by_heads(2))
        found = evaluator._run("recall", passes.attention_recall, *args, out=out)
        recall, held = evaluator.spread.on_host(found)
        kept, refined = (x.swapaxes(0, 1) for x in held)

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
        for slot, admitted in enumerate(batch):
            if admitted.logits is not None:
                top[slot, run.predicted == self.cut - 1] = int(jnp.argmax(admitted.logits))
        cache, answers, decode_seconds = self._answers(cache, batch, teacher, top)
        cache = evaluator.emptied(cache, np.ones(slots, bool))
        nll, kl = np.asarray(teacher.nll), np.asarray(teacher.kl)
        shared = {"score": seconds / len(batch), "decode": decode_seconds / len(batch)}
        results = []
        for slot, admitted in enumerate(batch):
            result = self._result(admitted, kept[slot], refined[slot], recall[slot], shared)
            result |= told.forced(
                run.answers, target[: len(run.scored)], top[slot], run.full_top, nll[slot], kl[slot]
            )
            said = answers[self.fed][slot][: run.new_tokens] if run.generates else None
            result |= told.answered(run.row, model.tokenizer, result["em"], said)
            said = [answers[fed][slot][: run.free_tokens] for fed in self.free_fed]
            result |= told.freely(run.row, model.tokenizer, said)
            results.append((admitted.variant, result))
        return cache, results

    def _result(self, admitted: _Admitted, kept, refined, recall, shared) -> dict[str, Any]:
        run, b = self.run, self.run.evaluator.config.block_size
        row, heads = run.row, run.evaluator.heads
        spec = run.evaluator.spec_in(admitted.variant.cache_dtype)
        blocks = int((-(-kept // b)).sum())
        in_all = blocks + int(refined.sum())
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
            "bytes": admitted.variant.held_bytes(spec, run.model.config, self.cut, in_all),
            "shortfall": admitted.shortfall,
            "recall": told.rounded(recall.mean()) if len(self.chunk) else None,
            "recall_by_layer": [told.rounded(share) for share in recall]
            if len(self.chunk)
            else None,
            "kept": kept.tolist(),
            "seconds": {
                "prefill": told.rounded(admitted.prefill_seconds),
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


def _vacant(cache) -> np.ndarray:
    """Blocks of each shard that nobody owns and that hold no finer codes of others."""
    free, fine = np.asarray(cache.free.count), cache.kv.fine
    return free if fine is None else free - np.asarray(fine.count)
