"""Qwen2.5-Coder-0.5B-Instruct from a GGUF file, against transformers (scripts/make_golden.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models import load_model
from tests.conftest import REPOSITORY
from tests.models.decoder_helpers import empty_cache, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def golden():
    return np.load(REPOSITORY / "tests" / "golden" / "qwen2.5-coder.npz")


@pytest.fixture(scope="module")
def model(qwen_coder_path):
    """By the name of the family's size: the file has output weights of its own all the same."""
    return load_model("qwen2.5-0.5b", weights=qwen_coder_path)


def test_tokens_equal_the_tokenizers_library(model, golden):
    tokens = golden["tokens"].tolist()
    assert model.tokenizer.encode(str(golden["text"]))[: len(tokens)] == tokens


def test_logits_equal_transformers(model, golden):
    assert not model.config.tie_word_embeddings
    tokens = jnp.asarray(golden["tokens"])[None]
    cache = empty_cache(model.config, *tokens.shape)
    logits, _ = jax.jit(run, static_argnums=0)(model.config, model.params, tokens, 0, cache)
    got = np.asarray(logits[0])
    np.testing.assert_allclose(got[:, golden["sampled_ids"]], golden["sampled_logits"], atol=1e-3)
    top = np.take_along_axis(got, golden["top_ids"], axis=-1)
    np.testing.assert_allclose(top, golden["top_logits"], rtol=0, atol=1e-3)
    assert (got.argmax(axis=-1) == golden["top_ids"][:, 0]).all()


def test_the_chat_template_puts_the_model_card_before_the_user(model):
    text = model.tokenizer.render_chat([{"role": "user", "content": "Hello."}])
    assert text.startswith("<|im_start|>system\nYou are Qwen")
    assert text.endswith("<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n")
