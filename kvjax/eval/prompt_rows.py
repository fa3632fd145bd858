"""A prompt's keys and values as variants write them to their caches."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from kvjax.cache.policy import Artefacts
from kvjax.cache.policy.rotary import ROPE_FREQUENCY
from kvjax.engine.dense import DensePass
from kvjax.eval import passes
from kvjax.eval.prompt_codecs import PromptCodec
from kvjax.eval.sizes import Variant


class PromptRows:
    """What a dense pass has of a prompt, as it is or through a codec of whole prompts."""

    def __init__(
        self,
        timed: Callable[..., Any],
        of_weights: Callable[[PromptCodec], Artefacts],
        dense: DensePass,
        artefacts: Artefacts,
    ):
        """
        Args:
            timed: runs a pass, named by a key, and says how many seconds it took.
            of_weights: what a codec reads of the model's weights.
            dense: the pass, which may go on behind the prompt.
            artefacts: arrays by name.
        """
        self._timed, self._of_weights, self._dense = timed, of_weights, dense
        self._artefacts = artefacts
        self._last: tuple[tuple[PromptCodec, int], Any] | None = None

    def of(self, variant: Variant, length: int) -> tuple[jax.Array, jax.Array, float]:
        """Keys and values [L, T, H, d] of which the first `length` tokens count, and the seconds
        that storing and restoring them took. Those of the last codec are kept."""
        codec, dense = variant.prompt_codec, self._dense
        if codec is None:
            return dense.k, dense.v, 0.0
        if self._last is None or self._last[0] != (codec, length):
            self._last = None
            fn = functools.partial(passes.through_codec, codec)
            artefacts = {**self._artefacts, **self._of_weights(codec)}
            read = {name: artefacts[name] for name in (ROPE_FREQUENCY, *codec.artefacts)}
            args = (dense, np.int32(length), read)
            self._last = (codec, length), self._timed(("codec", codec), fn, *args)
        (k, v), seconds = self._last[1]
        return k, v, seconds
