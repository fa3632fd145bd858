"""Every compression method, by name. A new one is a file here and a line in `_MODULES`."""

import difflib

from kvjax.cache.methods import (
    a2sf,
    adakv,
    full,
    h2o,
    key_norm,
    kv_compress,
    kvcrush,
    lazyeviction,
    paged_h2o,
    pyramidkv,
    random,
    scissorhands,
    snapkv,
    streaming_llm,
    tova,
    wide_pool,
)
from kvjax.cache.methods.base import Allocation, Method, Observation, Representatives
from kvjax.checks import SHOWN, shown
from kvjax.errors import UserError

_MODULES = (
    full,
    random,
    streaming_llm,
    h2o,
    snapkv,
    pyramidkv,
    adakv,
    kv_compress,
    wide_pool,
    paged_h2o,
    kvcrush,
    key_norm,
    tova,
    a2sf,
    scissorhands,
    lazyeviction,
)

METHODS: dict[str, Method] = {
    method.name: method for module in _MODULES for method in module.METHODS
}


def get_method(name: str) -> Method:
    """The method of that name, or a wrapped one as in `kvcrush-mean:snapkv`.

    Raises:
        UserError: there is none; names the nearest.
    """
    if name in METHODS:
        return METHODS[name]
    wrapper, colon, base = name.partition(":")
    chosen = kvcrush.parse_wrapper(wrapper) if colon else None
    if chosen is None or base not in METHODS:
        near = difflib.get_close_matches(name[:SHOWN], METHODS, n=3, cutoff=0.3) or list(METHODS)
        raise UserError(f"no method {shown(name)}; did you mean {' or '.join(near)}?")
    try:
        return kvcrush.wrap(name, METHODS[base], chosen)
    except UserError as error:
        raise UserError(f"method {shown(name)}: {error}") from None


__all__ = ["METHODS", "Allocation", "Method", "Observation", "Representatives", "get_method"]
