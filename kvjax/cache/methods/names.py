"""Every method by its name, and names of wrapped ones.

A name may wrap another: `kvcrush:snapkv`. Options go between, in any order: an anchor (`random` by
default, `mean`, `alternating`, `zeros`, `ones`), a unit (`chunk8`, `page32`, up to 4096), the share
of representatives in percent (25 by default) and `openvino` for the rule of OpenVINO's code, as in
`kvcrush-mean-chunk8-50:h2o`. `kmeans:BASE` clusters the keys instead; `matched:BASE` fits what
stays to attention as it was; `pyramidinfer:BASE` prunes while it prefills, with the share that
the last layers pass on in percent as in `pyramidinfer-80:BASE`.
"""

import difflib
import re
from collections.abc import Mapping
from typing import Any, get_args

from kvjax.cache.methods import (
    a2sf,
    adakv,
    compactor,
    compresskv,
    duo_heads,
    ems,
    epicache,
    expected_attention,
    fastgen,
    full,
    h2o,
    key_norm,
    keydiff,
    kv_compress,
    kvmerger,
    kvzap,
    kvzip,
    lazyeviction,
    paged_h2o,
    predicted_reads,
    pyramidinfer,
    pyramidkv,
    pyramidkv_ablations,
    r_kv,
    random,
    razor_attention,
    scissorhands,
    shared_reads,
    snapkv,
    speckv,
    streaming_llm,
    tova,
    triattention,
    wide_pool,
    windowkv,
)
from kvjax.cache.methods.k_means import k_means
from kvjax.cache.methods.kvcrush import Anchor, kv_crush
from kvjax.cache.methods.matched import matched
from kvjax.cache.policy.checks import MOST_UNIT
from kvjax.cache.policy.method import Method
from kvjax.checks import SHOWN, shown
from kvjax.errors import UserError

_BEFORE = (full, random, streaming_llm, h2o, snapkv, pyramidkv, adakv, kv_compress, wide_pool,
           predicted_reads, shared_reads, paged_h2o)  # fmt: skip
_AFTER = (key_norm, tova, a2sf, scissorhands, lazyeviction, keydiff, expected_attention,
          compactor, kvzip, kvzap, duo_heads, r_kv, triattention, pyramidkv_ablations,
          fastgen, razor_attention, kvmerger, ems, windowkv, compresskv, speckv, epicache,
          pyramidinfer)  # fmt: skip
_BASES = {m.name: m for module in (*_BEFORE, *_AFTER) for m in module.METHODS}
_WRAPPERS = {
    "kvcrush": kv_crush,
    "kmeans": k_means,
    "matched": matched,
    "pyramidinfer": pyramidinfer.pruned,
}
WRAPPED = (
    "matched:predicted-reads-blind",
    "matched:kv-compress",
    "kvcrush:h2o",
    "kvcrush-mean:h2o",
    "kvcrush-alternating:h2o",
    "kvcrush:snapkv",
    "kvcrush-chunk8:snapkv",
    "kvcrush:pyramidkv-exact",
    "kvcrush-page32:paged-h2o",
    "kvcrush-openvino-page32:paged-h2o",
    "kvcrush-mean:kv-compress",
    "kvcrush-alternating-75:key-norm",
    "kmeans:snapkv",
)
"""Combinations that the papers measure, or that we do."""


def _settings(wrapper: str) -> dict[str, Any] | None:
    """The settings that a wrapper's name stands for; None if it is no such name."""
    kind, *options = wrapper.split("-")
    if kind not in _WRAPPERS:
        return None
    settings: dict[str, Any] = {}
    for option in options:
        if kind == "matched":
            return None
        number = re.fullmatch(r"(chunk|page|)([1-9]\d{0,3})", option)
        if number and not number[1] and int(number[2]) < 100:
            settings["share"] = int(number[2]) / 100
        elif kind in ("kmeans", "pyramidinfer"):
            return None
        elif number and number[1] and int(number[2]) <= MOST_UNIT:
            settings["compared"] = int(number[2])
        elif option == "openvino":
            settings["mode"] = "openvino"
        elif option in get_args(Anchor):
            settings["anchor"] = option
        else:
            return None
    return settings


def _named(name: str, bases: Mapping[str, Method]) -> Method | None:
    """What a name with a wrapper stands for; None if it is no such name."""
    wrapper, _, base = name.partition(":")
    settings = _settings(wrapper)
    if settings is None or base not in bases:
        return None
    return _WRAPPERS[wrapper.split("-")[0]](bases[base], name, **settings)


def _all() -> dict[str, Method]:
    wrapped = {name: _named(name, _BASES) for name in WRAPPED}
    ordered = [m for module in _BEFORE for m in module.METHODS]
    ordered += [method for method in wrapped.values() if method is not None]
    ordered += [m for module in _AFTER for m in module.METHODS]
    return {method.name: method for method in ordered}


METHODS: dict[str, Method] = _all()


def get_method(name: str) -> Method:
    """The method of that name, or a wrapped one as in `kvcrush-mean:snapkv`.

    Raises:
        UserError: there is none; names the nearest.
    """
    if name in METHODS:
        return METHODS[name]
    try:
        method = _named(name, METHODS)
    except UserError as error:
        raise UserError(f"method {shown(name)}: {error}") from None
    if method is None:
        near = difflib.get_close_matches(name[:SHOWN], METHODS, n=3, cutoff=0.3) or list(METHODS)
        raise UserError(f"no method {shown(name)}; did you mean {' or '.join(near)}?")
    return method
