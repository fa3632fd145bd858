"""A prompt that comes to the pool chunk by chunk is fitted to queries of its own."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvjax.cache import CompressionConfig
from kvjax.cache.config import CALIBRATED
from kvjax.cache.policy.merge import PROMPT_QUERY
from kvjax.engine import LLM, SamplingParams
from kvjax.engine.checks import checked_request
from kvjax.engine.compilation import StepKey
from tests.sharded.tiny import SIZES, TINY, engine_of, engine_settings, made_calibration, model_of

LONG = np.random.default_rng(4).integers(0, 256, 90).astype(np.int32)
ASKED = SamplingParams(max_tokens=9, ignore_eos=True)
ROWS = 32
"""Of the newest and of all of a chunk."""


def watched(llm: LLM) -> list[tuple[StepKey, tuple, Any]]:
    """Every step that an engine runs: its key, its arguments and what it gave."""
    seen, run = [], llm.worker.compiled.run

    def running(call):
        found = run(call)
        seen.append((call.key, call.args, found))
        return found

    llm.worker.compiled.run = running  # type: ignore[method-assign]
    return seen


def queries_of(seen: list) -> tuple[list, list]:
    """What chunks in the pool gave, and what compressions were given."""
    chunks = [np.asarray(found[3]) for key, _, found in seen if key.step == "prefill in pool"]
    given = [args[3].get(PROMPT_QUERY) for key, args, _ in seen if key.step == "compress"]
    return chunks, given


def test_each_chunk_brings_its_own_and_what_is_generated_none():
    llm = engine_of(1, CALIBRATED, compress_every=4)
    seen = watched(llm)
    (output,) = llm.generate([LONG], ASKED)
    assert output.finish_reason == "length"
    chunks, given = queries_of(seen)
    assert [x.shape for x in chunks] == [(TINY.num_layers, TINY.num_heads, ROWS, 8)] * 3
    for got, want in zip(given[:3], chunks, strict=True):
        np.testing.assert_array_equal(got, want)
    assert len(given) > 3
    assert all(queries is None for queries in given[3:])


@pytest.mark.slow
def test_a_later_turn_brings_its_own():
    """What it says stands behind what is left of the first turn."""
    config = dataclasses.replace(SIZES, share_prefix="always", share_grain=8, retained_prefixes=2)
    llm = LLM(model_of(True), engine_settings(CALIBRATED), config, calibration=made_calibration())
    llm.generate([LONG[:40]], ASKED)
    seen = watched(llm)
    (output,) = llm.generate([LONG[:60]], ASKED)
    assert output.stats.cached_tokens
    chunks, given = queries_of(seen)
    assert chunks
    for got, want in zip(given, chunks, strict=True):
        np.testing.assert_array_equal(got, want)


def test_methods_that_ask_for_none_are_given_none():
    llm = engine_of(1, "kv-compress")
    (output,) = llm.generate([LONG], ASKED)
    assert output.finish_reason == "length"
    keys = [key for key in llm.worker.compiled.seconds if key.step == "compress"]
    assert {key.sizes[-1] for key in keys} == {0}


def test_prompts_that_stay_whole_with_queries_and_without_have_steps_of_their_own():
    """Else the second kind would be compiled in a round, where others wait for it."""
    llm = engine_of(1, CALIBRATED)
    prompt = SimpleNamespace(k=SimpleNamespace(shape=(0, 32)))
    settings = CompressionConfig(), engine_settings(CALIBRATED, on_prefill=False)
    both = [checked_request(llm, LONG[:20], ASKED, one, "one", 0) for one in settings]
    assert not any(request.compressed_first for request in both)
    assert len({llm.worker.place_call(one, prompt, 0, None).key for one in both}) == 2
