"""A tiny random Llama for the engine's tests."""

import gc
import threading

import pytest

from kvjax.engine.driver import Driver
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


@pytest.fixture
def no_thread_is_left():
    """Every engine under asyncio that a test began has ended its thread behind it."""
    # A server that other tests share has one of its own.
    before = set(threading.enumerate())
    yield
    gc.collect()
    for thread in threading.enumerate():
        if isinstance(thread, Driver) and thread not in before:
            thread.join(60)
            assert not thread.is_alive()
