"""SpecKV (Galim et al. 2025): the attention of the prompt's last queries, and of an answer's draft.

A draft says what may come behind the prompt; the prompt runs with it. A KV counts the largest
attention that any of the prompt's last 33 queries or of the draft's pays to it, over the query
heads of its group (softmax over all keys), max-pooled over 7 keys before these; the 33 stay, and of
the others the best of each head, as many in all heads. The authors' window is 32 queries and one
for the prompt's last token, which they run again.

Theirs drafts with a smaller model of the family, as many tokens as may be generated. Here it is
32 tokens at most, up to the end that the draft comes to, greedily: enough for the short answers of
LongBench, and an answer may be allowed to be thousands long. `LLM(draft=…)` takes the smaller
model; without one the model drafts for itself over its whole prompt, which costs so many decode
steps and a copy of the prompt, and is no longer an approximation but what it will say with the full
cache. KVs of the window and of decode steps have metric 0.

`speckv` computes all of the prompt's attention. Theirs prefills prompts of more than 4,096 tokens
sparsely, and so does `speckv-sparse`: in every layer these queries score first, with attention to
all keys; then every query attends, in each KV head, to the 2,048 keys that score highest, and to
2,048 keys before its own block of 64 queries. What scores is the state that such a prefill leaves
of the layers below. By the authors' code these slashes are fixed, and a KV head's verticals
are its group's. They count the draft's tokens, too, where they ask whether a prompt is that long,
and run the prompt's last token again behind what was kept. `speckv-sparse-256` is the same with
256 and 256, for prompts of more than 512 tokens; these numbers are ours. A model that drafts for
itself prefills the prompt in full first, which saves nothing.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from kvjax.cache.policy.allocate import ByLayer
from kvjax.cache.policy.attention import pooled
from kvjax.cache.policy.checks import check_a, check_attention, check_wholes
from kvjax.cache.policy.method import Method
from kvjax.cache.policy.probe import AtHand, Probe, Probed
from kvjax.cache.policy.score import Artefacts, LayerView, Scores
from kvjax.cache.policy.sparse import SparsePrefill

MOST_DRAFTED = 2**9
"""Tokens at most that may be drafted; the longest answers of LongBench have as many."""


@dataclasses.dataclass(frozen=True)
class Lookahead(Probed):
    """The largest attention of a window's queries and a draft's, pooled over the keys before."""

    window: int = 33
    """Last queries of the prompt that count."""
    drafted: int = 32
    """Tokens at most that are drafted; 0 for none."""
    pool: int = 7
    """Keys whose maximum counts."""

    def __post_init__(self):
        super().__post_init__()
        check_attention(self)
        check_wholes(self, 0, MOST_DRAFTED, "drafted")

    def with_window(self, window: int) -> "Lookahead":
        """The same with another observation window."""
        return dataclasses.replace(self, window=window)

    @property
    def drafts(self) -> int:
        return self.drafted

    def probes(self, prompt: np.ndarray, at_hand: AtHand) -> list[Probe]:
        last = np.asarray(prompt[-self.window :], np.int32)
        return [Probe(last, overlap=len(last), drafted=self.drafted)]

    def score(self, view: LayerView, artefacts: Artefacts) -> Scores:
        most = super().score(view, artefacts).metric
        joined = pooled(view, most[:, None], self.pool, before=view.start)[:, 0]
        at = view.key_position
        return Scores(jnp.where((at >= 0) & (at < view.start), joined, 0.0))


AUTHORS = SparsePrefill()
"""With the numbers of the authors' configurations."""


@dataclasses.dataclass(frozen=True)
class SparseLookahead(Lookahead):
    """The same of a prompt whose queries see the highest scoring keys and those next to them."""

    sparse: SparsePrefill = AUTHORS
    """Which keys they see, of long prompts."""

    def __post_init__(self):
        super().__post_init__()
        check_a("sparse", self.sparse, SparsePrefill)


_LOOKS = "attention of the last 33 queries and of a drafted answer, max-pooled over 7 keys"
METHODS = (
    Method("speckv", _LOOKS, Lookahead(), allocator=ByLayer(), protected=33, evidence="C"),
    Method(
        "speckv-sparse",
        f"{_LOOKS}; the best 2,048 and the nearest 2,048 are all that a prompt's queries see",
        SparseLookahead(),
        allocator=ByLayer(),
        protected=33,
        evidence="C",
    ),
    Method(
        "speckv-sparse-256",
        f"{_LOOKS}; the best 256 and the nearest 256 are all that a prompt's queries see",
        SparseLookahead(sparse=SparsePrefill(verticals=256, local=256)),
        allocator=ByLayer(),
        protected=33,
    ),
)
