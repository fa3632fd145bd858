"""Running models over the cache: steps, runner, generation."""

from kvjax.engine.generate import Generation
from kvjax.engine.runner import PrefillResult, Runner, RunnerConfig, plan_blocks
from kvjax.engine.sampling import SamplingParams

__all__ = [
    "Generation",
    "PrefillResult",
    "Runner",
    "RunnerConfig",
    "SamplingParams",
    "plan_blocks",
]
