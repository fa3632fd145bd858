"""What will be read of a KV, predicted when it is written: no question is needed.

The teacher is KVzip's score with KVzap's weight (see `kvzip`): how much a KV changes what the model
says when it repeats the text. A linear map of what enters the attention block, and of the norms of
key and value, predicts its logarithm (KVzap, NVIDIA 2026, section 3); it is calibrated once per
model (`kvjax calibrate`). Generated tokens get their metric as they are written. Without the claims
below (`predicted-reads-blind`) no query is looked at.

A second claim on the budget is what is being read now: the largest attention of the last queries.
It stands on the scale of the prediction: an attention counts as the prediction that is as rare in
the calibration texts, and a KV counts the higher of the two.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Num

from kvjax.cache.policy.attention import window_queries
from kvjax.cache.policy.checks import check_wholes
from kvjax.cache.policy.method import Method
from kvjax.cache.policy.score import (
    Artefacts,
    DecodeRule,
    HeadAxis,
    LayerView,
    Planes,
    Scorer,
    Scores,
    StepView,
)
from kvjax.cache.store import Plane, write_newest

WEIGHT, EXTRA, CLAIM = "reads_weight", "reads_extra", "reads_claim"
"""Calibrated arrays: [L, D, H]; [L, H, 5], of the logarithms of ‖k‖, ‖v‖ and 1 + position, a
constant, and the last position that was calibrated (later ones count as that one); [L, Q], the
prediction that an attention counts as, see `CLAIM_LEVELS`."""
CLAIM_LEVELS = 64
"""Attentions that the claim is tabled for: e^(−i/4) for i = 0 … 63."""
CLAIM_WINDOW = 16
"""Last queries whose reads are claims."""
LEAST = -30.0
"""The metric of what is read by nobody, below any prediction."""


def predicted(
    artefacts: Artefacts,
    hidden: Float[Array, "*T D"],
    k: Float[Array, "*T H d"],
    v: Float[Array, "*T H d"],
    position: Int32[Array, "*T"],
) -> Float[Array, "*T H"]:
    """The logarithm of the teacher's score, of one layer's KVs."""
    wide = jnp.float32

    def log_norm(x: Array) -> Array:
        squares = jnp.sum(jnp.square(x.astype(wide)), axis=-1)
        return jnp.log(jnp.maximum(squares, 1e-12)) / 2

    extra = artefacts[EXTRA].astype(wide)
    at = jnp.clip(position[..., None].astype(wide), 0, extra[:, 4])
    found = hidden.astype(wide) @ artefacts[WEIGHT].astype(wide)
    found = found + log_norm(k) * extra[:, 0] + log_norm(v) * extra[:, 1]
    return found + jnp.log1p(at) * extra[:, 2] + extra[:, 3]


def claimed(table: Float[Array, " Q"], attention: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The prediction that an attention counts as."""
    level = -4 * jnp.log(jnp.maximum(attention, 1e-12))
    return jnp.interp(level, jnp.arange(table.shape[0], dtype=jnp.float32), table, right=LEAST)


@dataclasses.dataclass(frozen=True)
class GivePredicted(DecodeRule):
    """Each new KV gets its prediction when it is written; nothing reads it yet."""

    claims: bool = True
    artefacts = (WEIGHT, EXTRA)
    held = False

    @property
    def planes(self) -> tuple[Plane, ...]:  # type: ignore[override]
        return (Plane("claim"),) if self.claims else ()

    def after(self, planes: Planes, step: StepView, artefacts: Artefacts) -> Planes:
        newest = predicted(artefacts, step.hidden, step.k, step.v, step.position)

        def written(plane: Array, value: Array) -> Array:
            return write_newest(plane, step.block_table, step.context_len, value, step.touched)

        planes = {**planes, "metric": written(planes["metric"], newest)}
        if self.claims:
            least = jnp.full((*newest.shape, 1), LEAST, jnp.float32)
            planes["claim"] = written(planes["claim"], least)
        return planes


@dataclasses.dataclass(frozen=True)
class PredictedReads(Scorer):
    """See above."""

    window: int = CLAIM_WINDOW
    """Last queries whose reads are claims; 0 for none."""

    head_axes: ClassVar[Mapping[str, HeadAxis]] = {WEIGHT: HeadAxis(2), EXTRA: HeadAxis(1)}

    def __post_init__(self):
        check_wholes(self, 0, 4096, "window")

    def with_window(self, window: int) -> "PredictedReads":
        """The same with another number of queries whose reads are claims, if any are."""
        return dataclasses.replace(self, window=window) if self.window else self

    @property
    def artefacts(self) -> tuple[str, ...]:  # type: ignore[override]
        return (WEIGHT, EXTRA, CLAIM) if self.window else (WEIGHT, EXTRA)

    @property
    def settled(self) -> bool:
        return not self.window

    @property
    def decode(self) -> DecodeRule:
        return GivePredicted(self.window > 0)

    def carry(self, length: Int32[Array, ""]) -> Float[Array, ""] | None:
        # A prediction is made once; what a chunk adds to it is 0.
        return jnp.float32(1)

    def score(self, view: LayerView, artefacts: Artefacts) -> Scores:
        assert view.hidden is not None
        assert view.v is not None
        num_tokens = view.hidden.shape[0]
        own = slice(view.k.shape[0] - num_tokens, None)
        position = view.start + jnp.arange(num_tokens, dtype=jnp.int32)
        new = predicted(artefacts, view.hidden, view.k[own], view.v[own], position).T
        metric = jnp.pad(new, ((0, 0), (view.k.shape[0] - num_tokens, 0)))
        if not self.window:
            return Scores(metric)
        claim = claimed(artefacts[CLAIM], largest_read(view, self.window))
        return Scores(metric, state={"claim": claim[..., None]})

    def rank(
        self,
        metric: Float[Array, "*rows T"],
        state: Mapping[str, Num[Array, "*rows T w"]],
        position: Int32[Array, "*rows T"],
        seq_len: Int32[Array, "*rows"],
    ) -> Float[Array, "*rows T"]:
        if "claim" not in state:
            return metric
        return jnp.maximum(metric, state["claim"][..., 0])


def largest_read(view: LayerView, window: int) -> Float[Array, "H P"]:
    """The largest attention that a query of the window, of any head of the group, pays a key."""
    queries, position, _ = window_queries(view, window)
    groups = queries.reshape(len(queries), view.num_heads, -1, queries.shape[-1])
    logits = jnp.einsum(
        "qhrd,phd->hrqp", groups.astype(jnp.float32), view.k.astype(jnp.float32)
    ) * (queries.shape[-1] ** -0.5)
    held = view.key_position[:, None, None, :]
    seen = (held >= 0) & (held <= position[:, None]) & (position >= 0)[:, None]
    share = jax.nn.softmax(jnp.where(seen, logits, -1e30), axis=-1)
    return jnp.max(jnp.where(seen, share, 0), axis=(1, 2))


METHODS = (
    Method(
        "predicted-reads",
        "what will be read, predicted from the hidden state, or is read now; global block budget",
        PredictedReads(),
        protected=8,
        sinks=4,
    ),
    Method(
        "predicted-reads-blind",
        "what will be read, predicted from the hidden state alone; global block budget",
        PredictedReads(window=0),
        protected=1,
        protected_share=1 / 8,
        protected_more=1 / 8,
        sinks=2,
        query_aware=False,
    ),
)
