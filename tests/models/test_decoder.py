"""Models of every family against transformers (golden files made by scripts/make_golden.py)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import kernels
from kvjax.models import decoder
from kvjax.models.architectures import config_from_hf
from kvjax.models.config import get_model_entry
from kvjax.models.weights import load_params
from tests.conftest import REPOSITORY
from tests.golden import tiny_models
from tests.models.decoder_helpers import empty_cache, params_from, run, unstacked

GOLDEN = REPOSITORY / "tests" / "golden"
# The parity promised; what is measured is below 1e-4.
TOLERANCE = 1e-3


@functools.cache
def tiny(case: str):
    """Configuration and parameters of a tiny model."""
    config = config_from_hf(tiny_models.CASES[case], case)
    return config, params_from(config, tiny_models.tiny_weights(case).__getitem__)


@pytest.mark.parametrize("layers", ["scan", "chosen", "unrolled"])
@pytest.mark.parametrize("case", tiny_models.CASES)
def test_tiny_models_equal_transformers(case, layers, monkeypatch):
    config, params = tiny(case)
    params = params if layers == "scan" else unstacked(params)
    monkeypatch.setattr(decoder, "chooses_layers", lambda _: layers == "chosen")
    tokens = jnp.asarray(tiny_models.tiny_tokens(case))
    cache = empty_cache(config, *tokens.shape)
    # Their weights are larger than those of models: products in parts would be seen.
    with jax.default_matmul_precision("highest"):
        logits, _ = jax.jit(run, static_argnums=(0, 3))(config, params, tokens, 0, cache)
    expected = tiny_models.golden_logits(case)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE / 4)


@pytest.mark.parametrize("case", ["gqa_2_to_1", "llama3_rope", "qkv_bias", "qk_norm"])
def test_decoding_token_by_token_equals_one_pass(case):
    config, params = tiny(case)
    tokens = jnp.asarray(tiny_models.tiny_tokens(case))
    batch, length = tokens.shape
    step = jax.jit(run, static_argnums=0)
    with jax.default_matmul_precision("highest"):
        _, cache = step(config, params, tokens[:, :80], 0, empty_cache(config, batch, length))
    expected = tiny_models.golden_logits(case)
    for t in range(80, length):
        logits, cache = step(config, params, tokens[:, t : t + 1], t, cache)
        np.testing.assert_allclose(logits[:, 0], expected[:, t], rtol=0, atol=TOLERANCE / 4)


def test_products_of_layers_are_those_of_kernels(monkeypatch):
    config, params = tiny("gqa_2_to_1")
    seen, usual = [], kernels.matmul

    def matmul(x, weight, **how):
        seen.append(weight.shape)
        return usual(x, weight, **how)

    monkeypatch.setattr(kernels, "matmul", matmul)
    tokens = jnp.asarray(tiny_models.tiny_tokens("gqa_2_to_1"))
    run(config, params, tokens, 0, empty_cache(config, *tokens.shape))
    wide, heads = config.hidden_size, config.num_heads * config.head_dim
    inner = 2 * config.num_kv_heads * config.head_dim
    ffn = config.intermediate_size
    of_layers = [(wide, heads + inner), (heads, wide), (wide, 2 * ffn), (ffn, wide)]
    assert seen == [*of_layers, (config.vocab_size, wide)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(0,), (1,), (3,), (2, 3)])
def test_logits_of_any_number_of_rows(shape, dtype):
    """One row of bfloat16 is multiplied among others on CPUs."""
    config, params = tiny("gqa_2_to_1")
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((*shape, config.hidden_size)))
    hidden = hidden.astype(dtype)
    got = decoder.logits(config, params, hidden)
    assert (got.dtype, got.shape) == (jnp.float32, (*shape, config.vocab_size))
    head = np.asarray(params["embed"][...].astype("float32"), np.float64).T
    wanted = np.asarray(hidden.astype("float32"), np.float64) @ head
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    """SmolLM2-135M-Instruct in f32, one array per layer, as the package loads it on CPU."""
    return load_params(smollm2_path, get_model_entry("smollm2-135m").config, stacked=False)


def test_smollm2_equals_transformers(smollm2):
    """Logits of 1,000 tokens of prose, then 64 greedy tokens decoded with a dense cache."""
    config, params = smollm2
    golden = np.load(GOLDEN / "smollm2.npz")
    tokens = jnp.asarray(golden["tokens"])[None]
    assert tokens.shape == (1, 1000)
    size = tokens.shape[1] + len(golden["greedy"])
    # Of this much work more is computing than compiling.
    options = {"xla_backend_optimization_level": 2}
    step = jax.jit(run, static_argnums=0, donate_argnums=4, compiler_options=options)
    logits, cache = step(config, params, tokens, 0, empty_cache(config, 1, size))
    got = np.asarray(logits[0])

    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=TOLERANCE)
    close(got[golden["full_positions"]], golden["full_logits"])
    close(got[:, golden["sampled_ids"]], golden["sampled_logits"])
    close(np.take_along_axis(got, golden["top_ids"], axis=-1), golden["top_logits"])
    close(jax.nn.logsumexp(logits[0], axis=-1), golden["logsumexp"])

    greedy = [int(got[-1].argmax())]
    for position in range(tokens.shape[1], size - 1):
        logits, cache = step(config, params, jnp.asarray([[greedy[-1]]]), position, cache)
        greedy.append(int(logits[0, 0].argmax()))
    assert greedy == golden["greedy"].tolist()
