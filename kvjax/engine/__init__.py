"""Running models over the cache: the engine that serves many requests.

Here belong the three jitted stages, what decides when they run, and the fronts that callers see;
in `calibrate`, what is measured of a model before it serves. Options, progress lines and scores of
answers are not here.
"""

from kvjax.engine.async_llm import AsyncLLM, AsyncOutputs
from kvjax.engine.config import EngineConfig
from kvjax.engine.episodes import EpisodeCaches
from kvjax.engine.llm import LLM
from kvjax.engine.memory import pool_tokens_for
from kvjax.engine.request import RequestOutput, TokenLogprobs
from kvjax.engine.sampling import SamplingParams
from kvjax.engine.tell import RateWarning

__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncOutputs",
    "EngineConfig",
    "EpisodeCaches",
    "RateWarning",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprobs",
    "pool_tokens_for",
]
