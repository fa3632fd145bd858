"""The newest KVs of each head as they were computed, beside a pool of codes.

Codes are written of all KVs, so that eviction, moves, sharing and files know nothing of this. A
window is a copy: W rows of each (slot, layer, head), and of each row which KV of its head it is.
Whose KV goes loses its row, whose KV moves is found again by its position, and attention reads
codes wherever there is no row.

Source: KIVI (2024), algorithm 1 (the residual of full precision).
"""

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Shaped

from kvjax.kernels import ExactKVs

NONE = -1
"""Position and index of a row that is no KV."""


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVWindow:
    """W rows of every head, in no order."""

    rows_k: Float[Array, "S L H W d"]
    """Keys, after RoPE, in the dtype that attention computes with."""
    rows_v: Float[Array, "S L H W d"]
    position: Int32[Array, "S L H W"]
    """Token position of each; −1 where there is none."""
    index: Int32[Array, "S L H W"]
    """Which KV of its head each is, in logical order; −1 where there is none."""

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int, int], dtype: str) -> "KVWindow":
        """One of shape [S, L, H, W, d] without any KV."""
        # Arrays of its own for each: what is donated is so only once.
        k, v = (jnp.zeros(shape, dtype) for _ in range(2))
        position, index = (jnp.full(shape[:-1], NONE, jnp.int32) for _ in range(2))
        return cls(k, v, position, index)

    @property
    def size(self) -> int:
        """W, the most KVs of a head."""
        return self.index.shape[3]

    # Rows of slots

    def without(self, slots: Bool[Array, " S"]) -> "KVWindow":
        """With no KV of the marked slots."""
        marked = slots[:, None, None, None]
        position, index = (jnp.where(marked, NONE, x) for x in (self.position, self.index))
        return dataclasses.replace(self, position=position, index=index)

    def taken(self, slots: Int32[Array, " G"]) -> "KVWindow":
        """That of some slots alone, in that order; those out of range have no KV."""

        def of(x: Shaped[Array, "S *n"], none: int) -> Shaped[Array, "G *n"]:
            return x.at[slots].get(mode="fill", fill_value=none)

        return KVWindow(
            of(self.rows_k, 0), of(self.rows_v, 0), of(self.position, NONE), of(self.index, NONE)
        )

    def put(self, slots: Int32[Array, " G"], part: "KVWindow") -> "KVWindow":
        """With what a step made of that of some slots; slots out of range are passed over."""
        return jax.tree.map(lambda x, new: x.at[slots].set(new, mode="drop"), self, part)

    def copied(self, source: Int32[Array, ""], target: Int32[Array, ""]) -> "KVWindow":
        """With a slot's rows in another slot, too; targets out of range are passed over."""
        return self.put(target[None], self.taken(source[None]))

    # New KVs

    def begun(
        self,
        grows: Bool[Array, "S #L #H"],
        position: Int32[Array, "S L H"],
        index: Int32[Array, "S L H"],
    ) -> "KVWindow":
        """With a row for one more KV of each head that grows, in place of its oldest. Keys and
        values follow by `write_newest`."""
        oldest = jnp.argmin(self.position, axis=-1)
        new = grows[..., None] & (jnp.arange(self.size) == oldest[..., None])
        return dataclasses.replace(
            self,
            position=jnp.where(new, position[..., None], self.position),
            index=jnp.where(new, index[..., None], self.index),
        )

    def write_newest(
        self,
        layer: Int32[Array, "*layers"],
        context_len: Int32[Array, "S *layers H"],
        k: Float[Array, "S *layers H d"],
        v: Float[Array, "S *layers H d"],
    ) -> "KVWindow":
        """With the newest KV of one layer, or of several, of heads that `context_len` counts any
        of."""
        column = jnp.argmax(self.position[:, layer], axis=-1)
        column = jnp.where(context_len > 0, column, self.size)
        slot, *_, head = jnp.indices(column.shape, sparse=True)
        at = (slot, layer[:, None] if layer.ndim else layer, head, column)

        def written(rows: Float[Array, "S L H W d"], new: Array) -> Float[Array, "S L H W d"]:
            return rows.at[at].set(new.astype(rows.dtype), mode="drop")

        return dataclasses.replace(
            self, rows_k=written(self.rows_k, k), rows_v=written(self.rows_v, v)
        )

    def with_prompt(
        self,
        slot: Int32[Array, ""],
        k: Float[Array, "L T H d"],
        v: Float[Array, "L T H d"],
        kept_index: Int32[Array, "L H P"],
        kept_len: Int32[Array, "L H"],
        old_len: Int32[Array, "L H"],
        start: Int32[Array, ""],
        token: Int32[Array, "L T"] | None = None,
    ) -> "KVWindow":
        """With the newest of what a slot's heads keep of some tokens, in place of their oldest.

        Args:
            slot: the slot; one out of range is passed over.
            k: keys of the tokens.
            v: their values.
            kept_index: ascending indices of the tokens that each head keeps.
            kept_len: how many of these count.
            old_len: KVs that each head held before.
            start: position of the first token.
            token: as of `write_prompt`.
        """
        held = self.taken(slot[None])
        old_position, old_index = held.position[0], held.index[0]
        age = jnp.argsort(jnp.argsort(old_position, axis=-1), axis=-1)
        count = jnp.minimum(kept_len, self.size)[..., None]
        new, rank = age < count, kept_len[..., None] - count + age
        row = jnp.take_along_axis(kept_index, jnp.clip(rank, 0, kept_index.shape[-1] - 1), -1)
        layer, head, _ = jnp.indices(row.shape, sparse=True)
        position = start + (row if token is None else token[layer, row])

        def rows(old: Float[Array, "1 L H W d"], k: Float[Array, "L T H d"]) -> Array:
            found = k.at[layer, row, head].get(mode="clip")
            return jnp.where(new[..., None], found.astype(old.dtype), old[0])[None]

        part = KVWindow(
            rows(held.rows_k, k),
            rows(held.rows_v, v),
            jnp.where(new, position, old_position)[None],
            jnp.where(new, old_len[..., None] + rank, old_index)[None],
        )
        return self.put(slot[None], part)

    # What attention and compression make of it

    def of_layer(self, layer: Int32[Array, ""]) -> ExactKVs:
        """What attention of a decode step reads of it."""
        of = lambda x: lax.dynamic_index_in_dim(x, layer, axis=1, keepdims=False)  # noqa: E731
        return ExactKVs(of(self.rows_k), of(self.rows_v), of(self.index))

    def over(
        self,
        slot: Int32[Array, "*R"],
        layer: Int32[Array, "*R"],
        k: Float[Array, "*R H T d"],
        v: Float[Array, "*R H T d"],
    ) -> tuple[Float[Array, "*R H T d"], Float[Array, "*R H T d"]]:
        """Keys and values of some (slot, layer) pairs by logical index, as their codes decode,
        with the rows that there are in their place."""
        index = self.index.at[slot, layer].get(mode="fill", fill_value=NONE)
        *row, _ = jnp.indices(index.shape, sparse=True)
        at = (*row, jnp.where(index < 0, k.shape[-2], index))
        exact = (x.at[slot, layer].get(mode="fill") for x in (self.rows_k, self.rows_v))
        k, v = (
            x.at[at].set(rows.astype(x.dtype), mode="drop")
            for x, rows in zip((k, v), exact, strict=True)
        )
        return k, v

    def changed(
        self,
        slot: Int32[Array, " R"],
        layer: Int32[Array, " R"],
        k: Float[Array, "R H T d"],
        v: Float[Array, "R H T d"],
    ) -> "KVWindow":
        """With what has become of the KVs of some (slot, layer) pairs, by logical index."""
        index = self.index.at[slot, layer].get(mode="fill", fill_value=NONE)
        at = jnp.maximum(index, 0)[..., None]

        def written(rows: Float[Array, "S L H W d"], new: Array) -> Float[Array, "S L H W d"]:
            new = jnp.take_along_axis(new, at, axis=2).astype(rows.dtype)
            return rows.at[slot, layer].set(new, mode="drop")

        return dataclasses.replace(
            self, rows_k=written(self.rows_k, k), rows_v=written(self.rows_v, v)
        )

    def found_again(
        self,
        slot: Int32[Array, " R"],
        layer: Int32[Array, " R"],
        position: Int32[Array, "R H T"],
    ) -> "KVWindow":
        """With each row of some (slot, layer) pairs where its KV is now, and without those whose
        KVs went.

        `position` has the token position of every KV by logical index, −1 where none is held.
        """
        own = self.position.at[slot, layer].get(mode="fill", fill_value=NONE)
        same = (own[..., None] == position[..., None, :]) & (own[..., None] >= 0)
        place = jnp.arange(position.shape[-1], dtype=jnp.int32)
        index = jnp.max(jnp.where(same, place, NONE), axis=-1)
        own = jnp.where(index < 0, NONE, own)
        return dataclasses.replace(
            self,
            position=self.position.at[slot, layer].set(own, mode="drop"),
            index=self.index.at[slot, layer].set(index, mode="drop"),
        )
