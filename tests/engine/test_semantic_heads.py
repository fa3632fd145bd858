"""Semantic heads: what heads read of a fact that is copied, and what layers lose with few KVs."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.engine.calibrate import semantic
from kvjax.engine.calibrate.semantic import Facts, asked, semantic_heads
from kvjax.errors import UserError
from kvjax.models import load_model
from tests.oracle.attention import causal_attention

T, H, R, D = 40, 2, 3, 4


def drawn():
    rng = np.random.default_rng(0)
    q = 2 * rng.standard_normal((T, H * R, D)).astype(np.float32)
    return q, *(rng.standard_normal((T, H, D)).astype(np.float32) for _ in range(2))


def test_attention_of_an_answer_is_that_of_all_queries():
    q, k, v = drawn()
    at = np.array([30, 31, 38], np.int32)
    whole = causal_attention(q, k)
    found = semantic.attention(jnp.asarray(q[at]), jnp.asarray(k), jnp.asarray(at))
    np.testing.assert_allclose(found, whole[:, at], rtol=1e-5, atol=1e-7)
    seen = np.arange(T) % 3 != 0
    few = semantic.attention(jnp.asarray(q[at]), jnp.asarray(k), jnp.asarray(at), jnp.asarray(seen))
    want = np.where(seen, whole[:, at], 0)
    np.testing.assert_allclose(few, want / want.sum(-1, keepdims=True), rtol=1e-5, atol=1e-7)
    got = semantic.outputs(few, jnp.asarray(v))
    for n, g in np.ndindex(len(at), H * R):
        want = np.asarray(few)[g, n] @ v[:, g // R]
        np.testing.assert_allclose(got[n, g], want, rtol=1e-5, atol=1e-6)


def test_few_are_the_highest_and_the_window(monkeypatch):
    monkeypatch.setattr(semantic, "FEW", 6)
    metric = np.array([5, 1, 9, 2, 8, 0, 0, 7, 0, 0, 3, 3], np.float32)
    found = semantic.kept(jnp.asarray(metric), jnp.int32(9), 3)
    assert np.flatnonzero(found).tolist() == [0, 2, 4, 6, 7, 8, 9, 10, 11]


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(weights=str(tiny_folder), dtype="float32")


def test_a_prompt_has_its_fact_and_its_answer(model):
    tokenizer = model.tokenizer
    text = "the quick brown fox jumps over the lazy dog. " * 40
    run = asked(tokenizer, text, 3, 400)
    fact = tokenizer.decode(run.tokens[slice(*run.fact)].tolist())
    assert len(run.tokens) == 400
    assert run.fact[0] < run.fact[1] <= run.first
    behind = run.tokens[run.first : run.first + len(run.answer)]
    assert behind.tolist() == run.answer.tolist()
    assert fact.strip()
    again = asked(tokenizer, text, 3, 400)
    assert again.tokens.tolist() == run.tokens.tolist()
    assert asked(tokenizer, text, 4, 400).tokens.tolist() != run.tokens.tolist()
    with pytest.raises(UserError, match=r"^20 tokens have no room for a fact[^\n]*$"):
        asked(tokenizer, text, 3, 20)


def test_heads_of_a_model(model, monkeypatch):
    texts = ["the quick brown fox jumps over the lazy dog. " * 20]
    with pytest.raises(UserError, match=r"^[^\n]*answers none of 1 facts of a text[^\n]*$"):
        semantic_heads(model, texts, Facts(number=1, recall=1.0))
    # A model that says what it is to say: the answers' own tokens.
    right = semantic.reads_of_fact

    def told(config, params, tokens, fact, first):
        mass = right(config, params, tokens, fact, first)[1]
        return tokens[first + jnp.arange(semantic.ANSWER)], mass

    monkeypatch.setattr(semantic, "reads_of_fact", told)
    found = semantic_heads(model, texts, Facts(number=2))
    config = model.config
    heads, error = found["semantic_head"], found["layer_error"]
    assert heads.shape == (config.num_layers, config.num_heads)
    assert ((heads > 0) & (heads < 1)).all()
    assert error.shape == (config.num_layers,)
    assert ((error > 0) & (error < 2)).all()


@pytest.mark.parametrize("wrong", [{"number": 0}, {"tokens": 3}, {"recall": 2.0}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(UserError, match=f"^{next(iter(wrong))}[^\n]*$"):
        Facts(**wrong)
