"""How a compression method states itself: as data, so that any step can be compiled from it.

A method is an `Observation` (what each KV's metric is), an `Allocation` (how many blocks each head
keeps), a selection (unit, scope, protection) and, if it has them, `Representatives`. All of it is
frozen and hashable: steps take a method as a static argument. Each of them raises `UserError` for
a value that no step could be compiled from.
"""

import dataclasses
import math
from typing import Any, Literal, get_args

from kvjax.cache.metrics import GroupReduction, PoolKind
from kvjax.checks import INT32_MAX, check_flag, check_number, check_text, check_whole, shown
from kvjax.errors import UserError

Source = Literal["attention", "position", "random", "key-norm"]
Statistic = Literal["sum", "hits", "recency"]
Runs = Literal["prefill", "both"]
Evidence = Literal["P", "C", "R", "A", "U", "own"]
LayerSplit = Literal["global", "uniform", "pyramid", "weights"]
HeadSplit = Literal["cheapest", "uniform", "ada"]
RepresentativesKind = Literal["kvcrush", "k-means"]
RepresentativesMode = Literal["paper", "openvino"]
Anchor = Literal["random", "mean", "alternating", "zeros", "ones"]
Pick = Literal["random", "middle"]

MOST_WINDOW = 4096
"""Most queries of an observation window that is not the whole prompt."""
MOST_REACH = 255
"""Most keys that pooling, or a read, may reach: programs grow with it."""
MOST_UNIT = 4096
"""Most token positions of a page."""


def _wanted(name: str, value: Any, wanted: str) -> UserError:
    return UserError(f"{name} {shown(value)}: wanted {wanted}")


def _whole(of: Any, least: int, most: int, *names: str) -> None:
    for name in names:
        object.__setattr__(of, name, check_whole(name, getattr(of, name), least, most))


def _number(of: Any, least: float, most: float, *names: str, above: bool = False) -> None:
    for name in names:
        check_number(name, getattr(of, name), least, most, above=above)


def _one_of(name: str, value: Any, kinds: Any) -> None:
    kinds = get_args(kinds)
    if not isinstance(value, str) or value not in kinds:
        raise _wanted(name, value, f"one of {', '.join(kinds)}")


def _a(name: str, value: Any, kind: type, *, none: bool = False) -> None:
    if not (isinstance(value, kind) or (none and value is None)):
        raise _wanted(name, value, f"{kind.__name__}(…){' or None' if none else ''}")


@dataclasses.dataclass(frozen=True)
class Reads:
    """Tokens that every head keeps because some head reads them at the prompt's end.

    Reading goes on where it is: what a query looked at n tokens before the end is by now n tokens
    further, what comes next follows it, and heads that match the last tokens (induction) only look
    there once decoding has begun. So the attention of each of the last queries is taken at its
    maximum over all heads of all layers, moved on by the query's age, and added up with the
    observation's decay; then it spreads over the keys that follow, fading. All heads keep the
    tokens where that is highest, and the highest of them go last. The others have it as the least
    metric in every head. Where it is less than `sure`, as mostly in plain text, nothing was looked
    up for certain: no token is kept for it, and it counts for less.
    """

    tokens: int = 10
    """How many tokens."""
    queries: int = 4
    """Last queries that count, at most the observation's window."""
    ahead: int = 10
    """Keys after a read one that share in it."""
    fade: float = 0.98
    """What is left of it with every key of distance."""
    sure: float = 0.3
    """The least that all heads keep a token for, in the observation's power; 0.3 is a little more
    than half of one query's attention, squared."""
    unsure: float = 0.1
    """What anything less counts as the least metric."""
    oldest: int = 4
    """First tokens of a prompt that are not read: heads rest on them whatever is asked."""
    newest: int = 32
    """Last tokens that are not read, but may follow one that is: heads look at what is near
    whatever is asked."""

    def __post_init__(self):
        _whole(self, 1, MOST_WINDOW, "tokens")
        _whole(self, 1, MOST_REACH, "queries")
        _whole(self, 0, MOST_REACH, "ahead")
        _whole(self, 0, INT32_MAX, "oldest", "newest")
        _number(self, 0, 1, "fade")
        _number(self, 0, math.inf, "sure", "unsure")


@dataclasses.dataclass(frozen=True)
class Observation:
    """What a method looks at and how it becomes one metric per KV; low metrics are evicted."""

    window: int | None
    """Last queries of the prompt that are observed; None for all of them."""
    power: int = 2
    """1 sums the attention, 2 its squares."""
    pool: int = 7
    """Width of the pooling over neighbouring keys; 1 for none."""
    pool_kind: PoolKind = "max"
    pool_window: bool = True
    """Whether the keys of the observed window itself take part in pooling."""
    group_first: bool = False
    """Join the query heads before pooling; otherwise each query head is pooled by itself."""
    group: GroupReduction = "sum"
    """How the query heads of a KV head are joined."""
    excluded_distance: int = 0
    """A key–query pair counts only if they are at least so many tokens apart."""
    background: float = 0.0
    """What the mean squared attention of a sample of the prompt's queries counts besides, summed
    over the query heads and not pooled; 0 for nothing. See `kvjax.cache.observe.background`."""
    reads: Reads | None = None
    """Tokens that all heads keep because some head reads them; with a window that sums."""
    query_decay: float = 1.0
    """A query n tokens before the last one counts this to the power of n."""
    statistic: Statistic = "sum"
    """sum: of the attention; hits: number of queries that give a KV at least an even share of
    their attention; recency: how likely the KV is hit again, from its last hit and the longest
    time between two (LazyEviction)."""
    least: float = 1e-4
    """Recency: attention that is no hit yet."""
    accumulate: bool = False
    """Whether decode steps add their attention to the metric, in the same power."""
    decode_decay: float = 1.0
    """Factor of all metrics before each decode step adds to them; 0 keeps the last step alone."""
    source: Source = "attention"
    """Whether the metric is attention at all, or follows from a KV's position, a seed or its
    key's norm alone; it is then given to every KV, also to those written while decoding."""
    seed: int = 0
    """Of the random source."""

    def __post_init__(self):
        if self.window is not None:
            _whole(self, 1, MOST_WINDOW, "window")
        _whole(self, 1, 2, "power")
        _whole(self, 1, MOST_REACH, "pool")
        if self.pool % 2 == 0:
            raise _wanted("pool", self.pool, "an odd number")
        _whole(self, 0, INT32_MAX, "excluded_distance", "seed")
        _number(self, 0, math.inf, "background", "least")
        _number(self, 0, 1, "query_decay", "decode_decay")
        for name in ("pool_window", "group_first", "accumulate"):
            check_flag(name, getattr(self, name))
        _one_of("pool_kind", self.pool_kind, PoolKind)
        _one_of("group", self.group, GroupReduction)
        _one_of("statistic", self.statistic, Statistic)
        _one_of("source", self.source, Source)
        _a("reads", self.reads, Reads, none=True)
        sums = self.statistic == "sum"
        if self.accumulate and not sums:
            raise _wanted("accumulate", self.accumulate, "False but for sums")
        if self.reads is not None:
            if not sums or self.window is None or self.intrinsic:
                raise _wanted("window", self.window, "one that sums attention, for reads")
            if self.window < self.reads.queries:
                raise _wanted("window", self.window, "at least the queries of reads")

    @property
    def intrinsic(self) -> bool:
        """Whether the metric needs no queries."""
        return self.source != "attention"


@dataclasses.dataclass(frozen=True)
class Allocation:
    """How the blocks that a sequence may keep are split over its layers and heads.

    A sequence keeps the same number of blocks whatever the allocation, except where `exact` is
    False. Shares in tokens become blocks by the divisor method of Webster: the next block goes to
    the layer (then to the head) with the largest share / (blocks so far + ½), ties to the lowest
    index. Every head keeps what it protects and at least one block.
    """

    layers: LayerSplit = "global"
    """global: the cheapest blocks go, wherever they are; uniform: each layer keeps as much;
    pyramid: linearly less from layer to layer; weights: in proportion to `weights`."""
    heads: HeadSplit = "cheapest"
    """Within a layer. cheapest: the cheapest blocks of the layer go; uniform: each head keeps as
    much; ada: Ada-KV's split by where the layer's largest metrics are. Ignored if global."""
    beta: int = 20
    """Pyramid: the last layer keeps about 1/beta of the mean."""
    exact: bool = True
    """Pyramid: False for the authors' floored step, which keeps more than the cap says."""
    floor: float = 0.0
    """Share of a uniform split that every head keeps at least (ada: Ada-KV's α)."""
    weights: tuple[float, ...] = ()
    """Relative cache size of each layer."""

    def __post_init__(self):
        _one_of("layers", self.layers, LayerSplit)
        _one_of("heads", self.heads, HeadSplit)
        _whole(self, 1, INT32_MAX, "beta")
        _number(self, 0, 1, "floor")
        if not check_flag("exact", self.exact) and self.layers != "pyramid":
            raise _wanted("exact", self.exact, "True but for pyramid")
        _a("weights", self.weights, tuple)
        for weight in self.weights:
            check_number("weights", weight, 0)
        if self.layers == "weights" and not sum(self.weights) > 0:
            raise _wanted("weights", self.weights, "a number for each layer, not all of them 0")

    @property
    def overruns(self) -> bool:
        """Whether a sequence may keep more blocks than its cap stands for."""
        return not self.exact


@dataclasses.dataclass(frozen=True)
class Representatives:
    """Part of the budget for KVs that stand for those that are dropped; see
    `kvjax.cache.representatives`."""

    share: float = 0.25
    """Share of what a head keeps that goes to representatives."""
    kind: RepresentativesKind = "kvcrush"
    mode: RepresentativesMode = "paper"
    """paper: a bit for each query head of the layer, one KV out of each of equal bins; openvino:
    one bit, whether the KV is in the upper half of its layer, every so many-th from the anchor."""
    anchor: Anchor = "random"
    unit: int = 1
    """Token positions that are compared and kept together, as aligned pages."""
    pick: Pick = "random"
    """Which one of a bin is kept."""
    seed: int = 0
    iterations: int = 10
    """Of k-means."""

    def __post_init__(self):
        _number(self, 0, 1, "share", above=True)
        if self.share == 1:
            raise _wanted("share", self.share, "less than 1")
        _one_of("kind", self.kind, RepresentativesKind)
        _one_of("mode", self.mode, RepresentativesMode)
        _one_of("anchor", self.anchor, Anchor)
        _one_of("pick", self.pick, Pick)
        _whole(self, 1, MOST_UNIT, "unit")
        _whole(self, 0, INT32_MAX, "seed")
        _whole(self, 1, 1000, "iterations")
        if self.kind == "k-means" and self.unit != 1:
            raise _wanted("unit", self.unit, "1 with k-means")


@dataclasses.dataclass(frozen=True)
class Method:
    """A named rule for what a compressed cache keeps."""

    name: str
    summary: str
    observation: Observation | None
    """What it observes; None for a method that never evicts."""
    protected: int = 0
    """Newest token positions that are never evicted."""
    sinks: int = 0
    """Oldest token positions that are never evicted."""
    protected_share: float = 0.0
    """Share of the cap that is kept for the newest tokens, if that is more than `protected`."""
    allocation: Allocation = Allocation()
    unit: int = 1
    """Token positions that stay or go together, as aligned pages; 1 for single KVs. A page's
    metric is the sum over its evictable KVs. The last page that goes may be cut, because heads
    keep whole blocks."""
    shared: bool = False
    """Whether all heads of a layer keep the same tokens, by the mean of their metrics."""
    per_age: bool = False
    """Whether metrics are divided by the number of queries that could see the KV."""
    representatives: Representatives | None = None
    """What part of the budget is for KVs that stand for dropped ones."""
    runs: Runs = "prefill"
    """both: decoding goes on measuring, so it is meant to be compressed again while it decodes."""
    query_aware: bool = True
    """Whether what is kept depends on the prompt's last tokens more than on the others."""
    evidence: Evidence = "own"
    """Where the rule comes from: P paper, C authors' code, R others' code, A abstract, U
    unverified."""

    def __post_init__(self):
        check_text("name", self.name)
        check_text("summary", self.summary)
        _a("observation", self.observation, Observation, none=True)
        _a("allocation", self.allocation, Allocation)
        _a("representatives", self.representatives, Representatives, none=True)
        _whole(self, 0, INT32_MAX, "protected", "sinks")
        _number(self, 0, 1, "protected_share")
        _whole(self, 1, MOST_UNIT, "unit")
        for name in ("shared", "per_age", "query_aware"):
            check_flag(name, getattr(self, name))
        _one_of("runs", self.runs, Runs)
        _one_of("evidence", self.evidence, Evidence)
        if self.shared and self.allocation.layers == "global":
            raise _wanted("shared", self.shared, "an allocation that is not global")
        chosen = self.representatives
        if chosen is not None and chosen.mode == "openvino" and not self.shared:
            raise _wanted("shared", self.shared, "True for openvino's mode")

    @property
    def votes(self) -> bool:
        """Whether choosing survivors of a prompt needs the metrics of single query heads."""
        chosen, observation = self.representatives, self.observation
        if chosen is None or observation is None or observation.intrinsic:
            return False
        return chosen.kind == "kvcrush" and chosen.mode == "paper"

    @property
    def needs_keys(self) -> bool:
        """Whether choosing survivors needs the keys themselves."""
        return self.representatives is not None and self.representatives.kind == "k-means"

    @property
    def compresses(self) -> bool:
        return self.observation is not None

    @property
    def is_plain(self) -> bool:
        """Whether it is the block eviction of KV-Compress: global, single KVs, each head alone."""
        return (
            self.allocation == Allocation()
            and self.unit == 1
            and self.representatives is None
            and not (self.shared or self.per_age or self.protected_share)
        )
