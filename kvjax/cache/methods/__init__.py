"""The compression methods, one file each: formula, defaults and paper.

A new one is a file here and its module in a list of `names.py`. One of your own need not be here:
`CompressionConfig(method=…)` and `compress(…, method)` take any `Method` object. What several
methods share stands in `kvjax.cache.policy`.
"""

from kvjax.cache.methods.k_means import k_means
from kvjax.cache.methods.kvcrush import kv_crush
from kvjax.cache.methods.names import METHODS, get_method
from kvjax.cache.policy.method import Method

__all__ = ["METHODS", "Method", "get_method", "k_means", "kv_crush"]
