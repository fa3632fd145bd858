"""Our own: what any head reads at the prompt's end stays in all heads.

The last 4 queries say which tokens any head of any layer reads, and all heads keep the 10 that are
read most; the rest of a head's budget goes by its own attention from the last 8 queries and by a
background, the mean squared attention from 256 queries, for what the text rather than the question
will need. Where no head looks anything up, no token is shared. docs/methods.md has the ablation.

Reading goes on where it is: what a query looked at n tokens before the end is by now n tokens
further, what comes next follows it, and heads that match the last tokens (induction) only look
there once decoding has begun. So the attention of each of the last queries is taken at its maximum
over all heads of all layers, moved on by the query's age, and added up with the window's decay;
then it spreads over the keys that follow, fading. All heads keep the tokens where that is highest,
and the highest of them go last. The others have it as the least metric in every head.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from kvjax.cache.policy.attention import window_size
from kvjax.cache.policy.checks import MOST_REACH, MOST_WINDOW, check_numbers, check_wholes, wanted
from kvjax.cache.policy.method import Method
from kvjax.cache.policy.pooling import fading_pool
from kvjax.cache.policy.score import Artefacts, LayerView, Scorer, Scores
from kvjax.checks import INT32_MAX
from kvjax.kernels import window_metrics

BACKGROUND_QUERIES = 256
"""Queries that the background samples."""
BACKGROUND_DISTANCE = 10
"""Tokens between a key and those of them that count, as in KV-Compress, full."""
BACKGROUND_LEAST = 1 / 20
"""The mean is over at least this share of them, so that few queries cannot lift the newest KVs."""
READ = 1e4
"""Metric of a token that all heads keep: more than any attention, and small enough that whole
numbers above it are exact."""


@dataclasses.dataclass(frozen=True)
class SharedReads(Scorer):
    """See above. Attention is squared throughout."""

    window: int = 8
    """Last queries of the prompt whose attention a head's own metric sums."""
    decay: float = 0.8
    """A query n tokens before the last one counts this to the power of n."""
    background: float = 60.0
    """What the mean squared attention of the sample counts besides; 0 leaves it out."""
    tokens: int = 10
    """Tokens that all heads keep; 0 for none."""
    queries: int = 4
    """Last queries whose reads count, at most the window."""
    ahead: int = 10
    """Keys after a read one that share in it."""
    fade: float = 0.98
    """What is left of it with every key of distance."""
    sure: float = 0.3
    """The least that all heads keep a token for: a little more than half of one query's attention,
    squared. Where a read is less, as mostly in plain text, nothing was looked up for certain."""
    unsure: float = 0.1
    """What anything less counts as the least metric."""
    oldest: int = 4
    """First tokens of a prompt that are not read: heads rest on them whatever is asked."""
    newest: int = 32
    """Last tokens that are not read, but may follow one that is: heads look at what is near
    whatever is asked."""

    across_heads: ClassVar[bool] = True

    def __post_init__(self):
        check_wholes(self, 1, MOST_WINDOW, "window")
        check_wholes(self, 0, MOST_WINDOW, "tokens")
        check_wholes(self, 1, MOST_REACH, "queries")
        check_wholes(self, 0, MOST_REACH, "ahead")
        check_wholes(self, 0, INT32_MAX, "oldest", "newest")
        check_numbers(self, 0, 1, "decay", "fade")
        check_numbers(self, 0, float("inf"), "background", "sure", "unsure")
        if self.window < self.queries:
            raise wanted("window", self.window, f"at least {self.queries}, the queries that read")

    def with_window(self, window: int) -> "SharedReads":
        """The same with another window; no more queries read than it has."""
        return dataclasses.replace(self, window=window, queries=min(self.queries, window))

    @property
    def needs_log_sum(self) -> bool:
        return self.background > 0

    def score(self, view: LayerView, artefacts: Artefacts) -> Scores:
        given, summed = by_age(self, view)
        metric = jnp.sum(summed, axis=1)
        if self.background:
            metric = metric + self.background * background(view)
        return Scores(metric, query_heads=summed, joint=given if self.tokens else None)

    def join_layers(
        self,
        scores: Scores,
        position: Int32[Array, "L H P"] | None,
        seq_len: Int32[Array, ""],
        num_positions: int,
    ) -> Scores:
        if scores.joint is None:
            return scores
        if position is None:
            given = jnp.max(scores.joint, axis=(0, 1))
        else:
            at = jnp.where(position >= 0, position, num_positions)
            by_query = jnp.moveaxis(scores.joint, 2, 0)
            given = jnp.zeros((by_query.shape[0], num_positions), jnp.float32)
            given = jax.vmap(lambda row, value: row.at[at].max(value, mode="drop"))(given, by_query)
        token = jnp.arange(given.shape[1], dtype=jnp.int32)
        counts = (token >= self.oldest) & (token < seq_len - self.newest)
        given = jnp.where(counts, given, 0)
        read = given[0]
        for age in range(1, min(given.shape)):
            moved = jnp.pad(given[age, :-age], (age, 0))
            read = read + moved * jnp.float32(self.decay**age)
        read = jnp.where(token < seq_len, fading_pool(read, self.ahead, self.fade), 0)
        value, top = lax.top_k(read, min(self.tokens, read.shape[0]))
        first = READ + self.tokens - jnp.arange(top.shape[0], dtype=jnp.float32)
        least = read * jnp.where(read >= self.sure, 1, jnp.float32(self.unsure))
        least = least.at[top].max(jnp.where(value >= self.sure, first, 0))
        if position is not None:
            least = jnp.where(position >= 0, least[jnp.maximum(position, 0)], 0)
        return dataclasses.replace(scores, metric=jnp.maximum(scores.metric, least))


def by_age(
    scorer: SharedReads, view: LayerView
) -> tuple[Float[Array, "H n P"], Float[Array, "H r P"]]:
    """What each of the last n queries gives, the newest first, at its maximum over the group; and
    the decayed sum over the window, per query head."""
    window = window_size(view, scorer.window)
    newest = min(scorer.queries, window)
    common = {"key_position": None if view.position is None else view.position.T, "power": 2}
    index = view.length - 1 - jnp.arange(window, dtype=jnp.int32)
    # Zeros from queries that a short prompt lacks.
    queries = view.q[jnp.maximum(index, 0)]
    position = jnp.where(index >= 0, view.start + index, -1)
    decay = jnp.float32(scorer.decay) ** jnp.arange(window, dtype=jnp.float32)

    def one(query, position):
        return window_metrics(query[None], view.k, query_position=position[None], **common)

    given = jax.vmap(one)(queries[:newest], position[:newest])
    summed = jnp.sum(given * decay[:newest, None, None], axis=0)
    if window > newest:
        # The rest of a wide window is not held query by query.
        summed = summed + window_metrics(
            queries[newest:],
            view.k,
            query_position=position[newest:],
            query_weight=decay[newest:],
            **common,
        )
    shape = (view.num_heads, -1, view.k.shape[0])
    given = jnp.max(given.reshape(newest, *shape), axis=2)
    # A prompt of fewer tokens (static) than reads count.
    given = jnp.pad(given, ((0, scorer.queries - newest), (0, 0), (0, 0)))
    return jnp.swapaxes(given, 0, 1), summed.reshape(shape)


def background(view: LayerView) -> Float[Array, "H P"]:
    """Mean squared attention of a sample of the prompt's queries: what text in general reads.

    The sample is half the last 128 queries, half 128 evenly spaced ones. A query counts for the
    keys at least 10 tokens before it; their mean, over at least a 20th of the sample, is taken,
    and summed over the query heads.
    """
    half = BACKGROUND_QUERIES // 2
    length = view.length
    i = jnp.arange(half, dtype=jnp.int32)
    # Of short prompts some come twice and some (−1 here) are missing.
    spaced = (i + 1) * (length // half) + (i + 1) * (length % half) // half - 1
    index = jnp.concatenate([spaced, length - half + i])
    position = jnp.where(index >= 0, view.start + index, -1)
    index = jnp.maximum(index, 0)
    given = window_metrics(
        view.q[index],
        view.k,
        log_sum=None if view.log_sum is None else view.log_sum[:, index],
        own_keys_last=False,
        query_position=position,
        key_position=None if view.position is None else view.position.T,
        excluded_distance=BACKGROUND_DISTANCE,
    )
    given = jnp.sum(given.reshape(view.num_heads, -1, view.k.shape[0]), axis=1)
    key_position = view.position
    if key_position is None:
        key_position = jnp.arange(view.k.shape[0], dtype=jnp.int32)[None]
    watched = position[:, None, None] - key_position >= BACKGROUND_DISTANCE
    watched = jnp.sum(watched & (position >= 0)[:, None, None], axis=0, dtype=jnp.float32)
    return given / jnp.maximum(watched, BACKGROUND_LEAST * BACKGROUND_QUERIES)


METHODS = (
    Method(
        "shared-reads",
        "what any head reads at the end, in all heads; own window and background, global budget",
        SharedReads(),
        protected=2,
    ),
)
