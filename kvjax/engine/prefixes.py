"""Prompts whose compressed caches stay, for those that begin with the same tokens.

All that the host has of it: which tokens lie in which row of the cache. Rows beyond those of
running sequences are for them; what they hold is shared (`kvjax.cache.share`), never copied here.
"""

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Iterator

import jax
import numpy as np

from kvjax.cache import CompressionConfig, Method

LOOK_AHEAD = 64
"""Requests of the queue that are compared with the one that begins."""


@dataclasses.dataclass(eq=False, frozen=True)
class Prefix:
    """Tokens whose KVs, or what is left of them, a row of the cache holds."""

    tokens: np.ndarray
    settings: Hashable
    """What its KVs depend on beside the tokens, the model and the engine."""
    row: int
    logits: jax.Array | None = None
    """After its last token, where a request with no further token can begin with them."""
    ended: bool = False
    """Whether it is what a sequence held when it came to its end."""

    def begins(self, tokens: np.ndarray) -> bool:
        """Whether some tokens continue it."""
        size = len(self.tokens)
        if size > len(tokens) or (size == len(tokens) and self.logits is None):
            return False
        return np.array_equal(self.tokens, tokens[:size])


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a prompt runs where prefixes are shared."""

    match: Prefix | None
    """What it continues."""
    until: int
    """Tokens after which it is compressed and retained, or all of them."""
    retains: bool

    @property
    def start(self) -> int:
        """Tokens that need not run."""
        return 0 if self.match is None else len(self.match.tokens)


class Prefixes:
    """Those that are retained, the least recently used first."""

    def __init__(self, rows: Iterable[int] = (), grain: int = 1):
        self._rows, self._grain = list(rows), grain
        self._held: list[Prefix] = []
        self._continued = set[Prefix]()
        """Ends of sequences that have had a next turn."""

    def __iter__(self) -> Iterator[Prefix]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def full(self) -> bool:
        """Whether one has to go before another is added."""
        return not self._rows

    def oldest(self, besides: Prefix | None = None) -> Prefix | None:
        """The least recently used one."""
        return next((prefix for prefix in self._held if prefix is not besides), None)

    def find(self, settings: Hashable, tokens: np.ndarray) -> Prefix | None:
        """The longest one that some tokens continue."""
        found = [p for p in self._held if p.settings == settings and p.begins(tokens)]
        return max(found, key=lambda p: len(p.tokens), default=None)

    def exactly(self, settings: Hashable, tokens: np.ndarray) -> Prefix | None:
        """That of exactly these tokens."""
        found = (p for p in self._held if p.settings == settings)
        return next((p for p in found if np.array_equal(p.tokens, tokens)), None)

    def plan(
        self,
        settings: Hashable,
        tokens: np.ndarray,
        wanted: int | None = None,
        others: Iterable[np.ndarray] = (),
    ) -> Plan | None:
        """How a prompt runs: it continues what is retained, and is retained itself where others
        are expected to go on.

        That is where its caller says, else where it parts with another prompt that waits, else at
        a multiple of the grain, one grain before its end at least.

        Args:
            settings: those of the request.
            tokens: its tokens.
            wanted: how many of them its caller says that others begin with.
            others: prompts with these settings that wait.
        """
        size, grain = len(tokens), self._grain
        match = self.find(settings, tokens)
        start = 0 if match is None else len(match.tokens)
        until = even = max((size // grain - 1) * grain, 0)
        if match is not None and even - start < 4 * grain:
            until = start
        ahead = itertools.islice(others, LOOK_AHEAD)
        parted = max((common(tokens, other) for other in ahead), default=0)
        if parted > start and parted >= max(grain, even // 2):
            until = parted
        until = until if wanted is None else wanted
        if until > start:
            return Plan(match, until, retains=True)
        return None if match is None else Plan(match, size, retains=False)

    def used(self, prefix: Prefix) -> None:
        """It was used just now."""
        self._held.remove(prefix)
        self._held.append(prefix)

    def continued(self, prefix: Prefix) -> None:
        """A request goes on from it.

        The end of a sequence is the first to go from its next turn on: the end of that one will
        take its place. Where more than one goes on from it, it is used like any other.
        """
        if prefix.ended and prefix not in self._continued:
            self._continued.add(prefix)
            self._held.remove(prefix)
            self._held.insert(0, prefix)
        else:
            self.used(prefix)

    def add(
        self,
        tokens: np.ndarray,
        settings: Hashable,
        logits: jax.Array | None,
        ended: bool = False,
    ) -> Prefix:
        """Give a new one a row."""
        prefix = Prefix(tokens, settings, self._rows.pop(), logits, ended)
        self._held.append(prefix)
        return prefix

    def remove(self, prefix: Prefix) -> None:
        """Its row is empty."""
        self._held.remove(prefix)
        self._continued.discard(prefix)
        self._rows.append(prefix.row)


def sharing_of(share: str, compression: CompressionConfig, method: Method) -> Hashable | None:
    """What the KVs of a prompt depend on, beside its tokens and what an engine has one of.

    Args:
        share: `EngineConfig.share_prefix`.
        compression: the request's settings.
        method: what they lead to.

    Returns:
        None where it shares nothing: a method that prunes the prompt has to have all of it, and so
        has one that probes it, unless it is made for the prompt's beginning; one that looks at the
        question keeps what answers the question it saw, not the next one, and one that scores held
        KVs anew would do so in blocks of others.
    """
    needs_all = method.pruner is not None or (method.probed and method.measured is None)
    if share == "never" or needs_all or method.rescored:
        return None
    if method.query_aware and share != "always":
        return None
    return compression if method.compresses else "whole"


def common(tokens: np.ndarray, others: np.ndarray) -> int:
    """How many tokens two prompts begin with in common."""
    size = min(len(tokens), len(others))
    differs = tokens[:size] != others[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size
