"""Sizes, memory plan, metrics and the scheduler's arithmetic, without running a model."""

import dataclasses
import inspect

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvjax.cache import CompressionConfig
from kvjax.cache.methods import METHODS
from kvjax.engine import memory
from kvjax.engine.building import build
from kvjax.engine.compilation import CompiledSteps, StepKey, sizes_upto
from kvjax.engine.config import EngineConfig
from kvjax.engine.llm import LLM
from kvjax.engine.memory import plan_memory, pool_tokens_for
from kvjax.engine.probe import Behind, request_tokens
from kvjax.engine.request import Request
from kvjax.engine.sampling import SamplingParams
from kvjax.engine.scheduler import Scheduler
from kvjax.engine.tell import RateWarning
from kvjax.errors import UserError
from kvjax.models import LoadedModel
from kvjax.models.tokenizer import ByteTokenizer
from tests.engine.conftest import TINY
from tests.engine.serving import HEADS, SMALL, greedy, make_llm, prompts_of

BAD_SIZES = [
    {"max_batch": 0},
    {"prefill_chunk": 0},
    {"pool_tokens": 0},
    {"block_size": 12},
    {"prefill_scratch": 64, "prefill_chunk": 65},
    {"memory_fraction": 0.0},
    {"memory_fraction": 1.5},
    {"pool_tokens": 5, "pool_bytes": 5},
    {"max_batch": 2**31},
    {"max_batch": 2.0},
    {"max_len": 2**31},
    {"block_size": True},
    {"decode_steps_per_sync": 10**9},
    {"pool_tokens": float("nan")},
    {"pool_bytes": "1 GB"},
    {"memory_fraction": float("nan")},
    {"memory_fraction": "0.5"},
    {"max_waiting": 0},
]


@pytest.mark.usefixtures("unchecked_signatures")
@pytest.mark.parametrize("sizes", BAD_SIZES)
def test_bad_sizes_are_refused(sizes):
    with pytest.raises(UserError, match=next(iter(sizes))):
        EngineConfig(**sizes)


@pytest.mark.parametrize(
    ("size", "blocks"),
    [
        ({}, 16),
        ({"rate": 32}, 16),
        ({"rate": 32, "floor": 48}, 16),
        ({"rate": 32, "floor": 47}, 8),
        ({"rate": 1, "floor": 16}, 16),
        ({"max_cache_tokens": 48}, 16),
        ({"max_cache_tokens": 40}, 8),
        ({"budget_bytes": 48_000}, 16),
        ({"budget_bytes": 47_999}, 8),
        ({"max_cache_tokens": 40, "method": "full"}, 16),
    ],
)
def test_small_caches_have_small_blocks(size, blocks):
    compression = CompressionConfig(**{"method": "snapkv", **size})
    assert EngineConfig().blocks_for(compression, 1000).block_size == blocks
    assert EngineConfig(block_size=4).blocks_for(compression, 1000).block_size == 4


def test_an_engine_has_the_blocks_of_its_own_compression(tiny_params):
    model = LoadedModel(TINY, tiny_params, ByteTokenizer(), "")
    few = CompressionConfig(method="snapkv", rate=8, floor=16)
    llm = LLM(model, few, EngineConfig(max_batch=2, max_len=64, pool_tokens=64))
    assert (llm.config.block_size, llm.worker.cache.block_size) == (8, 8)
    sizes = pool_tokens_for(TINY, EngineConfig(), few, 60, 4)
    assert sizes == pool_tokens_for(TINY, EngineConfig(block_size=8), few, 60, 4)
    assert sizes != pool_tokens_for(TINY, EngineConfig(block_size=16), few, 60, 4)


def test_the_plan_adds_up_and_refuses_what_does_not_fit(tiny_params):
    model = LoadedModel(TINY, tiny_params, ByteTokenizer(), "")
    config = EngineConfig(max_batch=2, pool_tokens=100, block_size=4, prefill_scratch=2048)
    plan = plan_memory(model, config, 128, "float32")
    assert plan.num_blocks == 25 * HEADS
    # With an id per free block, and how many there are.
    assert plan.pool == plan.num_blocks * (4 * (2 * 8 * 4 + 8) + 4) + 4
    parts = (plan.weights, plan.pool, plan.tables, plan.scratch, plan.workspace)
    assert plan.total == sum(parts)
    for text in ("weights", "pool of 150 blocks = 100 tokens"):
        assert text in str(plan)
    by_bytes = EngineConfig(max_batch=2, pool_bytes=100_000, block_size=4)
    found = plan_memory(model, by_bytes, 128, "float32")
    assert found.num_blocks == (100_000 - 4) // (4 * 72 + 4)
    assert found.pool <= 100_000
    # Never more than all slots can use.
    assert plan_memory(model, EngineConfig(max_batch=2), 128, "float32").pool_tokens == 2 * 128
    with pytest.raises(UserError, match="this does not fit"):
        plan_memory(model, EngineConfig(pool_tokens=10**10), 128, "float32")


def test_logits_that_a_decode_step_keeps_are_planned_for(tiny_params):
    """Of every query head, for as many KVs as a table can name."""
    model = LoadedModel(TINY, tiny_params, ByteTokenizer(), "")
    config = EngineConfig(max_batch=2, pool_tokens=100, prefill_chunk=16, prefill_scratch=16)
    short, long = (plan_memory(model, config, n, "float32") for n in (1024, 2048))
    tables = 2 * HEADS * (1024 // 16) * 4
    assert long.tables - short.tables == tables
    assert long.workspace - short.workspace == tables + 2 * TINY.num_heads * 1024 * 4


def test_a_repetition_behind_a_full_chunk_is_planned_for(tiny_params):
    """The request runs beside a chunk, behind a whole prompt, and its queries look at all of it."""
    model = LoadedModel(TINY, tiny_params, ByteTokenizer(), "")
    config = EngineConfig(max_batch=2, pool_tokens=100, block_size=4)
    plan = plan_memory(model, config, 128, "float32")
    again = plan_memory(model, config, 128, "float32", behind=Behind(40))
    # Keys and values and three numbers of each KV, in float32.
    assert again.scratch - plan.scratch == 40 * HEADS * 4 * (2 * TINY.head_dim + 3)
    assert again.workspace - plan.workspace >= 256 * TINY.num_heads * 128 * 4
    sizes = EngineConfig(max_batch=2, pool_tokens=128, prefill_chunk=32, max_len=128)
    named = dataclasses.replace(sizes, methods=("kvzip",))
    scratch = [LLM(model, config=given).plan.scratch for given in (sizes, named)]
    request = len(request_tokens(ByteTokenizer()))
    assert scratch[1] - scratch[0] == request * HEADS * 4 * (2 * TINY.head_dim + 3)


def test_sizes_that_steps_are_compiled_for():
    assert sizes_upto(12, 1, 2) == (1, 2, 4, 8, 12)
    assert sizes_upto(64, 1, 4) == (1, 4, 16, 64)
    assert sizes_upto(48, 64, 4) == (48,)
    assert sizes_upto(1, 1, 2) == (1,)
    known, keys = CompiledSteps(), [StepKey("decode", sizes=(n,)) for n in (1, 4, 12)]
    known.seconds[keys[1]] = 1.0
    assert known.fitting(iter(keys)) is keys[0]
    known.flexible = True
    assert known.fitting(iter(keys)) is keys[1]
    assert known.fitting(keys, exact=True) is keys[0]
    assert known.fitting(keys[2:]) is keys[2]


def request_of(order: int, length: int, budget: int | None, max_tokens: int = 10, **settings):
    compression = CompressionConfig(**settings)
    method = METHODS["full" if budget is None else "kv-compress"]
    return Request(
        str(order), order, np.zeros(length, np.int32), SamplingParams(max_tokens=max_tokens),
        compression, method, budget, HEADS, 4,
    )  # fmt: skip


def test_every_chunk_fills_an_observation_window(tiny_params):
    llm = make_llm(tiny_params, prefill_chunk=64, prefill_scratch=64)
    for length in range(65, 250):
        chunks = llm.worker.begin(request_of(0, length, None)).chunks
        assert sum(chunks) == length
        assert max(chunks) <= 64
        assert min(chunks) >= 32


def test_a_window_needs_chunks_of_twice_its_length(tiny_params):
    wide = CompressionConfig(method="kv-compress-w32-l2", rate=2)
    llm = make_llm(tiny_params, wide, prefill_chunk=32)
    with pytest.raises(UserError, match="window 32 of kv-compress-w32-l2: give at most half"):
        llm.add_request(prompts_of(60)[0], greedy(4))
    # A prompt of one chunk is measured whole.
    with pytest.warns(RateWarning, match=r"rate 2 is 1\.0 for a prompt of 20 tokens"):
        assert llm.generate(prompts_of(20), greedy(4))[0].error is None
    # Once is enough.
    assert llm.generate(prompts_of(20), greedy(4))[0].error is None


@pytest.mark.parametrize("length", [60, 200])
@pytest.mark.parametrize(
    "settings",
    [{}, pytest.param({"compress_every": 6}, marks=pytest.mark.slow), {"on_prefill": False}],
)
def test_a_pool_made_for_a_request_never_runs_out(tiny_params, length, settings):
    compression = dataclasses.replace(SMALL, **settings)
    sizes = EngineConfig(max_batch=1, prefill_chunk=32, prefill_scratch=128, block_size=4)
    tokens = pool_tokens_for(TINY, sizes, compression, length, 24)
    llm = make_llm(tiny_params, compression, pool_tokens=tokens, max_batch=1)
    (output,) = llm.generate(prompts_of(length), greedy(24))
    found = llm.metrics.as_dict()
    assert output.finish_reason == "length"
    assert found["kvjax_preemptions_total"] == 0
    due = 24 // 6 - 1 if "compress_every" in settings else 0
    in_pool = -(-length // 32) if length > 128 and compression.on_prefill else 0
    assert found["kvjax_compressions_total"] == due + in_pool


def test_a_pool_has_no_more_kvs_than_steps_can_number(tiny_params, monkeypatch):
    monkeypatch.setattr(memory, "_limit", lambda *_: 1 << 60)
    model = LoadedModel(TINY, tiny_params, ByteTokenizer(), "")
    most = (2**31 - 1) // 4 // HEADS * 4

    def plan(tokens):
        config = EngineConfig(max_batch=2, pool_tokens=tokens, block_size=4)
        return plan_memory(model, config, 128, "float32")

    assert plan(most).num_blocks * 4 < 2**31
    with pytest.raises(UserError, match="give a smaller pool"):
        plan(most + 4)


def test_what_a_request_needs():
    whole = request_of(0, 40, None)
    assert whole.blocks_to_admit() == HEADS * 11
    assert whole.blocks_to_finish() == HEADS * 13
    small = request_of(1, 40, 3 * HEADS)
    assert small.blocks_to_admit() == HEADS * 4
    assert small.blocks_to_finish() == HEADS * 5
    assert small.blocks_to_admit(chunk_in_pool=16) == HEADS * 8
    kept = request_of(2, 40, 3 * HEADS, before_preemption=False)
    assert kept.blocks_to_finish() == HEADS * (3 + 3 + 1)
    late = request_of(3, 40, 3 * HEADS, on_prefill=False)
    assert late.blocks_to_admit() == HEADS * 11
    # Its prompt may be prefilled again, with what it has generated.
    assert small.blocks_to_finish(chunk_in_pool=16) == HEADS * 8
    assert late.blocks_to_finish(chunk_in_pool=32) == HEADS * 12
    assert not late.compressed_first
    late.tokens.append(0)
    assert late.compressed_first
    assert late.blocks_to_admit() == HEADS * 4
    whole = request_of(3, 40, 3 * HEADS, on_prefill=False, before_preemption=False)
    whole.tokens.append(0)
    assert not whole.compressed_first
    short = request_of(4, 5, 3 * HEADS, max_tokens=1)
    assert short.blocks_to_admit() == HEADS * 2


def test_the_queue_keeps_the_order_of_arrival():
    sizes = EngineConfig(max_batch=2, block_size=4, prefill_chunk=32, prefill_scratch=128)
    scheduler = Scheduler(sizes, [30 * HEADS])
    accounts = scheduler.accounts
    first, second, third = (request_of(n, 40, None) for n in range(3))
    for request in (second, third, first):
        scheduler.add(request)
    assert scheduler.begin_next() is first
    assert scheduler.begin_next() is None  # one prompt at a time
    scheduler.inserted(first, in_pool=True)
    accounts.take(0, 10 * HEADS, 40)
    assert scheduler.begin_next() is second
    scheduler.inserted(second, in_pool=True)
    accounts.take(1, 10 * HEADS, 40)
    assert scheduler.begin_next() is None  # no slot
    assert scheduler.holders() == [first, second]
    assert scheduler.leave(second) == 1
    scheduler.add(second)
    assert scheduler.waiting == [second, third]
    assert accounts.num_free == 20 * HEADS
    accounts.growth[0] = 9 * HEADS
    assert scheduler.begin_next() is None  # room for those that run comes first
    accounts.growth[0] = 0
    assert scheduler.begin_next() is second


def test_metrics_are_a_dict_and_prometheus_text(tiny_params):
    llm = make_llm(tiny_params, SMALL)
    llm.generate(prompts_of(10, 60), greedy(6))
    found = llm.metrics.as_dict()
    assert found["kvjax_requests_total"] == 2
    assert found['kvjax_requests_ended_total{reason="length"}'] == 2
    assert found["kvjax_prompt_tokens_total"] == 70
    assert found["kvjax_output_tokens_total"] == 12
    assert found["kvjax_blocks_used"] == 0
    assert found["kvjax_blocks_free"] == llm.plan.num_blocks
    assert 0 < found["kvjax_blocks_peak"] <= llm.plan.num_blocks
    assert found["kvjax_evicted_blocks_total"] > 0
    assert found["kvjax_time_to_first_token_seconds_count"] == 2
    assert found["kvjax_compiled_steps"] == len(llm.worker.compiled.seconds) > 0
    phases = [v for k, v in found.items() if k.startswith("kvjax_seconds_total")]
    assert len(phases) == 6
    # One of the two waits while the other's steps compile.
    assert 0 < found["kvjax_compile_stall_seconds_total"] <= found["kvjax_compile_seconds"]
    assert min(phases) >= 0
    families = text_string_to_metric_families(llm.metrics.prometheus())
    parsed = {sample.name: sample.value for family in families for sample in family.samples}
    assert parsed["kvjax_output_tokens_total"] == 12


def test_what_files_take_of_the_memory_is_there_and_what_others_may_not_have_is_not(tmp_path):
    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert memory.available_bytes(tmp_path) > 0  # where nothing says so
    write("proc/meminfo", "MemTotal: 99 kB\nMemFree: 10 kB\nMemAvailable: 50 kB\n")
    assert memory.available_bytes(tmp_path) == 50 * 1024
    write("sys/fs/cgroup/memory.max", "max\n")
    write("sys/fs/cgroup/memory.current", "30000\n")
    write("sys/fs/cgroup/memory.stat", "anon 9\ninactive_file 5000\n")
    assert memory.available_bytes(tmp_path) == 50 * 1024
    write("sys/fs/cgroup/memory.max", "40000\n")
    assert memory.available_bytes(tmp_path) == 15000


@pytest.mark.parametrize(
    "given", [{"compression": EngineConfig()}, {"config": CompressionConfig()}, {"model": None}]
)
def test_what_is_no_configuration_is_named(tiny_params, given):
    asked = {"model": make_llm(tiny_params).model, "compression": None, "config": None} | given
    (name,) = given
    with pytest.raises(UserError, match=rf"^{name} .*: give an? \w+ \({name}=…\)$"):
        # As where nothing checks types before.
        inspect.unwrap(build)(**asked, cache_dtype=None, calibration="none", draft=None)


def test_memory_tells_the_plan_and_the_device(tiny_params, monkeypatch):
    llm = make_llm(tiny_params)
    found = llm.memory()
    assert found["planned"] == llm.plan.total
    assert "bytes_in_use" not in found
    told = {"bytes_in_use": 7, "peak_bytes_in_use": 9, "bytes_limit": 10**9, "num_allocs": 3}

    class Device:
        def memory_stats(self):
            return told

    monkeypatch.setattr("jax.local_devices", lambda: [Device()])
    assert llm.memory()["peak_bytes_in_use"] == 9
    model = LoadedModel(TINY, tiny_params, ByteTokenizer(), "")
    plan = plan_memory(model, EngineConfig(memory_fraction=0.5), 128, "float32")
    assert plan.limit == 10**9 // 2
    told["bytes_limit"] = 1000
    with pytest.raises(UserError, match="this does not fit: weights"):
        plan_memory(model, EngineConfig(), 128, "float32")
