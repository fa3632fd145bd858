"""The full cache: nothing is ever evicted. What every other method is measured against."""

from kvjax.cache.policy.method import Method

METHODS = (Method("full", "keeps every KV", scorer=None, query_aware=False),)
