"""Another model that says what may come behind a prompt, for methods that look ahead."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvjax.cache import CompressionConfig
from kvjax.checks import shown
from kvjax.engine import processes
from kvjax.engine.checks import checked_request
from kvjax.engine.sampling import SamplingParams
from kvjax.errors import UserError
from kvjax.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvjax.engine.llm import LLM

ALONE = "models draft in a single process; let the model draft itself"


class Draft:
    """An engine that drafts greedily, from a cache that it compresses by its own settings.

    It belongs to the engine that it drafts for and runs in its rounds: nobody else may use it, and
    requests of that engine wait while it drafts.
    """

    def __init__(self, llm: "LLM", tokenizer: Tokenizer):
        """For an engine of that tokenizer.

        Raises:
            UserError: it is no engine, has another tokenizer, or there are several processes.
        """
        if not hasattr(llm, "engine"):
            raise UserError(f"draft {shown(llm)}: give an LLM")
        if processes.current() is not None:
            raise UserError(f"draft: {ALONE}")
        check_same(llm.model.tokenizer, tokenizer)
        self.llm = llm

    def beside(self, limit: int) -> int:
        """What is left of a device's bytes for the engine that it drafts for."""
        return limit - self.llm.plan.total

    def check(self, length: int, most: int) -> None:
        """Raise `UserError` where it cannot draft so many tokens behind so many."""
        prompt, sampling = np.zeros(length, np.int32), SamplingParams(max_tokens=most)
        try:
            checked_request(self.llm, prompt, sampling, self._compression(length), "draft", -1)
        except UserError as error:
            raise UserError(f"draft: {error}") from None

    def __call__(self, tokens: np.ndarray, most: int) -> Sequence[int]:
        """What it says behind some tokens; less, or nothing, where it fails."""
        if self.llm.dead is not None:
            self.llm.reset()
        sampling, compression = SamplingParams(max_tokens=most), self._compression(len(tokens))
        return self.llm.generate([tokens], sampling, compression)[0].token_ids

    def _compression(self, length: int) -> CompressionConfig:
        """Its engine's settings, a rate as the cap that it comes to: nobody asked for that rate, so
        nobody is told where it is not reached."""
        own = self.llm.compression
        if own.rate is None:
            return own
        cap = own.cap(length, self.llm.plan.spec.block_size)
        return dataclasses.replace(own, rate=None, max_cache_tokens=cap)


def check_same(one: Tokenizer, other: Tokenizer) -> None:
    """Raise `UserError` where two tokenizers do not know the same tokens by the same numbers."""
    for index in range(max(one.vocab_size, other.vocab_size)):
        if one.token_bytes(index) != other.token_bytes(index):
            raise UserError(
                f"draft: its tokenizer differs from the model's at token {index}: give a model of "
                "the same family"
            )
