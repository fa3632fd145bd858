"""A tiny random model with one token per byte, and rows for it."""

from typing import Any

import jax.numpy as jnp
import pytest

from kvjax.eval.rows import Row
from kvjax.models import LoadedModel
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import init_params
from kvjax.models.tokenizer import ByteTokenizer

TINY = ModelConfig(
    name="tiny",
    vocab_size=256,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=1024,
)


@pytest.fixture(scope="session")
def tiny_model() -> LoadedModel:
    """Its likeliest tokens are small letters, so that what it says can be written down."""
    params = init_params(TINY, "float32", seed=3)
    letters = jnp.arange(TINY.vocab_size)
    letters = (letters >= ord("a")) & (letters <= ord("z"))
    head: Any = params["lm_head"]
    params["lm_head"] = head.replace(jnp.where(letters, head[...], 0))
    return LoadedModel(TINY, params, ByteTokenizer(), "dummy weights")


def make_row(**values) -> Row:
    """A row of about a hundred bytes."""
    given = {
        "id": "row",
        "task": "test",
        "length": 100,
        "head": "<user>",
        "context": "It was the best of times, it was the worst of times, it was the age of wisdom",
        "question": " What age was it?",
        "suffix": "<end>",
        "answer_prefix": "It was",
        "target": " the age",
        **values,
    }
    return Row(**given)
