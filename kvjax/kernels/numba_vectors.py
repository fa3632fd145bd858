"""Products of a few rows, in vectors of a processor: what a compiler of loops makes too little of.

A sum over the lanes of a vector takes several steps; of sixteen vectors at once it takes three
steps each. Sums and queries stay in registers while rows are read from where they lie.
"""

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.errors import RequireLiteralValue

from kvjax.kernels.numba_calls import BFLOAT16, FLOAT32, INT4, INT8, intrinsic

ROWS = 16
"""Rows that are worked on at once."""
_FLOAT, _INDEX = ir.FloatType(), ir.IntType(32)
_FUSED = ("contract",)
"""A product and a sum may be one instruction."""


@intrinsic
def dots(typing, query, rows, out, d):
    """Products of one row of d numbers with `ROWS` others, to `ROWS` numbers.

    Args: addresses, of the row, of an array of the others' addresses, and of the result; d, a
    literal. All numbers are float32.
    """
    width = _width(d)

    def build(context, builder, signature, arguments):
        query, rows, out, _ = arguments
        wanted = [_load(builder, query, c, width) for c in range(d.literal_value // width)]
        sums = []
        for row in _addresses(builder, rows):
            total = ir.Constant(ir.VectorType(_FLOAT, width), None)
            for c, x in enumerate(wanted):
                product = builder.fmul(x, _load(builder, row, c, width), flags=_FUSED)
                total = builder.fadd(total, product, flags=_FUSED)
            sums.append(total)
        for i in range(0, ROWS, width):
            found = _summed(builder, sums[i : i + width], width)
            _store(builder, found, out, i // width, width)
        return context.get_dummy_value()

    return types.none(*[types.int64] * 3, d), build


@intrinsic
def add_weighted(typing, weights, rows, out, d):
    """Add `ROWS` rows of d numbers, each times a weight, to a row.

    Args: addresses, of the weights, of an array of the rows' addresses, and of the row that is
    added to; d, a literal. All numbers are float32.
    """
    width = _width(d)

    def build(context, builder, signature, arguments):
        weights, rows, out, _ = arguments
        sums = [_load(builder, out, c, width) for c in range(d.literal_value // width)]
        first = builder.inttoptr(weights, _FLOAT.as_pointer())
        for t, row in enumerate(_addresses(builder, rows)):
            weight = builder.load(builder.gep(first, [_index(t)]), align=4)
            weight = _everywhere(builder, weight, width)
            for c, total in enumerate(sums):
                product = builder.fmul(weight, _load(builder, row, c, width), flags=_FUSED)
                sums[c] = builder.fadd(total, product, flags=_FUSED)
        for c, total in enumerate(sums):
            _store(builder, total, out, c, width)
        return context.get_dummy_value()

    return types.none(*[types.int64] * 3, d), build


@intrinsic
def to_float32(typing, source, out, d, kind):
    """A row of d numbers as they are stored, in float32.

    Args: addresses, of the stored row and of the result; d and `kind`, what is stored, literals.
    """
    width = _width(d)
    if not isinstance(kind, types.IntegerLiteral):
        raise RequireLiteralValue("kind")
    stored = kind.literal_value
    numbers = {FLOAT32: _FLOAT, BFLOAT16: ir.IntType(16)}.get(stored, ir.IntType(8))

    def build(context, builder, signature, arguments):
        source, out, _, _ = arguments
        if stored == INT4:
            _nibbles(builder, source, out, d.literal_value // 2)
            return context.get_dummy_value()
        for i in range(d.literal_value // width):
            x = _load(builder, source, i, width, numbers)
            if stored == INT8:
                x = builder.sitofp(x, ir.VectorType(_FLOAT, width))
            elif stored == BFLOAT16:
                whole = ir.VectorType(_INDEX, width)
                x = builder.shl(builder.zext(x, whole), ir.Constant(whole, [16] * width))
                x = builder.bitcast(x, ir.VectorType(_FLOAT, width))
            _store(builder, x, out, i, width)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, d, kind), build


def _nibbles(builder: ir.IRBuilder, source: ir.Value, out: ir.Value, half: int) -> None:
    """A row from so many bytes: the low halves are its first part, the high ones its second."""
    width = math.gcd(half, ROWS)
    byte, single = ir.VectorType(ir.IntType(8), width), ir.VectorType(_FLOAT, width)
    for i in range(half // width):
        x = _load(builder, source, i, width, ir.IntType(8))
        low = builder.and_(x, ir.Constant(byte, [15] * width))
        high = builder.lshr(x, ir.Constant(byte, [4] * width))
        for part, code in enumerate((low, high)):
            middle = ir.Constant(single, [-7.5] * width)
            level: Any = builder.fadd(builder.uitofp(code, single), middle)
            _store(builder, level, out, part * half // width + i, width)


def _width(d: types.Type) -> int:
    """Numbers of a vector, of which a row is a multiple."""
    if not isinstance(d, types.IntegerLiteral):
        raise RequireLiteralValue("d")
    return math.gcd(d.literal_value, ROWS)


def _index(i: int) -> ir.Constant:
    return ir.Constant(_INDEX, i)


def _addresses(builder: ir.IRBuilder, rows: ir.Value) -> list[ir.Value]:
    first = builder.inttoptr(rows, ir.IntType(64).as_pointer())
    return [builder.load(builder.gep(first, [_index(t)])) for t in range(ROWS)]


def _load(
    builder: ir.IRBuilder, address: ir.Value, i: int, width: int, numbers: ir.Type = _FLOAT
) -> ir.Value:
    """The i-th vector behind an address."""
    first = builder.inttoptr(address, ir.VectorType(numbers, width).as_pointer())
    return builder.load(builder.gep(first, [_index(i)]), align=1)


def _store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, i: int, width: int) -> None:
    first = builder.inttoptr(address, ir.VectorType(_FLOAT, width).as_pointer())
    builder.store(value, builder.gep(first, [_index(i)]), align=4)


def _lanes(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, chosen: list[int]) -> ir.Value:
    mask = ir.Constant(ir.VectorType(_INDEX, len(chosen)), chosen)
    return builder.shuffle_vector(a, b, mask)


def _everywhere(builder: ir.IRBuilder, x: ir.Value, width: int) -> ir.Value:
    empty = ir.Constant(ir.VectorType(_FLOAT, width), ir.Undefined)
    one = builder.insert_element(empty, x, _index(0))
    return _lanes(builder, one, empty, [0] * width)


def _summed(builder: ir.IRBuilder, vectors: list[Any], width: int) -> ir.Value:
    """The sums of as many vectors as one has lanes, in their order.

    Each step adds halves of segments: of two vectors the halves of every segment become one
    segment, those of the first before those of the second.
    """
    segment = width
    while len(vectors) > 1:
        half, low = segment // 2, []
        for start in range(0, width, segment):
            own = list(range(start, start + half))
            low += own + [width + i for i in own]
        high = [i + half for i in low]
        pairs = zip(vectors[: len(vectors) // 2], vectors[len(vectors) // 2 :])
        vectors = [
            builder.fadd(_lanes(builder, a, b, low), _lanes(builder, a, b, high)) for a, b in pairs
        ]
        segment = half
    return vectors[0]
