"""Semantic heads: what heads read of a fact that is copied, and what layers lose with few KVs."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from kvjax.engine.calibrate import semantic
from kvjax.engine.calibrate.exercises import drawn_fact
from kvjax.engine.calibrate.generated import Draw
from kvjax.engine.calibrate.semantic import Facts, asked, semantic_heads
from kvjax.errors import UserError
from kvjax.models import load_model
from tests.oracle import semantic as oracle
from tests.oracle.attention import causal_attention
from tests.tiny import TINY, write_tiny

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
def folder(tmp_path_factory):
    """A model of eight heads a layer, half of which count."""
    folder = tmp_path_factory.mktemp("semantic")
    write_tiny(folder, dataclasses.replace(TINY, num_heads=8))
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load_model(weights=str(folder), dtype="float32")


@pytest.fixture(scope="module")
def checkpoint(folder):
    """What the oracle knows of it."""
    hf = json.loads((folder / "config.json").read_text())
    hf |= {"rope_theta": TINY.rope_theta, "rms_norm_eps": TINY.rms_norm_eps}
    hf["tie_word_embeddings"] = TINY.tie_word_embeddings
    return hf, load_file(folder / "model.safetensors")


def test_errors_are_of_what_attention_adds_token_by_token(model, checkpoint):
    (hf, weights), rng, first = checkpoint, np.random.default_rng(6), 61
    tokens = rng.integers(0, 256, 96).astype(np.int32)
    counts = rng.random((TINY.num_layers, 8)).astype(np.float32)
    run = jax.jit(functools.partial(semantic.errors_with_few, model.config))
    for count in (1, 7):
        found = run(model.params, tokens, np.int32(first), np.int32(count), counts)
        want = oracle.errors_with_few(hf, weights, tokens, first, count, counts, semantic.FEW)
        np.testing.assert_allclose(found, want, rtol=1e-3)


def test_a_prompt_has_its_fact_and_its_answer(model):
    tokenizer = model.tokenizer
    text = "the quick brown fox jumps over the lazy dog. " * 40
    run = asked(tokenizer, text, 3, 400)
    fact = drawn_fact(Draw(90_003))
    assert tokenizer.decode(run.tokens[slice(*run.fact)].tolist()) == f" {fact.told}"
    assert f" {fact.statement} " in tokenizer.decode(run.tokens[: run.first].tolist())
    assert len(run.tokens) == 400
    assert run.fact[0] < run.fact[1] <= run.first
    behind = run.tokens[run.first : run.first + len(run.answer)]
    assert behind.tolist() == run.answer.tolist()
    again = asked(tokenizer, text, 3, 400)
    assert again.tokens.tolist() == run.tokens.tolist()
    assert asked(tokenizer, text, 4, 400).tokens.tolist() != run.tokens.tolist()
    with pytest.raises(UserError, match=r"^20 tokens have no room for a fact[^\n]*$"):
        asked(tokenizer, text, 3, 20)


def test_what_answers_a_question_is_a_part_of_the_fact():
    for number in range(300):
        fact = drawn_fact(Draw(number))
        assert "".join(fact.parts) == f" {fact.statement} "
        assert fact.parts[1] == f" {fact.told}"
        assert fact.told in fact.answer
        assert fact.told not in fact.question


def test_heads_of_a_model(model, checkpoint, monkeypatch):
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
    assert error.shape == (config.num_layers,)
    hf, weights = checkpoint
    runs = [asked(model.tokenizer, texts[0], number, 512) for number in range(2)]
    want = [oracle.read_of_fact(hf, weights, r.tokens, r.fact, r.first, r.answer) for r in runs]
    np.testing.assert_allclose(heads, np.mean(want, axis=0), rtol=1e-3)
    few = semantic.FEW
    lost = [
        oracle.errors_with_few(hf, weights, r.tokens, r.first, len(r.answer), heads, few)
        for r in runs
    ]
    np.testing.assert_allclose(error, np.mean(lost, axis=0), rtol=1e-3)


@pytest.mark.parametrize("wrong", [{"number": 0}, {"tokens": 3}, {"recall": 2.0}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(UserError, match=f"^{next(iter(wrong))}[^\n]*$"):
        Facts(**wrong)
