"""Products in tiles of a processor with AMX, and numbers as they go into tiles.

A tile has 16 rows of 64 bytes. One instruction multiplies 16 rows of 32 bfloat16 numbers by 32 rows
of 16 and adds to 16 × 16 sums in float32, at many times the rate of vectors. A float32 number is
there the sum of two of bfloat16, its digits: what it is rounded to, and what that leaves, rounded.
Of the four products of digits that of the two last ones is left out, it is as small as what
rounding left (Henry, Tang and Heinecke, Leveraging the bfloat16 Artificial Intelligence Datatype
For Higher-Precision Computations, 2019; JAX's precision "high"): off by less than 2⁻¹⁶ of each
product.

What is multiplied lies in the order in which it is read. A panel is `SIDE` rows of the first
matrix, or columns of the second; its steps, of `DEPTH` numbers each, come one after the other, of
each the first digits of the panel's halves, a tile each, then the second digits.
"""

import ctypes
import functools
import platform
import sys
from typing import Any, no_type_check

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.errors import RequireLiteralValue

from kvjax.kernels.numba_calls import BFLOAT16, FLOAT32, intrinsic, row_bytes
from kvjax.kernels.numba_matrices import hold
from kvjax.kernels.numba_vectors import literal, numbers_of, prefetch

SIDE, DEPTH = 32, 32
"""Rows or columns of a panel, and numbers of a step."""
TILE = 1024
"""Bytes of a tile."""
_ROWS, _ROW_BYTES = 16, 64
"""Of a tile."""
_CONFIG = 64
"""Bytes that say how large each tile is."""
_AHEAD = 2
"""Steps by which what comes is fetched before."""
_ASK, _TILES = 0x1023, 18
"""ARCH_REQ_XCOMP_PERM of Linux, and the number of AMX's registers among those that one asks for."""
_SYSTEM_CALL = 158
"""arch_prctl, on x86-64."""
_BYTE, _HALF, _SMALL, _WORD = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_NAN = 0x7FC00000


def digits_of(kind: int) -> int:
    """How many numbers of bfloat16 one is the sum of."""
    return 2 if kind == FLOAT32 else 1


@no_type_check
@numba.njit(inline="always")
def step_bytes(kind):
    """Bytes of a panel's step."""
    return 4 * TILE if kind == FLOAT32 else 2 * TILE


@functools.cache
def check() -> None:
    """
    Raises:
        NotImplementedError: the processor has no AMX, or the system does not let one use it.
    """
    try:
        features = llvmlite.binding.get_host_cpu_features()
    except RuntimeError:
        features = {}
    wanted = "amx-tile", "amx-bf16", "avx512f"
    if not all(features.get(name) for name in wanted) or platform.machine() != "x86_64":
        raise NotImplementedError("a processor without AMX")
    if numba.config.CPU_NAME or numba.config.CPU_FEATURES:  # type: ignore[attr-defined]
        raise NotImplementedError("a processor that NUMBA_CPU_NAME or NUMBA_CPU_FEATURES chooses")
    if not sys.platform.startswith("linux") or _not_allowed():
        raise NotImplementedError(f"AMX on {platform.platform()}")


def available() -> bool:
    """Whether `check` finds nothing in the way."""
    try:
        check()
    except NotImplementedError:
        return False
    return True


def _not_allowed() -> bool:
    """Whether the system refuses the process AMX's registers; threads have what their process
    has."""
    return ctypes.CDLL(None).syscall(_SYSTEM_CALL, _ASK, _TILES) != 0


def _llvm(builder: ir.IRBuilder, name: str, *kinds: ir.Type) -> ir.Function:
    """An instruction by its name."""
    name = f"llvm.x86.{name}"
    found = builder.module.globals.get(name)
    if found is not None:
        return found
    return ir.Function(builder.module, ir.FunctionType(ir.VoidType(), kinds), name)


@intrinsic
def _configure(typing, address):
    def build(context, builder, signature, arguments):
        pointer = _BYTE.as_pointer()
        call = _llvm(builder, "ldtilecfg", pointer)
        builder.call(call, [builder.inttoptr(arguments[0], pointer)])
        return context.get_dummy_value()

    return types.none(types.int64), build


@intrinsic
def release(typing):
    """Have no tiles any more: a thread's last step with them."""

    def build(context, builder, signature, arguments):
        builder.call(_llvm(builder, "tilerelease"), [])
        return context.get_dummy_value()

    return types.none(), build


@no_type_check
@numba.njit
def begin():
    """Have eight tiles of full size: a thread's first step with them."""
    config = np.zeros(_CONFIG, np.uint8)
    config[0] = 1
    for i in range(8):
        config[16 + 2 * i] = _ROW_BYTES
        config[48 + i] = _ROWS
    _configure(config.ctypes.data)
    hold(config)


@intrinsic
def product(typing, a, b, out, steps, places, kind_of_a, kind_of_b, fetched):
    """The product of a panel of rows and a panel of columns: `SIDE` × `SIDE` sums, float32.

    Args: addresses, of the panels and of the first sum; the steps, at least 1; where the sums go: a
    tuple of the bytes from row to row of 16 of them, to those of the rows below, and to those of
    the columns to the right; what the numbers of either are, literals; whether panels are far, so
    that steps are fetched before, a literal.
    """
    kinds = literal(kind_of_a, "kind_of_a"), literal(kind_of_b, "kind_of_b")
    parts = tuple(map(digits_of, kinds))
    if not isinstance(fetched, types.BooleanLiteral):
        raise RequireLiteralValue("fetched")
    ahead = fetched.literal_value

    def build(context, builder, signature, arguments):
        a, b, out, steps, places = arguments[:5]
        pointer = _BYTE.as_pointer()
        zero = _llvm(builder, "tilezero", _BYTE)
        load = _llvm(builder, "tileloadd64", _BYTE, pointer, _WORD)
        store = _llvm(builder, "tilestored64", _BYTE, pointer, _WORD)
        multiply = _llvm(builder, "tdpbf16ps", _BYTE, _BYTE, _BYTE)

        def behind(address: Any, more: int) -> Any:
            return builder.inttoptr(builder.add(address, _WORD(more)), pointer)

        stride, below, right = (builder.extract_value(places, i) for i in range(3))
        places = [
            builder.inttoptr(place, pointer)
            for row in (out, builder.add(out, below))
            for place in (row, builder.add(row, right))
        ]
        for i in range(len(places)):
            builder.call(zero, [_BYTE(i)])
        before = builder.block
        loop, end = (builder.append_basic_block(name) for name in ("loop", "behind"))
        builder.branch(loop)
        builder.position_at_end(loop)
        step, from_a, from_b = (builder.phi(_WORD) for _ in range(3))

        def read(first: int, address: Any, digit: int) -> None:
            for i in range(2):
                place = behind(address, (2 * digit + i) * TILE)
                builder.call(load, [_BYTE(first + i), place, _WORD(_ROW_BYTES)])

        def add() -> None:
            for i in range(4):
                builder.call(multiply, [_BYTE(i), _BYTE(4 + i // 2), _BYTE(6 + i % 2)])

        # Each pair of digits is read once: the first of the rows with both of the columns, then
        # the second of the rows with the first of the columns, which is there already.
        read(4, from_a, 0)
        if parts[1] == 2:
            read(6, from_b, 1)
            add()
        read(6, from_b, 0)
        add()
        if parts[0] == 2:
            read(4, from_a, 1)
            add()
        # A processor fetches too little before of what tiles are loaded of.
        for address, digits in ((from_a, parts[0]), (from_b, parts[1])) if ahead else ():
            for line in range(0, 2 * digits * TILE, _ROW_BYTES):
                more = _AHEAD * 2 * digits * TILE + line
                prefetch(builder, builder.add(address, _WORD(more)))
        after = builder.add(step, _WORD(1))
        for phi, start, more in (
            (step, _WORD(0), after),
            (from_a, a, builder.add(from_a, _WORD(2 * parts[0] * TILE))),
            (from_b, b, builder.add(from_b, _WORD(2 * parts[1] * TILE))),
        ):
            phi.add_incoming(start, before)
            phi.add_incoming(more, loop)
        builder.cbranch(builder.icmp_signed("<", after, steps), loop, end)
        builder.position_at_end(end)
        for i, place in enumerate(places):
            builder.call(store, [_BYTE(i), place, stride])
        return context.get_dummy_value()

    places = types.UniTuple(types.int64, 3)
    return types.none(*[types.int64] * 4, places, kind_of_a, kind_of_b, fetched), build


def digits_of_vector(builder: Any, x: Any) -> tuple[Any, Any]:
    """Vectors of 16 float32 as their digits, each in the upper halves of int32 numbers."""
    whole, single = (ir.VectorType(kind, 16) for kind in (_SMALL, ir.FloatType()))

    def rounded(x: Any) -> Any:
        bits = builder.bitcast(x, whole)
        bits = builder.add(bits, ir.Constant(whole, [0x8000] * 16))
        return builder.and_(bits, ir.Constant(whole, [0xFFFF0000] * 16))

    first = rounded(x)
    left = builder.fsub(x, builder.bitcast(first, single))
    # What is no number may have all bits set, and would be rounded to 0.
    there = builder.fcmp_ordered("ord", left, left)
    second = builder.select(there, rounded(left), ir.Constant(whole, [_NAN] * 16))
    return first, second


def halves(builder: ir.IRBuilder, first: Any, second: Any) -> Any:
    """The upper halves of 16 int32 numbers and of 16 others, one after the other: as 16 float32."""
    narrow = ir.VectorType(_HALF, 16)
    shift = ir.Constant(ir.VectorType(_SMALL, 16), [16] * 16)
    one, other = (builder.trunc(builder.lshr(x, shift), narrow) for x in (first, second))
    both = builder.shuffle_vector(
        one, other, ir.Constant(ir.VectorType(_SMALL, 32), list(range(32)))
    )
    return builder.bitcast(both, ir.VectorType(ir.FloatType(), 16))


def _sixteen(builder: ir.IRBuilder, address: Any, kind: int) -> Any:
    """The upper halves of 16 numbers behind an address, as float32 has them, in int32; of float32
    all of their bits."""
    bits = numbers_of(builder, address, kind)
    return builder.bitcast(bits, ir.VectorType(_SMALL, 16))


@intrinsic
def _row_step(typing, source, out, kind):
    """A step of a row, `DEPTH` numbers, as it lies in a tile.

    Args: addresses, of the numbers and of the row in the tile of their first digits, from which
    that of the second is two tiles away; `kind`, what the numbers are, a literal. Float32 has two
    digits.
    """
    stored = literal(kind, "kind")

    def build(context, builder, signature, arguments):
        source, out, _ = arguments
        size = {FLOAT32: 4, BFLOAT16: 2}[stored]
        places = source, builder.add(source, _WORD(16 * size))
        numbers: list[tuple] = [(_sixteen(builder, place, stored),) for place in places]
        if stored == FLOAT32:
            single = ir.VectorType(ir.FloatType(), 16)
            numbers = [digits_of_vector(builder, builder.bitcast(x, single)) for (x,) in numbers]
        for digit, both in enumerate(zip(*numbers, strict=True)):
            row = halves(builder, *both)
            place = builder.add(out, _WORD(2 * digit * TILE))
            builder.store(row, builder.inttoptr(place, row.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, kind), build


@intrinsic
def _no_row(typing, out, kind):
    """Zeros in place of a step of a row."""
    stored = literal(kind, "kind")

    def build(context, builder, signature, arguments):
        nothing = ir.VectorType(_HALF, DEPTH)
        for digit in range(digits_of(stored)):
            place = builder.add(arguments[0], _WORD(2 * digit * TILE))
            place = builder.inttoptr(place, nothing.as_pointer())
            builder.store(ir.Constant(nothing, None), place, align=1)
        return context.get_dummy_value()

    return types.none(types.int64, kind), build


@intrinsic
def _two_rows(typing, source, below, out, kind):
    """16 numbers of one row and of the row below as they lie in a tile: in pairs.

    Args: addresses, of both rows' numbers and of the row in the tile of their first digits, from
    which that of the second is two tiles away; `kind`, what the numbers are, a literal. Float32 has
    two digits; int8 numbers are themselves in bfloat16.
    """
    stored = literal(kind, "kind")

    def build(context, builder, signature, arguments):
        source, below, out, _ = arguments
        whole = ir.VectorType(_SMALL, 16)
        rows = [_sixteen(builder, address, stored) for address in (source, below)]
        digits: list[tuple] = [(row,) for row in rows]
        if stored == FLOAT32:
            single = ir.VectorType(ir.FloatType(), 16)
            digits = [digits_of_vector(builder, builder.bitcast(row, single)) for row in rows]
        for part, (one, other) in enumerate(zip(*digits, strict=True)):
            one = builder.lshr(one, ir.Constant(whole, [16] * 16))
            place = builder.add(out, _WORD(2 * part * TILE))
            place = builder.inttoptr(place, whole.as_pointer())
            builder.store(builder.or_(one, other), place, align=1)
        return context.get_dummy_value()

    return types.none(*[types.int64] * 3, kind), build


@no_type_check
@numba.njit(inline="always")
def pack_rows(source, stride, count, steps, out, kind):
    """A panel of rows, of which there are `count`, and zeros instead of others.

    Args: addresses, of the first row and of the panel; bytes from row to row; rows; steps; what the
    numbers are, a literal.
    """
    for step in range(steps):
        own = out + step * step_bytes(kind)
        for row in range(SIDE):
            place = own + row // _ROWS * TILE + row % _ROWS * _ROW_BYTES
            if row < count:
                number = source + row * stride + row_bytes(step * DEPTH, kind)
                _row_step(number, place, kind)
            else:
                _no_row(place, kind)


@no_type_check
@numba.njit(inline="always")
def pack_columns(source, stride, steps, out, kind):
    """A panel of columns.

    Args: addresses, of the columns in the first row and of the panel; bytes from row to row; steps;
    what the numbers are, a literal.
    """
    for step in range(steps):
        own = out + step * step_bytes(kind)
        for pair in range(_ROWS):
            first = source + (step * DEPTH + 2 * pair) * stride
            for half in range(2):
                number = first + row_bytes(half * _ROWS, kind)
                place = own + half * TILE + pair * _ROW_BYTES
                _two_rows(number, number + stride, place, kind)


@intrinsic
def _turn_tile(typing, source, out):
    """A tile of 16 × 16 pairs of numbers with its rows for columns."""

    def build(context, builder, signature, arguments):
        whole = ir.VectorType(_SMALL, 16)

        def place(address: Any, row: int) -> Any:
            return builder.inttoptr(
                builder.add(address, _WORD(row * _ROW_BYTES)), whole.as_pointer()
            )

        rows = [builder.load(place(arguments[0], row), align=1) for row in range(16)]
        for bit in (1, 2, 4, 8):
            # Of two rows a bit apart, those columns change places whose numbers are a bit apart.
            low = ir.Constant(whole, [i + 16 - bit if i & bit else i for i in range(16)])
            high = ir.Constant(whole, [i + 16 if i & bit else i + bit for i in range(16)])
            for i in range(16):
                if not i & bit:
                    pair = rows[i], rows[i + bit]
                    rows[i], rows[i + bit] = (builder.shuffle_vector(*pair, x) for x in (low, high))
        for row, found in enumerate(rows):
            builder.store(found, place(arguments[1], row), align=1)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), build


@no_type_check
@numba.njit(inline="always")
def pack_turned(source, stride, steps, room, out, kind):
    """A panel of columns that lie as rows: `SIDE` of them.

    Args: as of `pack_rows`, and the address of as much room as the panel takes.
    """
    pack_rows(source, stride, SIDE, steps, room, kind)
    for tile in range(0, steps * step_bytes(kind), TILE):
        _turn_tile(room + tile, out + tile)
