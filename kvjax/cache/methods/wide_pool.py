"""Our own: KV-Compress's global block budget with a sharper look at the prompt's end.

`wide-pool`: the last 4 queries, squared attention, max-pooled over 17 keys, and the maximum over
the query heads of a group where KV-Compress sums: a small window knows the question, a wide pool
keeps what is read as one thing (a number of one token per digit), the maximum keeps what any one
head needs.

`shared-reads`, the default: the last 4 queries say which tokens any head of any layer reads, and
all heads keep the 10 that are read most; the rest of a head's budget goes by its own attention from
the last 8 queries and by a background, the mean squared attention from 256 queries, for what the
text rather than the question will need. Where no head looks anything up, no token is shared.
docs/methods.md has the ablation.
"""

from kvjax.cache.methods.base import Method, Observation, Reads

METHODS = (
    Method(
        "wide-pool",
        "squared attention of the last 4 queries, pooled widely, global block budget",
        Observation(window=4, power=2, pool=17, group="max"),
        protected=4,
    ),
    Method(
        "shared-reads",
        "what any head reads at the end, in all heads; own window and background, global budget",
        Observation(window=8, power=2, pool=1, query_decay=0.8, background=60, reads=Reads()),
        protected=2,
    ),
)
