"""Calls from a compiled program on a CPU into functions that Numba compiles.

XLA for CPUs has no loop that reads pages where they lie, and Pallas no compiler for CPUs. XLA calls
functions of others through an interface in C (`xla/ffi/api/c_api.h`, which jaxlib ships) with one
pointer to a frame that says where arguments and results are. A version of it is served for a year
at least, and XLA asks a function for the one that it was written for when it is registered.

Needs Numba (`pip install '.[cpu]'`).
"""

import functools
import threading
from collections.abc import Callable
from importlib import metadata
from typing import Any, no_type_check

import jax
import numba
import numba.extending
from llvmlite import ir
from numba import types

intrinsic: Any = numba.extending.intrinsic
"""Its functions are called with one argument less than they are written with."""

API_VERSION = (0, 4)
"""Of the interface: what offsets are of, in jaxlib 0.11."""

# Offsets in words of 8 bytes; all structures begin with their size and a list of extensions.
_EXTENSIONS = 1
_STAGE, _NUM_ARGUMENTS, _ARGUMENTS, _NUM_RESULTS, _RESULTS = 4, 7, 9, 12, 14
"""Of XLA_FFI_CallFrame: the stage, and the lists of arguments' and results' buffers."""
_METADATA = 3
"""Of XLA_FFI_Metadata_Extension."""
_DATA, _RANK, _SIZES = 3, 4, 5
"""Of XLA_FFI_Buffer: where its elements are, how many axes it has, and where their sizes are."""
_EXECUTE = 3
"""XLA_FFI_ExecutionStage_EXECUTE."""

FLOAT32, BFLOAT16, INT8, INT4 = range(4)
"""What is stored of numbers; of 4 bits two to a byte, as `kvjax.cache.store.scaled.packed` has
them."""

KINDS = {"float32": FLOAT32, "bfloat16": BFLOAT16, "int8": INT8}
"""What is stored of numbers, by their dtype."""


@no_type_check
@numba.njit(inline="always")
def row_bytes(d, kind):
    """Bytes of a row of d numbers."""
    return d // 2 if kind == INT4 else d * (4, 2, 1)[kind]


def _pointer_to(kind: types.Type, element: ir.Type) -> Any:
    """A function of an address that gives a pointer to elements of a type."""

    @intrinsic
    def pointer(typing, address):
        def build(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], element.as_pointer())

        return types.CPointer(kind)(types.int64), build

    return pointer


words = _pointer_to(types.int64, ir.IntType(64))
int32s = _pointer_to(types.int32, ir.IntType(32))
int16s = _pointer_to(types.int16, ir.IntType(16))
float32s = _pointer_to(types.float32, ir.FloatType())


@no_type_check
@numba.njit(inline="always")
def runs(frame):
    """Whether a function is called to compute; answers what XLA asks when it is registered."""
    if frame[_EXTENSIONS] != 0:
        found = words(frame[_EXTENSIONS])[_METADATA]
        # Behind the size: the version (size, extensions, major, minor) and what it can do, nothing.
        version = int32s(found + 3 * 8)
        version[0], version[1], version[2] = API_VERSION[0], API_VERSION[1], 0
        return False
    return frame[_STAGE] & 0xFFFFFFFF == _EXECUTE


@no_type_check
@numba.njit(inline="always")
def argument(frame, index):
    """Where the elements of an argument are."""
    return words(words(frame[_ARGUMENTS])[index])[_DATA]


@no_type_check
@numba.njit(inline="always")
def result(frame, index):
    """Where those of a result go."""
    return words(words(frame[_RESULTS])[index])[_DATA]


@no_type_check
@numba.njit(inline="always")
def num_arguments(frame):
    return frame[_NUM_ARGUMENTS]


@no_type_check
@numba.njit(inline="always")
def num_results(frame):
    return frame[_NUM_RESULTS]


@no_type_check
@numba.njit(inline="always")
def sizes(frame, index):
    """The sizes of an argument's axes."""
    return words(words(words(frame[_ARGUMENTS])[index])[_SIZES])


@no_type_check
@numba.njit(inline="always")
def rank(frame, index):
    """How many axes an argument has."""
    return words(words(frame[_ARGUMENTS])[index])[_RANK]


@intrinsic
def bfloat16_at(typing, address, index):
    """Of the bfloat16 that begin at an address one, in float32."""

    def build(context, builder, signature, arguments):
        start = builder.inttoptr(arguments[0], ir.IntType(16).as_pointer())
        bits = builder.load(builder.gep(start, [arguments[1]]))
        wide = builder.shl(builder.zext(bits, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(wide, ir.FloatType())

    return types.float32(types.int64, types.int64), build


@intrinsic
def times_power_of_two(typing, x, exponent):
    """x · 2^exponent of a float32 near 1, by its bits: an int32 between −125 and 125."""

    def build(context, builder, signature, arguments):
        bits = builder.bitcast(arguments[0], ir.IntType(32))
        more = builder.shl(arguments[1], ir.Constant(ir.IntType(32), 23))
        return builder.bitcast(builder.add(bits, more), ir.FloatType())

    return types.float32(types.float32, types.int32), build


def once[**P](build: Callable[P, str]) -> Callable[P, str]:
    """A function that lets programs call something by a name, once for each of its arguments: a
    name stands for one function, and programs are made by several threads."""
    lock, found = threading.Lock(), functools.cache(build)

    @functools.wraps(build)
    def one_at_a_time(*args: P.args, **kwargs: P.kwargs) -> str:
        with lock:
            return found(*args, **kwargs)

    return one_at_a_time


_COMPILED: list[Any] = []
"""Programs know addresses alone, and call them as long as the process lives."""


def compiled(function: Any, kind: Any) -> Any:
    """A function that C may call, of a signature, compiled; on disk, too, where Numba finds a
    folder for it."""
    try:
        found = numba.cfunc(kind, cache=True)(function)
    except RuntimeError:
        found = numba.cfunc(kind)(function)
    _COMPILED.append(found)
    return found


def check() -> None:
    """
    Raises:
        NotImplementedError: jaxlib does not serve the version of the interface.
    """
    _nothing()


@once
def _nothing() -> str:
    """The name by which programs call what does nothing: it is compiled in no time."""

    @no_type_check
    def call(frame):
        runs(frame)
        return 0

    register("kvjax_nothing", compiled(call, types.int64(types.CPointer(types.int64))))
    return "kvjax_nothing"


def register(name: str, function: Any) -> None:
    """Let programs call a function by a name.

    Raises:
        NotImplementedError: jaxlib does not serve the version of the interface.
    """
    try:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function.address), platform="cpu")
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise NotImplementedError(f"jaxlib {metadata.version('jaxlib')} ({reason})") from None
