"""Keys and values that are one array, in the layout that TPUs keep.

TPUs keep an array of rows of 128 numbers as it is. One of shorter rows they lay out with blocks
last, and a decode step would copy all of it to read blocks of it, and back: there a key and a value
(or codes of both) are one row, of 128 numbers or 256, or those of several KVs are (`Half`); and
what is one number of each KV makes two rows of a block (`HalfNumbers`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, Num

from kvjax.cache.store.codec import Codec
from kvjax.kernels import Half, HalfNumbers, device
from kvjax.kernels.encoded import LANES, fold_of, folded

SUBLANES = 4
"""Rows of a block, at least, where a row has several KVs."""


def joins_rows() -> bool:
    """Whether keys and values are one array, where they are short ones, on the device at hand."""
    return device.of(None).platform == "tpu"


def stored_shapes(
    codec: Codec, num_blocks: int, block_size: int, head_dim: int, joined: bool
) -> tuple[Any, Any, int | None]:
    """Shapes and dtypes of what a pool stores of keys and of values, and `KVPool.joined`.

    Where they are joined, two arrays alike are one in place of that of keys, and None in place of
    the other: of [N, b, w], w below 128, [N, b, 128 or 256], or [N, b / fold, 128] of short rows,
    of which a quarter may be zeros; of [N, b], [N, 2, 128 or a multiple].
    """
    shape = (num_blocks, block_size, head_dim)
    k, v = codec.of_keys.stored_shapes(*shape), codec.of_values.stored_shapes(*shape)
    if not joined or jax.tree.structure(k) != jax.tree.structure(v):
        return k, v, None
    width = _joined_width(k, v, block_size)

    def both(one, other):
        if one == other and one.ndim == 2:
            rows, numbers = 2, block_size
        elif width is not None and one == other and one.shape[2:] == (width,):
            rows, numbers = block_size // fold_of(width), 2 * width
        else:
            return None
        return jax.ShapeDtypeStruct((num_blocks, rows, numbers + -numbers % LANES), one.dtype)

    joint = jax.tree.map(both, k, v)
    k = jax.tree.map(lambda x, one: one if x is None else x, joint, k, is_leaf=is_none)
    v = jax.tree.map(lambda x, other: other if x is None else None, joint, v, is_leaf=is_none)
    return k, v, width


def _joined_width(k: Any, v: Any, block_size: int) -> int | None:
    """Numbers of the rows that are joined; None if none are."""
    pairs = zip(*map(jax.tree.leaves, (k, v)))
    widths = {one.shape[2] for one, other in pairs if one == other and one.ndim == 3}
    if len(widths) != 1 or (width := widths.pop()) >= LANES:
        return None
    fold = fold_of(width)
    if width < LANES // 2 and 2 * width * fold < LANES * 3 // 4:
        return None
    whole = block_size > 2 if fold == 1 else block_size % (SUBLANES * fold) == 0
    return width if whole else None


def halves(k: Any, v: Any, block_size: int, width: int | None) -> tuple[Any, Any]:
    """What is stored of keys and of values, each array of both as its halves."""

    def half(of_values: bool):
        def of(one, other):
            if other is not None:
                return other if of_values else one
            if of_numbers(one):
                return HalfNumbers(one, block_size, of_values)
            assert width is not None
            return Half(one, width, of_values)

        return of

    return tuple(jax.tree.map(half(x), k, v, is_leaf=is_none) for x in (False, True))


def is_none(x: object) -> bool:
    """Whether there is nothing: a leaf of what is stored of values."""
    return x is None


def joint(k: Any, v: Any) -> list:
    """The arrays of both, of what is stored of keys and of values."""
    pairs = zip(*(jax.tree.flatten(x, is_leaf=is_none)[0] for x in (k, v)))
    return [one for one, other in pairs if other is None]


def of_numbers(both: Any) -> bool:
    """Whether an array of both has one number of each KV."""
    return both.shape[1] == 2


def with_both(
    both: Num[Array, "N lines w"],
    at: tuple[Int32[Array, "*n"], ...],
    one: Num[Array, "..."],
    other: Num[Array, "..."],
) -> Num[Array, "N lines w"]:
    """An array of both with rows, or numbers, of keys and of values at some blocks, or at offsets
    in them; ids of N are passed over."""
    blocks, *offsets = at
    one, other = one.astype(both.dtype), other.astype(both.dtype)
    if of_numbers(both):
        if offsets:
            at = blocks[..., None], jnp.arange(2), offsets[0][..., None]
            return both.at[at].set(jnp.stack([one, other], axis=-1), mode="drop")
        pair = jnp.stack([one, other], axis=-2)
        room = [(0, 0)] * (pair.ndim - 1) + [(0, both.shape[2] - pair.shape[-1])]
        return both.at[blocks].set(jnp.pad(pair, room), mode="drop")
    pair = jnp.concatenate([one, other], axis=-1)
    if not offsets:
        return both.at[blocks].set(folded(pair), mode="drop")
    places = _places(both, pair.shape[-1], blocks, *offsets)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(places.ndim - 1,),
        inserted_window_dims=(0, 1),
        scatter_dims_to_operand_dims=(0, 1, 2),
    )
    return lax.scatter(both, places, pair, numbers, mode="drop")


def _places(
    both: Num[Array, "N lines w"],
    width: int,
    blocks: Int32[Array, "*n"],
    offsets: Int32[Array, "*n"],
) -> Int32[Array, "*n 3"]:
    """Where the parts of rows begin that hold some KVs, keys and values so wide in all."""
    count = both.shape[1]
    return jnp.stack([blocks, offsets % count, offsets // count * width], axis=-1)


def moved_both(
    both: Num[Array, "N lines w"],
    source: Int32[Array, "rows U"],
    target: Int32[Array, "rows U"],
    count: Int32[Array, " rows"],
    block_size: int,
    width: int | None,
) -> Num[Array, "N lines w"]:
    """An array of both after the first `count` moves of each row, slots as in `move_kvs`."""
    moves = jnp.arange(source.shape[1]) < count[:, None]
    (block, offset), (into, place) = (
        (slots // block_size, slots % block_size) for slots in (source, target)
    )
    into = jnp.where(moves, into, both.shape[0])
    if of_numbers(both):
        pair = (both.at[block, n, offset].get(mode="fill", fill_value=0) for n in range(2))
        return with_both(both, (into, place), *pair)
    assert width is not None
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(source.ndim,), collapsed_slice_dims=(0, 1), start_index_map=(0, 1, 2)
    )
    places = _places(both, 2 * width, block, offset)
    pair = lax.gather(both, places, numbers, (1, 1, 2 * width), mode="fill", fill_value=0)
    return with_both(both, (into, place), *jnp.split(pair, 2, axis=-1))
