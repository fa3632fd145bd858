"""Tokens that leave a prompt between two layers of its prefill: later layers never compute them.

Source: PyramidInfer (Yang et al. 2024, arXiv 2405.12532), section 3, and the authors' code.
"""

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from kvjax.cache.policy.checks import check_numbers, check_wholes, wanted

NARROWER = 0.85
"""A stage ends where a layer has at most so many of the rows that its first one has."""
GRAIN = 32
"""Rows of a stage are a multiple of these."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """Layers that are compiled for one number of rows."""

    first: int
    width: int


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """How prompts of at most so many tokens run."""

    rows: Int32[np.ndarray, "l w"]
    """Tokens that each layer has of a prompt of 0 … W, and those that would come behind the last
    layer."""
    recent: Int32[np.ndarray, " w"]
    """Newest tokens of such a prompt, which stay."""
    stages: tuple[Stage, ...]


@dataclasses.dataclass(frozen=True)
class Pruner:
    """After each layer the context loses the tokens that the newest ones attend to least.

    The newest tokens and the sinks always stay. What goes is gone from all later layers, in all
    their heads. With T tokens the newest are R + 1, R = ⌊recent · T⌋; of the c others that layer l
    of L has, the next one has ⌊c · δ⌋ with δ = decay + (1 − decay) · (1 + cos(π l / L)) / 2, if
    that is more than `least`, else all c.
    """

    recent: float = 0.2
    """Share of the prompt that counts as its newest tokens."""
    decay: float = 0.9
    """What is kept of the context from the last layers to the next; the first keep all of it."""
    sinks: int = 4
    """Oldest tokens that stay."""
    least: int = 64
    """A context is not cut to so few tokens."""
    newest_weight: float = 1.2
    """What the last token's attention counts, beside 1 of the first that counts."""

    def __post_init__(self):
        check_numbers(self, 0, 1, "recent", "decay")
        check_wholes(self, 0, 2**20, "sinks", "least")
        check_numbers(self, 0, 1e6, "newest_weight", above=True)
        if self.sinks > self.least:
            raise wanted("sinks", self.sinks, f"at most least, {self.least}")

    def shares(self, num_layers: int) -> list[float]:
        """δ of each layer."""
        turns = [math.cos(math.pi * layer / num_layers) for layer in range(num_layers)]
        return [(1.0 - self.decay) * (turn + 1) / 2 + self.decay for turn in turns]

    def num_recent(self, length: Int32[np.ndarray, "*n"] | int) -> Int32[np.ndarray, "*n"]:
        """Newest tokens of prompts of these lengths."""
        length = np.asarray(length)
        share = np.asarray(length * self.recent).astype(np.int32)
        return np.asarray(np.minimum(length, share + 1), np.int32)

    def rows(
        self, num_layers: int, length: Int32[np.ndarray, "*n"] | int
    ) -> Int32[np.ndarray, "l *n"]:
        """Tokens that each layer has of prompts of these lengths, and the layer that there is not
        behind the last one."""
        recent = self.num_recent(length)
        found = [np.asarray(length, np.int32) - recent]
        for share in self.shares(num_layers):
            cut = (found[-1] * share).astype(np.int32)
            found.append(np.where(cut > self.least, cut, found[-1]).astype(np.int32))
        return np.stack(found) + recent

    def plan(self, num_layers: int, width: int) -> Plan:
        """How prompts of at most `width` tokens run."""
        return _plan(self, num_layers, width)

    def query_weight(
        self, count: Int32[Array, ""], recent: Int32[Array, ""], num_rows: int
    ) -> Float[Array, " T"]:
        """What the attention of each of a layer's tokens counts; 0 of all but the newest.

        Args:
            count: tokens that the layer has; what is behind them is padding.
            recent: the newest of them, so many, count: from 1 up to `newest_weight`.
            num_rows: T (static).
        """
        index = jnp.arange(num_rows, dtype=jnp.int32)
        number = index - (count - recent)
        steps = jnp.maximum(recent - 1, 1).astype(jnp.float32)
        weight = 1 + (self.newest_weight - 1) * number.astype(jnp.float32) / steps
        return jnp.where((number >= 0) & (index < count), weight, 0)

    def stay(
        self,
        received: Float[Array, " T"],
        count: Int32[Array, ""],
        recent: Int32[Array, ""],
        after: Int32[Array, ""],
    ) -> Int32[Array, " T"]:
        """Which tokens go on to the next layer, as ascending indices.

        Args:
            received: attention that each received.
            count: tokens that the layer has.
            recent: the newest, which stay.
            after: tokens that the next layer has. Of equal ones the older stay. Indices behind
                these mean nothing, and are in range.
        """
        index = jnp.arange(len(received), dtype=jnp.int32)
        stays = (index < self.sinks) | (index >= count - recent)
        value = jnp.where(stays, jnp.inf, received)
        value = jnp.where(index < count, value, -jnp.inf)
        order = jnp.argsort(-value, stable=True)
        kept = jnp.zeros(len(received), bool).at[order].set(index < after)
        return jnp.argsort(~kept, stable=True).astype(jnp.int32)


@functools.lru_cache(maxsize=64)
def _plan(pruner: Pruner, num_layers: int, width: int) -> Plan:
    lengths = np.arange(width + 1, dtype=np.int32)
    rows, recent = pruner.rows(num_layers, lengths), pruner.num_recent(lengths)
    # A longer prompt may have fewer rows, where a shorter one's context is too short to be cut.
    most = np.minimum(-(-rows.max(axis=1) // GRAIN) * GRAIN, width)
    stages = [Stage(0, width)]
    for layer in range(1, num_layers):
        if most[layer] <= NARROWER * stages[-1].width:
            stages.append(Stage(layer, int(most[layer])))
    return Plan(rows, recent, tuple(stages))
