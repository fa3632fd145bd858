"""Mergers: what becomes of the KVs that go, before their blocks are freed."""

from jaxtyping import Array, Bool, Float, Int32


class Merger:
    """Folds dropped KVs into kept ones. Subclasses are frozen dataclasses."""

    def fold(
        self,
        k: Float[Array, "*rows T d"],
        v: Float[Array, "*rows T d"],
        position: Int32[Array, "*rows T"],
        score: Float[Array, "*rows T"],
        dropped: Bool[Array, "*rows T"],
        kept: Bool[Array, "*rows T"],
    ) -> tuple[Float[Array, "*rows T d"], Float[Array, "*rows T d"]]:
        """Keys and values after dropped ones were merged into kept ones.

        Only those of kept KVs count afterwards. Positions and numbers of kept KVs stay.

        Args:
            k: keys, rotated.
            v: values.
            position: token position of each KV.
            score: its eviction score; +inf where it could not be evicted.
            dropped: KVs that go.
            kept: KVs that stay; slots that hold nothing are neither.
        """
        raise NotImplementedError
