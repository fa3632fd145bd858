"""A tiny random Llama for the engine's tests."""

import pytest

from kvjax.models.config import ModelConfig
from kvjax.models.decoder import init_params

TINY = ModelConfig(
    name="tiny",
    vocab_size=97,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=4096,
)


@pytest.fixture(scope="session")
def tiny_params():
    return init_params(TINY, "float32", seed=3)
