"""Engines of models whose keys have biases, and few bits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import CompressionConfig, as_codec, check_invariants
from kvjax.engine import LLM, EngineConfig
from kvjax.engine.prefix_files import Kind
from kvjax.engine.smoothing import FIRST, STRIDE, TOKENS, key_smoothing, smooths
from kvjax.eval.passes import teacher_force
from kvjax.models import LoadedModel
from kvjax.models.config import get_model_entry
from kvjax.models.decoder import forward, init_params
from tests.engine.conftest import TINY
from tests.engine.serving import FULL, SIZES, cache_behind, greedy, mean_kl, prompts_of, told_behind
from tests.models.tokenizer_builders import tiny_tokenizer

BIASED = dataclasses.replace(TINY, attention_bias=True, rope_theta=1e6)


@pytest.fixture(scope="module")
def params():
    """Keys with a few channels that are much larger than the others, where RoPE hardly turns."""
    found: Any = init_params(BIASED, "float32", seed=3, stacked=True)
    bias = np.array(found["layers"]["qkv_bias"][...])
    bias[:, :, -2, [3, 7]] = [60.0, -40.0]
    found["layers"]["qkv_bias"] = found["layers"]["qkv_bias"].replace(jnp.asarray(bias))
    return found


def make(params, stored: str | None, compression=FULL, **given) -> LLM:
    model = LoadedModel(BIASED, params, tiny_tokenizer(), "random weights")
    return LLM(model, compression, EngineConfig(**{**SIZES, **given}), cache_dtype=stored)


def test_it_is_of_keys_with_biases_that_become_codes():
    biased, plain = (get_model_entry(name).config for name in ("qwen2.5-1.5b", "llama3.2-1b"))
    for name in ("int8", "int4", "int4+", "int2w16", "affine4", "e4m3", "k8v4"):
        assert smooths(biased, as_codec(name, "float32"))
        assert not smooths(plain, as_codec(name, "float32"))
    for name in ("float32", "bfloat16"):
        assert not smooths(biased, as_codec(name, "float32"))


def test_it_is_measured_on_keys_and_queries(params):
    """Against a pass with attention written out."""
    heads, d = BIASED.num_kv_heads, BIASED.head_dim
    assert BIASED.max_position_embeddings // TOKENS == 8 < STRIDE
    tokens = np.random.default_rng(0).integers(0, BIASED.vocab_size, (1, TOKENS), dtype=np.int32)
    place = jnp.arange(TOKENS)

    def attend(carry, layer, q, k, v, hidden):
        s = jnp.einsum("thgd,shd->hgts", q[0].reshape(TOKENS, heads, -1, d), k[0]) / np.sqrt(d)
        w = jax.nn.softmax(jnp.where(place[:, None] >= place, s, -jnp.inf))
        out = jnp.einsum("hgts,shd->thgd", w, v[0]).reshape(1, TOKENS, -1, d)
        return carry, out, (q[0], k[0])

    _, _, (q, k) = jax.jit(forward, static_argnums=(0, 4))(
        BIASED, params, tokens, 8 * place[None], attend, ()
    )
    q, k = (np.asarray(x, np.float64)[:, FIRST:] for x in (q, k))
    found = jax.jit(key_smoothing, static_argnums=0)(BIASED, params)
    np.testing.assert_allclose(found.shift, k.mean(1), atol=1e-3)
    asked = (q.reshape(len(q), -1, heads, BIASED.group_size, d) ** 2).mean((1, 3))
    ratio = k.var(1) + np.roll(k.var(1), d // 2, -1), asked + np.roll(asked, d // 2, -1)
    power = np.log2(ratio[0] / ratio[1]) / 4
    assert (np.abs(np.log2(found.scale) - power) < 0.51).all()
    # What the biases are is taken off.
    assert np.abs(found.shift[:, :, 3]).min() > 20


@pytest.mark.parametrize(
    ("compression", "given"),
    [
        # Prompts in a scratch and in chunks in the pool, compression by what steps measured.
        (
            CompressionConfig("h2o-decode", max_cache_tokens=16, compress_every=4),
            {"max_len": 192, "prefill_scratch": 64},
        ),
        # What goes is folded into what stays, by keys; and keys of the pool choose what goes.
        pytest.param(
            CompressionConfig("kvmerger", max_cache_tokens=16, compress_every=4),
            {"max_len": 192},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["h2o", "kvmerger"],
)
def test_with_every_kv_exact_an_engine_is_one_without_codes(params, compression, given):
    """Tokens and kept positions, round by round: nothing of what is computed has changed."""
    found = []
    for stored in (None, "int2w192"):
        llm = make(params, stored, compression, **given)
        assert (llm.worker.cache.smoothing is None) == (stored is None)
        for prompt in prompts_of(30, 150):
            llm.add_request(prompt, greedy(20))
        rounds = []
        while llm.has_unfinished():
            told = {out.request_id: out.token_ids for out in llm.step()}
            check_invariants(llm.worker.cache)
            rounds.append((told, np.asarray(llm.worker.cache.position).tolist()))
        found.append(rounds)
    assert found[0] == found[1]


def test_few_bits_lose_little_beside_what_they_lose_without_it(params):
    """KL of the next tokens, step by step behind the same prompt and tokens."""
    ids, first = prompts_of(32)[0], 24
    smoothing = jax.jit(key_smoothing, static_argnums=0)(BIASED, params)

    def told(*stored):
        cache = cache_behind(BIASED, params, ids[:first], *stored)
        return told_behind(BIASED, params, cache, ids[first:])

    exact, plain, smooth = told("float32"), told("int4"), told("int4", smoothing)
    lost = {"plain": mean_kl(exact, plain), "smooth": mean_kl(exact, smooth)}
    assert 0 < lost["smooth"] < 0.1 * lost["plain"], lost


def test_an_engine_goes_on_after_a_reset_and_files_tell_it(params):
    llm = make(params, "int8", max_len=64)
    prompts = prompts_of(20)
    first = llm.generate(prompts, greedy(6))[0].token_ids
    llm.worker.reset()
    assert llm.generate(prompts, greedy(6))[0].token_ids == first
    kinds = [Kind.of(llm.model, llm.worker, FULL)]
    smoothing = llm.worker.cache.smoothing
    assert smoothing is not None
    other = dataclasses.replace(smoothing, shift=smoothing.shift + 1)
    llm.worker.cache = dataclasses.replace(llm.worker.cache, smoothing=other)
    kinds.append(Kind.of(llm.model, llm.worker, FULL))
    assert kinds[0].calibration != kinds[1].calibration


def test_an_evaluation_reads_keys_as_they_were(params):
    """What follows a prompt, as the evaluator runs it, is the same behind exact KVs."""
    (ids,) = prompts_of(24)
    smoothing = jax.jit(key_smoothing, static_argnums=0)(BIASED, params)
    found = []
    for stored, how in (("float32", None), ("int2w32", smoothing)):
        cache = cache_behind(BIASED, params, ids[:16], stored, how)
        at, none = jnp.arange(7), jnp.zeros((7, BIASED.vocab_size))
        told = jax.jit(teacher_force, static_argnums=0)(
            BIASED, params, cache, ids[16:], jnp.int32(16), at, ids[17:], none
        )
        found.append(np.asarray(told.nll))
    np.testing.assert_allclose(found[0], found[1], atol=1e-3)
