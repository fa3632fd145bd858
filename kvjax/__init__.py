"""kvjax: KV-cache compression on JAX, with a paged cache per (sequence, layer, KV head)."""

import importlib
import logging
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Quiet until whoever uses the library asks for its records.
logging.getLogger(__name__).addHandler(logging.NullHandler())

if TYPE_CHECKING:
    from kvjax.cache import CompressionConfig, PagedCache
    from kvjax.engine import (
        LLM,
        AsyncLLM,
        EngineConfig,
        RateWarning,
        RequestOutput,
        SamplingParams,
    )
    from kvjax.errors import UserError
    from kvjax.models import load_model

_HOMES = {
    "LLM": "kvjax.engine",
    "AsyncLLM": "kvjax.engine",
    "CompressionConfig": "kvjax.cache",
    "EngineConfig": "kvjax.engine",
    "PagedCache": "kvjax.cache",
    "RateWarning": "kvjax.engine",
    "RequestOutput": "kvjax.engine",
    "SamplingParams": "kvjax.engine",
    "UserError": "kvjax.errors",
    "load_model": "kvjax.models",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompressionConfig",
    "EngineConfig",
    "PagedCache",
    "RateWarning",
    "RequestOutput",
    "SamplingParams",
    "UserError",
    "load_model",
]


def __getattr__(name: str):
    """Public names, imported when first asked for: a script's --help need not wait for JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvjax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
