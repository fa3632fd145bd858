"""The engine on a tiny model: what comes out, whatever else is in the batch."""

import dataclasses

import numpy as np
import pytest

from kvjax.cache import CompressionConfig, budget_blocks
from kvjax.engine.sampling import SamplingParams
from tests.engine.conftest import TINY
from tests.engine.serving import (
    FULL,
    HEADS,
    SMALL,
    TIGHT,
    alone,
    assert_empty,
    dense_greedy,
    greedy,
    make_llm,
    prompts_of,
    tokens_of,
)
from tests.models.tokenizer_builders import TINY_EOS

LENGTHS = (10, 40, 33, 70, 25, 150, 21)
"""One part, several parts, and too long for the scratch."""


def test_full_cache_equals_a_dense_decode(tiny_params):
    prompts = prompts_of(10, 70, 150)
    llm = make_llm(tiny_params)
    got = tokens_of(llm.generate(prompts, greedy(8)))
    assert [list(tokens) for tokens in got] == [dense_greedy(tiny_params, p, 8) for p in prompts]
    assert_empty(llm)


@pytest.mark.parametrize("compression", [FULL, SMALL])
def test_tokens_do_not_depend_on_the_batch(tiny_params, compression):
    prompts = prompts_of(*LENGTHS)
    llm = make_llm(tiny_params, compression)
    assert tokens_of(llm.generate(prompts, greedy())) == alone(
        tiny_params, prompts, greedy(), compression
    )
    assert llm.metrics.as_dict()["kvjax_batch_largest"] == 4
    assert_empty(llm)


def test_sampled_tokens_depend_on_the_seed_alone(tiny_params):
    prompts = prompts_of(10, 40, 33, 21)
    sampling = [greedy(temperature=1.0, seed=s, top_k=20) for s in (1, 2, 1, 4)]
    together = tokens_of(make_llm(tiny_params).generate(prompts, sampling))
    other = tokens_of(make_llm(tiny_params).generate(prompts[::-1], sampling[::-1]))[::-1]
    assert together == other
    again = make_llm(tiny_params)
    same = tokens_of(again.generate([prompts[0]] * 2, [sampling[0], sampling[1]]))
    assert same[0] == together[0]
    assert same[1] != same[0]


def test_preemption_loses_nothing(tiny_params):
    prompts = prompts_of(30, 40, 33, 24, 25, 28)
    llm = make_llm(tiny_params, FULL, TIGHT)
    outputs = llm.generate(prompts, greedy(40))
    assert sum(output.stats.preemptions for output in outputs) > 0
    assert tokens_of(outputs) == alone(tiny_params, prompts, greedy(40))
    assert_empty(llm)


def test_compression_comes_before_preemption(tiny_params):
    prompts = prompts_of(30, 40, 33, 24, 25, 28)
    llm = make_llm(tiny_params, SMALL, TIGHT)
    outputs = llm.generate(prompts, greedy(40))
    found = llm.metrics.as_dict()
    assert found["kvjax_preemptions_total"] == 0
    assert found["kvjax_compressions_total"] > 0
    assert found["kvjax_batch_largest"] == 4
    assert all(output.stats.blocks_evicted_decoding > 0 for output in outputs)
    assert_empty(llm)
    kept = CompressionConfig(max_cache_tokens=16, protected=8, before_preemption=False)
    llm = make_llm(tiny_params, kept, TIGHT)
    outputs = llm.generate(prompts, greedy(40))
    assert llm.metrics.as_dict()["kvjax_compressions_total"] == 0
    assert tokens_of(outputs)
    assert_empty(llm)


@pytest.mark.parametrize(
    "method",
    ["kv-compress", pytest.param("h2o-decode", marks=pytest.mark.slow), "pyramidkv-exact"],
)
def test_a_prompt_takes_what_its_budget_says(tiny_params, method):
    llm = make_llm(tiny_params, dataclasses.replace(SMALL, method=method))
    budget = budget_blocks(16, 3, 2, 4)
    for output in llm.generate(prompts_of(60, 90, 150), greedy(2)):
        stats = output.stats
        assert stats.blocks_before == HEADS * -(-len(output.prompt_token_ids) // 4)
        assert stats.blocks_after == budget
        assert stats.kept is not None
        assert (-(-stats.kept // 4)).sum() == budget
        assert stats.kept.min() >= 8
        assert stats.shortfall == 0


def test_a_cap_that_holds_everything_changes_nothing(tiny_params):
    prompts, capped = prompts_of(60, 150), CompressionConfig(max_cache_tokens=150)
    outputs = make_llm(tiny_params, capped).generate(prompts, greedy())
    assert tokens_of(outputs) == alone(tiny_params, prompts, greedy())
    assert [o.stats.blocks_after for o in outputs] == [o.stats.blocks_before for o in outputs]


def test_a_batch_may_mix_settings(tiny_params):
    prompts = prompts_of(60, 60, 60, 60)
    settings = [
        FULL,
        SMALL,
        CompressionConfig(method="kv-compress-w8-l1", max_cache_tokens=24, protected=4),
        CompressionConfig(
            method="kv-compress-continual", max_cache_tokens=32, window=8, compress_every=6
        ),
    ]
    llm = make_llm(tiny_params)
    together = tokens_of(llm.generate(prompts, greedy(20), settings))
    for prompt, setting, tokens in zip(prompts, settings, together, strict=True):
        assert alone(tiny_params, [prompt], greedy(20), setting) == [tokens]
    assert len(set(together)) > 1
    assert_empty(llm)


@pytest.mark.parametrize(
    "method", ["kv-compress", "h2o", pytest.param("kvcrush-mean:h2o", marks=pytest.mark.slow)]
)
def test_parts_of_a_prompt_keep_what_the_whole_keeps(tiny_params, method):
    prompts = prompts_of(60, 127)
    compression = CompressionConfig(method=method, max_cache_tokens=16, protected=8)
    whole = make_llm(tiny_params, compression, prefill_chunk=128).generate(prompts, greedy(4))
    parts = make_llm(tiny_params, compression, prefill_chunk=32).generate(prompts, greedy(4))
    assert tokens_of(whole) == tokens_of(parts)
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(one.stats.kept, other.stats.kept)


@pytest.mark.parametrize("method", ["kv-compress", "kv-compress-full-l2"])
def test_chunks_in_the_pool_measure_what_the_whole_prompt_does(tiny_params, method):
    compression = CompressionConfig(method=method, max_cache_tokens=150)

    def metric_by_position(**sizes):
        llm = make_llm(tiny_params, compression, **sizes)
        llm.add_request(prompts_of(150)[0], greedy(40))
        while not llm.scheduler.running:
            llm.step()
        cache = llm.worker.cache
        table = np.asarray(cache.block_table[0])
        pages = np.minimum(table, cache.num_blocks - 1)
        flat = (*table.shape[:2], -1)
        position, metric = (
            np.asarray(x)[pages].reshape(flat) for x in (cache.position, cache.metric)
        )
        order = np.argsort(np.where(position < 0, 10**6, position), axis=-1)
        return np.take_along_axis(metric, order, -1)[..., :150]

    whole = metric_by_position(prefill_chunk=256, prefill_scratch=256)
    parts = metric_by_position(prefill_chunk=64, prefill_scratch=64)
    np.testing.assert_allclose(whole, parts, rtol=2e-4, atol=1e-6)


def test_chunks_in_the_pool_never_hold_more_than_cap_and_chunk(tiny_params):
    compression = CompressionConfig(max_cache_tokens=32)
    llm = make_llm(tiny_params, compression, prefill_scratch=64, prefill_chunk=64)
    (output,) = llm.generate(prompts_of(240), greedy(4))
    assert output.stats.blocks_after == HEADS * 8
    peak = llm.metrics.as_dict()["kvjax_blocks_peak"]
    assert HEADS * (8 + 60 // 4) <= peak <= HEADS * (8 + 60 // 4 + 1)


def test_continual_compression_adds_squared_attention(tiny_params):
    compression = CompressionConfig(method="kv-compress-continual", max_cache_tokens=64)
    llm = make_llm(tiny_params, compression, prefill_chunk=64)
    llm.add_request(prompts_of(60)[0], greedy(20))
    llm.step()
    before = float(llm.worker.cache.metric.sum())
    llm.step()
    after = float(llm.worker.cache.metric.sum())
    # Each of the 4 steps adds Σ p² of every query head: more than 1/context and at most 1 each.
    most = 4 * TINY.num_layers * TINY.num_heads
    assert most / 64 < after - before <= most


def test_compression_on_an_interval(tiny_params):
    every = CompressionConfig(max_cache_tokens=16, protected=8, compress_every=6)
    llm = make_llm(tiny_params, every)
    (output,) = llm.generate(prompts_of(40), greedy(30))
    assert output.stats.blocks_evicted_decoding > 0
    found = llm.metrics.as_dict()
    assert found["kvjax_compressions_total"] == 30 // 6 - 1
    assert found["kvjax_blocks_peak"] <= HEADS * (16 // 4 + 6 // 4 + 2)
    assert_empty(llm)


@pytest.mark.parametrize("method", ["kv-compress", "kv-compress-continual"])
def test_compression_keeps_generated_tokens_that_nobody_measured(tiny_params, method):
    compression = CompressionConfig(
        method=method, max_cache_tokens=32, protected=4, window=8, compress_every=6
    )
    llm = make_llm(tiny_params, compression)
    llm.add_request(prompts_of(60)[0], greedy(60))
    while llm.metrics.as_dict()["kvjax_compressions_total"] < 3:
        llm.step()
    cache = llm.worker.cache
    seq_len, pages = int(cache.seq_len[0]), np.minimum(cache.block_table[0], cache.num_blocks - 1)
    held = np.asarray(cache.position)[pages].reshape(TINY.num_layers, TINY.num_kv_heads, -1)
    index = np.arange(held.shape[-1])
    held = np.where(index < np.asarray(cache.context_len[0])[..., None], held, -1)
    generated = np.arange(60, seq_len)[-16:]
    there = [np.isin(generated, row).all() for row in held.reshape(-1, held.shape[-1])]
    assert len(generated) == 16
    # Those that decode steps measured compete with the prompt's.
    assert all(there) == (method == "kv-compress")


def test_logprobs(tiny_params):
    prompts = prompts_of(10, 40)
    llm = make_llm(tiny_params)
    with_scores, without = llm.generate(prompts, [greedy(6, logprobs=2), greedy(6)])
    assert without.logprobs is None
    assert with_scores.logprobs is not None
    assert [entry.token for entry in with_scores.logprobs] == list(with_scores.token_ids)
    for entry in with_scores.logprobs:
        # Greedy tokens are the likeliest ones.
        assert entry.top[0] == (entry.token, pytest.approx(entry.logprob))
        assert entry.top[1][1] <= entry.top[0][1] < 0
        assert len(entry.top) == 2


def test_a_stop_text_ends_a_request_and_its_text(tiny_params):
    llm = make_llm(tiny_params)
    plain = llm.generate(prompts_of(10), greedy(24))[0]
    stop = plain.text[9:11]
    first = plain.text.find(stop)
    for asked in ((stop,), ["no such text", stop], stop):
        output = llm.generate(prompts_of(10), greedy(24, stop=asked, logprobs=0))[0]
        assert output.finish_reason == "stop"
        assert output.text == plain.text[:first]
        # The last token is the one that completed it.
        at = len(output.token_ids)
        assert output.token_ids == plain.token_ids[:at]
        tokenizer = llm.model.tokenizer
        assert stop in tokenizer.decode(plain.token_ids[:at])
        assert stop not in tokenizer.decode(plain.token_ids[: at - 1])
        assert len(output.logprobs or ()) == at
    assert_empty(llm)


@pytest.mark.parametrize("at", [0, 5])
def test_the_end_of_sequence_token_ends_a_request(tiny_params, at):
    """Seeds that draw it as a prompt's first token, or later."""
    llm = make_llm(tiny_params)
    prompt = prompts_of(10)[0]
    drawn = [{"temperature": 50.0, "seed": seed} for seed in range(300)]
    outputs = llm.generate([prompt] * 300, [greedy(at + 1, **one) for one in drawn])
    ends = [i for i, o in enumerate(outputs) if (*o.token_ids, TINY_EOS).index(TINY_EOS) == at]
    seed = ends[0]
    assert outputs[seed].finish_reason == "length"
    output = llm.generate([prompt], SamplingParams(max_tokens=24, **drawn[seed]))[0]
    assert output.finish_reason == "eos"
    assert output.token_ids == outputs[seed].token_ids
    assert output.text == llm.model.tokenizer.decode(output.token_ids[:-1])
    assert_empty(llm)


def test_one_token_is_enough(tiny_params):
    llm = make_llm(tiny_params, SMALL)
    outputs = llm.generate(prompts_of(1, 60, 150), greedy(1))
    assert [len(tokens) for tokens in tokens_of(outputs)] == [1, 1, 1]
    assert_empty(llm)
