"""What a dense pass tells of the residual stream, against NumPy."""

import functools
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from kvjax.engine.dense import dense_pass
from kvjax.models import decoder
from kvjax.models.weights import load_params
from tests.models.decoder_helpers import unstacked
from tests.oracle import transformer
from tests.tiny import TINY

TOKENS = np.random.default_rng(2).integers(0, 256, 30).astype(np.int32)


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_params(tiny_folder)


@pytest.fixture(scope="module")
def stream(tiny_folder):
    """What enters each layer, before its norm [L, T, D]."""
    hf, found = json.loads((tiny_folder / "config.json").read_text()), []
    hf |= {"rope_theta": TINY.rope_theta, "rms_norm_eps": TINY.rms_norm_eps}
    hf["tie_word_embeddings"] = TINY.tie_word_embeddings
    weights = load_file(tiny_folder / "model.safetensors")
    transformer.forward(hf, weights, TOKENS, np.arange(len(TOKENS)), stream=found)
    return np.stack(found)


@pytest.mark.parametrize("layers", ["scan", "chosen", "unrolled"])
def test_peaks_are_of_what_enters_a_layer(model, stream, layers, monkeypatch):
    """However layers run; the rest of the pass is what it is without."""
    monkeypatch.setattr(decoder, "chooses_layers", lambda _: layers == "chosen")
    config, params = model
    params = params if layers == "scan" else unstacked(params)
    padded, at = np.pad(TOKENS, (0, 2)), np.array([3, 29], np.int32)
    plain, dense = (
        jax.jit(functools.partial(dense_pass, config, peaks=peaks))(params, padded, at)
        for peaks in (False, True)
    )
    assert plain.peak is None
    np.testing.assert_allclose(
        dense.peak[:, : len(TOKENS)], np.abs(stream).max(axis=-1), rtol=1e-4, atol=1e-5
    )
    for name in ("q", "k", "v", "log_sum", "hidden", "logits"):
        np.testing.assert_allclose(getattr(dense, name), getattr(plain, name), atol=1e-5)
