"""Scores of methods that run something behind the prompt, from what the dense pass left of it."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import Method
from kvjax.cache.methods.speckv import SparseLookahead
from kvjax.cache.policy import Scores
from kvjax.cache.policy.probe import Probe, Probed
from kvjax.engine import probe as behind
from kvjax.engine.dense import DensePass
from kvjax.engine.draft import Draft
from kvjax.engine.parallel import SAME
from kvjax.engine.prefill import PromptKV
from kvjax.engine.sparse import prefill_sparse
from kvjax.engine.spread import Spread, by_heads
from kvjax.eval.sizes import padded_size
from kvjax.models import LoadedModel


def _held(dense, metric, length):
    """A prompt as the engine has it; `metric` is None before the first probe."""
    if metric is None:
        num_layers, num_tokens, num_heads, _ = dense.k.shape
        metric = jnp.zeros((num_layers, num_heads, num_tokens), jnp.float32)
    return PromptKV(dense.k, dense.v, Scores(metric), length)


def _again(config, scorer, params, artefacts, dense, metric, length, tokens, count, overlap):
    """The prompt's metrics with one more of its probes."""
    held = _held(dense, metric, length)
    return behind.probe_again(config, scorer, params, artefacts, held, tokens, count, overlap)


def _draft(config, most, params, dense, length, tokens, count, eos_ids):
    """What the model says behind the prompt."""
    return behind.draft(config, most, params, _held(dense, None, length), tokens, count, eos_ids)


class Probes:
    """A model and what its probes need, each made when it is first asked for."""

    def __init__(self, model: LoadedModel, spread: Spread, draft: Draft | None = None):
        self.model, self.spread, self.draft = model, spread, draft
        self.bench = behind.Bench(model)
        self.eos_ids = np.asarray(sorted(model.tokenizer.eos_ids) or [-1], np.int32)

    @functools.cached_property
    def artefacts(self) -> dict[str, jax.Array]:
        """What is read beside the parameters."""
        return self.spread.probe_artefacts()

    def scores(
        self, timed: Callable[..., Any], method: Method, dense: DensePass, prompt: np.ndarray
    ) -> tuple[Scores, float]:
        """The scores of a prompt's KVs, and the seconds that its probes and drafts took.

        Args:
            timed: `(key, function, *arguments, out=…) -> (result, seconds)`, compiles.
            method: a method that is `probed`.
            dense: keys and values, those of the prompt first.
            prompt: its tokens.
        """
        assert isinstance(method.scorer, Probed)
        params, metric, total = self.model.params, None, 0.0
        length = np.int32(len(prompt))
        for one in method.scorer.probes(prompt, self.bench):
            scorer = method.scorer.behind(one)
            artefacts = self.artefacts if scorer.artefacts else {}
            said, seconds = self._said(timed, one, dense, prompt)
            total += seconds
            fn = functools.partial(_again, self.spread.config, scorer)
            args = (params, artefacts, dense, metric, length, *said, np.int32(one.overlap))
            metric, seconds = timed(("probe", scorer), fn, *args, out=by_heads(1))
            total += seconds
        assert metric is not None
        return Scores(metric), total

    def sparse(
        self, timed: Callable[..., Any], method: Method, dense: DensePass, prompt: np.ndarray
    ) -> tuple[PromptKV, jax.Array, float, float]:
        """What a method that prefills sparsely has of a prompt, with its scores, the logits behind
        it, and the seconds of that prefill and of the draft; arguments as of `scores`."""
        scorer = method.scorer
        assert isinstance(scorer, SparseLookahead)
        (one,) = scorer.probes(prompt, self.bench)
        said, drafting = self._said(timed, one, dense, prompt)
        tokens = np.zeros(padded_size(len(prompt), 128), np.int32)
        tokens[: len(prompt)] = prompt
        fn = functools.partial(prefill_sparse, self.spread.config, scorer)
        args = (self.model.params, tokens, np.int32(len(prompt)), *said, np.int32(one.overlap))
        (held, logits), seconds = timed(("sparse", scorer), fn, *args)
        return held, logits, seconds, drafting

    def _said(
        self, timed: Callable[..., Any], one: Probe, dense: DensePass, prompt: np.ndarray
    ) -> tuple[Any, float]:
        """A probe's tokens, with what is drafted behind them, and their number; and the seconds
        that the draft took."""
        tokens, total = np.zeros(padded_size(len(one), 128), np.int32), 0.0
        if one.drafted and self.draft is not None:
            self.draft.check(len(prompt), one.drafted)
            start = time.perf_counter()
            one = one.saying(self.draft(prompt, one.drafted))
            total += time.perf_counter() - start
        tokens[: len(one.tokens)] = one.tokens
        said: Any = tokens, np.int32(len(one.tokens))
        if one.drafted:
            fn = functools.partial(_draft, self.spread.config, one.drafted)
            args = (self.model.params, dense, np.int32(len(prompt)), *said, self.eos_ids)
            said, seconds = timed(("draft", one.drafted), fn, *args, out=SAME)
            total += seconds
        return said, total
