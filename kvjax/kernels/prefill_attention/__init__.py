"""Attention of a prompt's queries: causal among themselves, whole over what a cache holds."""

import dataclasses
import math
from typing import no_type_check

import jax
from jaxtyping import Array, Float, Int32

from kvjax.kernels.prefill_attention import reference


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
    """KVs of one layer of one sequence that come before every query.

    Gathered from the pool by the caller: a loop that reads the pool itself would make XLA copy it
    before a later step can write to it in place.
    """

    k: Float[Array, "H P d"]
    v: Float[Array, "H P d"]
    length: Int32[Array, " H"]
    """How many of them each head holds; the rest may be anything."""


def prefill_attention(
    q: Float[Array, "T Hr d"],
    k: Float[Array, "T H d"],
    v: Float[Array, "T H d"],
    *,
    prefix: Prefix | None = None,
    scale: float | None = None,
) -> Float[Array, "T Hr d"]:
    """Causal attention of a prompt in memory linear in its length.

    Args:
        q: queries of T consecutive tokens; query head i reads KV head i // r.
        k: keys of the same tokens.
        v: values of the same tokens.
        prefix: what the cache holds of the tokens before; each head has its own length.
        scale: factor of the logits, 1/√d by default.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    part = reference.causal(q, k, v, scale)
    if prefix is not None:
        before = reference.over_prefix(q, prefix.k, prefix.v, prefix.length, scale)
        part = reference.merged(part, before)
    return reference.normalised(part, v.dtype)
