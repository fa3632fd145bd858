"""ZipCache (He et al. 2024): tokens that are read much for their place have more bits.

Section 4 and the authors' code. Probes are the last 5 % of the queries and 5 % of the others, drawn
with a fixed seed; a KV's saliency is the attention that they pay to it, over the number of tokens
from it on, which all could have read it. Of each head the 60 % most salient KVs have 4 bits, the
others 2. Keys have a scale by channel for each tier; values are divided by √(max |v|) of their
channel and then have one by token, of their own head (theirs joins the heads' n-th salient tokens).
A group's query heads are added. Theirs draws probes with replacement.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache.policy import Artefacts, LayerView
from kvjax.cache.store.scaled import divisor
from kvjax.cache.store.spec import KVShape
from kvjax.eval.prompt_codecs.base import PromptCodec, Rows
from kvjax.eval.prompt_codecs.codes import (
    NUMBER,
    code_bytes,
    first_tokens,
    in_bfloat16,
    in_codes,
    largest,
    permille,
    ranks,
)
from kvjax.kernels import window_metrics


@dataclasses.dataclass(frozen=True)
class ZipCache(PromptCodec):
    """Salient KVs in `high` bits, the others in `low`."""

    high: int = 4
    low: int = 2
    share: int = 600
    """Thousandths of the tokens that are salient."""
    probes: int = 50
    """Thousandths of the queries that are observed as the last ones, and as many of the others."""

    @property
    def name(self) -> str:
        return "zipcache"

    def layer(self, view: LayerView, artefacts: Artefacts) -> Rows:
        k, v = view.k, view.v
        assert v is not None
        valid = first_tokens(len(k), view.length)
        saliency = jnp.where(valid, self.saliency(view), -jnp.inf)
        salient = largest(saliency, view.length - permille(1000 - self.share, view.length))
        salient, valid = salient.T[..., None], valid[:, None, None]
        tiers = ((self.high, salient), (self.low, valid & ~salient))
        keys = (in_codes(k, bits, 0, counts) for bits, counts in tiers)
        channel = jnp.max(jnp.where(valid, jnp.abs(v), 0), axis=0)
        channel = in_bfloat16(divisor(jnp.sqrt(channel)))
        values = (in_codes(v / channel, bits, -1) for bits, _ in tiers)
        return jnp.where(salient, *keys), jnp.where(salient, *values) * channel

    def saliency(self, view: LayerView) -> Float[Array, "H T"]:
        """Attention of the probes over the tokens that could have paid any."""
        num_tokens, length = len(view.k), view.length
        token = jnp.arange(num_tokens, dtype=jnp.int32)
        count = permille(self.probes, length)
        draw = jnp.where(token < length - count, drawn(num_tokens), jnp.inf)
        probe = (token < length) & ((token >= length - count) | (ranks(draw, 0) < count))
        # The probes alone, in places that suffice for any length.
        most = max(1, 2 * permille(self.probes, num_tokens))
        at = jnp.argsort(~probe, stable=True)[:most].astype(jnp.int32)
        position = jnp.where(probe[at], at, -1)
        given = window_metrics(view.q[at], view.k, query_position=position, power=1)
        given = jnp.sum(given.reshape(view.num_heads, -1, num_tokens), axis=1)
        return given / jnp.maximum(length - token, 1)

    def stored_bytes(self, shape: KVShape, length: int) -> int:
        d = shape.head_dim
        low = permille(1000 - self.share, length)
        codes = code_bytes((length - low) * d, self.high) + code_bytes(low * d, self.low)
        # Ends by channel of both tiers, ends by token, a channel's divisor, a bit for each token.
        numbers = 2 * 2 * d + 2 * length + d
        head = 2 * codes + numbers * NUMBER + code_bytes(length, 1)
        return shape.num_layers * shape.num_kv_heads * head


def drawn(num_tokens: int) -> Float[Array, " T"]:
    """A number between 0 and 1 for each token, the same whatever follows it."""
    key = jax.random.key(0)
    return jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i)))(
        jnp.arange(num_tokens)
    )
