"""Our own: KV-Compress's global block budget with a sharper look at the prompt's end.

The last 4 queries, squared attention, max-pooled over 17 keys, and the maximum over the query heads
of a group where KV-Compress sums: a small window knows the question, a wide pool keeps what is read
as one thing (a number of one token per digit), the maximum keeps what any one head needs.
"""

from kvjax.cache.methods.kv_compress import KVCompress
from kvjax.cache.policy.method import Method

METHODS = (
    Method(
        "wide-pool",
        "squared attention of the last 4 queries, pooled widely, global block budget",
        KVCompress(window=4, pool=17, group="max"),
        protected=4,
    ),
)
