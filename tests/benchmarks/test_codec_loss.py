"""What codes cost, with a window of the newest KVs that are read as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.codec_loss import next_tokens
from kvjax.cache import as_codec, init_cache, write_prompt
from kvjax.cache.policy import Observer
from kvjax.engine.decode import decode_step
from kvjax.engine.prefill import prefill
from kvjax.models import LoadedModel
from kvjax.models.decoder import forward, init_params, logits
from kvjax.models.tokenizer import ByteTokenizer
from tests.tiny import TINY

TOKENS, CODED, WINDOW = 12, 6, 3


def expected(model, codec, ids, window):
    """The same, row by row in NumPy: what each row reads is put together for it alone."""
    d = TINY.head_dim

    def attend(carry, layer, q, k, v, hidden):
        q, k, v = (np.asarray(x[0], np.float64) for x in (q, k, v))
        keys, values = (
            np.asarray(one.decode(one.encode(jnp.asarray(x, jnp.float32))), np.float64)
            for one, x in ((codec.of_keys, k), (codec.of_values, v))
        )
        out = np.zeros_like(q)
        for row in range(TOKENS):
            here = np.arange(row + 1)
            new = (row - here < window) | (row < TOKENS - CODED)
            read_k, read_v = (
                np.where(new[:, None, None], exact[here], coded[here])
                for exact, coded in ((k, keys), (v, values))
            )
            for head in range(q.shape[1]):
                of = head // (q.shape[1] // k.shape[1])
                s = read_k[:, of] @ q[row, head] / np.sqrt(d)
                w = np.exp(s - s.max())
                out[row, head] = (w / w.sum()) @ read_v[:, of]
        return carry, jnp.asarray(out, hidden.dtype)[None], jnp.zeros(())

    position = jnp.arange(TOKENS, dtype=jnp.int32)
    last, _, _ = forward(TINY, model.params, jnp.asarray(ids)[None], position[None], attend, ())
    found = np.asarray(logits(TINY, model.params, last[0, TOKENS - CODED :]), np.float64)
    return found - np.log(np.exp(found).sum(-1, keepdims=True))


@pytest.mark.slow
def test_the_newest_kvs_are_read_as_they_are():
    model = LoadedModel(TINY, init_params(TINY, "float32", seed=2), ByteTokenizer(), "dummy")
    ids = np.random.default_rng(1).integers(0, 256, TOKENS).astype(np.int32)
    codecs = [as_codec(kind, "float32") for kind in ("float32", f"int2w{WINDOW}")]
    call = next_tokens(model, codecs, TOKENS, CODED)
    exact, coded = (np.asarray(call(number, ids)[0]) for number in (0, 1))
    # So that each layer's arrays are there for NumPy.
    with jax.disable_jit():
        wanted = expected(model, codecs[1], ids, WINDOW)
    np.testing.assert_allclose(coded, wanted, atol=2e-4)
    assert np.abs(exact - coded).max() > 1e-2


def test_decode_steps_read_what_is_measured():
    """The cache's steps behind a prompt, token by token."""
    model = LoadedModel(TINY, init_params(TINY, "float32", seed=2), ByteTokenizer(), "dummy")
    ids = np.random.default_rng(1).integers(0, 256, TOKENS).astype(np.int32)
    codec = as_codec(f"int2w{WINDOW}", "float32")
    wanted = np.asarray(next_tokens(model, [codec], TOKENS, CODED)(0, ids)[0])
    cache = init_cache(
        num_slots=1, num_layers=TINY.num_layers, num_kv_heads=TINY.num_kv_heads,
        head_dim=TINY.head_dim, num_blocks=20, max_blocks_per_head=4, block_size=4, codec=codec,
    )  # fmt: skip
    first = TOKENS - CODED
    prompt, _ = jax.jit(prefill, static_argnums=(0, 1))(
        TINY, Observer(None), model.params, {}, ids[:first], jnp.int32(first)
    )
    cache, ok = jax.jit(write_prompt)(
        cache, 0, prompt.k, prompt.v, prompt.scores.metric, prompt.length
    )
    assert ok
    step = jax.jit(decode_step, static_argnums=(0, 1))
    for token, want in zip(ids[first:], wanted, strict=True):
        cache, out, ok = step(
            TINY, None, model.params, cache, jnp.asarray([token]), jnp.ones(1, bool)
        )
        assert ok
        np.testing.assert_allclose(jax.nn.log_softmax(out[0]), want, atol=2e-4)
