"""Every compression method, by name. A new one is a file here and a line in `_MODULES`."""

import difflib

from kvjax.cache.methods import (
    full,
    h2o,
    key_norm,
    kv_compress,
    pyramidkv,
    random,
    snapkv,
    streaming_llm,
)
from kvjax.cache.methods.base import Allocation, Method, Observation
from kvjax.errors import UserError

_MODULES = (full, random, streaming_llm, h2o, snapkv, pyramidkv, kv_compress, key_norm)

METHODS: dict[str, Method] = {
    method.name: method for module in _MODULES for method in module.METHODS
}


def get_method(name: str) -> Method:
    """The method of that name.

    Raises:
        UserError: there is none; names the nearest.
    """
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=3, cutoff=0.3) or list(METHODS)
        raise UserError(f"no method {name!r}; did you mean {' or '.join(near)}?")
    return METHODS[name]


__all__ = ["METHODS", "Allocation", "Method", "Observation", "get_method"]
