"""KVCrush (Jha et al. 2025): a quarter of any method's budget for KVs that stand for dropped ones.

Names wrap a base method: `kvcrush:snapkv`. Options go between, in any order: an anchor (`random`
by default, `mean`, `alternating`, `zeros`, `ones`), a unit (`chunk8`, `page32`, up to 4096), the
share of representatives in percent (25 by default) and `openvino` for the rule of OpenVINO's code,
as in `kvcrush-mean-chunk8-50:h2o`. `kmeans:BASE` clusters the keys instead, the paper's baseline.

The paper has one bit per head and token, whether the head's own choice would keep the token; and
one random member per bucket. See `kvjax.cache.representatives` for what it leaves open. OpenVINO
adds its representatives to the budget; here they are part of it.
"""

import dataclasses
import re

from kvjax.cache.methods import h2o, key_norm, kv_compress, paged_h2o, pyramidkv, snapkv
from kvjax.cache.methods.base import MOST_UNIT, Method, Representatives
from kvjax.errors import UserError

ANCHORS = ("random", "mean", "alternating", "zeros", "ones")


def parse_wrapper(name: str) -> Representatives | None:
    """The representatives that a wrapper's name stands for; None if it is no such name."""
    kind, *options = name.split("-")
    if kind not in ("kvcrush", "kmeans"):
        return None
    chosen = Representatives(kind="kvcrush" if kind == "kvcrush" else "k-means")
    for option in options:
        number = re.fullmatch(r"(chunk|page|)([1-9]\d{0,3})", option)
        if number and not number[1] and int(number[2]) < 100:
            chosen = dataclasses.replace(chosen, share=int(number[2]) / 100)
        elif kind == "kmeans":
            return None
        elif number and number[1] and int(number[2]) <= MOST_UNIT:
            chosen = dataclasses.replace(chosen, unit=int(number[2]))
        elif option == "openvino":
            chosen = dataclasses.replace(chosen, mode="openvino")
        elif option in ANCHORS:
            chosen = dataclasses.replace(chosen, anchor=option)  # type: ignore[arg-type]
        else:
            return None
    return chosen


def wrap(name: str, base: Method, chosen: Representatives) -> Method:
    """`base` with part of its budget for representatives.

    Raises:
        UserError: the base never evicts, has representatives already, or cannot be shared by the
            heads of a layer where that is needed.
    """
    if not base.compresses or base.representatives is not None:
        raise UserError(f"base {base.name}: wanted one that evicts by itself")
    what = "k-means of the keys" if chosen.kind == "k-means" else f"{chosen.anchor} anchor"
    return dataclasses.replace(
        base,
        name=name,
        summary=f"{base.summary}; {100 * chosen.share:.0f} % for representatives ({what})",
        representatives=chosen,
        shared=base.shared or chosen.mode == "openvino",
        evidence="P" if chosen.mode == "paper" else "C",
    )


_BASES = {
    method.name: method
    for module in (h2o, snapkv, pyramidkv, paged_h2o, kv_compress, key_norm)
    for method in module.METHODS
}


def _named(name: str) -> Method:
    wrapper, base = name.split(":")
    chosen = parse_wrapper(wrapper)
    assert chosen is not None
    return wrap(name, _BASES[base], chosen)


METHODS = tuple(
    _named(name)
    for name in (
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
)
