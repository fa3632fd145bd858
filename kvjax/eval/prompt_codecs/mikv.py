"""MiKV (Yang et al. 2024): what an eviction would drop is kept in few bits.

Of each head the important fifth has more bits than the others: half of it the newest tokens, half
those that received most attention of all the prompt's queries (H2O). Codes are per token, in groups
of half a head; keys are balanced before, channel by channel, by √(max |q| / max |k|) over the
prompt, and queries by its inverse, so that outlying channels do not set the scale. Known from a
third party's account, not from the authors' code. Assumed: maxima are over the query heads of a
group, and both tiers are balanced.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.cache.policy import Artefacts, LayerView
from kvjax.cache.policy.attention import received
from kvjax.cache.store.scaled import divisor
from kvjax.cache.store.spec import KVShape
from kvjax.eval.prompt_codecs.base import PromptCodec, Rows
from kvjax.eval.prompt_codecs.codes import (
    NUMBER,
    code_bytes,
    first_tokens,
    in_bfloat16,
    in_groups,
    largest,
    permille,
)


@dataclasses.dataclass(frozen=True)
class MiKV(PromptCodec):
    """Important KVs in `high` bits, the others in `low`."""

    high: int = 8
    low: int = 2
    share: int = 200
    """Thousandths of the tokens that are important."""

    @property
    def name(self) -> str:
        return f"mikv{self.high}"

    def layer(self, view: LayerView, artefacts: Artefacts) -> Rows:
        k, v = view.k, view.v
        assert v is not None
        token = jnp.arange(len(k))
        valid = first_tokens(len(k), view.length)
        count = permille(self.share, view.length)
        mass = jnp.sum(received(view, None), axis=1)
        newest = valid & (token >= view.length - count // 2)
        mass = jnp.where(newest, jnp.inf, jnp.where(valid, mass, -jnp.inf))
        important = largest(mass, count).T[..., None]

        def most(x: Array) -> Array:
            return jnp.max(jnp.where(valid[:, None, None], jnp.abs(x), 0), axis=0)

        q = most(view.q.astype(jnp.float32)).reshape(k.shape[1], -1, k.shape[2])
        balance = jnp.sqrt(jnp.max(q, axis=1) / divisor(most(k)))
        balance = in_bfloat16(jnp.where(balance > 0, balance, 1))

        def stored(x: Array) -> Array:
            tiers = (in_groups(x, bits, max(1, x.shape[-1] // 2)) for bits in (self.high, self.low))
            return jnp.where(important, *tiers)

        return stored(k * balance) / balance, stored(v)

    def stored_bytes(self, shape: KVShape, length: int) -> int:
        d, important = shape.head_dim, permille(self.share, length)

        def row(bits: int) -> int:
            return code_bytes(d, bits) + 2 * 2 * NUMBER

        rows = important * row(self.high) + (length - important) * row(self.low)
        head = 2 * rows + code_bytes(length, 1) + d * NUMBER
        return shape.num_layers * shape.num_kv_heads * head
