"""A tiny model in which next to nothing comes out even on several devices, and engines for it."""

import dataclasses
import functools
from typing import Any

import numpy as np

from kvjax.cache import CompressionConfig
from kvjax.cache.calibration import HEAD_LOAD, Calibration
from kvjax.cache.config import as_method
from kvjax.cache.methods.matched import REFERENCE_QUERY
from kvjax.cache.methods.predicted_reads import EXTRA, WEIGHT
from kvjax.engine import LLM, EngineConfig
from kvjax.models import ByteTokenizer, LoadedModel
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import init_params

TINY = ModelConfig(
    name="tiny",
    vocab_size=257,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=6,
    num_kv_heads=3,
    head_dim=8,
    max_position_embeddings=4096,
)
SIZES = EngineConfig(
    max_batch=2, max_len=128, block_size=4, prefill_chunk=32, prefill_scratch=64, pool_tokens=400
)


@functools.cache
def model_of(
    stacked: bool,
    weight_dtype: str | None = None,
    layers: int = TINY.num_layers,
    group: int = TINY.group_size,
    biased: bool = False,
) -> LoadedModel:
    heads = TINY.num_kv_heads * group
    config = dataclasses.replace(
        TINY, weight_dtype=weight_dtype, num_layers=layers, num_heads=heads, attention_bias=biased
    )
    params: Any = init_params(config, "float32", seed=3, stacked=stacked)
    if biased:  # so large that few bits are in need of what keys are smoothed by
        bias = params["layers"]["qkv_bias"]
        params["layers"]["qkv_bias"] = bias.replace(400 * bias[...])
    return LoadedModel(config, params, ByteTokenizer(), "dummy weights")


@functools.cache
def made_calibration() -> Calibration:
    """Arrays as the default method reads them, drawn at random."""
    rng = np.random.default_rng(8)
    layers, heads, d = TINY.num_layers, TINY.num_kv_heads, TINY.head_dim
    extra = np.array([1.0, 0.5, -0.2, 0.0, 1e4])
    arrays = {
        WEIGHT: rng.standard_normal((layers, TINY.hidden_size, heads)),
        EXTRA: np.broadcast_to(extra, (layers, heads, 5)),
        REFERENCE_QUERY: rng.standard_normal((layers, 8, TINY.num_heads, d)),
        HEAD_LOAD: 1 + rng.random((layers, heads)),
    }
    narrow = {name: np.ascontiguousarray(x, np.float32) for name, x in arrays.items()}
    return Calibration(narrow, model_of(True).fingerprint)


def engine_settings(method: str, **settings) -> CompressionConfig:
    return CompressionConfig(method=method, rate=3, floor=4, **settings)


def engine_of(
    devices: int,
    method: str,
    stacked: bool = True,
    weight_dtype: str | None = None,
    cache_dtype: str | None = None,
    layers: int = TINY.num_layers,
    group: int = TINY.group_size,
    replicas: int = 1,
    biased: bool = False,
    **settings,
) -> LLM:
    config = dataclasses.replace(SIZES, tensor_parallel=devices, kv_replicas=replicas)
    calibration = made_calibration() if as_method(method).calibrated else "none"
    settled = engine_settings(method, **settings)
    model = model_of(stacked, weight_dtype, layers, group, biased)
    return LLM(model, settled, config, cache_dtype=cache_dtype, calibration=calibration)
