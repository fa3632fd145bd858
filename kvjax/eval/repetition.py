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
from kvjax.eval.sizes import bucket
from kvjax.models import LoadedModel


class Repetition:
    """A model and what its repetitions need, each made when it is first asked for."""

    def __init__(self, model: LoadedModel):
        self.model = model

    @functools.cached_property
    def request(self) -> list[int]:
        """Tokens that ask the model to repeat a prompt."""
        return repeat.request_tokens(self.model.tokenizer)

    @functools.cached_property
    def artefacts(self) -> dict[str, jax.Array]:
        """What is read beside the parameters."""
        return repeat.repeat_artefacts(self.model.config, self.model.params)

    def scores(
        self, timed: Callable[..., Any], method: Method, dense: DensePass, prompt: np.ndarray
    ) -> tuple[Scores, float]:
        """The scores of a prompt's KVs, and the seconds that its repetitions took.

        Args:
            timed: `(key, function, *arguments) -> (result, seconds)`, compiles.
            method: a method that repeats.
            dense: keys and values, those of the prompt first.
            prompt: its tokens.
        """
        model = self.model
        scorer = repeat.scorer_behind(method.scorer, self.request)
        artefacts = self.artefacts if scorer.artefacts else {}
        num_layers, num_tokens, num_heads, _ = dense.k.shape
        scores = Scores(jnp.zeros((num_layers, num_heads, num_tokens), jnp.float32))
        fn, total = functools.partial(repeat.repeat_again, model.config, scorer), 0.0
        for part in repeat.repetitions(self.request, prompt):
            padded = np.zeros(bucket(len(part), 128), np.int32)
            padded[: len(part)] = part
            held = PromptKV(dense.k, dense.v, scores, jnp.int32(len(prompt)))
            args = (model.params, artefacts, held, padded, np.int32(len(part)))
            metric, seconds = timed(("repeat", scorer), fn, *args)
            scores, total = Scores(metric), total + seconds
        return scores, total
