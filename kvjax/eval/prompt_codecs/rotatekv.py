"""RotateKV (Su et al. 2025): keys turned before RoPE, channels that are alike coded together.

Section 4 and the authors' code: keys before RoPE are turned by a Hadamard matrix over four heads
together, and the turned channels of all heads are sorted by their sum over the tokens, so that
those of one group of 128 are alike; values are turned head by head (in the model's weights there,
here as they come). Codes are per token with a scale and a least number per group; in 2 bits the
ends stand for 0.8 of the least and of the largest number. The 20 positions of the largest entries
of what enters the layer, before its norm, attention's sinks, stay as they are.

Assumed: the order, which the paper calibrates, is that of the prompt itself, and its bytes count;
20 positions are 20 tokens, where the code takes the tokens of the 20 largest entries, which may be
fewer; least numbers are bfloat16 where the code has whole zero points. Where the heads are no
multiple of four, as many are turned together as divide them; of a row whose size is no power of
two, parts that are.
"""

import dataclasses

import jax.numpy as jnp

from kvjax.cache.policy import Artefacts, LayerView
from kvjax.cache.policy.rotary import ROPE_FREQUENCY, turned, turned_back
from kvjax.cache.store.scaled import rotated
from kvjax.cache.store.spec import KVShape
from kvjax.eval.prompt_codecs.base import PromptCodec, Rows
from kvjax.eval.prompt_codecs.codes import (
    NUMBER,
    code_bytes,
    first_tokens,
    group_size,
    in_bfloat16,
    in_groups,
    index_bytes,
    largest,
)


@dataclasses.dataclass(frozen=True)
class RotateKV(PromptCodec):
    """Turned and sorted rows in codes, and a few tokens as they are."""

    artefacts = (ROPE_FREQUENCY,)
    peaks = True

    bits: int = 2
    heads: int = 4
    group: int = 128
    sinks: int = 20

    @property
    def name(self) -> str:
        return f"rotatekv{self.bits}"

    @property
    def clip(self) -> float:
        """Share of the ends of a group that codes reach."""
        return 0.8 if self.bits == 2 else 1.0

    def layer(self, view: LayerView, artefacts: Artefacts) -> Rows:
        k, v, peak = view.k, view.v, view.peak
        assert v is not None
        assert peak is not None
        tokens, num_heads = k.shape[:2]
        token = jnp.arange(tokens, dtype=jnp.int32)
        valid = first_tokens(tokens, view.length)
        sink = largest(jnp.where(valid, peak, -jnp.inf), self.sinks)[:, None, None]

        before = turned_back(k, token, artefacts[ROPE_FREQUENCY])
        together = (tokens, num_heads // group_size(num_heads, self.heads), -1)
        rows = rotated(before.reshape(together)).reshape(tokens, -1)
        order = jnp.argsort(jnp.sum(jnp.where(valid[:, None], rows, 0), axis=0))
        rows = in_groups(rows[:, order], self.bits, self.group, self.clip)
        rows = jnp.zeros_like(rows).at[:, order].set(rows)
        keys = rotated(rows.reshape(together)).reshape(k.shape)
        keys = jnp.where(sink, in_bfloat16(before), keys)
        angle = (token[:, None] * artefacts[ROPE_FREQUENCY])[:, None]

        rows = in_groups(rotated(v).reshape(tokens, -1), self.bits, self.group, self.clip)
        values = jnp.where(sink, in_bfloat16(v), rotated(rows.reshape(v.shape)))
        return turned(keys, jnp.cos(angle), jnp.sin(angle)), values

    def stored_bytes(self, shape: KVShape, length: int) -> int:
        row, exact = shape.num_kv_heads * shape.head_dim, min(self.sinks, length)
        groups = row // group_size(row, self.group)
        coded = (length - exact) * 2 * (code_bytes(row, self.bits) + groups * 2 * NUMBER)
        kept = exact * (2 * row * NUMBER + index_bytes(length))
        return shape.num_layers * (coded + kept + row * index_bytes(row))
