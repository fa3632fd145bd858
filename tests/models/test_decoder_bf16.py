"""Models of every family against NumPy, in bfloat16 above all, and NumPy against transformers.

What a bfloat16 model must compute in float32 (norms, rotations, logits) shows in the first layer's
queries and keys: done right, they are the oracle's to the bit but for sums whose order tips a
rounding; done in bfloat16, some 40 % of them differ.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kvjax.models import decoder
from kvjax.models.architectures import config_from_hf
from tests.golden import tiny_models
from tests.models.decoder_helpers import dense_attention, params_from
from tests.oracle import transformer as oracle

START = 3000
"""Far from 0: angles in bfloat16 would be off by radians."""


@pytest.mark.parametrize("case", tiny_models.CASES)
def test_the_oracle_equals_transformers(case):
    hf, weights = tiny_models.CASES[case], tiny_models.tiny_weights(case)
    expected = tiny_models.golden_logits(case)
    positions = np.arange(expected.shape[1])
    got, _ = oracle.forward(hf, weights, tiny_models.tiny_tokens(case)[0], positions)
    np.testing.assert_allclose(got, expected[0], rtol=0, atol=2.5e-4)


def run(hf, weights, tokens, positions, dtype):
    """Hidden states, logits, and rotated queries, rotated keys and values of every layer."""
    config = config_from_hf(hf)
    params = params_from(config, weights.__getitem__)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)

    def attend(carry, layer, q, k, v, _):
        wide_q, wide_k, wide_v = (x.astype(jnp.float32) for x in (q, k, v))
        out = dense_attention(wide_q, wide_k, wide_v, positions, positions)
        return carry, out, (q, k, v)

    @jax.jit
    def compute(params, tokens):
        hidden, _, aux = decoder.forward(
            config, params, tokens, jnp.asarray(positions), attend, None
        )
        return hidden, decoder.logits(config, params, hidden), aux

    return compute(params, jnp.asarray(tokens))


@pytest.mark.parametrize("case", ["qkv_bias", "qk_norm"])
def test_small_activations(case):
    """So small that the norms divide by no more than epsilon's root."""
    hf = tiny_models.CASES[case]
    small = ("model.embed_tokens.weight", "q_proj.weight", "k_proj.weight")
    weights = {
        name: weight * 1e-3 if name.endswith(small) else weight
        for name, weight in tiny_models.tiny_weights(case).items()
    }
    tokens = tiny_models.tiny_tokens(case)[:1]
    positions = np.arange(tokens.shape[1], dtype=np.int32)[None]
    _, _, aux = run(hf, weights, tokens, positions, jnp.float32)
    _, projected = oracle.forward(hf, weights, tokens[0], positions[0])
    for got, want in zip(aux, projected[0], strict=True):
        np.testing.assert_allclose(got[0, 0], want, rtol=0, atol=1e-3)


@pytest.mark.parametrize("case", ["llama3_rope", "qkv_bias", "qk_norm"])
def test_bfloat16(case):
    hf, weights = tiny_models.CASES[case], tiny_models.tiny_weights(case)
    tokens = tiny_models.tiny_tokens(case)[:1]
    positions = START + np.arange(tokens.shape[1], dtype=np.int32)[None]
    hidden, logits, aux = run(hf, weights, tokens, positions, jnp.bfloat16)
    expected, projected = oracle.forward(
        hf, weights, tokens[0], positions[0], dtype=ml_dtypes.bfloat16
    )
    for got, want in zip(aux, projected[0], strict=True):
        assert got.dtype == jnp.bfloat16
        assert (np.asarray(got[0, 0], np.float32) == want).mean() > 0.98
    assert hidden.dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32
    got = np.asarray(logits[0])
    # Logits that were ever bfloat16 would all be numbers that bfloat16 has.
    assert (got.astype(ml_dtypes.bfloat16).astype(np.float32) == got).mean() < 0.05
    assert np.sqrt(np.mean((got - expected) ** 2)) < 0.025 * expected.std()
