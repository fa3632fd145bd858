"""The calls that probe behind prompts, and what they are made of; steps are those of `probe.py`."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from kvjax.cache.methods.speckv import SparseLookahead
from kvjax.cache.policy import Scorer
from kvjax.cache.policy.probe import Probe, Probed
from kvjax.engine.compilation import StepCall, StepKey, StepName, bucket
from kvjax.engine.job import PromptJob
from kvjax.engine.parallel import Parallel
from kvjax.engine.probe import Bench, probe_artefacts
from kvjax.models.config import ModelConfig


class Probing:
    """Calls of a worker's probes. Like the worker's own, they only say what is to run.

    Args:
        model: the model.
        params: its parameters.
        eos_ids: tokens that end what the model drafts, int32[E].
        steps: the compiled steps by name.
        chunk: tokens of a chunk of a prompt at most.
        parallel: how the model is spread over devices; None on one.
        bench: what probes are made of; None where no method runs any.
        draft: says what may come behind some tokens, so many at most; without one the model itself.
    """

    def __init__(
        self,
        model: ModelConfig,
        params: nnx.State,
        eos_ids: jax.Array,
        steps: Mapping[StepName, Callable[..., Any]],
        chunk: int,
        parallel: Parallel | None = None,
        bench: Bench | None = None,
        draft: Callable[[np.ndarray, int], Sequence[int]] | None = None,
    ):
        self.model, self.params, self.eos_ids = model, params, eos_ids
        self.parallel, self.bench, self.draft = parallel, bench, draft
        self._steps, self._chunk = steps, chunk
        self._artefacts: dict[str, jax.Array] = {}

    def idle(self) -> "Probing":
        """The same where nothing runs: only the shapes of its calls matter."""
        idle = copy.copy(self)
        if idle.bench is not None:
            idle.bench = copy.copy(idle.bench)
            idle.bench.idle = True
        return idle

    def probes(self, scorer: Scorer | None, tokens: np.ndarray) -> list[Probe]:
        """What a prompt's scorer runs behind it."""
        if not isinstance(scorer, Probed):
            return []
        assert self.bench is not None
        return scorer.probes(tokens, self.bench)

    def said(self, job: PromptJob) -> tuple[np.ndarray, np.int32]:
        """A job's next probe with what another model drafts behind it: tokens and their number."""
        probe = job.probes[0]
        assert self.draft is not None
        return self._padded(job, probe.saying(self.draft(job.tokens, probe.drafted)))

    def drafts_first(self, job: PromptJob) -> bool:
        """Whether a job's prompt runs at once with what another model drafts behind it."""
        return job.sparse is not None and bool(job.probes) and self.draft is not None

    def drafts_itself(self, job: PromptJob) -> bool:
        """Whether the model drafts for a job's next probe."""
        return bool(job.probes[0].drafted) and self.draft is None

    def draft_call(self, job: PromptJob, prompt: Any) -> StepCall:
        """What the model itself says behind a job's prompt, as its next probe wants it."""
        probe = job.probes[0]
        tokens, length = self._padded(job, probe)
        key = StepKey("draft", sizes=(probe.drafted, len(tokens), prompt.k.shape[1]))
        args = (self.model, probe.drafted, self.params, prompt, tokens, length, self.eos_ids)
        return StepCall(key, self._steps[key.step], args)

    def call(self, job: PromptJob, prompt: Any, said: Any = None) -> StepCall:
        """A job's next probe; `said` are its tokens and their number, where a draft has said
        some."""
        probe, scorer = job.probes[0], job.request.method.scorer
        assert isinstance(scorer, Probed)
        scorer = scorer.behind(probe)
        if job.sparse is not None:
            assert isinstance(scorer, SparseLookahead)
            return self._sparse_call(job, scorer, said)
        if scorer.artefacts and not self._artefacts:
            if self.parallel is None:
                found = probe_artefacts(self.model, self.params)
            else:
                found = self.parallel.probe_artefacts(self.params)
            self._artefacts.update(found)
        artefacts = self._artefacts if scorer.artefacts else {}
        tokens, length = self._padded(job, probe) if said is None else said
        key = StepKey("probe", scorer, (len(tokens), prompt.k.shape[1]))
        args = (self.model, scorer, self.params, artefacts, prompt, tokens, length)
        return StepCall(key, self._steps[key.step], (*args, np.int32(probe.overlap)))

    def _sparse_call(self, job: PromptJob, scorer: SparseLookahead, said: Any) -> StepCall:
        """A job's whole prompt once more, or for the first time, with its next probe behind it."""
        probe = job.probes[0]
        looking, count = self._padded(job, probe) if said is None else said
        tokens = np.zeros(bucket([len(job.tokens)], self._chunk), np.int32)
        tokens[: len(job.tokens)] = job.tokens
        key = StepKey("prefill sparse", scorer, (len(tokens), len(looking)))
        args = (self.model, scorer, self.params, tokens, np.int32(len(job.tokens)), looking, count)
        return StepCall(key, self._steps[key.step], (*args, np.int32(probe.overlap)))

    def calls(self, job: PromptJob, prompt: Any) -> list[StepCall]:
        """Those of a job's next probe, of shapes."""
        if not job.probes:
            return []
        if not self.drafts_itself(job):
            return [self.call(job, prompt)]
        draft = self.draft_call(job, prompt)
        said = draft.step.eval_shape(*draft.args)  # type: ignore[attr-defined]
        return [draft, self.call(job, prompt, said)]

    def _padded(self, job: PromptJob, probe: Probe) -> tuple[np.ndarray, np.int32]:
        """A probe's tokens, padded to the longest of a job's probes, and how many they are."""
        tokens = np.zeros(bucket(map(len, job.probes), self._chunk), np.int32)
        tokens[: len(probe.tokens)] = probe.tokens
        return tokens, np.int32(len(probe.tokens))
