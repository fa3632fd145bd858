"""Codecs by the names that options have for them."""

import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from kvjax.cache.store.affine import Affine
from kvjax.cache.store.codec import Codec, Pair, Plain, Rounded, Windowed
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
        asked: a codec or its name, with "w" and a number for a window of so many newest KVs
            (`Windowed`), or the dtype to store; None stores what is computed.
        computed: dtype of the model's keys and values, and of what is decoded.

    Raises:
        UserError: no codec stores that, or it cannot have such a window.
    """
    dtype = jnp.dtype(computed).name
    if isinstance(asked, str):
        asked = NAMED.get(asked, asked)
    if isinstance(asked, str) and (windowed := re.fullmatch("(.+)w(-?[0-9]{1,9})", asked)):
        codes, size = windowed.groups()
        if codes in NAMED or codes in DTYPES:
            codes = NAMED[codes] if codes in NAMED else Plain(codes)
            asked = Windowed(dtype, codes, int(size))
    if isinstance(asked, Codec):
        return asked.decoding_to(dtype)
    try:
        stored = dtype if asked is None else jnp.dtype(asked).name
    except TypeError:
        stored = None
    if stored not in DTYPES:
        names = ", ".join((*DTYPES, *NAMED))
        raise UserError(
            f"cache_dtype {shown(asked)}: give one of {names}, or one with a window of its newest "
            "KVs as they are, as int4w16, or a codec"
        )
    return Plain(dtype) if stored == dtype else Rounded(dtype, stored)
