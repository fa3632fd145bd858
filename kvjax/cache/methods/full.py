"""The full cache: nothing is ever evicted. What every other method is measured against."""

from kvjax.cache.methods.base import Method

METHODS = (Method("full", "keeps every KV", observation=None, runs="both", query_aware=False),)
