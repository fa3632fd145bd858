"""A prompt on its way through the model."""

import dataclasses

import jax
import numpy as np

from kvjax.cache.policy import Scores, SparsePrefill
from kvjax.cache.policy.probe import Probe
from kvjax.engine import prefill
from kvjax.engine.request import Request


@dataclasses.dataclass(eq=False)
class PromptJob:
    """A prompt on its way through the model, chunk by chunk."""

    request: Request
    tokens: np.ndarray
    chunks: list[int]
    in_pool: bool
    """Too long for the scratch: its chunks go to its slot at once, compressed in between."""
    done: int = 0
    start: int = 0
    """Tokens before the first chunk: its slot held them when it began."""
    retains: bool = False
    """Whether what has run is retained after the last chunk."""
    prompt: prefill.PromptKV | None = None
    """The scratch. It is let go with the prompt in its slot: the next one may need the memory."""
    scores: Scores | None = None
    """What it was scored in there, kept for who waits for that."""
    logits: jax.Array | None = None
    """After the last chunk."""
    queries: jax.Array | None = None
    """Of the last chunk in the pool, [L, Hr, n, d]: those that its method's merger asks for."""
    fits: jax.Array | None = None
    """Whether the pool had room: for the last chunk with `in_pool`, else for what it keeps, once it
    is there."""
    freed: jax.Array | int = 0
    """Blocks that it would have taken whole and did not."""
    shortfall: jax.Array | int = 0
    """Blocks over its budget that could not be evicted."""
    probes: list[Probe] = dataclasses.field(default_factory=list)
    """What is still to run behind the prompt, for a method that scores it so."""

    @property
    def probing(self) -> bool:
        """Whether all chunks have run and a probe is next."""
        return self.done == len(self.tokens) and bool(self.probes)

    @property
    def sparse(self) -> SparsePrefill | None:
        """Which keys its queries see; None for all."""
        found = self.request.method.sparse
        return found if found is not None and found.applies(len(self.tokens)) else None

    @property
    def budget(self) -> int | None:
        """Blocks that its tokens keep where they are retained."""
        return self.request.budget_at(len(self.tokens))

    @property
    def next_chunk(self) -> int:
        """Tokens of the next chunk, or of the next probe; 0 once all have run."""
        if self.probing:
            return len(self.probes[0])
        sums = np.cumsum([self.start, *self.chunks])
        at = int(np.searchsorted(sums, self.done))
        return self.chunks[at] if at < len(self.chunks) else 0
