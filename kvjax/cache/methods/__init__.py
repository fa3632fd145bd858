"""Every compression method, by name. A new one is a file here and a line in `_MODULES`."""

import difflib

from kvjax.cache.methods import full, kv_compress
from kvjax.cache.methods.base import Method, Observation
from kvjax.errors import UserError

_MODULES = (full, kv_compress)

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


__all__ = ["METHODS", "Method", "Observation", "get_method"]
