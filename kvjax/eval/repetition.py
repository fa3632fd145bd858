"""Scores of methods that have the prompt repeated, from what the dense pass left of it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import Method
from kvjax.cache.policy import Scores
from kvjax.engine import repeat
from kvjax.engine.dense import DensePass
from kvjax.engine.prefill import PromptKV
from kvjax.engine.spread import Spread, by_heads
from kvjax.eval.sizes import bucket
from kvjax.models import LoadedModel


def _again(config, scorer, params, artefacts, dense, metric, length, tokens, count):
    """The prompt's metrics with one more of its repetitions; `metric` is None before the first."""
    if metric is None:
        num_layers, num_tokens, num_heads, _ = dense.k.shape
        metric = jnp.zeros((num_layers, num_heads, num_tokens), jnp.float32)
    held = PromptKV(dense.k, dense.v, Scores(metric), length)
    return repeat.repeat_again(config, scorer, params, artefacts, held, tokens, count)


class Repetition:
    """A model and what its repetitions need, each made when it is first asked for."""

    def __init__(self, model: LoadedModel, spread: Spread):
        self.model, self.spread = model, spread

    @functools.cached_property
    def request(self) -> list[int]:
        """Tokens that ask the model to repeat a prompt."""
        return repeat.request_tokens(self.model.tokenizer)

    @functools.cached_property
    def artefacts(self) -> dict[str, jax.Array]:
        """What is read beside the parameters."""
        return self.spread.repeat_artefacts()

    def scores(
        self, timed: Callable[..., Any], method: Method, dense: DensePass, prompt: np.ndarray
    ) -> tuple[Scores, float]:
        """The scores of a prompt's KVs, and the seconds that its repetitions took.

        Args:
            timed: `(key, function, *arguments, out=…) -> (result, seconds)`, compiles.
            method: a method that repeats.
            dense: keys and values, those of the prompt first.
            prompt: its tokens.
        """
        model = self.model
        scorer = repeat.scorer_behind(method.scorer, self.request)
        artefacts = self.artefacts if scorer.artefacts else {}
        fn, metric, total = functools.partial(_again, self.spread.config, scorer), None, 0.0
        for part in repeat.repetitions(self.request, prompt):
            padded = np.zeros(bucket(len(part), 128), np.int32)
            padded[: len(part)] = part
            sizes = np.int32(len(prompt)), np.int32(len(part))
            args = (model.params, artefacts, dense, metric, sizes[0], padded, sizes[1])
            metric, seconds = timed(("repeat", scorer), fn, *args, out=by_heads(1))
            total += seconds
        assert metric is not None
        return Scores(metric), total
