"""Codecs by the names that options have for them."""

import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from kvjax.cache.store.affine import Affine
from kvjax.cache.store.codec import Codec, Pair, Plain, Refined, Rounded, Windowed
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
        Refined(codes=Integers(bits=4)),
        Refined(codes=Integers(bits=2)),
    )
}
"""Those that are no dtypes."""
OF_PROMPTS: Mapping[str, str] = {
    "kcvt4": "affine4",
    "kcvt3": "int3.6",
    "kivi2": "affine2",
    "gear4": "int4",
    "gear2": "int2",
    "mikv8": "int3.6",
    "mikv4": "int2",
    "zipcache": "int3.6",
    "kvquant4": "int4",
    "kvquant3": "int3.6",
    "kvquant2": "int2",
    "kvquant4c": "int4",
    "kvquant3c": "int3.6",
    "kvquant2c": "int2",
    "rotatekv4": "int4",
    "rotatekv2": "int2",
    "minicache": "int8",
    "xkv": "int2",
    "xquant4": "int4",
    "xquant3": "int3.6",
    "xquant2": "int2",
    "xquantcl4": "int4",
    "xquantcl3": "int3.6",
    "xquantcl2": "int2",
}
"""What stores whole prompts and is evaluated only (`kvjax.eval.prompt_codecs`), and the codec of a
pool that is nearest in kind and bytes."""


def as_codec(asked: Codec | jax.typing.DTypeLike | None, computed: jax.typing.DTypeLike) -> Codec:
    """The codec of a pool: the one that is given, or the one that stores rows in a dtype.

    Args:
        asked: a codec or its name, with "w" and a number for a window of so many newest KVs
            (`Windowed`), or the dtype to store; None stores what is computed.
        computed: dtype of the model's keys and values, and of what is decoded.

    Raises:
        UserError: no codec stores that, it cannot have such a window, or it stores whole prompts.
    """
    dtype = jnp.dtype(computed).name
    if isinstance(asked, str) and asked in OF_PROMPTS:
        raise UserError(
            f"cache_dtype {asked} stores a prompt as a whole, which only kvjax evaluate can look "
            f"at: give {OF_PROMPTS[asked]}, the nearest that a cache can be of"
        )
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
