"""A prompt's caches of all its episodes, and the questions that choose among them.

Source: EpiCache (Kim et al. 2025, arXiv 2509.17396), its three stages: segments are sorted into
episodes, each episode's medoid has a cache made of the whole prompt, and a question is answered
from the cache of the episode next to it. `kvjax.cache.methods.epicache` says how episodes are found
and what differs; here each cache is a prefix that is retained under a method of its own.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int32

from kvjax.cache import CompressionConfig
from kvjax.cache.methods.epicache import Episode, nearest_episode
from kvjax.checks import check_text, check_whole
from kvjax.engine.checks import checked_request
from kvjax.engine.interrupts import held
from kvjax.engine.prompts import Prompt, as_batch, token_ids
from kvjax.engine.request import Request, RequestOutput
from kvjax.engine.retaining import SHORTEST, retain
from kvjax.engine.sampling import SamplingParams
from kvjax.errors import UserError

if TYPE_CHECKING:
    from kvjax.engine.llm import LLM


@dataclasses.dataclass(frozen=True, eq=False)
class EpisodeCaches:
    """What `LLM.episodes` has retained of a prompt.

    They are prefixes like any others: one that had to give way is made again, by a prefill, when a
    question chooses it.
    """

    llm: "LLM"
    prompt: Int32[np.ndarray, " T"]
    compressions: tuple[CompressionConfig, ...]
    """Of each cache: requests that begin with the prompt and bring these settings go on from it."""
    centroids: Float[np.ndarray, "E D"]
    """Of the episodes, float64 of unit length."""

    def __len__(self) -> int:
        return len(self.compressions)

    def route(self, question: Prompt) -> int:
        """Which cache a question chooses: that whose centroid is nearest to its embedding, the mean
        of its tokens' rows in the model's table. May be called from any thread.

        Raises:
            UserError: the question is empty, or no text and no token ids.
        """
        bench = self.llm.worker.probing.bench
        assert bench is not None
        return nearest_episode(self.centroids, bench.embedded(self._tokens(question)))

    def asked(self, question: Prompt) -> tuple[Int32[np.ndarray, " N"], CompressionConfig]:
        """What to hand to `LLM.add_request` and its like: the prompt with a question behind it, and
        the settings that have it go on from the cache it chooses. Errors as of `route`."""
        tokens = self._tokens(question)
        return np.concatenate([self.prompt, tokens]), self.compressions[self.route(tokens)]

    def generate(
        self,
        questions: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers to questions about the prompt, each from the cache that it chooses.

        What comes behind the prompt is protected, up to half of a cache's cap, and takes the place
        of what its episode's medoid reads least.

        Args:
            questions: texts or token ids, with whatever stands between prompt and answer.
            sampling: settings for all of them, or one for each.

        Returns:
            The last output of each, as of `LLM.generate`.

        Raises:
            UserError: as of `route` and of `LLM.generate`.
        """
        asked = [self.asked(question) for question in as_batch(questions)]
        prompts, compressions = [one for one, _ in asked], [one for _, one in asked]
        return self.llm.generate(prompts, sampling, compressions)

    def free(self) -> None:
        """Give back the blocks of the caches, and of answers that are retained behind them.

        Requests that go on from one keep what they hold.

        Raises:
            UserError: another thread is using the engine, or this is a callback.
        """
        engine = self.llm.engine
        with engine.owner("free"), held():
            for prefix in list(engine.scheduler.prefixes):
                if prefix.settings in self.compressions:
                    engine.keeper.forget(prefix)
            engine.observe()

    def _tokens(self, question: Prompt) -> Int32[np.ndarray, " N"]:
        tokenizer = self.llm.model.tokenizer
        if isinstance(question, str):
            # It stands behind a prompt: no token begins it.
            question = tokenizer.encode(check_text("question", question))
        if not len(question):
            raise UserError("the question is empty: give at least one token")
        return token_ids(question, tokenizer, self.llm.model.config.vocab_size)


def prepare(
    llm: "LLM", prompt: Prompt, compression: CompressionConfig | None, number: int | None
) -> EpisodeCaches:
    """See `LLM.episodes`."""
    compression = llm.compression if compression is None else compression
    request = checked_request(llm, prompt, SHORTEST, compression, "episodes", -1)
    tokens, compression = request.prompt, request.compression
    method = compression.resolved
    scorer = method.scorer
    if not isinstance(scorer, Episode):
        raise UserError(f"method {method.name} has no episodes: give method 'epicache'")
    if request.budget is None:
        raise UserError("the settings evict nothing: give a rate above 1 or max_cache_tokens")
    if number is not None:
        check_whole("number", number, 1, 2**12)
        scorer = dataclasses.replace(scorer, episodes=number)
    segments, size = scorer.segments(tokens).shape
    if scorer.episodes > segments:
        raise UserError(
            f"{scorer.episodes} episodes of a prompt of {len(tokens)} tokens, which are {segments} "
            f"segments of {size}: give number={segments}, or a longer prompt"
        )
    bench = llm.worker.probing.bench
    assert bench is not None
    found = scorer.found(tokens, bench)
    _check_room(llm, request, len(found))
    settings = [
        dataclasses.replace(
            compression,
            method=dataclasses.replace(method, scorer=medoid, query_aware=False),
        )
        for medoid, _ in found
    ]
    centroids = np.stack([centroid for _, centroid in found])
    caches = EpisodeCaches(llm, tokens, tuple(settings), centroids)
    with llm.engine.owner("episodes"):
        try:
            with llm.worker.keeping_scratch():
                for one in settings:
                    retain(llm, tokens, one)
            prefixes = llm.scheduler.prefixes
            there = sum(prefixes.exactly(one, tokens) is not None for one in settings)
            if there < len(found):
                raise UserError(
                    f"{len(found) - there} of {len(found)} caches had to give way to what runs: "
                    "give a larger pool, or come when less runs"
                )
        except UserError:
            caches.free()
            raise
    return caches


def _check_room(llm: "LLM", request: Request, number: int) -> None:
    """Raise `UserError` unless so many caches may be retained, beside a question that runs."""
    rows, config = llm.config.retained_prefixes, llm.config
    if config.sharing and rows < number:
        raise UserError(
            f"{number} episodes and retained_prefixes {rows}: give at least as many, or fewer "
            "episodes"
        )
    assert request.budget is not None
    cache = min(request.budget, request.blocks_whole(request.length))
    # A part of the pool stays free. A question begins with a block of each head, and has another to
    # grow into.
    accounts = llm.scheduler.accounts
    part = accounts.kept_free
    needs = -(-part * ((number + 1) * cache + 2 * request.heads) // (part - 1))
    if not accounts.could_hold(needs):
        pool = -(-needs // request.heads) * request.block_size
        raise UserError(
            f"{number} caches of {cache} blocks and a question need {needs} blocks, and the pool "
            f"has {llm.plan.num_blocks}: give a pool of {pool} tokens, a higher rate, or fewer "
            "episodes"
        )
