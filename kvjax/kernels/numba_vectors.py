"""Products of a few rows, in vectors of a processor: what a compiler of loops makes too little of.

A sum over the lanes of a vector takes several steps; of sixteen vectors at once it takes three
steps each. Sums and queries stay in registers while rows are read from where they lie.
"""

import itertools
import math
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core.errors import RequireLiteralValue

from kvjax.kernels.numba_calls import BFLOAT16, FLOAT32, INT4, INT8, intrinsic

ROWS = 16
"""Rows that are worked on at once."""
AT_ONCE = 4
"""Rows of a matrix that are added to sums at once."""
_AHEAD = 8
"""Rows of it by which what comes is fetched before."""
FAR = 8192
"""Bytes by which what is read on end is fetched before."""
LINE = 64
"""Bytes that come from memory at once."""
TALL = 6
"""Rows of a tile that a product has in registers."""


def _wide() -> tuple[int, int]:
    """Columns of such a tile: how many numbers a vector has, and how many vectors a row.

    With the `TALL` rows, a row of the second matrix and one number of the first they fill the
    registers there are, 32 of 16 numbers or 16 of 8.
    """
    try:
        features = llvmlite.binding.get_host_cpu_features()
    except RuntimeError:
        features = {}
    return (16, 4) if features.get("avx512f") else (8, 2)


WIDTH, VECTORS = _wide()
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
def product(typing, a, b, out, depth, strides, width, vectors):
    """A tile of a product of matrices: `TALL` rows of a [n, depth] times b [depth, columns].

    Args: addresses, of a's first row, of b's first row, and of the result's; the depth, at least
    1; bytes from row to row of the three, a tuple; numbers of a vector and vectors of a row, which
    are the columns, literals. All numbers are float32.
    """
    lanes, count = (literal(x, "width and vectors") for x in (width, vectors))

    def build(context, builder, signature, arguments):
        a, b, out, depth, strides, _, _ = arguments
        a_stride, b_stride, out_stride = (builder.extract_value(strides, i) for i in range(3))
        vector, word = ir.VectorType(_FLOAT, lanes), ir.IntType(64)
        rows = [a]
        for _ in range(TALL - 1):
            rows.append(builder.add(rows[-1], a_stride))
        before = builder.block
        loop, behind = (builder.append_basic_block(name) for name in ("loop", "behind"))
        builder.branch(loop)
        builder.position_at_end(loop)
        step, from_b = builder.phi(word), builder.phi(word)
        sums = [[builder.phi(vector) for _ in range(count)] for _ in range(TALL)]
        of_b = [_load(builder, from_b, j, lanes) for j in range(count)]
        found = []
        for row in rows:
            first = builder.inttoptr(row, _FLOAT.as_pointer())
            x = _everywhere(builder, builder.load(builder.gep(first, [step]), align=4), lanes)
            found.append([builder.fmul(x, y, flags=_FUSED) for y in of_b])
        for i in range(TALL):
            for j in range(count):
                found[i][j] = builder.fadd(sums[i][j], found[i][j], flags=_FUSED)
                sums[i][j].add_incoming(ir.Constant(vector, None), before)
                sums[i][j].add_incoming(found[i][j], loop)
        for phi, start, more in ((step, word(0), word(1)), (from_b, b, b_stride)):
            phi.add_incoming(start, before)
            phi.add_incoming(builder.add(phi, more), loop)
        after = builder.add(step, word(1))
        builder.cbranch(builder.icmp_signed("<", after, depth), loop, behind)
        builder.position_at_end(behind)
        for row in found:
            for j, x in enumerate(row):
                _store(builder, x, out, j, lanes)
            out = builder.add(out, out_stride)
        return context.get_dummy_value()

    addresses = [types.int64] * 4
    return types.none(*addresses, types.UniTuple(types.int64, 3), width, vectors), build


@intrinsic
def add_products(typing, b, a, out, vectors, strides, kind, rows):
    """Add to rows of sums the product of `AT_ONCE` columns of a and as many rows of b.

    Args: addresses, of b's first row, of the columns in a's first row, and of the first row of
    sums; vectors of `ROWS` numbers in a row of b, at least 1; bytes from row to row of b, of a and
    of the sums, a tuple; what the numbers of b are, a literal, and how many rows a has, another.
    What is not of b is float32.
    """
    stored, count = literal(kind, "kind"), literal(rows, "rows")
    size = {FLOAT32: 4, BFLOAT16: 2, INT8: 1}[stored]

    def build(context, builder, signature, arguments):
        b, a, out, vectors, strides, _, _ = arguments
        word = ir.IntType(64)
        b_stride, a_stride, out_stride = (builder.extract_value(strides, i) for i in range(3))
        factors = []
        for i in range(count):
            row = builder.inttoptr(
                builder.add(a, builder.mul(a_stride, word(i))), _FLOAT.as_pointer()
            )
            numbers = [builder.load(builder.gep(row, [_index(j)]), align=4) for j in range(AT_ONCE)]
            factors.append([_everywhere(builder, x, ROWS) for x in numbers])
        far = builder.mul(b_stride, word(_AHEAD))
        before = builder.block
        loop, behind = (builder.append_basic_block(name) for name in ("loop", "behind"))
        builder.branch(loop)
        builder.position_at_end(loop)
        step, from_b, to = (builder.phi(word) for _ in range(3))
        of_b, row = [], from_b
        for _ in range(AT_ONCE):
            of_b.append(numbers_of(builder, row, stored))
            prefetch(builder, builder.add(row, far))
            row = builder.add(row, b_stride)
        for i in range(count):
            place = builder.add(to, builder.mul(out_stride, word(i)))
            total = _load(builder, place, 0, ROWS)
            for x, y in zip(factors[i], of_b):
                total = fused(builder, x, y, total)
            _store(builder, total, place, 0, ROWS)
        after = builder.add(step, word(1))
        for phi, start, more in (
            (step, word(0), after),
            (from_b, b, builder.add(from_b, word(ROWS * size))),
            (to, out, builder.add(to, word(ROWS * 4))),
        ):
            phi.add_incoming(start, before)
            phi.add_incoming(more, loop)
        builder.cbranch(builder.icmp_signed("<", after, vectors), loop, behind)
        builder.position_at_end(behind)
        return context.get_dummy_value()

    addresses = [types.int64] * 4
    return types.none(*addresses, types.UniTuple(types.int64, 3), kind, rows), build


@intrinsic
def row_dots(typing, a, b, out, steps, strides, kind, rows):
    """Products of some rows of a with some of b, `WIDTH` in all: first those of a's first row.

    Args: addresses, of the first rows and of the result; vectors of `WIDTH` numbers in a row, at
    least 1; bytes from row to row of a and of b, a tuple; what the numbers of b are, a literal, and
    how many rows a has, another, a divisor of `WIDTH`. What is not of b is float32.
    """
    stored, count = literal(kind, "kind"), literal(rows, "rows")
    size = {FLOAT32: 4, BFLOAT16: 2, INT8: 1}[stored]

    def build(context, builder, signature, arguments):
        a, b, out, steps, strides, _, _ = arguments
        word, vector = ir.IntType(64), ir.VectorType(_FLOAT, WIDTH)
        a_stride, b_stride = (builder.extract_value(strides, i) for i in range(2))
        before = builder.block
        loop, behind = (builder.append_basic_block(name) for name in ("loop", "behind"))
        builder.branch(loop)
        builder.position_at_end(loop)
        step, of_a, of_b = (builder.phi(word) for _ in range(3))
        sums = [builder.phi(vector) for _ in range(WIDTH)]
        x, y = [], []
        for i in range(count):
            row = builder.add(of_a, builder.mul(a_stride, word(i)))
            x.append(_load(builder, row, 0, WIDTH))
        for j in range(WIDTH // count):
            row = builder.add(of_b, builder.mul(b_stride, word(j)))
            y.append(numbers_of(builder, row, stored, WIDTH))
            prefetch(builder, builder.add(row, word(FAR)), near=2)
        found = [
            fused(builder, one, other, total)
            for (one, other), total in zip(itertools.product(x, y), sums)
        ]
        after = builder.add(step, word(1))
        phis = [(step, word(0), after), (of_a, a, builder.add(of_a, word(WIDTH * 4)))]
        phis.append((of_b, b, builder.add(of_b, word(WIDTH * size))))
        phis += [(one, ir.Constant(vector, None), new) for one, new in zip(sums, found)]
        for phi, start, more in phis:
            phi.add_incoming(start, before)
            phi.add_incoming(more, loop)
        builder.cbranch(builder.icmp_signed("<", after, steps), loop, behind)
        builder.position_at_end(behind)
        _store(builder, _summed(builder, found, WIDTH), out, 0, WIDTH)
        return context.get_dummy_value()

    addresses = [types.int64] * 4
    return types.none(*addresses, types.UniTuple(types.int64, 2), kind, rows), build


def numbers_of(builder: ir.IRBuilder, address: ir.Value, kind: int, width: int = ROWS) -> Any:
    """Some numbers behind an address, in float32."""
    element = {FLOAT32: _FLOAT, BFLOAT16: ir.IntType(16), INT8: ir.IntType(8)}[kind]
    x, single = _load(builder, address, 0, width, element), ir.VectorType(_FLOAT, width)
    if kind == INT8:
        return builder.sitofp(x, single)
    if kind == BFLOAT16:
        whole = ir.VectorType(_INDEX, width)
        return builder.bitcast(
            builder.shl(builder.zext(x, whole), ir.Constant(whole, [16] * width)), single
        )
    return x


def prefetch(builder: ir.IRBuilder, address: ir.Value, near: int = 3) -> None:
    """Have what is behind an address fetched into the first cache, or, `near` being 2, into the
    second, for which more is on its way at a time."""
    pointer = ir.IntType(8).as_pointer()
    name, kinds = "llvm.prefetch.p0i8", [pointer, _INDEX, _INDEX, _INDEX]
    call = builder.module.globals.get(name)
    if call is None:
        call = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), kinds), name)
    # To be read, to be kept, data.
    builder.call(call, [builder.inttoptr(address, pointer), _index(0), _index(near), _index(1)])


@intrinsic
def fetch(typing, address):
    """Have the line of an address fetched into the second cache, wherever it leads."""

    def build(context, builder, signature, arguments):
        prefetch(builder, arguments[0], near=2)
        return context.get_dummy_value()

    return types.none(types.int64), build


@intrinsic
def to_float32(typing, source, out, d, kind):
    """A row of d numbers as they are stored, in float32.

    Args: addresses, of the stored row and of the result; d and `kind`, what is stored, literals.
    """
    width = _width(d)
    stored = literal(kind, "kind")
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


def fused(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x · y + z, rounded once where a processor can."""
    return builder.fadd(builder.fmul(x, y, flags=_FUSED), z, flags=_FUSED)


def _width(d: types.Type) -> int:
    """Numbers of a vector, of which a row is a multiple."""
    return math.gcd(literal(d, "d"), ROWS)


def literal(x: types.Type, name: str) -> int:
    """The value of an argument that must be known when a function is compiled."""
    if not isinstance(x, types.IntegerLiteral):
        raise RequireLiteralValue(name)
    return x.literal_value


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
