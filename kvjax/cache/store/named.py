"""Codecs by the names that options have for them."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from kvjax.cache.store.affine import Affine
from kvjax.cache.store.codec import Codec, Pair, Plain, Rounded
from kvjax.cache.store.pruned import Pruned
from kvjax.cache.store.scaled import Companded, Floats, Integers
from kvjax.checks import shown
from kvjax.errors import UserError
from kvjax.kernels.paged_attention.spec import DTYPES

NAMED: Mapping[str, Codec] = {
    codec.name: codec
    for codec in (
        Integers(),
        Integers(bits=5),
        Integers(bits=4),
        Companded(),
        Integers(bits=2),
        Floats(),
        Floats(kind="e5m2"),
        Pair(keys=Integers(), values=Integers(bits=4)),
        Pair(keys=Integers(bits=5), values=Integers(bits=4)),
        Pair(keys=Integers(bits=5), values=Companded()),
        Affine(),
        Affine(bits=2),
        Pruned(),
        Pruned(share=0.7),
    )
}
"""Those that are no dtypes."""


def as_codec(asked: Codec | jax.typing.DTypeLike | None, computed: jax.typing.DTypeLike) -> Codec:
    """The codec of a pool: the one that is given, or the one that stores rows in a dtype.

    Args:
        asked: a codec, or the dtype to store; None stores what is computed.
        computed: dtype of the model's keys and values, and of what is decoded.

    Raises:
        UserError: no codec stores that.
    """
    dtype = jnp.dtype(computed).name
    if isinstance(asked, str):
        asked = NAMED.get(asked, asked)
    if isinstance(asked, Codec):
        return asked.decoding_to(dtype)
    try:
        stored = dtype if asked is None else jnp.dtype(asked).name
    except TypeError:
        stored = None
    if stored not in DTYPES:
        names = ", ".join((*DTYPES, *NAMED))
        raise UserError(f"cache_dtype {shown(asked)}: give one of {names}, or a codec")
    return Plain(dtype) if stored == dtype else Rounded(dtype, stored)
