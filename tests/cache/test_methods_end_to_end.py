"""Every method through the steps of the engine: admission, decoding, compression while running."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as kv
from kvjax.cache import CompressionConfig
from kvjax.cache.methods import METHODS, get_method
from kvjax.engine import LLM, EngineConfig, SamplingParams, steps
from kvjax.models import load_model
from kvjax.models.config import LlamaConfig
from kvjax.models.llama import init_params

TINY = LlamaConfig(
    name="tiny",
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=512,
)
B, T, M = 4, 64, 20
HEADS = TINY.num_layers * TINY.num_kv_heads
KEEP = HEADS * 24 // B


# Run once on next to nothing: compiling is all that takes time.
QUICKLY = partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)


@pytest.fixture(scope="module")
def params():
    return init_params(TINY, "float32", seed=5)


def owned(cache: kv.PagedCache) -> np.ndarray:
    return -(-np.asarray(cache.context_len) // B)


@pytest.mark.parametrize("name", METHODS)
def test_admission_decoding_and_compression(params, name):
    method = dataclasses.replace(get_method(name), protected=6, sinks=min(4, METHODS[name].sinks))
    cache = kv.init_cache(
        num_slots=2,
        num_layers=TINY.num_layers,
        num_kv_heads=TINY.num_kv_heads,
        head_dim=TINY.head_dim,
        num_blocks=2 * HEADS * M,
        max_blocks_per_head=M,
        block_size=B,
    )

    @QUICKLY
    def admit(cache, tokens, length):
        prompt, scores = steps.prefill(TINY, method, params, tokens, length)
        if not method.compresses:
            cache, ok = steps.admit_whole(cache, jnp.int32(1), prompt)
            return cache, ok, jnp.int32(0), scores
        cache, report, ok = steps.admit(cache, jnp.int32(1), prompt, jnp.int32(KEEP), method)
        return cache, ok, report.shortfall[0], scores

    @QUICKLY
    def decode_and_compress(cache, token):
        active = jnp.array([False, True])

        def one(cache, _):
            cache, scores, ok = steps.decode_step(
                TINY, method, params, cache, jnp.full(2, token), active
            )
            return cache, (scores[1], ok)

        cache, (scores, ok) = jax.lax.scan(one, cache, None, length=9)
        if not method.compresses:
            return cache, cache, scores, ok, jnp.int32(0)
        slots, keep = jnp.array([1, 2], jnp.int32), jnp.full(2, KEEP, jnp.int32)
        after, report = steps.compress_slots(cache, slots, keep, method, 1000)
        return cache, after, scores, ok, report.shortfall[0]

    tokens = np.random.default_rng(0).integers(0, TINY.vocab_size, T).astype(np.int32)
    cache, ok, shortfall, scores = admit(cache, tokens, np.int32(61))
    assert ok
    assert np.isfinite(scores).all()
    assert shortfall == 0
    kv.check_invariants(cache)
    assert not owned(cache)[0].any()
    held = owned(cache)[1].sum()
    assert held == (KEEP if method.compresses and not method.allocation.overruns else held)
    grown, after, scores, ok, shortfall = decode_and_compress(cache, np.int32(3))
    assert ok.all()
    assert np.isfinite(scores).all()
    assert shortfall == 0
    for each in (grown, after):
        kv.check_invariants(each)
    assert (np.asarray(grown.context_len)[1] == np.asarray(cache.context_len)[1] + 9).all()
    assert owned(after)[1].sum() == (held if method.compresses else owned(grown)[1].sum())
    if method.compresses:
        newest = np.asarray(after.position).max()
        table, count = np.asarray(after.block_table)[1], np.asarray(after.context_len)[1]
        for at in np.ndindex(*count.shape):
            row = np.asarray(after.position)[table[at][: owned(after)[1][at]]]
            assert set(range(newest - 5, newest + 1)) <= set(row.reshape(-1).tolist())


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    config = EngineConfig(max_batch=1, max_len=512, prefill_chunk=1024, pool_tokens=1024)
    return LLM(load_model(weights=smollm2_path), config=config)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_continues_a_text(smollm2, name):
    """SmolLM2 through the engine: the cache holds what the cap says, and tokens come out."""
    method = METHODS[name]
    cap = max(128, method.protected + 64)
    compression = CompressionConfig(method=name, max_cache_tokens=cap)
    text = "The sea was calm that morning, and " * 40
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    (output,) = smollm2.generate([text], sampling, compression)
    assert output.error is None
    assert len(output.token_ids) == 16
    stats = output.stats
    if method.compresses and not method.allocation.overruns:
        assert stats.blocks_after <= kv.budget_blocks(cap, 30, 3, 16) < stats.blocks_before
    kv.check_invariants(smollm2.worker.cache)
    assert smollm2.worker.free_blocks() == smollm2.plan.num_blocks
