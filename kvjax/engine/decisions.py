"""What the scheduler decides and the engine carries out."""

import dataclasses
from collections.abc import Hashable

from kvjax.engine.prefixes import Prefix
from kvjax.engine.request import FinishReason, Request


@dataclasses.dataclass(frozen=True)
class Remove:
    """Empty the slots of requests that have ended."""

    slots: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Begin:
    """Begin with a request's prompt; its `job` is to be noted."""

    request: Request


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Run the next tokens of the prompt that is being prefilled."""

    request: Request
    size: int
    compress: bool
    """Whether its slot is compressed afterwards, if the chunk fitted into the pool."""


@dataclasses.dataclass(frozen=True)
class Retain:
    """Retain what is left of the tokens that have run, for others that begin with them, and go on
    from there; the `job` that goes on is to be noted."""

    request: Request


@dataclasses.dataclass(frozen=True)
class Forget:
    """Give back the row of a prefix that was retained."""

    prefix: Prefix


@dataclasses.dataclass(frozen=True)
class Insert:
    """Put the prompt that is through into its slot, and let it decode."""

    request: Request


@dataclasses.dataclass(frozen=True)
class Compress:
    """Compress running requests to their budgets."""

    requests: tuple[Request, ...]


@dataclasses.dataclass(frozen=True)
class Decode:
    """Decode up to so many tokens of each of some requests."""

    requests: tuple[Request, ...]
    steps: int
    rule: Hashable
    """What the steps do to metrics; it is one for all of the requests, or nothing."""


@dataclasses.dataclass(frozen=True)
class Preempt:
    """Free what a request holds; it comes again from the queue with all its tokens."""

    request: Request


@dataclasses.dataclass(frozen=True)
class End:
    """End a request."""

    request: Request
    reason: FinishReason


Decision = Remove | Begin | Chunk | Retain | Forget | Insert | Compress | Decode | Preempt | End
