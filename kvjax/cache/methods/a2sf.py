"""A2SF (Jo and Shin 2024): accumulated attention with a forgetting factor.

Every step multiplies the scores by α before it adds its own attention, so a query n steps ago
counts α^n; the newest 16 tokens stay. α is 0.95 in the authors' current example and 0.2 in their
older code; the paper's values per model are unverified. Decoding goes on in the same way.
"""

from kvjax.cache.methods.h2o import Accumulated
from kvjax.cache.policy.allocate import ByLayer
from kvjax.cache.policy.method import Method


def _a2sf(name: str, forget: float) -> Method:
    return Method(
        name,
        f"attention received so far, each step forgets {100 * (1 - forget):.0f} %",
        Accumulated(forget=forget, continual=True),
        allocator=ByLayer(),
        protected=16,
        evidence="C",
    )


METHODS = (_a2sf("a2sf", 0.95), _a2sf("a2sf-f20", 0.2))
