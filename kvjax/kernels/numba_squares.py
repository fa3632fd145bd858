"""Logits of 32 queries and 32 keys, as four tiles: their maxima, weights, and digits of these.

Of a square the tiles come in the order in which digits of its rows lie in a panel of rows: a row's
first 16 numbers are where the first digits of all 32 go, the others where the second ones do. So a
row becomes what is multiplied next without going anywhere.
"""

from typing import Any

from llvmlite import ir
from numba import types

from kvjax.kernels.numba_calls import intrinsic
from kvjax.kernels.numba_matrices import LOG2_E, POWER_OF_TWO
from kvjax.kernels.numba_tiles import TILE, digits_of_vector, halves
from kvjax.kernels.numba_vectors import fused

PLACES = (64, TILE, 2 * TILE)
"""Of a square: bytes from row to row, to the rows below, and to the numbers to the right."""
_LANES = 16
_VECTOR = ir.VectorType(ir.FloatType(), _LANES)
_WHOLE = ir.VectorType(ir.IntType(32), _LANES)
_WORD = ir.IntType(64)
_LEAST = -125.0
"""Powers of two below this one are taken for it."""


def _at(builder: ir.IRBuilder, address: Any, more: int = 0) -> Any:
    place = builder.add(address, _WORD(more)) if more else address
    return builder.inttoptr(place, _VECTOR.as_pointer())


def _all(x: Any) -> ir.Constant:
    return ir.Constant(_VECTOR, [float(x)] * _LANES)


def _everywhere(builder: ir.IRBuilder, x: Any) -> Any:
    empty = ir.Constant(_VECTOR, ir.Undefined)
    one = builder.insert_element(empty, x, ir.IntType(32)(0))
    return builder.shuffle_vector(one, empty, ir.Constant(_WHOLE, [0] * _LANES))


def _larger(builder: ir.IRBuilder, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", y, x), y, x)


@intrinsic
def maxima(typing, row, lanes):
    """Make of 16 numbers the larger ones of them and a row's.

    Args: addresses, of the row in a square and of the numbers.
    """

    def build(context, builder, signature, arguments):
        row, lanes = arguments
        found = builder.load(_at(builder, lanes), align=4)
        for more in (0, PLACES[2]):
            found = _larger(builder, found, builder.load(_at(builder, row, more), align=4))
        builder.store(found, _at(builder, lanes), align=4)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), build


@intrinsic
def weights(typing, row, largest, lanes):
    """Make of a row of logits the digits of its exponentials over those of a number, and add these
    to 16 sums.

    Args: address of the row in a square; the number; address of the sums.
    """

    def build(context, builder, signature, arguments):
        row, largest, lanes = arguments
        over = _everywhere(builder, largest)
        total = builder.load(_at(builder, lanes), align=4)
        parts = []
        for more in (0, PLACES[2]):
            x = builder.fsub(builder.load(_at(builder, row, more), align=4), over)
            parts.append(_exponential(builder, x))
            total = builder.fadd(total, parts[-1])
        builder.store(total, _at(builder, lanes), align=4)
        digits = zip(*(digits_of_vector(builder, part) for part in parts))
        for more, both in zip((0, PLACES[2]), digits):
            builder.store(halves(builder, *both), _at(builder, row, more), align=4)
        return context.get_dummy_value()

    return types.none(types.int64, types.float32, types.int64), build


def _exponential(builder: ir.IRBuilder, x: Any) -> Any:
    """As `numba_matrices.exp`, of 16 numbers."""
    y = builder.fmul(x, _all(LOG2_E))
    y = _larger(builder, y, _all(_LEAST))
    name = f"llvm.floor.v{_LANES}f32"
    floor = builder.module.globals.get(name)
    if floor is None:
        floor = ir.Function(builder.module, ir.FunctionType(_VECTOR, [_VECTOR]), name)
    whole = builder.call(floor, [builder.fadd(y, _all(0.5))])
    y = builder.fsub(y, whole)
    p: Any = _all(POWER_OF_TWO[-1])
    for factor in reversed(POWER_OF_TWO[:-1]):
        p = fused(builder, p, y, _all(factor))
    more = builder.shl(builder.fptosi(whole, _WHOLE), ir.Constant(_WHOLE, [23] * _LANES))
    return builder.bitcast(builder.add(builder.bitcast(p, _WHOLE), more), _VECTOR)


@intrinsic
def add_received(typing, row, share, received, power):
    """Add to what 32 keys received their weights, or the squares of these, of one query, times a
    number.

    Args: address of the query's row in a square, of digits; the number; address of the keys'; the
    power, 1 or 2.
    """

    def build(context, builder, signature, arguments):
        row, share, received, power = arguments
        times = _everywhere(builder, share)
        square = builder.icmp_signed("==", power, _WORD(2))
        pair = ir.VectorType(ir.IntType(16), 16)
        for i in range(2):
            found: Any = _all(0)
            for digit in (0, PLACES[2]):
                place = builder.add(row, _WORD(digit + 32 * i))
                bits = builder.load(builder.inttoptr(place, pair.as_pointer()), align=4)
                bits = builder.shl(builder.zext(bits, _WHOLE), ir.Constant(_WHOLE, [16] * _LANES))
                found = builder.fadd(found, builder.bitcast(bits, _VECTOR))
            found = builder.select(square, builder.fmul(found, found), found)
            place = _at(builder, received, 64 * i)
            builder.store(
                fused(builder, found, times, builder.load(place, align=4)), place, align=4
            )
        return context.get_dummy_value()

    return types.none(types.int64, types.float32, types.int64, types.int64), build
