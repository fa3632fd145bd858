"""WindowKV (Zuo et al. 2025): windows of 8 tokens stay or go together, chosen once for 8 layers.

The attention of the suffix, the last 32 queries, is summed. A window of the text before it counts
the mean of its 4 largest sums (`windowkv`, for tasks that look something up), or the mean of all
(`windowkv-average`, for summaries; a suffix of 16); the mean over all query heads. The windows of
least count go in all heads. Of 8 layers each, the first one's choice is the others' too. The suffix
stays.

Groups of layers keep linearly less: with B = C − suffix tokens on average, 2B − ⌊8 B / β⌋ in the
first one and ⌊8 B / β⌋ in the last, β = 14. This is the authors' code; the paper's own classifier
that tells which of the two a prompt asks for is a trained BERT, so here the name says it. A last
group of fewer layers (theirs has none, and leaves such layers out) is one like the others, and
budgets hold the cap. The last window that goes may be cut, because heads keep whole blocks. A
prompt that runs in parts is measured anew by each part's suffix; a KV that a group's first layer
does not hold counts 0 in the others. KVs written by decode steps have metric 0.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache.policy.allocate import Budget, ByLayer, EvenLayers
from kvjax.cache.policy.attention import received, window_start
from kvjax.cache.policy.checks import MOST_UNIT, check_attention, check_wholes
from kvjax.cache.policy.method import AttentionScorer, Method
from kvjax.cache.policy.pooling import reduce_group
from kvjax.cache.policy.score import Artefacts, LayerView, Scores
from kvjax.cache.policy.select import Selector
from kvjax.checks import INT32_MAX

SHARED = 8
"""Layers of a group."""


@dataclasses.dataclass(frozen=True)
class Windows(AttentionScorer):
    """What the last queries give to the best keys of each aligned window."""

    window: int | None = 32
    """Last queries that are observed, the suffix; None for all."""
    width: int = 8
    """Tokens of a window."""
    best: int = 4
    """Keys of a window that count, the largest; all where it has fewer."""
    layers: int = SHARED
    """Layers that go by the first of them."""

    def __post_init__(self):
        check_attention(self)
        check_wholes(self, 1, MOST_UNIT, "width", "best")
        check_wholes(self, 1, INT32_MAX, "layers")

    def carry(self, length: Int32[Array, ""]) -> Float[Array, ""] | None:
        return None

    def score(self, view: LayerView, artefacts: Artefacts) -> Scores:
        given = received(view, self.window)
        at = view.key_position
        counts = view.keys_from(0) & (at < window_start(view, self.window))
        of_group = jax.vmap(self._of_windows, (0, None, None))
        found = jax.vmap(of_group)(given, at // self.width, counts)
        return Scores(reduce_group(found, "mean"))

    def _of_windows(
        self, given: Float[Array, " P"], number: Int32[Array, " P"], counts: Bool[Array, " P"]
    ) -> Float[Array, " P"]:
        """The mean of the largest values of each window, at all of its keys; 0 elsewhere."""
        size = given.shape[0]
        number = jnp.where(counts, number, INT32_MAX)
        order = jnp.lexsort((-given, number))
        number, place = number[order], jnp.arange(size, dtype=jnp.int32)
        begins = jnp.concatenate([jnp.ones(1, bool), number[1:] != number[:-1]])
        first = jax.lax.cummax(jnp.where(begins, place, 0))
        segment = jnp.cumsum(begins, dtype=jnp.int32) - 1
        taken = counts[order] & (place - first < self.best)

        def summed(x):
            return jax.ops.segment_sum(x, segment, size, indices_are_sorted=True)[segment]

        mean = summed(jnp.where(taken, given[order], 0)) / jnp.maximum(summed(1.0 * taken), 1)
        return jnp.zeros_like(given).at[order].set(mean)

    def join_layers(
        self,
        scores: Scores,
        position: Int32[Array, "L H P"] | None,
        seq_len: Int32[Array, ""],
        num_positions: int,
    ) -> Scores:
        num_layers, num_heads, _ = scores.metric.shape
        group = jnp.arange(num_layers, dtype=jnp.int32) // self.layers
        first = scores.metric[:: self.layers]
        if position is None:
            return dataclasses.replace(scores, metric=first[group])
        at = jnp.where(position >= 0, position, num_positions)
        table = jnp.zeros((len(first), num_heads, num_positions), jnp.float32)
        layer, head = (jnp.arange(n)[:, None] for n in table.shape[:2])
        table = table.at[layer[..., None], head, at[:: self.layers]].set(first, mode="drop")
        metric = jax.vmap(jax.vmap(lambda row, at: row.at[at].get(mode="fill", fill_value=0)))
        return dataclasses.replace(scores, metric=metric(table[group], at))


@dataclasses.dataclass(frozen=True)
class GroupPyramid(EvenLayers):
    """Linearly less from one group of layers to the next."""

    beta: int = 14
    """The last group keeps about `layers` / beta of the mean."""
    layers: int = SHARED
    """Layers of a group."""

    def __post_init__(self):
        check_wholes(self, 1, INT32_MAX, "beta", "layers")

    def tokens(self, budget: Budget, artefacts: Artefacts) -> Float[Array, " L"]:
        groups = -(-budget.num_layers // self.layers)
        even = super().tokens(budget, artefacts)
        if groups == 1:
            return even
        base = jnp.maximum(budget.cap.astype(jnp.int32) - budget.protected, 0)
        # Not more than the whole where groups are larger than beta.
        low = jnp.minimum(base * self.layers // self.beta, 2 * base)
        high = 2 * base - low
        group = (jnp.arange(budget.num_layers, dtype=jnp.int32) // self.layers).astype(jnp.float32)
        slope = (high - low).astype(jnp.float32) / (groups - 1)
        return high.astype(jnp.float32) - group * slope + budget.protected


def _windowkv(name: str, summary: str, scorer: Windows) -> Method:
    return Method(
        name,
        summary,
        scorer,
        allocator=ByLayer(GroupPyramid()),
        selector=Selector(scope="layer"),
        protected=scorer.window or 0,
        evidence="C",
    )


METHODS = (
    _windowkv(
        "windowkv",
        "windows of 8 tokens by their best 4, chosen once for 8 layers",
        Windows(),
    ),
    _windowkv(
        "windowkv-average",
        "windows of 8 tokens by their mean, chosen once for 8 layers",
        Windows(window=16, best=8),
    ),
)
