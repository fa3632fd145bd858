"""Steps copy block tables no wider than those who take part need."""

import asyncio
import dataclasses
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.engine import tables, warming
from kvjax.engine.config import EngineConfig
from kvjax.engine.memory import plan_sizes
from kvjax.engine.needs import needs_of
from kvjax.engine.tables import ENTRIES, Tables
from tests.engine.async_serving import make, run, settled
from tests.engine.conftest import TINY
from tests.engine.serving import (
    SMALL,
    alone,
    assert_empty,
    greedy,
    make_llm,
    prompts_of,
    tokens_of,
)
from tests.engine.test_compile_beside import metric

SIZES = st.fixed_dictionaries(
    {
        "max_blocks": st.integers(1, 40_000),
        "block_size": st.sampled_from([4, 16, 64]),
        "slots": st.integers(1, 300),
        "blocks": st.integers(1, 10**7),
        "heads": st.integers(1, 500),
    }
)


@given(SIZES, st.lists(st.integers(0, 700_000), min_size=1, max_size=300))
def test_everybody_takes_part_once_in_rows_that_hold_them(given_sizes, longest):
    sizes = Tables.of(**given_sizes)
    longest = [min(kvs, sizes.widths[-1] * sizes.block_size) for kvs in longest]
    parts = sizes.parts(longest[: sizes.slots])
    assert sorted(i for part in parts for i in part) == list(range(min(len(longest), sizes.slots)))
    for part in parts:
        most = max(longest[i] for i in part)
        found = list(sizes.holding(len(part), most))
        assert found
        assert [width for _, width in found] == sorted(width for _, width in found)
        for count, width in found:
            assert len(part) <= count <= sizes.rows(width) <= sizes.slots
            assert most <= width * sizes.block_size
        # A narrower row would not hold them.
        assert all(w >= found[0][1] or w * sizes.block_size < most for w in sizes.widths)


@given(SIZES)
def test_copies_are_bounded_by_the_pool(given_sizes):
    """Beyond what rows of `narrow` take: by so many entries per block, or a single row."""
    sizes = Tables.of(**given_sizes)
    assert sizes.widths[-1] == max(sizes.widths)
    bound = max(
        sizes.heads * sizes.slots * min(sizes.narrow, sizes.widths[-1]),
        sizes.heads * sizes.widths[-1],
        ENTRIES * sizes.blocks,
    )
    assert sizes.heads * math.prod(sizes.largest) <= bound
    for width in sizes.widths:
        assert sizes.rows(width) * width <= math.prod(sizes.largest)


@given(SIZES)
def test_no_more_sequences_need_wide_rows_than_may_take_part(given_sizes):
    """Where no head holds more than four times what an average one does."""
    sizes = Tables.of(**given_sizes)
    for before, width in zip(sizes.widths, sizes.widths[1:]):
        owned = sizes.heads * (before + 1) / 4
        assert min(sizes.slots, sizes.blocks // owned) <= max(1, sizes.rows(width))


@pytest.fixture
def few_columns(monkeypatch):
    """Four blocks of four KVs are narrow, and of wider rows one takes part at a time."""
    monkeypatch.setattr(tables, "NARROW", 16)
    monkeypatch.setattr(tables, "ENTRIES", 1)


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("settings", [{}, {"compression": SMALL}])
def test_tokens_are_those_of_whole_rows(tiny_params, few_columns, once, settings):
    """Of sequences that grow from one width to the next, too, with a step held back."""
    prompts = prompts_of(3, 11, 40, 90, 5)
    want = alone(tiny_params, prompts, greedy(30), **settings)
    llm = make_llm(tiny_params, **settings)
    llm.worker.decodes_once = llm.engine.runs_ahead = once
    assert tokens_of(llm.generate(prompts, greedy(30))) == want
    assert_empty(llm)
    name = "decode once" if once else "decode"
    sizes = {key.sizes[:2] for key in llm.worker.compiled.seconds if key.step == name}
    # A pool of 600 tokens has 900 blocks for six heads: rows of 16 and 64 are for nine and two.
    assert {width for _, width in sizes} == {4, 16, 64}
    assert all(count <= {4: 4, 16: 4, 64: 2}[width] for count, width in sizes)


def test_forks_have_rows_that_hold_their_prompt(tiny_params, few_columns):
    """No chunk of theirs has told how much that is."""
    (prompt,) = prompts_of(70)
    sampling = [greedy(temperature=1.0, seed=seed) for seed in range(3)]
    want = [alone(tiny_params, [prompt], one)[0] for one in sampling]
    llm = make_llm(tiny_params, share_prefix="always", share_grain=16)
    outputs = llm.generate([prompt] * 3, sampling)
    assert [output.stats.cached_tokens for output in outputs] == [0, 70, 70]
    assert tokens_of(outputs) == want


def test_a_step_is_as_large_as_its_rows_not_as_tables(tiny_params):
    """Of what it copies, compiled: a table sixteen times as wide adds nothing."""

    def temporaries(max_len: int) -> int:
        llm = make_llm(tiny_params, max_len=max_len, block_size=16, pool_tokens=4096)
        call = llm.worker.decode_call([0, 1, 2], 100, 4, None, None)
        lowered = call.step.lower(*call.args)  # type: ignore[attr-defined]
        analysis = lowered.compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    narrow, wide = (temporaries(n) for n in (tables.NARROW, 16 * tables.NARROW))
    assert wide < 1.1 * narrow


def test_long_sequences_take_little_of_the_pool(tiny_params):
    """Beside the tables themselves."""
    shapes = jax.eval_shape(lambda: tiny_params)
    config, limit = EngineConfig(max_batch=256), 100 * 2**20

    def plan(max_len: int):
        return plan_sizes(TINY, shapes, config, max_len, limit=limit)

    short, long = plan(tables.NARROW), plan(16 * tables.NARROW)
    assert long.total <= limit
    further = long.tables - short.tables
    assert short.pool - long.pool - further < 0.05 * short.pool
    # As many blocks as there is room for.
    block = long.spec.block_bytes + 4
    assert limit - long.total < 2 * block * (1 + ENTRIES)
    # What is copied at most is planned for.
    sizes = Tables.of(
        16 * tables.NARROW // 16, 16, 256, long.num_blocks, TINY.num_layers * TINY.num_kv_heads
    )
    rows, width = sizes.largest
    named = rows * width * 4
    assert long.workspace - short.workspace >= 0
    assert long.workspace >= named * (long.spec.heads + TINY.num_heads * 16)


def test_what_is_wider_is_compiled_before_it_is_needed(tiny_params, monkeypatch):
    """Once sequences are half as long as their rows hold."""
    monkeypatch.setattr(tables, "NARROW", 64)

    async def main():
        async with make(tiny_params) as llm:
            seconds = llm.llm.worker.compiled.seconds

            def widths() -> set[int]:
                return {key.sizes[1] for key in list(seconds) if key.step == "decode"}

            await llm.generate(prompts_of(3), greedy(4))
            await settled(llm)
            assert widths() == {16}
            await llm.generate(prompts_of(20), greedy(12))
            async with asyncio.timeout(30):
                while widths() != {16, 64}:
                    await asyncio.sleep(0.01)
            assert metric(llm, "compile_stalls_total") == 0

    run(main())


def test_a_prompt_begins_when_it_can_grow(tiny_params, monkeypatch):
    """To twice its length, or as far as it will."""
    monkeypatch.setattr(tables, "NARROW", 64)
    llm = make_llm(tiny_params)

    def widths(length: int, tokens: int) -> list[int]:
        (request,) = warming.like(llm, [length], False, None)
        sampling = dataclasses.replace(request.sampling, max_tokens=tokens)
        needs = needs_of(llm.worker, dataclasses.replace(request, sampling=sampling))
        return [need.key.sizes[1] for need in needs if need.key.step == "decode"]

    assert widths(20, 200) == [16]
    assert widths(40, 5) == [16]
    assert widths(40, 200) == [16, 64]
    assert widths(70, 5) == [64]


def test_who_outgrows_a_warmed_width_waits_for_nothing(tiny_params, few_columns):
    """The widest steps do for all until others are compiled."""

    async def main():
        async with make(tiny_params) as llm:
            await llm.warm_up([3])
            sizes = {k.sizes for k in llm.llm.worker.compiled.seconds if k.step == "decode"}
            assert {width for _, width in sizes} == {4, 64}
            outputs = await llm.generate(prompts_of(3, 4, 3), greedy(90))
            assert np.shape([output.token_ids for output in outputs]) == (3, 90)
            assert metric(llm, "compile_stalls_total") == 0
            await settled(llm)

    run(main())
