"""Probes: what runs behind a prompt to score its KVs, and is thrown away.

After prefill, and before anything goes, tokens of the method's choice run behind the whole prompt;
a KV counts the largest attention that one of their queries pays to it, over the query heads of its
group. `kvjax.engine.probe` runs them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from kvjax.cache.policy.checks import check_wholes
from kvjax.cache.policy.score import Artefacts, LayerView, Scorer, Scores
from kvjax.checks import INT32_MAX

AT_ONCE = 256
"""Queries whose attention to all keys stands in memory."""


@dataclasses.dataclass(frozen=True, eq=False)
class Probe:
    """Tokens that run behind a prompt."""

    tokens: np.ndarray
    first: int = 0
    """How many of them do not count, from the first on."""
    overlap: int = 0
    """How many of them are the prompt's own last ones: they run where they stand in it, and what
    is scored are the KVs before them."""
    drafted: int = 0
    """Tokens at most that a draft says behind these."""

    def __len__(self) -> int:
        return len(self.tokens) + self.drafted

    def saying(self, said: Sequence[int]) -> "Probe":
        """The same with what a draft said."""
        tokens = np.concatenate([self.tokens, np.asarray(said[: self.drafted], np.int32)])
        return dataclasses.replace(self, tokens=tokens, drafted=0)


class AtHand:
    """What there is to make probes of, beside the prompt."""

    size: int
    """Tokens that run at a time."""

    @property
    def request(self) -> Sequence[int]:
        """Tokens that ask the model to repeat what stands before."""
        raise NotImplementedError

    def embedded(self, tokens: np.ndarray) -> np.ndarray:
        """The model's embedding [T, D] of each token."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Probed(Scorer):
    """The largest attention that a chunk's queries from `first` on pay to each key before it.

    Subclasses say what runs.
    """

    first: int = 0
    """Queries of the chunk that do not count; a probe says it."""

    def __post_init__(self):
        check_wholes(self, 0, INT32_MAX, "first")

    probed: ClassVar[bool] = True
    sees_itself: ClassVar[bool] = True
    """Whether a query's attention is what it pays to all keys before it, the chunk's among them;
    otherwise what it would pay to the keys before the chunk alone."""

    def probes(self, prompt: np.ndarray, at_hand: AtHand) -> list[Probe]:
        """What runs behind a prompt, one after the other; of several the largest attention counts.

        How long they are follows from the prompt's length alone.
        """
        raise NotImplementedError

    def behind(self, probe: Probe) -> Any:
        """The same, of a probe's queries."""
        return dataclasses.replace(self, first=probe.first)

    @property
    def drafts(self) -> int:
        """Tokens at most that a draft says for it."""
        return 0

    @property
    def needs_log_sum(self) -> bool:
        return True

    def query_factor(self, view: LayerView) -> Float[Array, " T"] | None:
        """What the attention of each query is divided by; None for nothing. A query of 0 does not
        count."""
        return None

    def key_factor(self, view: LayerView, artefacts: Artefacts) -> Float[Array, "H r P"] | None:
        """What attention to each key of each query head is multiplied by, > 0; None for nothing.
        P keys are those before the chunk."""
        return None

    def score(self, view: LayerView, artefacts: Artefacts) -> Scores:
        assert view.log_sum is not None
        num_tokens, d = view.q.shape[0], view.q.shape[2]
        # Padded so that parts of one size cover all queries.
        short = -num_tokens % AT_ONCE
        token = jnp.arange(num_tokens + short, dtype=jnp.int32)
        counts = (token >= self.first) & (token < view.length)
        q = jnp.pad(view.q, ((0, short), (0, 0), (0, 0))).astype(jnp.float32)
        q = q.reshape(-1, AT_ONCE, view.num_heads, q.shape[1] // view.num_heads, d)
        log_sum = jnp.pad(view.log_sum, ((0, 0), (0, short)))
        log_sum = log_sum.reshape(view.num_heads, -1, q.shape[0], AT_ONCE)
        bias = jnp.zeros(num_tokens + short)
        if (divided := self.query_factor(view)) is not None:
            divided = jnp.pad(divided, (0, short))
            counts = counts & (divided > 0)
            bias = -jnp.log(jnp.where(counts, divided, 1))
        bias = jnp.where(counts, bias, -jnp.inf).reshape(q.shape[0], AT_ONCE)
        # Keys of the chunk itself are not what is scored.
        held = view.k.shape[0] - num_tokens
        keys = view.k[:held].astype(jnp.float32)
        at = view.key_position[:, :held]
        there = (at >= 0) & (at < view.start)

        def largest(i, most):
            logits = jnp.einsum("qhrd,phd->hrqp", q[i], keys) * d**-0.5
            together = log_sum[:, :, i, :, None]
            if not self.sees_itself:
                seen = jnp.where(there[:, None, None], logits, -1e30)
                together = jax.nn.logsumexp(seen, axis=-1, keepdims=True)
            share = logits - together + bias[i][:, None]
            return jnp.maximum(most, jnp.max(share, axis=2))

        none = jnp.full((*log_sum.shape[:2], held), -jnp.inf)
        most = lax.fori_loop(0, q.shape[0], largest, none)
        if (weight := self.key_factor(view, artefacts)) is not None:
            most = most + jnp.log(weight)
        metric = jnp.exp(jnp.max(most, axis=1))
        metric = jnp.where(there, metric, 0.0)
        return Scores(jnp.pad(metric, ((0, 0), (0, num_tokens))))
