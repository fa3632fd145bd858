"""The whole path on a real model: against transformers' tokens, and with a quarter of the cache."""

import dataclasses

import jax
import numpy as np
import pytest

from kvjax.cache import CompressionConfig
from kvjax.engine import LLM, EngineConfig, RequestOutput, SamplingParams, pool_tokens_for
from kvjax.engine.compilation import CompiledSteps
from kvjax.models import LoadedModel, load_model
from kvjax.models.config import MODELS
from kvjax.models.decoder import init_params
from kvjax.models.tokenizer import ByteTokenizer
from tests.conftest import REPOSITORY
from tests.engine.serving import FULL, assert_empty


@pytest.fixture(scope="module")
def model(smollm2_path):
    return load_model("smollm2-135m", weights=smollm2_path)


def run(model, prompt, compression, max_tokens, **sampling) -> RequestOutput:
    sizes = EngineConfig(max_batch=1, max_len=len(prompt) + max_tokens, pool_tokens=2048)
    llm = LLM(model, compression, sizes)
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    outputs = list(llm.stream(prompt, params))
    assert "".join(output.new_text for output in outputs) == outputs[-1].text
    assert_empty(llm)
    return outputs[-1]


def test_paged_decode_gives_transformers_tokens(model):
    golden = np.load(REPOSITORY / "tests" / "golden" / "smollm2.npz")
    expected = golden["greedy"].tolist()
    found = run(model, golden["tokens"].tolist(), FULL, len(expected), ignore_eos=True)
    assert list(found.token_ids) == expected


@pytest.mark.slow
def test_a_quarter_of_the_cache_still_knows_the_answer(model):
    filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. "
    needle = "The pass key is 71432. Remember it. 71432 is the pass key. "
    text = filler * 25 + needle + filler * 25 + "\nWhat is the pass key?"
    prompt = model.tokenizer.chat([{"role": "user", "content": text}])
    prompt += model.tokenizer.encode("The pass key is")
    found = run(model, prompt, CompressionConfig(rate=4), 8)
    assert "71432" in found.text
    kept = found.stats.kept
    assert kept is not None
    assert len(prompt) * kept.size / kept.sum() >= 4
    assert found.stats.shortfall == 0
    assert kept.min() < kept.max() / 2


@pytest.mark.slow
def test_a_long_prompt_peaks_below_its_full_cache(monkeypatch):
    length, compression = 32_000, CompressionConfig(rate=8)
    config = MODELS["smollm2-135m"].config
    model = LoadedModel(config, init_params(config, "float32", stacked=False), ByteTokenizer(), "")
    sizes = EngineConfig(max_batch=1, max_len=length + 64, prefill_chunk=4096, prefill_scratch=4096)
    pool = pool_tokens_for(config, sizes, compression, length, 64)
    llm = LLM(model, compression, dataclasses.replace(sizes, pool_tokens=pool))
    temporaries = {}

    def compile_only(_, call):
        memory = call.step.lower(*call.args).compile().memory_analysis()
        temporaries[call.key.step] = memory.temp_size_in_bytes
        raise KeyboardInterrupt

    monkeypatch.setattr(CompiledSteps, "run", compile_only)
    llm.add_request(np.zeros(length, np.int32), SamplingParams(max_tokens=64))
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    request = llm.scheduler.prefilling
    assert request is not None
    with pytest.raises(KeyboardInterrupt):
        llm.worker.compress([0], [1], [0], request.method, 1 << 20, length)
    assert temporaries.keys() == {"prefill in pool", "compress"}
    full = length * config.num_layers * config.num_kv_heads * 2 * config.head_dim * 4
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.worker.cache))
    assert held + max(temporaries.values()) < 0.7 * full
