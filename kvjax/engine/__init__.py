"""Running models over the cache: the engine that serves many requests."""

from kvjax.engine.async_llm import AsyncLLM, AsyncOutputs
from kvjax.engine.config import EngineConfig
from kvjax.engine.llm import LLM, RateWarning
from kvjax.engine.memory import pool_tokens_for
from kvjax.engine.request import RequestOutput, TokenLogprobs
from kvjax.engine.sampling import SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncOutputs",
    "EngineConfig",
    "RateWarning",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprobs",
    "pool_tokens_for",
]
