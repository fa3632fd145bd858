"""Our own: KV-Compress's global block budget with a sharper look at the prompt's end.

The last 4 queries, squared attention, max-pooled over 17 keys, and the maximum over the query heads
of a group where KV-Compress sums: a small window knows the question, a wide pool keeps what is read
as one thing (a number of one token per digit), the maximum keeps what any one head needs.
`wide-pool-background` adds a little of the squared attention of the whole prompt, not pooled and
from queries at least 10 tokens later, for what the text rather than the question will need, and
multiplies by the norm of the value, what the KV can add to an output. docs/methods.md has the
ablation.
"""

import dataclasses

from kvjax.cache.methods.base import Method, Observation

_SHARP = Method(
    "wide-pool",
    "squared attention of the last 4 queries, pooled widely, global block budget",
    Observation(window=4, power=2, pool=17, group="max"),
    protected=4,
)

METHODS = (
    _SHARP,
    dataclasses.replace(
        _SHARP,
        name="wide-pool-background",
        summary="wide-pool and a little of all queries, times value norms, global block budget",
        observation=Observation(
            window=4, power=2, pool=17, group="max", background=0.03, value_norm=True
        ),
        protected=8,
    ),
)
