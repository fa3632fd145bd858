"""xKV (Chang et al. 2025): four layers' keys, and their values, share a basis.

Section 4 and the authors' code: of each prompt the keys before RoPE of four consecutive layers
stand side by side, [tokens, 4 · heads · d], and a singular value decomposition keeps rank 512 of
them, and 768 of values: of Llama-3.1-8B's 4,096 columns an eighth and three sixteenths, which is
what other models keep here. A group of fewer layers at the end keeps the same shares. Both factors
are stored, the basis too: it is the prompt's own.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.cache.policy import Artefacts
from kvjax.cache.policy.rotary import ROPE_FREQUENCY, turned
from kvjax.cache.store.spec import KVShape
from kvjax.engine.dense import DensePass
from kvjax.eval.prompt_codecs.base import PromptCodec, Rows
from kvjax.eval.prompt_codecs.codes import NUMBER, first_tokens, in_bfloat16


@dataclasses.dataclass(frozen=True)
class XKV(PromptCodec):
    """A low rank of the keys and of the values of every few layers."""

    layers: int = 4
    keys: int = 2
    """Sixteenths of the columns that the keys' rank is."""
    values: int = 3
    """Of the values'."""

    @property
    def name(self) -> str:
        return "xkv"

    def restore(self, dense: DensePass, length: Int32[Array, ""], artefacts: Artefacts) -> Rows:
        token = jnp.arange(dense.k.shape[1], dtype=jnp.int32)
        # Angles are the same in all layers.
        angle = (token[:, None] * artefacts[ROPE_FREQUENCY][0])[:, None]
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        valid = first_tokens(len(token), length)[:, None, None]
        k = self.low_rank(jnp.where(valid, turned(dense.k, cos, -sin), 0), self.keys)
        v = self.low_rank(jnp.where(valid, dense.v.astype(jnp.float32), 0), self.values)
        return turned(k, cos, sin), v

    def low_rank(self, x: Float[Array, "L T H d"], sixteenths: int) -> Float[Array, "L T H d"]:
        """Keys or values of all layers, of each group the part in its basis."""

        def of_group(x: Float[Array, "n T H d"]) -> Float[Array, "n T H d"]:
            together = x.swapaxes(0, 1)
            rows = together.reshape(len(together), -1)
            # Right singular vectors, from the smaller product: what it loses of small ones in
            # float32 is of the size of its rounding. The largest come last.
            _, vectors = jnp.linalg.eigh(rows.T @ rows)
            basis = vectors[:, -rank_of(rows.shape[1], sixteenths) :]
            parts = in_bfloat16(rows @ basis) @ in_bfloat16(basis).T
            return parts.reshape(together.shape).swapaxes(0, 1)

        firsts = range(0, len(x), self.layers)
        return jnp.concatenate([of_group(x[first : first + self.layers]) for first in firsts])

    def stored_bytes(self, shape: KVShape, length: int) -> int:
        total = 0
        for first in range(0, shape.num_layers, self.layers):
            layers = min(self.layers, shape.num_layers - first)
            columns = layers * shape.num_kv_heads * shape.head_dim
            for sixteenths in (self.keys, self.values):
                rank = min(length, rank_of(columns, sixteenths))
                total += (length + columns) * rank * NUMBER
        return total


def rank_of(columns: int, sixteenths: int) -> int:
    """The rank that is kept of so many columns."""
    return max(1, columns * sixteenths // 16)
