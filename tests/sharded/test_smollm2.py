"""A real model with three KV heads per layer says on several devices what it says on one."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from kvjax.cache import CompressionConfig
from kvjax.cache.config import CALIBRATED
from kvjax.engine import LLM, EngineConfig, SamplingParams
from kvjax.models import LoadedModel, load_model
from kvjax.models.parallel import Dealing

pytestmark = pytest.mark.slow

TEXT = "The lighthouse keeper counted the ships that passed in the night, one by one. " * 12
SIZES = EngineConfig(
    max_batch=1, max_len=256, prefill_chunk=192, prefill_scratch=192, pool_tokens=512
)


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> LoadedModel:
    return load_model("smollm2-135m", weights=smollm2_path)


@pytest.mark.parametrize("method", ["kv-compress", CALIBRATED])
def test_same_tokens_and_same_kvs_as_on_one_device(model, method):
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    prompt = model.tokenizer.encode(TEXT)[:180]
    found = []
    for devices in (1, 2, 3, 4, 8):
        sizes = dataclasses.replace(SIZES, tensor_parallel=devices)
        # Of the default method with the calibration that ships, by which heads are dealt, too.
        llm = LLM(model, CompressionConfig(method=method, rate=4, floor=16), sizes)
        dealt = llm.worker.parallel is not None and not llm.worker.parallel.dealing.same_as(
            Dealing.even(30, 3, devices)
        )
        assert dealt == (method == CALIBRATED and devices > 1)
        llm.add_request(prompt, sampling, report_kept=True)
        while llm.has_unfinished():
            found += [output for output in llm.step() if output.finished]
    one, *others = found
    assert one.error is None
    assert 2 < len(prompt) / np.mean(one.stats.kept) < 8
    for several in others:
        assert several.token_ids == one.token_ids
        np.testing.assert_array_equal(several.stats.kept, one.stats.kept)
        np.testing.assert_array_equal(several.stats.kept_tokens, one.stats.kept_tokens)
