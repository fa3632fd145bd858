"""A tiny model in which nothing comes out even on 2, 3 or 4 devices, and engines for it."""

import dataclasses
import functools

from kvjax.cache import CompressionConfig
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
def model_of(stacked: bool) -> LoadedModel:
    params = init_params(TINY, "float32", seed=3, stacked=stacked)
    return LoadedModel(TINY, params, ByteTokenizer(), "dummy weights")


def engine_settings(method: str, **settings) -> CompressionConfig:
    return CompressionConfig(method=method, rate=3, floor=4, **settings)


def engine_of(devices: int, method: str, stacked: bool = True, **settings) -> LLM:
    config = dataclasses.replace(SIZES, tensor_parallel=devices)
    return LLM(model_of(stacked), engine_settings(method, **settings), config)
