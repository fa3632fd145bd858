"""The runner on a tiny model, against a plain dense decode."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import CompressionConfig, check_invariants, free_blocks
from kvjax.engine import Generation, Runner, RunnerConfig, SamplingParams, plan_blocks
from kvjax.errors import UserError
from kvjax.models.config import MODELS
from kvjax.models.llama import forward, init_params, logits, unstack_layers
from kvjax.models.tokenizer import ByteTokenizer
from tests.engine.conftest import TINY

HEADS = TINY.num_layers * TINY.num_kv_heads
FULL = CompressionConfig(method="full")


def prompt_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, TINY.vocab_size, length).astype(np.int32)


def make_runner(params, compression=FULL, *, blocks=None, prompt_len=60, max_tokens=24, **config):
    config = RunnerConfig(**{"max_len": 256, "block_size": 4, "steps_per_visit": 4, **config})
    if blocks is None:
        one = plan_blocks(TINY, config, compression, prompt_len, max_tokens)
        blocks = config.num_slots * one
    return Runner(TINY, params, config, compression, num_blocks=blocks)


def run(runner, prompt, max_tokens=24, slot=0, **sampling) -> Generation:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
    generation = Generation(runner, ByteTokenizer(), prompt, sampling, slot=slot)
    for _ in generation:
        pass
    check_invariants(runner.cache)
    return generation


def dense_greedy(params, prompt, steps: int) -> list[int]:
    """Greedy tokens without any cache: the whole sequence again for every token."""

    def attend(carry, layer, q, k, v):
        group = q.shape[2] // k.shape[2]
        k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
        return carry, jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v), ()

    @jax.jit
    def scores(tokens, last):
        at = jnp.arange(tokens.shape[0], dtype=jnp.int32)[None]
        hidden, _, _ = forward(TINY, params, tokens[None], at, attend, ())
        return logits(TINY, params, hidden[0, last])

    tokens = np.zeros(len(prompt) + steps, np.int32)
    tokens[: len(prompt)] = prompt
    for i in range(len(prompt), len(tokens)):
        tokens[i] = int(jnp.argmax(scores(tokens, i - 1)))
    return tokens[len(prompt) :].tolist()


def test_full_cache_equals_dense_decode(tiny_params):
    prompt = prompt_of(60)
    expected = dense_greedy(tiny_params, prompt, 24)
    assert run(make_runner(tiny_params), prompt).tokens == expected


def test_a_cap_that_holds_everything_changes_nothing(tiny_params):
    prompt = prompt_of(60)
    capped = make_runner(tiny_params, CompressionConfig(max_cache_tokens=60))
    full = make_runner(tiny_params, blocks=capped.cache.num_blocks)
    assert run(capped, prompt).tokens == run(full, prompt).tokens
    np.testing.assert_array_equal(capped.cache.k, full.cache.k)
    np.testing.assert_array_equal(capped.cache.block_table, full.cache.block_table)


@pytest.mark.parametrize("method", ["kv-compress", "h2o-decode", "pyramidkv-exact"])
def test_compressed_prompt_frees_what_the_budget_says(tiny_params, method):
    compression = CompressionConfig(method=method, max_cache_tokens=16, protected=8)
    runner = make_runner(tiny_params, compression)
    prefill = run(runner, prompt_of(60)).prefill
    assert prefill is not None
    assert prefill.blocks_before == HEADS * 15
    assert prefill.blocks_after == HEADS * 16 // 4
    assert prefill.shortfall == 0
    assert prefill.kept.sum() == prefill.kvs_after <= HEADS * 16
    assert prefill.kept.min() >= 8


def test_every_running_slot_is_independent(tiny_params):
    compression = CompressionConfig(max_cache_tokens=16)
    prompts = [prompt_of(n, seed=n) for n in (60, 33, 47)]
    alone = [run(make_runner(tiny_params, compression), p).tokens for p in prompts]
    runner = make_runner(tiny_params, compression, num_slots=3)
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    tokens = [[runner.prefill(slot, p, sampling).token] for slot, p in enumerate(prompts)]
    while np.asarray(runner.state.active).any():
        out, ok = runner.decode()
        assert ok
        for slot, stream in enumerate(tokens):
            stream += [t for t in out[:, slot].tolist() if t >= 0]
    check_invariants(runner.cache)
    assert tokens == alone
    for slot in range(3):
        runner.finish(slot)
    assert int(free_blocks(runner.cache)) == runner.cache.num_blocks


def test_chunked_prefill_without_eviction_equals_one_shot(tiny_params):
    prompt = prompt_of(150)
    for method in ("kv-compress", "kv-compress-full-l2"):
        compression = CompressionConfig(method=method, max_cache_tokens=150)
        whole = make_runner(tiny_params, compression, prompt_len=150)
        parts = make_runner(tiny_params, compression, prompt_len=150, prefill_chunk=64)
        assert run(whole, prompt).tokens == run(parts, prompt).tokens

        def by_position(runner):
            table = np.asarray(runner.cache.block_table[0])
            metric = np.asarray(runner.cache.metric)
            position = np.asarray(runner.cache.position)
            pages = np.minimum(table, runner.cache.num_blocks - 1)
            flat = (*table.shape[:2], -1)
            position, metric = position[pages].reshape(flat), metric[pages].reshape(flat)
            order = np.argsort(np.where(position < 0, 10**6, position), axis=-1)
            return np.take_along_axis(metric, order, -1)[..., :150]

        np.testing.assert_allclose(by_position(whole), by_position(parts), rtol=2e-4, atol=1e-6)


def test_chunked_prefill_never_holds_more_than_cap_and_chunk(tiny_params):
    compression = CompressionConfig(max_cache_tokens=32)
    runner = make_runner(tiny_params, compression, prompt_len=240, prefill_chunk=64, max_tokens=4)
    whole = HEADS * -(-240 // 4)
    assert runner.cache.num_blocks < whole
    prefill = run(runner, prompt_of(240), max_tokens=4).prefill
    assert prefill is not None
    assert prefill.blocks_after == HEADS * 8
    assert runner.peak_blocks <= HEADS * (8 + 64 // 4 + 1)


def test_every_chunk_fills_an_observation_window(tiny_params):
    runner = make_runner(tiny_params, CompressionConfig(rate=2), prefill_chunk=64)
    for length in range(65, 250):
        chunks = runner._chunks(length)
        assert sum(chunks) == length
        assert max(chunks) <= 64
        assert min(chunks) >= 32


def test_continual_compression_adds_squared_attention(tiny_params):
    compression = CompressionConfig(method="kv-compress-continual", max_cache_tokens=64)
    runner = make_runner(tiny_params, compression)
    start = runner.prefill(0, prompt_of(60), SamplingParams(max_tokens=5, ignore_eos=True))
    assert start.shortfall == 0
    before = float(runner.cache.metric.sum())
    runner.decode()
    after = float(runner.cache.metric.sum())
    # Each of the 4 steps adds Σ p² of every query head: more than 1/context and at most 1 each.
    most = 4 * TINY.num_layers * TINY.num_heads
    assert most / 64 < after - before <= most


def test_compression_on_an_interval_bounds_the_cache(tiny_params):
    compression = CompressionConfig(
        method="kv-compress-continual", max_cache_tokens=32, compress_every=8
    )
    runner = make_runner(tiny_params, compression, max_tokens=64)
    generation = run(runner, prompt_of(60), max_tokens=64)
    assert len(generation.tokens) == 64
    assert generation.blocks_evicted_decoding > 0
    assert runner.peak_blocks <= HEADS * (32 // 4 + 8 // 4 + 1)


def test_compression_instead_of_preemption(tiny_params):
    compression = CompressionConfig(max_cache_tokens=32)
    blocks = HEADS * (32 // 4 + 3)
    runner = make_runner(tiny_params, compression, blocks=blocks)
    generation = run(runner, prompt_of(60), max_tokens=60)
    assert generation.finish_reason == "length"
    assert len(generation.tokens) == 60
    assert generation.blocks_evicted_decoding > 0

    compression = dataclasses.replace(compression, before_preemption=False)
    runner = make_runner(tiny_params, compression, blocks=blocks)
    generation = run(runner, prompt_of(60), max_tokens=60)
    assert generation.finish_reason == "pool"
    assert 1 < len(generation.tokens) < 60


def test_pool_too_small_leaves_the_slot_empty(tiny_params):
    compression = CompressionConfig(max_cache_tokens=32)
    runner = make_runner(tiny_params, compression, blocks=HEADS * 8 - 1)
    with pytest.raises(UserError, match=f"needs {HEADS * 8} blocks"):
        runner.prefill(0, prompt_of(60), SamplingParams())
    check_invariants(runner.cache)
    assert int(free_blocks(runner.cache)) == runner.cache.num_blocks


def test_refusals(tiny_params):
    runner = make_runner(tiny_params)
    with pytest.raises(UserError, match="empty"):
        runner.prefill(0, prompt_of(0), SamplingParams())
    with pytest.raises(UserError, match="300 tokens and the limit is 256"):
        runner.prefill(0, prompt_of(300), SamplingParams())
    with pytest.raises(UserError, match="power of two"):
        RunnerConfig(block_size=12)
    with pytest.raises(UserError, match="at least 64"):
        make_runner(tiny_params, CompressionConfig(method="kv-compress-w32-l2"), prefill_chunk=32)
    with pytest.raises(UserError, match="cache of 4 tokens is smaller than the 8"):
        make_runner(tiny_params, CompressionConfig(max_cache_tokens=4)).prefill(
            0, prompt_of(60), SamplingParams()
        )


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("method", ["full", "kv-compress-continual"])
def test_no_step_copies_the_pool(tiny_params, method, stacked):
    params = tiny_params if stacked else unstack_layers(tiny_params)
    compression = CompressionConfig(method=method, max_cache_tokens=64)
    runner = make_runner(params, compression, blocks=1 << 16, block_size=16, prefill_chunk=64)
    runner.warm_up(60)
    runner.warm_up(150)
    pool = runner.cache.k.nbytes + runner.cache.v.nbytes
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.cache))
    for name, compiled in runner._compiled.items():
        if name.split()[0] in ("admit", "chunk", "compress", "decode"):
            memory = compiled.memory_analysis()
            assert memory.temp_size_in_bytes < pool / 10, name
            assert memory.alias_size_in_bytes >= whole, name


@pytest.mark.slow
def test_a_long_prompt_peaks_below_its_full_cache():
    length = 32_000
    model = MODELS["smollm2-135m"].config
    compression = CompressionConfig(rate=8)
    config = RunnerConfig(max_len=length + 64, prefill_chunk=4096)
    blocks = plan_blocks(model, config, compression, length, 64)
    params = init_params(model, "float32", stacked=False)
    runner = Runner(model, params, config, compression, num_blocks=blocks)
    runner.warm_up(length)
    full = length * model.num_layers * model.num_kv_heads * 2 * model.head_dim * 4
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.cache))
    steps = [c for name, c in runner._compiled.items() if name.startswith(("chunk", "compress"))]
    assert len(steps) == 2
    assert held + max(c.memory_analysis().temp_size_in_bytes for c in steps) < 0.7 * full
