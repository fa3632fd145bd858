"""What codes cost, with a window of the newest KVs that are read as they are."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.codec_loss import next_tokens
from kvjax.cache import as_codec
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


def test_the_newest_kvs_are_read_as_they_are():
    model = LoadedModel(TINY, init_params(TINY, "float32", seed=2), ByteTokenizer(), "dummy")
    ids = np.random.default_rng(1).integers(0, 256, TOKENS).astype(np.int32)
    codecs = [as_codec(kind, "float32") for kind in ("float32", "int2")]
    call = next_tokens(model, codecs, TOKENS, CODED, WINDOW)
    exact, coded = (np.asarray(call(number, ids)[0]) for number in (0, 1))
    # So that each layer's arrays are there for NumPy.
    with jax.disable_jit():
        wanted = expected(model, codecs[1], ids, WINDOW)
    np.testing.assert_allclose(coded, wanted, atol=2e-4)
    assert np.abs(exact - coded).max() > 1e-2
