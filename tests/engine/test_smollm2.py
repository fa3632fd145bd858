"""The whole path on a real model: against transformers' tokens, and with a quarter of the cache."""

import numpy as np
import pytest

from kvjax.cache import CompressionConfig, check_invariants
from kvjax.engine import Generation, Runner, RunnerConfig, SamplingParams, plan_blocks
from kvjax.models import load_model
from tests.conftest import REPOSITORY


@pytest.fixture(scope="module")
def model(smollm2_path):
    return load_model("smollm2-135m", weights=smollm2_path)


def run(model, prompt, compression, max_tokens, **sampling) -> Generation:
    config = RunnerConfig(max_len=len(prompt) + max_tokens)
    blocks = plan_blocks(model.config, config, compression, len(prompt), max_tokens)
    eos = tuple(model.tokenizer.eos_ids)
    runner = Runner(model.config, model.params, config, compression, num_blocks=blocks, eos_ids=eos)
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    generation = Generation(runner, model.tokenizer, np.asarray(prompt, np.int32), params)
    assert "".join(generation) == generation.text
    check_invariants(runner.cache)
    return generation


def test_paged_decode_gives_transformers_tokens(model):
    golden = np.load(REPOSITORY / "tests" / "golden" / "smollm2.npz")
    expected = golden["greedy"].tolist()
    full = CompressionConfig(method="full")
    found = run(model, golden["tokens"], full, len(expected), ignore_eos=True)
    assert found.tokens == expected


def test_a_quarter_of_the_cache_still_knows_the_answer(model):
    filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. "
    needle = "The pass key is 71432. Remember it. 71432 is the pass key. "
    text = filler * 25 + needle + filler * 25 + "\nWhat is the pass key?"
    prompt = model.tokenizer.chat([{"role": "user", "content": text}])
    prompt += model.tokenizer.encode("The pass key is")
    found = run(model, prompt, CompressionConfig(rate=4, window=4), 8)
    assert "71432" in found.text
    prefill = found.prefill
    assert prefill is not None
    assert prefill.kvs_before / prefill.kvs_after >= 4
    assert prefill.shortfall == 0
    assert prefill.kept.min() < prefill.kept.max() / 2
