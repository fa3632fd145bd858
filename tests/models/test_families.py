"""A family other than Llama, from its checkpoint through the whole engine."""

import jax
import jax.numpy as jnp

from kvjax import LLM, CompressionConfig, EngineConfig, SamplingParams
from kvjax.models import LoadedModel
from kvjax.models.architectures import config_from_hf
from kvjax.models.tokenizer import ByteTokenizer
from tests.golden import tiny_models
from tests.models.decoder_helpers import empty_cache, params_from, run, unstacked


def dense_greedy(config, params, prompt, count):
    """Greedy tokens with a dense cache."""
    step = jax.jit(run, static_argnums=0)
    logits, cache = step(
        config, params, jnp.asarray(prompt)[None], 0, empty_cache(config, 1, len(prompt) + count)
    )
    tokens = [int(logits[0, -1].argmax())]
    for position in range(len(prompt), len(prompt) + count - 1):
        logits, cache = step(config, params, jnp.asarray(tokens[-1:])[None], position, cache)
        tokens.append(int(logits[0, 0].argmax()))
    return tokens


def test_qwen3_in_the_engine():
    config = config_from_hf(tiny_models.CASES["qk_norm"], "tiny")
    weights = params_from(config, tiny_models.tiny_weights("qk_norm").__getitem__)
    model = LoadedModel(config, unstacked(weights), ByteTokenizer(), "random weights")
    sizes = EngineConfig(
        max_batch=1, max_len=128, prefill_chunk=128, prefill_scratch=128, pool_tokens=256
    )
    llm = LLM(model, CompressionConfig(method="snapkv", rate=1), sizes)
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    prompt = tiny_models.tiny_tokens("qk_norm")[0]
    (whole,) = llm.generate([prompt], sampling)
    assert list(whole.token_ids) == dense_greedy(config, weights, prompt, 6)
    # Compressed, the first token is still that of the whole prompt.
    smaller_cache = CompressionConfig(method="snapkv", rate=4, floor=16)
    (smaller,) = llm.generate([prompt], sampling, smaller_cache)
    assert smaller.error is None
    assert smaller.token_ids[0] == tiny_models.golden_logits("qk_norm")[0, -1].argmax()
    assert smaller.stats.blocks_after * 2 < smaller.stats.blocks_before
