"""Running models over the cache: the engine that serves many requests, and one request alone."""

from kvjax.engine.config import EngineConfig
from kvjax.engine.generate import Generation
from kvjax.engine.llm import LLM
from kvjax.engine.request import RequestOutput, TokenLogprobs
from kvjax.engine.runner import PrefillResult, Runner, RunnerConfig, plan_blocks
from kvjax.engine.sampling import SamplingParams

__all__ = [
    "LLM",
    "EngineConfig",
    "Generation",
    "PrefillResult",
    "RequestOutput",
    "Runner",
    "RunnerConfig",
    "SamplingParams",
    "TokenLogprobs",
    "plan_blocks",
]
