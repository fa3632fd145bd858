"""The evaluator against plain passes: a dense one for the full cache, token by token for others."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import init_cache
from kvjax.cache.methods import get_method
from kvjax.engine import steps
from kvjax.errors import UserError
from kvjax.eval.evaluator import (
    Evaluator,
    EvaluatorConfig,
    Variant,
    bucket,
    rate_blocks,
    slots_for,
)
from kvjax.eval.rows import PROTOCOLS
from kvjax.models.llama import forward, logits
from tests.eval.conftest import TINY, make_row

CONFIG = EvaluatorConfig(block_size=4, num_slots=4)
HEADS = TINY.num_layers * TINY.num_kv_heads


PADDED = 160
"""Every plain pass runs so many tokens, so that each is compiled once."""


def padded(tokens) -> np.ndarray:
    out = np.zeros(PADDED, np.int32)
    out[: len(tokens)] = tokens
    return out


@jax.jit
def _dense(params, tokens):
    def attend(carry, layer, q, k, v):
        group = q.shape[2] // k.shape[2]
        k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
        return carry, jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v), ()

    at = jnp.arange(PADDED, dtype=jnp.int32)[None]
    hidden, _, _ = forward(TINY, params, tokens[None], at, attend, ())
    return logits(TINY, params, hidden[0])


def dense_scores(model, tokens) -> np.ndarray:
    """Logits after every token, by attention written out."""
    return np.asarray(_dense(model.params, padded(tokens)))[: len(tokens)]


def run_row(evaluator, row, protocols, variants) -> dict[tuple[str, str, float], dict]:
    tokens = evaluator.tokenise(row)
    batches = evaluator.evaluate(row, tokens, dict.fromkeys(protocols, variants))
    results = [result for batch in batches for result in batch]
    keyed = {(r["protocol"], r["method"], r["rate"]): r for r in results}
    assert len(keyed) == len(results) == len(protocols) * len(variants)
    return keyed


@pytest.fixture(scope="module")
def evaluator(tiny_model):
    return Evaluator(tiny_model, CONFIG)


def log_softmax(x):
    return (
        x
        - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - x.max(-1, keepdims=True)
    )


@pytest.mark.parametrize("target", [" the age", " "])
def test_rate_1_and_the_full_cache_equal_a_plain_pass(evaluator, tiny_model, target):
    row = make_row(target=target)
    tokens = evaluator.tokenise(row)
    scores = dense_scores(tiny_model, np.concatenate([tokens.prompt, tokens.target]))
    scores = log_softmax(scores[len(tokens.prompt) - 1 : -1])
    nll = -scores[np.arange(len(tokens.target)), tokens.target]
    variants = [Variant("full", 1.0), Variant("kv-compress", 1.0)]
    for result in run_row(evaluator, row, PROTOCOLS, variants).values():
        assert result["em"] == np.array_equal(scores.argmax(-1), tokens.target)
        assert result["kvs"] == result["kvs_full"] == HEADS * result["compressed_tokens"]
        if len(target) == 1:
            assert result["nll"] is None
            continue
        np.testing.assert_allclose(result["nll"], nll[1:].mean(), rtol=1e-4)
        assert abs(result["kl"]) < 1e-6
        assert result["agree"] == 1
        assert result["recall"] == pytest.approx(1, abs=1e-4)


def test_an_answer_that_the_model_gives_counts_as_exact(evaluator, tiny_model):
    """The full cache's own greedy continuation is matched under every protocol."""
    tokens = list(evaluator.tokenise(make_row()).prompt)
    start = len(tokens)
    for _ in range(4):
        tokens.append(int(dense_scores(tiny_model, np.asarray(tokens))[-1].argmax()))
    text = bytes(tokens[start:]).decode()
    results = run_row(evaluator, make_row(target=text), PROTOCOLS, [Variant("full", 1.0)])
    assert [result["em"] for result in results.values()] == [1, 1, 1]


@functools.cache
def decode_step():
    return jax.jit(functools.partial(steps.decode_step, TINY, get_method("full")))


@functools.cache
def prefill(method):
    return jax.jit(functools.partial(steps.prefill, TINY, get_method(method)))


@functools.cache
def admit(method):
    return jax.jit(functools.partial(steps.admit, method=get_method(method)))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("method", ["kv-compress", "kv-compress-full-l2"])
def test_compressed_scores_equal_decoding_token_by_token(evaluator, tiny_model, method, protocol):
    row, rate = make_row(), 2.0
    tokens = evaluator.tokenise(row)
    cut, full = tokens.cut(protocol), np.concatenate([tokens.prompt, tokens.target])
    result = run_row(evaluator, row, [protocol], [Variant(method, rate)])[protocol, method, rate]

    prompt, scores = prefill(method)(tiny_model.params, padded(full[:cut]), np.int32(cut))
    cache = init_cache(
        num_slots=1,
        num_layers=TINY.num_layers,
        num_kv_heads=TINY.num_kv_heads,
        head_dim=TINY.head_dim,
        num_blocks=400,
        max_blocks_per_head=64,
        block_size=4,
    )
    keep = rate_blocks(cut, rate, HEADS, 4)
    cache, _, ok = admit(method)(cache, np.int32(0), prompt, np.int32(keep))
    assert ok
    assert result["kept"] == np.asarray(cache.context_len[0]).tolist()
    assert result["kvs"] == np.asarray(cache.context_len[0]).sum() < result["kvs_full"]
    predicted = [log_softmax(np.asarray(scores))]
    for token in full[cut:-1]:
        cache, scores, ok = decode_step()(
            tiny_model.params, cache, np.asarray([token], np.int32), np.asarray([True])
        )
        predicted.append(log_softmax(np.asarray(scores[0])))
    ours = np.stack(predicted)[-len(tokens.target) :]
    reference = dense_scores(tiny_model, full)[len(tokens.prompt) - 1 : -1]
    reference = log_softmax(reference)
    nll = -ours[np.arange(len(tokens.target)), tokens.target]
    kl = (np.exp(reference) * (reference - ours)).sum(-1)
    np.testing.assert_allclose(result["nll"], nll[1:].mean(), rtol=1e-3)
    np.testing.assert_allclose(result["kl"], kl[1:].mean(), rtol=1e-2, atol=1e-5)
    assert result["agree"] == pytest.approx(
        (ours.argmax(-1) == reference.argmax(-1))[1:].mean(), abs=1e-4
    )
    assert 0 < result["recall"] < 1
    assert result["recall"] == pytest.approx(np.mean(result["recall_by_layer"]), abs=1e-4)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_generated_answers_are_greedy(evaluator, tiny_model, protocol):
    row = make_row(metric="f1", max_new_tokens=11)
    tokens = list(evaluator.tokenise(row).prompt)
    for _ in range(11):
        tokens.append(int(dense_scores(tiny_model, np.asarray(tokens))[-1].argmax()))
    expected = tiny_model.tokenizer.decode(tokens[-11:]).lstrip("\n")
    variants = [Variant("full", 1.0), Variant("kv-compress", 2.0)]
    results = run_row(evaluator, row, [protocol], variants)
    assert results[protocol, "full", 1.0]["answer"] == expected
    assert results[protocol, "full", 1.0]["metric"] == "f1"
    assert isinstance(results[protocol, "kv-compress", 2.0]["answer"], str)


def test_stop_texts_end_an_answer_early(tiny_model):
    evaluator = Evaluator(tiny_model, CONFIG)
    row = make_row(metric="f1", max_new_tokens=40)
    variants = [Variant("full", 1.0)]
    whole = run_row(evaluator, row, ["prompt"], variants)["prompt", "full", 1.0]["answer"]
    stop = whole[3:5]
    stopped = make_row(metric="f1", max_new_tokens=40, stop=(stop,))
    answer = run_row(evaluator, stopped, ["prompt"], variants)["prompt", "full", 1.0]["answer"]
    assert answer == whole[: whole.index(stop)]


def test_one_slot_suffices(tiny_model):
    """The pool of a single slot holds a full cache and its answer."""
    row = make_row(context="word" * 25, answer_prefix="", target=" ", metric="f1")
    # As long as a padded prompt can be, so that nothing is to spare.
    alone = Evaluator(tiny_model, dataclasses.replace(CONFIG, num_slots=1))
    assert len(alone.tokenise(row).prompt) == bucket(128, 128) == 128
    result = run_row(alone, row, ["prompt"], [Variant("full", 1.0)])["prompt", "full", 1.0]
    assert len(result["answer"]) == 64
    assert result["kvs"] == HEADS * 128
    assert slots_for(tiny_model, 100) == 16


def test_more_variants_than_slots_and_equal_cuts(evaluator):
    """Batches of four; a row without question, suffix and prefix has one cut for all protocols."""
    row = make_row(question="", suffix="", answer_prefix="", metric="nll")
    variants = [Variant("full", 1.0)]
    # One of each kind; every method runs end to end in tests/cache.
    few = ("random", "kv-compress", "snapkv", "kvcrush:snapkv")
    variants += [Variant(method, rate) for method in few for rate in (2.0, 4.0)]
    results = run_row(evaluator, row, PROTOCOLS, variants)
    for (_, method, rate), result in results.items():
        assert result == {**results["prompt", method, rate], "protocol": result["protocol"]}
        assert result["score"] is None
        if rate > 1:
            assert result["kvs"] < result["kvs_full"]
            assert result["bytes"] == result["blocks"] * 4 * (2 * TINY.head_dim * 4 + 8)
    first = results["prompt", variants[1].method, 2.0]
    assert set(first["seconds"]) == {"prefill", "select", "score", "decode"}


def test_rates_mean_what_they_say():
    assert rate_blocks(1024, 4, 90, 16) == 1024 * 90 // 64
    assert rate_blocks(1000, 64, 90, 16) == 90  # a block for every head
    assert rate_blocks(1000, 64, 90, 16, floor=128) == 8 * 90
    assert rate_blocks(1000, 1, 90, 16) > 10**9
    for rate in (0.5, float("nan"), float("inf")):
        with pytest.raises(UserError, match="rate"):
            rate_blocks(1000, rate, 90, 16)


def test_padding_is_at_most_a_quarter():
    for size in range(1, 5000, 7):
        padded = bucket(size, 16)
        assert size <= padded <= max(size + 15, 1.25 * size)
    assert len({bucket(size, 128) for size in range(1, 8192)}) < 30


def test_sizes_that_cannot_be():
    for values in ({"num_slots": 0}, {"floor": -1}, {"context_length": 0}, {"max_new_tokens": 0}):
        with pytest.raises(UserError):
            EvaluatorConfig(**values)  # pyright: ignore[reportArgumentType]
