"""Attention matching: what stays is changed so that it is read as all of it was.

A head that gives up KVs loses twice: what they said, and their weight in the softmax, so that what
comes later is read too much. Zweiger, Guo, Fu and Kim (Fast KV Compaction via Attention Matching,
arXiv 2602.16284, 2026) give the KVs that stay a bias each and new values, both by least squares
over reference queries, so that mass and output of each head's attention stay what they were. Their
queries come of a second pass over the context, their bias is added to the logits.

Here the queries are a model's own, written down once (`kvjax calibrate`), and on a prompt's way in
some of the prompt's, turned to the positions that come next, so it costs no pass; and the mass is
given back by one vector per head that is added to all keys, the ridge regression of the mass that
lacks on the query, so attention runs as ever. Values as theirs, drawn to what they were.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache.policy.checks import check_numbers, check_wholes
from kvjax.cache.policy.merge import PROMPT_QUERY, Merger
from kvjax.cache.policy.method import Method
from kvjax.cache.policy.rotary import ROPE_FREQUENCY, turned
from kvjax.cache.policy.score import Artefacts, HeadAxis, QuerySample
from kvjax.errors import UserError
from kvjax.kernels import device, match_attention

REFERENCE_QUERY = "reference_query"
"""Calibrated array [L, n, Hr, d]: queries before RoPE of n tokens of the calibration's texts."""
MOST_MASS = 4.0
"""Most that a query may lack, in logarithmic units. One that looks at nothing that stays would
decide alone."""


@dataclasses.dataclass(frozen=True)
class AttentionMatched(Merger):
    """Keys moved by one vector per head, and values refitted."""

    ahead: int = 256
    """Positions behind the sequence over which the queries are spread."""
    turns: int = 2
    """Of these, how many each query is turned to; one, where the prompt gives queries, too."""
    newest: int = 16
    """Last queries of a prompt that are references, too, when it is compressed on its way in; of
    its last chunk, where it comes in several to the pool."""
    spread: int = 16
    """Queries of all of it that are."""
    stiffness: float = 0.01
    """Ridge of the keys' vector, times the mean square of a query's entry."""
    drawn_back: float = 1.0
    """Ridge of the values' change, times the mean Σ of a query's squared weights."""

    artefacts: ClassVar[tuple[str, ...]] = (ROPE_FREQUENCY, REFERENCE_QUERY)
    head_axes: ClassVar[Mapping[str, HeadAxis]] = {
        REFERENCE_QUERY: HeadAxis(2, grouped=True),
        PROMPT_QUERY: HeadAxis(1, grouped=True),
    }

    def __post_init__(self):
        check_wholes(self, 1, 2**20, "ahead", "turns")
        check_wholes(self, 0, 2**12, "newest", "spread")
        check_numbers(self, 1e-6, 1e6, "stiffness", "drawn_back")

    @property
    def layers_at_once(self) -> int | None:
        # The heads of two layers are dealt to a CPU's threads more evenly; more are too much for
        # its caches.
        return 2 if device.of().platform == "cpu" else None

    @property
    def queries(self) -> QuerySample | None:
        return QuerySample(self.newest, self.spread) if self.newest + self.spread else None

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
        some, turns = [jnp.swapaxes(artefacts[REFERENCE_QUERY], 0, 1)], self.turns
        if PROMPT_QUERY in artefacts:
            some, turns = [*some, artefacts[PROMPT_QUERY]], 1
        frequency = artefacts[ROPE_FREQUENCY]
        q = [self._ahead(jnp.tile(x, (1, turns, 1)), seq_len, frequency) for x in some]
        q = jnp.concatenate(q, axis=1).reshape(k.shape[0], -1, k.shape[-1])
        return match_attention(
            q, k, v, dropped, kept,
            most_mass=MOST_MASS, stiffness=self.stiffness, drawn_back=self.drawn_back,
        )  # fmt: skip

    def _ahead(
        self,
        q: Float[Array, "Hr n d"],
        seq_len: Int32[Array, ""],
        frequency: Float[Array, " half"],
    ) -> Float[Array, "Hr n d"]:
        """Queries at positions behind the sequence, in float32, scaled by 1/√d."""
        step = jnp.arange(q.shape[1], dtype=jnp.int32) * self.ahead // q.shape[1]
        angle = (seq_len + step).astype(jnp.float32)[:, None] * frequency
        return turned(q, jnp.cos(angle), jnp.sin(angle)) * q.shape[-1] ** -0.5


def matched(base: Method, name: str) -> Method:
    """`base`, with what stays fitted to attention as it was.

    Raises:
        UserError: the base never evicts, or folds what goes by a rule of its own.
    """
    if not base.compresses or base.merger is not None:
        raise UserError(f"base {base.name}: wanted one that evicts, and folds nothing by itself")
    summary = f"{base.summary}; what stays is fitted to attention as it was"
    merger = AttentionMatched()
    return dataclasses.replace(base, name=name, summary=summary, merger=merger, evidence="own")
