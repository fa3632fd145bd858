"""Matrices of one byte per weight: a number of few bits each, and a scale for every output.

The scales have the dtype of the activations, and weights are divided by what is stored of them, so
that nothing is off by their rounding. Products are those of the activations' dtype, in which the
numbers are exact; each output is scaled once, after its sum. CPUs multiply int8 weights by
integers: activations are rounded to 16 bits there.

Qwix does the same to the operands of products that it intercepts. Ours are reshaped on their way
to one, and rows of embeddings are looked up, neither of which its stored weights can be.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

from kvjax import kernels
from kvjax.kernels import device

MOST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""Largest number of each dtype that weights can have."""
_TILE, _LEAST_ROWS = 1 << 18, 32
"""Weights that a CPU multiplies by at a time, of small matrices down to a quarter of that; and the
least rows of a matrix that are."""
_TILES = 16
"""Of a small matrix: fewer, larger ones take longer."""


def narrowed(
    rows: np.ndarray, dtype: np.dtype, scale_dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Rows [R, in] of weights, one for each output, as numbers [R, in] and scales [R].

    Rows of zeros, and those whose scale would be none in its dtype, become zeros.
    """
    wide = rows.astype(np.float32)
    most = MOST[dtype.name]
    scale = (np.abs(wide).max(1) / np.float32(most)).astype(scale_dtype)
    scale = np.where(scale > 0, scale, np.ones_like(scale))
    wide /= scale.astype(np.float32)[:, None]
    if dtype == np.int8:
        np.rint(wide, out=wide)
    np.clip(wide, -most, most, out=wide)
    return wide.astype(dtype), scale


def scaled_product(
    x: Float[Array, "*n I"], weight: Num[Array, "A B"], scale: Float[Array, " O"], axis: int = 0
) -> Float[Array, "*n O"]:
    """x times a matrix of few bits in f32, whose inputs lie on `axis`."""
    if device.of().platform != "cpu":
        out = _product(x, weight.astype(x.dtype), axis, jnp.float32)
    elif weight.dtype != jnp.int8:
        out = _by_tiles(x, weight, axis)
    elif x.ndim == 2 and kernels.matmul.choice(x, weight, axis=axis).name != "xla":
        out = kernels.matmul(x, weight, axis=axis, dtype=jnp.float32)
    else:
        out = _by_integers(x, weight, axis)
    return out * scale.astype(jnp.float32)


def _product(x: Array, weight: Array, axis: int, dtype: DTypeLike) -> Array:
    dims = (((x.ndim - 1,), (axis,)), ((), ()))
    return jax.lax.dot_general(x, weight, dims, preferred_element_type=dtype)


def _by_integers(x: Array, weight: Array, axis: int) -> Array:
    """The product of int8 weights with x in two int8 digits: what x is rounded to, and 254 times
    what that leaves. It is off by 2⁻¹⁶ of a row's largest |x| at most for each weight of 1.

    Two digits are two rows of one product. CPUs multiply bytes several times as fast as floats, and
    nothing is written in a wider dtype first. A row with an infinity or a NaN becomes NaN or
    infinite, as its factor is.
    """
    wide = x.astype(jnp.float32)
    factor = jnp.max(jnp.abs(wide), -1, keepdims=True) / 127
    factor = jnp.where(factor == 0, 1, factor)
    wide /= factor
    first = jnp.round(wide)
    digits = jnp.stack([first, jnp.round((wide - first) * 254)]).astype(jnp.int8)
    high, low = _product(digits, weight, axis, jnp.int32).astype(jnp.float32)
    return (high + low / 254) * factor


def _by_tiles(x: Array, weight: Array, axis: int) -> Array:
    """The same, a few rows of the matrix at a time.

    XLA for CPUs writes all of a matrix in the wider dtype before it multiplies by it, at a
    multiple of the time that reading it takes; of a tile that stays in a core's cache, at none.
    """
    count, columns = weight.shape
    tile = min(_TILE, max(_TILE // 4, weight.size // _TILES))
    size = min(count, max(_LEAST_ROWS, tile // columns))

    def product(start: Array | int, size: int) -> Array:
        part = jax.lax.dynamic_slice_in_dim(weight, start, size)
        own = x if axis else jax.lax.dynamic_slice_in_dim(x, start, size, x.ndim - 1)
        return _product(own, part.astype(x.dtype), axis, jnp.float32)

    def body(i: Array, out: Array) -> Array:
        found = product(i * size, size)
        if axis:
            return jax.lax.dynamic_update_slice_in_dim(out, found, i * size, out.ndim - 1)
        return out + found

    tiles, rest = divmod(count, size)
    out = jnp.zeros((*x.shape[:-1], count if axis else columns), jnp.float32)
    out = jax.lax.fori_loop(0, tiles, body, out)
    if rest and axis:
        return out.at[..., tiles * size :].set(product(tiles * size, rest))
    return out + product(tiles * size, rest) if rest else out
