"""Retrieval heads: what heads read of repeated tokens, and the order that they are kept in."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.engine.calibrate import heads
from kvjax.engine.calibrate.heads import Probe, order, retrieval_heads
from kvjax.errors import UserError
from kvjax.models import load_model
from tests.oracle.attention import causal_attention

PERIOD, COPIES, H, R, D = 5, 4, 2, 3, 4
T = PERIOD * COPIES


def test_heads_read_copies_and_what_followed_them():
    rng = np.random.default_rng(0)
    q = 2 * rng.standard_normal((T, H * R, D)).astype(np.float32)
    k = rng.standard_normal((T, H, D)).astype(np.float32)
    attention = causal_attention(q, k)
    logits = np.einsum("thrd,shd->hrts", q.reshape(T, H, R, D), k) / D**0.5
    seen = np.where(np.tri(T, dtype=bool), logits, -np.inf).reshape(H * R, T, T)
    log_sum = np.log(np.exp(seen).sum(-1)).astype(np.float32)
    found = heads._reads(jnp.asarray(q), jnp.asarray(k), jnp.asarray(log_sum), PERIOD)
    for ahead, got in enumerate(found):
        want = np.zeros(H * R)
        for i in range(PERIOD, T):
            for j in range(i % PERIOD, i, PERIOD):
                want += attention[:, i, j + ahead]
        want = (want / (T - PERIOD)).reshape(H, R).max(axis=1)
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_the_first_by_either_reading_come_before_all_others():
    rng = np.random.default_rng(1)
    echo, induction = rng.random((2, 20, 10))
    by = order(echo, induction)
    best = set(np.argsort(-echo, axis=None)[:2].tolist())
    more = set(np.argsort(-induction, axis=None)[:28].tolist())
    assert not best <= more
    whole = set(np.argsort(-by, axis=None)[: len(best | more)].tolist())
    assert whole == best | more


def test_heads_of_a_model(tiny_folder):
    model = load_model(weights=str(tiny_folder), dtype="float32")
    found = retrieval_heads(model, Probe(16, 3))["retrieval_head"]
    assert found.shape == (model.config.num_layers, model.config.num_kv_heads)
    assert len(np.unique(found)) > 1
    assert len(Probe(10**5, 4).drawn(model.config)) <= model.config.max_position_embeddings
    small = dataclasses.replace(model.config, max_position_embeddings=30)
    with pytest.raises(UserError, match=r"^[^\n]*too few for a probe[^\n]*$"):
        Probe().drawn(small)
    for wrong in ({"tokens": 3}, {"copies": 1}):
        with pytest.raises(UserError, match=f"^{next(iter(wrong))}[^\n]*$"):
            Probe(**wrong)
