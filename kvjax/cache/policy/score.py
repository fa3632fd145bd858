"""Scorers: what each KV counts, from what a layer knows while a prompt or a token runs through it.

A scorer is a frozen, hashable value: steps are compiled from it. It owns its formula and says
what it needs, so that nothing is computed or kept for methods that do not ask for it.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Num

from kvjax.cache.store import Plane

Artefacts = Mapping[str, Array]
"""Arrays of a `Calibration` by name, each with a leading axis of layers; scorers get their
layer's part."""


@dataclasses.dataclass(frozen=True)
class Observation:
    """Sums of the attention of all queries of a prompt, by key: Σ decay^age · p^power."""

    power: int = 1
    excluded_distance: int = 0
    """A key–query pair counts only if they are so many tokens apart."""
    decay: float = 1.0
    """A query n tokens before the last one counts this to the power of n."""

    def query_weight(self, length: Int32[Array, ""], num_queries: int) -> Float[Array, " T"]:
        """What each query counts of a prompt of `length` tokens; 0 for padding."""
        age = length - 1 - jnp.arange(num_queries, dtype=jnp.int32)
        weight = jnp.float32(self.decay) ** jnp.maximum(age, 0).astype(jnp.float32)
        return jnp.where(age >= 0, weight, 0)


@dataclasses.dataclass(frozen=True)
class QuerySample:
    """Which queries of a prompt, or of its last chunk, are kept for a merger."""

    newest: int = 0
    """Its last ones."""
    spread: int = 0
    """More, in equal distances."""


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerView:
    """What a layer knows of a prompt, or of a chunk of it behind what its heads hold already."""

    layer: Int32[Array, ""] | int
    q: Float[Array, "T Hr d"]
    """Queries of the chunk, rotated."""
    k: Float[Array, "P H d"]
    """Keys, rotated: the held ones, then those of the chunk."""
    length: Int32[Array, ""]
    """Tokens of the chunk; those from `length` on are padding."""
    start: Int32[Array, ""]
    """Token position of the chunk's first token."""
    position: Int32[Array, "H P"] | None = None
    """Token position of each key, −1 for none; None for 0 … P−1."""
    log_sum: Float[Array, "Hr T"] | None = None
    """Log-sum-exp of each query's logits over all keys it sees, where the attention told it."""
    v: Float[Array, "P H d"] | None = None
    """Values, in the order of the keys."""
    hidden: Float[Array, "T D"] | None = None
    """What enters the attention block: the residual stream after the layer's first norm."""
    peak: Float[Array, " T"] | None = None
    """Largest absolute entry of that before the norm, for codecs of whole prompts that read it."""
    received: Float[Array, "Hr P"] | None = None
    """What each key received of all queries, where the attention told it."""
    observation: Observation | None = dataclasses.field(default=None, metadata={"static": True})
    """What `received` is."""
    token: Int32[Array, " T"] | None = None
    """Token position of each query, where layers before have dropped some tokens of the prompt;
    None where they follow each other from `start` on. The keys are of the same tokens."""
    from_newest: Float[Array, " T"] | None = None
    """What a `Pruner` measured of each key: attention from the prompt's newest tokens."""

    @property
    def num_heads(self) -> int:
        return self.k.shape[1]

    @property
    def end(self) -> Int32[Array, ""]:
        """Tokens that the sequence has seen once the chunk is through."""
        return self.start + self.length

    @property
    def key_position(self) -> Int32[Array, "H P"]:
        """`position`, written out."""
        if self.position is not None:
            return self.position
        token = jnp.arange(self.k.shape[0], dtype=jnp.int32)
        return jnp.broadcast_to(token, (self.num_heads, self.k.shape[0]))

    @property
    def query_position(self) -> Int32[Array, " T"]:
        """Token position of each query, and of the key of the same token; padding goes on, or may
        be anything where `token` says where they are."""
        if self.token is not None:
            return self.token
        return self.start + jnp.arange(self.q.shape[0], dtype=jnp.int32)

    def keys_from(self, first: int) -> Bool[Array, "H P"]:
        """Which keys are of tokens from position `first` on, and no padding."""
        at = self.key_position
        return (at >= first) & (at < self.end)


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
    """What a scorer made of a layer; stacked, of all layers."""

    metric: Float[Array, "*L H P"]
    """One number per KV; low ones are evicted, −inf first, +inf and what is no number never."""
    query_heads: Float[Array, "*L H r P"] | None = None
    """The same of each query head by itself, for selectors that ask for it."""
    state: dict[str, Num[Array, "*L H P w"]] = dataclasses.field(default_factory=dict)
    """Of each plane that the scorer's decode rule declares."""
    joint: Num[Array, "*L H n P"] | None = None
    """What `Scorer.join_layers` needs beside the metric."""
    queries: Float[Array, "*L Hr n d"] | None = None
    """Of the prompt, before RoPE, where a merger asks for some (`Merger.queries`)."""

    def spread(self, first: int, room: int) -> "Scores":
        """With zeros behind the first KVs, so that these and the zeros are `room`."""
        if first == room:
            return self

        def wide(x: Array | None, axis: int = -1) -> Any:
            if x is None:
                return None
            before, behind = jnp.split(x, [first], axis=axis)
            shape = list(x.shape)
            shape[axis] = room - first
            return jnp.concatenate([before, jnp.zeros(shape, x.dtype), behind], axis=axis)

        return dataclasses.replace(
            self,
            metric=wide(self.metric),
            query_heads=wide(self.query_heads),
            state={name: wide(x, -2) for name, x in self.state.items()},
            joint=wide(self.joint),
        )


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepView:
    """What a layer knows of a decode step: S sequences, the newest KV of each already written."""

    layer: Int32[Array, ""]
    k: Float[Array, "S H d"]
    """The newest keys, rotated."""
    v: Float[Array, "S H d"]
    hidden: Float[Array, "S D"]
    """What enters the attention block."""
    position: Int32[Array, " S"]
    """Their token positions."""
    block_table: Int32[Array, "S H M"]
    context_len: Int32[Array, "S H"]
    """KVs of each head, the newest included; 0 where a sequence does not run."""
    touched: Bool[Array, " S"]
    """Sequences whose numbers the step may change."""
    group: int = dataclasses.field(metadata={"static": True})
    """Query heads per KV head."""

    def rows(self, num_blocks: int) -> Int32[Array, "S H M"]:
        """The blocks whose numbers may change; N (out of range) for the others."""
        return jnp.where(self.touched[:, None, None], self.block_table, num_blocks)


Planes = dict[str, Num[Array, "N b *w"]]
"""The pool's numbers per KV: "metric" [N, b], and each declared plane [N, b, w]."""


class DecodeRule:
    """What decode steps do to the numbers of each KV. Frozen and hashable, compiled from.

    A step calls `before`, then the attention, which adds Σ p^`power` over each query group to the
    plane `into` (unless `power` is None), then `after`.
    """

    power: int | None = None
    artefacts: ClassVar[tuple[str, ...]] = ()
    """Names of the calibrated arrays that `after` reads."""
    into: ClassVar[str] = "metric"
    held: ClassVar[bool] = True
    """Whether steps change numbers of KVs that were there before them."""
    planes: ClassVar[tuple[Plane, ...]] = ()

    def before(self, planes: Planes, step: StepView) -> Planes:
        """The planes before the attention adds to them."""
        return planes

    def after(self, planes: Planes, step: StepView, artefacts: Artefacts) -> Planes:
        """The planes after the attention; `artefacts` are the layer's."""
        return planes


class HeadAxis(NamedTuple):
    """Which axis of an array of all layers [L, …] is one of heads."""

    axis: int
    grouped: bool = False
    """Whether they are query heads, one group after the other."""


class Scorer:
    """How much each KV counts. Subclasses are frozen dataclasses and give at least `score`."""

    artefacts: ClassVar[tuple[str, ...]] = ()
    """Names of the calibrated arrays that it reads."""
    head_axes: ClassVar[Mapping[str, HeadAxis]] = MappingProxyType({})
    """Which of them have an axis of heads. On several devices each has its own heads of these."""
    across_heads: ClassVar[bool] = False
    """Whether a KV's score depends on other heads, or on which head it is of: not possible on
    several devices, which have some heads each."""
    over_gaps: ClassVar[bool] = False
    """Whether it scores layers that lack tokens, too (`LayerView.token`)."""
    probed: ClassVar[bool] = False
    """Whether its metrics come of what runs behind the prompt and is thrown away (`Probed`); the
    prompt's own queries then score nothing, and `artefacts` are that pass's affair."""
    rescored: ClassVar[bool] = False
    """Whether all KVs that a sequence holds are scored anew when some of them are evicted: `score`
    then sees a view without queries, of the held keys and values, their positions and the time.
    Metrics have to follow from one layer alone."""

    @property
    def measured(self) -> int | None:
        """Tokens at a prompt's beginning that it measures, where it is made for these alone: what
        comes behind them has no metric, and changes none of theirs. None for any prompt, as a
        whole."""
        return None

    @property
    def needs_log_sum(self) -> bool:
        """Whether one pass over the logits suffices where the attention tells their log-sum-exp."""
        return False

    @property
    def observation(self) -> Observation | None:
        """What it sums of all queries of a whole prompt, which the attention itself can tell; None
        for nothing."""
        return None

    @property
    def settled(self) -> bool:
        """Whether a KV's numbers are final when it is written: further chunks change none."""
        return False

    @property
    def decode(self) -> DecodeRule | None:
        """What decode steps add; None for nothing: KVs written then have metric 0."""
        return None

    def score(self, view: LayerView, artefacts: Artefacts) -> Scores:
        """The scores of all keys of one layer; see `LayerView`."""
        raise NotImplementedError

    def join_layers(
        self,
        scores: Scores,
        position: Int32[Array, "L H P"] | None,
        seq_len: Int32[Array, ""],
        num_positions: int,
    ) -> Scores:
        """The scores once those of all layers are there; as they are by default.

        Args:
            scores: what `score` returned of each layer, stacked.
            position: token position of each key, −1 for none; None for 0 … P−1.
            seq_len: tokens of the prompt so far.
            num_positions: more than any token position (static).
        """
        return scores

    @property
    def joins_layers(self) -> bool:
        return type(self).join_layers is not Scorer.join_layers

    def carry(self, length: Int32[Array, ""]) -> Float[Array, ""] | None:
        """What an older metric counts beside that of a chunk of `length` tokens; None where the
        chunk measures all KVs anew."""
        return None

    def rank(
        self,
        metric: Float[Array, "*rows T"],
        state: Mapping[str, Num[Array, "*rows T w"]],
        position: Int32[Array, "*rows T"],
        seq_len: Int32[Array, "*rows"],
    ) -> Float[Array, "*rows T"]:
        """What a KV's numbers count when something is evicted; the metric itself by default."""
        return metric


@dataclasses.dataclass(frozen=True)
class Stored(Scorer):
    """Metrics as they stand in the pool, whoever wrote them."""

    def score(self, view: LayerView, artefacts: Artefacts) -> Scores:
        return Scores(jnp.zeros((view.num_heads, view.k.shape[0]), jnp.float32))
