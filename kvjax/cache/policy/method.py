"""A compression method: a scorer, an allocator, a selector, perhaps a merger, and what it protects.

All of them are frozen and hashable values that own their formulas, so that any step can be compiled
from them. They raise `UserError` when made with a value that no step could be compiled from.
"""

import dataclasses
from collections.abc import Hashable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.cache.policy.allocate import Allocator, Global
from kvjax.cache.policy.checks import (
    check_a,
    check_constant,
    check_numbers,
    check_one_of,
    check_wholes,
    wanted,
)
from kvjax.cache.policy.merge import Merger
from kvjax.cache.policy.observe import Observer
from kvjax.cache.policy.prune import Pruner
from kvjax.cache.policy.rotary import ROPE_FREQUENCY
from kvjax.cache.policy.score import DecodeRule, HeadAxis, Observation, Scorer, Stored
from kvjax.cache.policy.select import Selector
from kvjax.cache.policy.sparse import SparsePrefill
from kvjax.cache.store import Plane
from kvjax.checks import INT32_MAX, check_flag, check_text

KEY_SIMILARITY = "key_similarity"
"""Array [L]: how alike each layer's keys are with full attention and with blocks alone; an engine
measures it where a method that it names reads it."""
OF_THE_MODEL = (ROPE_FREQUENCY, KEY_SIMILARITY)
"""Arrays that follow from the model without a calibration."""

Evidence = Literal["P", "C", "R", "A", "U", "own"]


class AttentionScorer(Scorer):
    """A scorer with an observation window: how many of the last queries count, None for all."""

    window: int | None

    @property
    def needs_log_sum(self) -> bool:
        return self.window is None

    @property
    def observation(self) -> Observation | None:
        return Observation() if self.window is None else None

    def carry(self, length: Int32[Array, ""]) -> Float[Array, ""] | None:
        return None if self.window is not None else jnp.float32(1)

    def with_window(self, window: int) -> "Scorer":
        """The same with another observation window."""
        return dataclasses.replace(self, window=window)  # type: ignore[type-var]


@dataclasses.dataclass(frozen=True)
class Method:
    """A named rule for what a compressed cache keeps.

    A pytree whose leaves are what it protects, so that steps are traced with these numbers and
    compiled from the rest; two methods with equal parts share compiled steps, whatever their names.
    """

    name: str = dataclasses.field(compare=False)
    summary: str = dataclasses.field(compare=False)
    scorer: Scorer | None
    """What each KV counts; None for a method that never evicts."""
    allocator: Allocator = dataclasses.field(default=Global())
    """How many blocks each head keeps."""
    selector: Selector = dataclasses.field(default=Selector())
    """Which KVs a head gives up."""
    merger: Merger | None = None
    """What becomes of them."""
    pruner: Pruner | None = None
    """Which tokens of a prompt leave on its way through the layers, whatever the budget."""
    protected: int = 0
    """Newest token positions that are never evicted. Inside a step an array, of each sequence or of
    all."""
    sinks: int = 0
    """Oldest token positions that are never evicted."""
    protected_share: float = 0.0
    """Share of the cap that is kept for the newest tokens, if that is more than `protected`."""
    protected_more: float = 0.0
    """Share of what the cap has above `allocate.MANY_KVS` that is kept for them, too."""
    query_aware: bool = dataclasses.field(default=True, compare=False)
    """Whether what is kept depends on the prompt's last tokens more than on the others."""
    evidence: Evidence = dataclasses.field(default="own", compare=False)
    """Where the rule comes from: P paper, C authors' code, R others' code, A abstract, U
    unverified."""

    def __post_init__(self):
        check_text("name", self.name)
        check_text("summary", self.summary)
        check_a("scorer", self.scorer, Scorer, none=True)
        check_a("allocator", self.allocator, Allocator)
        check_a("selector", self.selector, Selector)
        check_a("merger", self.merger, Merger, none=True)
        check_a("pruner", self.pruner, Pruner, none=True)
        for name in ("scorer", "allocator", "selector", "merger", "pruner"):
            check_constant(name, getattr(self, name))
        if self.pruner is not None:
            self._check_over_gaps()
        check_wholes(self, 0, INT32_MAX, "protected", "sinks")
        check_numbers(self, 0, 1, "protected_share", "protected_more")
        check_flag("query_aware", self.query_aware)
        check_one_of("evidence", self.evidence, Evidence)
        self.selector.check_with(self.allocator)

    def _check_over_gaps(self) -> None:
        """Raise `UserError` where something needs all tokens of a prompt in every layer."""
        scorer = self.scorer
        if self.merger is not None or type(self.selector) is not Selector:
            raise wanted("pruner", self.pruner, "a plain selector and no merger beside it")
        if scorer is not None and not scorer.over_gaps:
            raise wanted(
                "pruner", self.pruner, f"a scorer of layers that lack tokens, {scorer} is none"
            )

    @property
    def compresses(self) -> bool:
        return self.scorer is not None

    @property
    def across_heads(self) -> bool:
        """Whether scores of one head depend on others; see `Scorer.across_heads`."""
        together = self.scorer is not None and self.scorer.across_heads
        together = together or self.pruner is not None
        return together or self.selector.scope == "layer"

    @property
    def head_axes(self) -> dict[str, HeadAxis]:
        """Which of its arrays have an axis of heads; see `Scorer.head_axes`."""
        parts = (self.scorer, self.merger)
        return {name: at for part in parts if part for name, at in part.head_axes.items()}

    @property
    def probed(self) -> bool:
        """Whether something runs behind the prompt after prefill; see `Scorer.probed`."""
        return self.scorer is not None and self.scorer.probed

    @property
    def measured(self) -> int | None:
        """Tokens at a prompt's beginning that it is made for; see `Scorer.measured`."""
        return None if self.scorer is None else self.scorer.measured

    @property
    def drafts(self) -> bool:
        """Whether a draft says what may come behind the prompt; see `Probed.drafts`."""
        return getattr(self.scorer, "drafts", 0) > 0

    @property
    def sparse(self) -> SparsePrefill | None:
        """Which keys queries of long prompts see in prefill, which then runs behind the draft; None
        for all."""
        return getattr(self.scorer, "sparse", None)

    @property
    def rescored(self) -> bool:
        """Whether held KVs are scored anew at an eviction; see `Scorer.rescored`."""
        return self.scorer is not None and self.scorer.rescored

    @property
    def decode(self) -> DecodeRule | None:
        """What decode steps do to its sequences' numbers; None for nothing."""
        return None if self.scorer is None else self.scorer.decode

    @property
    def whole(self) -> "Method":
        """What a sequence of this method does where it has no budget: it evicts nothing."""
        return self._with(scorer=None)

    @property
    def runs(self) -> Literal["prefill", "both"]:
        """both: KVs that decoding writes are measured, too (or nothing is ever evicted), so it is
        meant to be compressed again while it decodes."""
        measures = self.decode is not None or self.rescored
        return "prefill" if self.compresses and not measures else "both"

    @property
    def planes(self) -> tuple[Plane, ...]:
        """Numbers per KV that it keeps beside metric and position."""
        return () if self.decode is None else self.decode.planes

    @property
    def artefacts(self) -> tuple[str, ...]:
        """Names of the arrays that it needs."""
        own = () if self.scorer is None or self.probed else self.scorer.artefacts
        rule = () if self.decode is None else self.decode.artefacts
        merger = () if self.merger is None else self.merger.artefacts
        return tuple(dict.fromkeys((*own, *rule, *self.allocator.artefacts, *merger)))

    @property
    def calibrated(self) -> tuple[str, ...]:
        """Those of them that a calibration has to give: all but what follows from the model."""
        return tuple(name for name in self.artefacts if name not in OF_THE_MODEL)

    @property
    def shares(self) -> tuple[Any, Any]:
        """What is kept for the newest tokens of the cap, and of what it has above
        `allocate.MANY_KVS`."""
        return self.protected_share, self.protected_more

    @property
    def eviction(self) -> "Method":
        """The method as an eviction sees it: where KVs are ranked by the metric that they have,
        whose metric it is makes no difference, and steps are shared."""
        scorer = self.scorer
        if scorer is None or scorer.rescored or type(scorer).rank is not Scorer.rank:
            return self
        return self._with(scorer=Stored())

    @property
    def parts(self) -> Hashable:
        """All that steps are compiled from."""
        return _flatten(self)[1]

    @property
    def observer(self) -> Observer:
        """What prefill depends on."""
        return Observer(
            None if self.probed else self.scorer,
            self.selector.needs_query_heads,
            None if self.merger is None else self.merger.queries,
        )

    def protecting(self, newest: Int32[Array, "*G"] | int) -> "Method":
        """The same with at least so many of the newest token positions protected, of each
        sequence or of all; for use inside a step."""
        return self._with(protected=jnp.maximum(self.protected, newest))

    def _with(self, **changed: Any) -> "Method":
        """The same with other parts; nothing is checked, they may be traced."""
        method = object.__new__(Method)
        for field in dataclasses.fields(Method):
            value = changed.get(field.name, getattr(self, field.name))
            object.__setattr__(method, field.name, value)
        return method


PLAIN = Method("plain", "the globally cheapest blocks by the metrics as they stand", Stored())
"""What compresses where no method is given: KV-Compress's block eviction, nothing protected."""


@dataclasses.dataclass(frozen=True)
class _Parts:
    """What of a method is static. Compared and hashed by what steps are compiled from."""

    scorer: Scorer | None
    allocator: Allocator
    selector: Selector
    merger: Merger | None
    told: tuple[str, str, bool, str] = dataclasses.field(compare=False)


_PROTECTS = ("protected", "sinks", "protected_share", "protected_more")


def _flatten(method: Method) -> tuple[tuple[Any, ...], _Parts]:
    told = (method.name, method.summary, method.query_aware, method.evidence)
    parts = _Parts(method.scorer, method.allocator, method.selector, method.merger, told)
    return tuple(getattr(method, name) for name in _PROTECTS), parts


def _unflatten(parts: _Parts, leaves: Any) -> Method:
    # Leaves may be anything in a tree under way: nothing is checked.
    method = object.__new__(Method)
    for part in dataclasses.fields(_Parts)[:4]:
        object.__setattr__(method, part.name, getattr(parts, part.name))
    object.__setattr__(method, "pruner", None)  # that is the prefill's affair
    for name, value in zip(("name", "summary", "query_aware", "evidence"), parts.told):
        object.__setattr__(method, name, value)
    for name, value in zip(_PROTECTS, leaves):
        object.__setattr__(method, name, value)
    return method


jax.tree_util.register_pytree_node(Method, _flatten, _unflatten)
