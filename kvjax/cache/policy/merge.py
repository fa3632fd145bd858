"""Mergers: what becomes of the KVs that go, before their blocks are freed."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache.policy.score import Artefacts, HeadAxis, QuerySample

PROMPT_QUERY = "prompt_query"
"""Artefact [L, Hr, n, d] that only mergers see, and only while a prompt is on its way in: the
prompt's own queries before RoPE, as `Merger.queries` asks for them."""


class Merger:
    """Folds dropped KVs into kept ones. Subclasses are frozen dataclasses."""

    artefacts: ClassVar[tuple[str, ...]] = ()
    """Names of the calibrated arrays that it reads."""
    head_axes: ClassVar[Mapping[str, HeadAxis]] = MappingProxyType({})
    """As of `Scorer.head_axes`."""

    @property
    def layers_at_once(self) -> int | None:
        """Layers that are folded together; None for one after the other."""
        return None

    @property
    def queries(self) -> QuerySample | None:
        """Which of a prompt's queries it wants to see (`PROMPT_QUERY`); None for none."""
        return None

    def reads(self, artefacts: Artefacts) -> tuple[str, ...]:
        """Names of those of `artefacts` that it is given a layer's part of."""
        prompts = self.queries is not None and PROMPT_QUERY in artefacts
        return (*self.artefacts, PROMPT_QUERY) if prompts else self.artefacts

    def fold(
        self,
        k: Float[Array, "H T d"],
        v: Float[Array, "H T d"],
        position: Int32[Array, "H T"],
        score: Float[Array, "H T"],
        dropped: Bool[Array, "H T"],
        kept: Bool[Array, "H T"],
        seq_len: Int32[Array, ""],
        artefacts: Artefacts,
    ) -> tuple[Float[Array, "H T d"], Float[Array, "H T d"]]:
        """Keys and values of a layer after dropped ones were merged into kept ones.

        Only those of kept KVs count afterwards. Positions and numbers of kept KVs stay.

        Args:
            k: keys, rotated.
            v: values.
            position: token position of each KV.
            score: its eviction score; +inf where it could not be evicted.
            dropped: KVs that go.
            kept: KVs that stay; slots that hold nothing are neither.
            seq_len: tokens that the sequence has seen.
            artefacts: the layer's.
        """
        raise NotImplementedError
