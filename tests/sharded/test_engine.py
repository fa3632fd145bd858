"""An engine on several devices says what it says on one, and keeps the same KVs."""

import asyncio
import dataclasses
import logging
import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.cache import CompressionConfig, get_method
from kvjax.cache.config import CALIBRATED
from kvjax.cache.methods.matched import REFERENCE_QUERY
from kvjax.cache.methods.predicted_reads import CLAIM, EXTRA, WEIGHT
from kvjax.cache.methods.speckv import Lookahead
from kvjax.cache.methods.triattention import QUERY_CENTRE
from kvjax.engine import LLM, AsyncLLM, SamplingParams, pool_tokens_for
from kvjax.engine.parallel import Parallel
from kvjax.errors import UserError
from kvjax.models import ByteTokenizer, LoadedModel
from kvjax.models.decoder import init_params, logical_axes
from kvjax.models.parallel import Dealing, Split, join_params, split_params
from tests.sharded.heads import mesh_of
from tests.sharded.tiny import SIZES, TINY, engine_of, engine_settings, made_calibration, model_of

PROMPTS = [
    np.random.default_rng(n).integers(0, 256, size).astype(np.int32)
    for n, size in enumerate((30, 61, 90))
]
"""One goes whole, one in parts of a scratch, one chunk by chunk in the pool."""


def _answers(*engine, once: bool = False, **settings):
    """`once`: as GPUs decode."""
    llm = engine_of(*engine, **settings)
    llm.worker.decodes_once = llm.engine.runs_ahead = once
    greedy = SamplingParams(max_tokens=6, ignore_eos=True)
    drawn = dataclasses.replace(greedy, temperature=0.8, seed=5)
    names = [
        llm.add_request(prompt, sampling, report_kept=True)
        for prompt, sampling in zip(PROMPTS, (greedy, drawn, greedy))
    ]
    ended = {}
    while llm.has_unfinished():
        ended |= {out.request_id: out for out in llm.step() if out.finished}
    assert (llm.scheduler.accounts.free == llm.scheduler.accounts.num_blocks).all()
    return [ended[name] for name in names]


@pytest.fixture(scope="module")
def on_one() -> dict:
    return {}


NARROW = {"weight_dtype": "int8", "cache_dtype": "int4w8"}
SMOOTHED = {"biased": True, "cache_dtype": "int4", "replicas": 2}
CASES = [
    (2, CALIBRATED, True, {}),
    pytest.param(4, "kv-compress", False, {"replicas": 2, "group": 3}, marks=pytest.mark.slow),
    pytest.param(6, CALIBRATED, True, {"replicas": 2}, marks=pytest.mark.slow),
    pytest.param(8, "kv-compress", True, {"layers": 3}, marks=pytest.mark.slow),
    pytest.param(2, "key-norm", False, NARROW, marks=pytest.mark.slow),
    pytest.param(4, "kv-compress", True, SMOOTHED, marks=pytest.mark.slow),
]
"""Layers are stacked, or taken one by one as CPUs do; one head for each of eight devices and one
more; methods with calibrated arrays and what stays changed; KV heads on two devices each, more of
these than heads, and queries that do not come out even; weights, keys and values of few bits; and
keys with biases, of few bits.
"""


@pytest.mark.parametrize(("devices", "method", "stacked", "given"), CASES)
def test_same_tokens_and_same_kvs_as_on_one_device(devices, method, stacked, given, on_one):
    settings: dict[str, Any] = {"compress_every": 4, "protected": 4, **given}
    key = (method, *given.items())
    if key not in on_one:
        on_one[key] = _answers(1, method, **{**settings, "replicas": 1})
    found = _answers(devices, method, stacked, **settings)
    assert_same(found, on_one[key])


@pytest.mark.slow
def test_single_steps_and_chunks_behind_them_on_several_devices(on_one):
    settings: dict[str, Any] = {"compress_every": 4, "protected": 4}
    wanted = on_one.get((CALIBRATED,)) or _answers(1, CALIBRATED, **settings)
    assert_same(_answers(2, CALIBRATED, once=True, **settings), wanted)


def assert_same(found, wanted) -> None:
    for one, several in zip(wanted, found, strict=True):
        assert several.finish_reason == one.finish_reason == "length"
        assert several.token_ids == one.token_ids
        np.testing.assert_array_equal(several.stats.kept, one.stats.kept)
        np.testing.assert_array_equal(several.stats.kept_tokens, one.stats.kept_tokens)
        assert several.stats.shortfall == one.stats.shortfall


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "replicas"), [(4, 2)])
def test_what_is_drafted_and_read_behind_a_prompt_is_that_of_one_device(devices, replicas):
    looks = Lookahead(window=8, drafted=6)
    method = dataclasses.replace(get_method("speckv"), scorer=looks, protected=8)
    found = []
    for split in ({}, {"tensor_parallel": devices, "kv_replicas": replicas}):
        config = dataclasses.replace(SIZES, prefill_scratch=128, **split)
        llm = LLM(model_of(False), CompressionConfig(method=method, rate=3, floor=4), config)
        llm.add_request(PROMPTS[1], SamplingParams(max_tokens=6, ignore_eos=True), report_kept=True)
        outputs = []
        while llm.has_unfinished():
            outputs += llm.step()
        assert llm.metrics.as_dict()["kvjax_probe_tokens_total"] == 8 + 6
        found.append(outputs[-1])
    one, several = found
    assert several.error is one.error is None
    assert several.token_ids == one.token_ids
    np.testing.assert_array_equal(several.stats.kept_tokens, one.stats.kept_tokens)
    assert one.stats.kept_tokens.sum() < one.stats.kept_tokens.size / 2


def test_a_pool_made_for_a_request_never_runs_out():
    """Though one head, on one of three devices, keeps all that may be kept."""
    made = made_calibration()
    extra = made.arrays[EXTRA].copy()
    extra[1, 2, 3] = 1e3
    made = dataclasses.replace(made, arrays={**made.arrays, EXTRA: extra})
    settings = engine_settings("predicted-reads-blind", protected=1, sinks=1)
    settings = dataclasses.replace(settings, rate=6)
    config = dataclasses.replace(SIZES, tensor_parallel=3, prefill_scratch=128, pool_tokens=None)
    tokens = pool_tokens_for(TINY, config, settings, len(PROMPTS[2]), 6)
    config = dataclasses.replace(config, pool_tokens=tokens)
    llm = LLM(model_of(True), settings, config, calibration=made)
    (output,) = llm.generate(PROMPTS[2:], SamplingParams(max_tokens=6, ignore_eos=True))
    assert output.finish_reason == "length"
    kept = np.asarray(output.stats.kept)
    assert kept[1, 2] > 0.7 * kept.sum()
    assert llm.metrics.as_dict()["kvjax_preemptions_total"] == 0


@pytest.mark.slow
def test_steps_compile_beside_the_rounds(caplog):
    """How their inputs will lie on the devices is known before there are any."""

    async def main():
        config = dataclasses.replace(SIZES, tensor_parallel=2)
        async with AsyncLLM(model_of(True), engine_settings("kv-compress"), config) as llm:
            for prompt in PROMPTS[1:]:
                sampling = SamplingParams(max_tokens=3, ignore_eos=True)
                outputs = [one async for one in llm.add(prompt, sampling, report_kept=True)]
                assert outputs[-1].error is None
            assert llm.metrics.as_dict()["kvjax_compile_stalls_total"] == 0
            return {key.step.replace(" ", "_") for key in llm.llm.worker.compiled.seconds}

    jax.config.update("jax_log_compiles", True)
    try:
        with caplog.at_level(logging.WARNING):
            steps = asyncio.run(main())
    finally:
        jax.config.update("jax_log_compiles", False)
    assert {"prefill_in_scratch", "prefill_in_pool", "place", "start", "decode"} <= steps
    ours = re.compile(rf"Compiling jit\(({'|'.join(steps)})\)")
    found = [record for record in caplog.records if ours.match(record.getMessage())]
    assert len(found) >= len(steps)
    assert {record.threadName.split("_")[0] for record in found} == {"kvjax compiler"}


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize(
    ("shards", "replicas", "group"),
    [(2, 1, 2), pytest.param(4, 1, 2, marks=pytest.mark.slow), (3, 2, 3)],
)
def test_weights_come_back_as_they_were(shards, replicas, group, stacked):
    model, devices = model_of(stacked, group=group), shards * replicas
    axes = logical_axes(model.config, stacked)
    dealing = Dealing.even(TINY.num_layers, TINY.num_kv_heads, shards, replicas)
    params = split_params(model.params, axes, Split(dealing, mesh_of(devices)))
    for path, leaf in cast(Any, nnx.to_flat_state(params)):
        parts = {"kv_heads", "mlp", "vocab"} & set(axes[path])
        shard = leaf[...].addressable_shards[0].data
        assert shard.size * (devices if parts else 1) == leaf[...].size, path
    back = join_params(params, axes, model.config, dealing)
    jax.tree.map(np.testing.assert_array_equal, back, model.params)


def test_replicas_share_the_queries_of_their_heads():
    """Each has the key and value of its heads, and some of their query heads; none is twice."""
    model = model_of(True, group=3)
    dealing = Dealing(np.array([[0, 1, 2], [2, 0, 3]], np.int32), 3, 3, 2)
    split = Split(dealing, mesh_of(6))
    params = cast(Any, split_params(model.params, logical_axes(model.config), split))
    whole, dealt = (x["layers"]["qkv"][...] for x in (cast(Any, model.params), params))
    assert dealt.shape == (2, TINY.hidden_size, 6, 4, TINY.head_dim)
    for layer, row in enumerate(dealing.number):
        for device in range(6):
            head, (first, *_) = row[device // 2], [[0, 1], [2]][device % 2]
            found = np.asarray(dealt[layer, :, device])
            if head == 3:
                assert not found.any()
                continue
            want = np.asarray(whole[layer, :, head])
            np.testing.assert_array_equal(found[:, 0], want[:, first])
            np.testing.assert_array_equal(found[:, 1], want[:, 1] if first == 0 else 0)
            np.testing.assert_array_equal(found[:, 2:], want[:, 3:])
    out = np.asarray(params["layers"]["out"][...])
    assert out.shape == (2, 6, 2, TINY.head_dim, TINY.hidden_size)
    want = np.asarray(cast(Any, model.params)["layers"]["out"][...])
    np.testing.assert_array_equal(out[0, 1], [want[0, 0, 2], np.zeros_like(want[0, 0, 2])])


def test_replicas_count_no_block_twice():
    once, twice = (
        engine_of(shards * replicas, "kv-compress", replicas=replicas).plan
        for shards, replicas in ((2, 1), (2, 2))
    )
    assert twice.num_blocks == once.num_blocks
    assert twice.pool == once.pool


@pytest.mark.slow
def test_shared_prefixes_are_those_of_one_device(tmp_path):
    """Blocks of several owners on every device; a question goes on where it would on one."""
    document, found = PROMPTS[2], []
    for devices in (1, 2):
        shares = dataclasses.replace(
            SIZES, tensor_parallel=devices, share_prefix="always", share_grain=16,
            retained_prefixes=2,
        )  # fmt: skip
        llm = LLM(model_of(True), engine_settings("key-norm"), shares)
        sampling = SamplingParams(max_tokens=5, ignore_eos=True)
        said = []
        for question in (PROMPTS[0][:9], PROMPTS[1][:7]):
            (output,) = llm.generate([np.append(document, question)], sampling)
            assert output.error is None
            said.append((output.token_ids, output.stats.cached_tokens))
        said.append(np.asarray(llm.worker.cache.shared).sum())
        if devices == 2:
            with pytest.raises(UserError, match="prefixes in files with tensor_parallel 2"):
                llm.save_prefix(tmp_path / "document", document)
            with pytest.raises(UserError, match="prefixes in files with tensor_parallel 2"):
                llm.load_prefix(tmp_path / "document")
        llm.forget_prefixes()
        assert (llm.worker.free_blocks() == llm.worker.shard_blocks).all()
        assert not np.asarray(llm.worker.cache.shared).any()
        found.append(said)
    assert found[0] == found[1]
    assert found[0][1][1] >= 64


def test_calibrated_arrays_go_where_their_heads_go():
    rng = np.random.default_rng(1)
    layers, heads, group = TINY.num_layers, TINY.num_kv_heads, TINY.group_size
    weight = rng.random((layers, 4, heads)).astype(np.float32)
    centre = rng.random((layers, heads * group, 6)).astype(np.float32)
    parallel = Parallel(TINY, Dealing(np.array([[2, 3, 0, 1], [0, 3, 1, 2]], np.int32), heads, 2))
    arrays = {WEIGHT: weight, QUERY_CENTRE: centre, CLAIM: weight[..., 0]}
    arrays[REFERENCE_QUERY] = np.stack([centre, centre + 1], axis=1)
    found = parallel.artefacts({name: jnp.asarray(array) for name, array in arrays.items()})
    for layer, row in enumerate(parallel.dealing.number):
        for place, head in enumerate(row):
            own = weight[layer, :, head] if head < heads else 0
            np.testing.assert_array_equal(found[WEIGHT][layer, :, place], own)
            queries = found[QUERY_CENTRE][layer, place * group : (place + 1) * group]
            own = centre[layer, head * group : (head + 1) * group] if head < heads else 0
            np.testing.assert_array_equal(queries, own)
            queries = found[REFERENCE_QUERY][layer, 1, place * group : (place + 1) * group]
            np.testing.assert_array_equal(queries, own + 1 if head < heads else 0)
    shapes = {name: x.addressable_shards[0].data.shape for name, x in found.items()}
    assert shapes == {
        WEIGHT: (2, 4, 2),
        QUERY_CENTRE: (2, 2 * group, 6),
        CLAIM: (2, 4),
        REFERENCE_QUERY: (2, 2, 2 * group, 6),
    }


def test_what_is_refused():
    for devices, method, said in (
        (9, "kv-compress", "tensor_parallel 9: this process has 8 of kind cpu; give at most 8"),
        (2, "random", "method random with tensor_parallel 2: its scores join heads"),
        (2, "tova", "method tova with tensor_parallel 2"),
    ):
        with pytest.raises(UserError, match=said):
            engine_of(devices, method)
    for load in (np.ones((3, 3)), -np.ones((2, 3))):
        with pytest.raises(UserError, match="array head_load: wanted a number from 0 on for each"):
            Parallel.of(TINY, 2, (), load)
    for devices, replicas, said in (
        (4, 3, "kv_replicas 3 with tensor_parallel 4: .* give a divisor of 4"),
        (1, 2, "kv_replicas 2 with tensor_parallel 1: .* give a divisor of 1"),
        (6, 3, "kv_replicas 3: tiny has 2 query heads of each KV head to share out; give at most"),
        (4, 0, "kv_replicas 0: "),
    ):
        with pytest.raises(UserError, match=said):
            engine_of(devices, "kv-compress", replicas=replicas)
    narrow = dataclasses.replace(TINY, num_layers=1, num_heads=2, num_kv_heads=2)
    model = LoadedModel(narrow, init_params(narrow, "float32"), ByteTokenizer(), "dummy weights")
    config = dataclasses.replace(SIZES, tensor_parallel=3)
    with pytest.raises(UserError, match="tensor_parallel 3: tiny has 2 KV heads in all layers"):
        LLM(model, CompressionConfig(method="kv-compress"), config)
