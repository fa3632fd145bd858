"""Chunks of a call, dealt to the threads that XLA computes with.

XLA runs calls of a program one after the other, each on one thread, but lends its threads
(`XLA_FFI_ThreadPool_Schedule`). Whether and when they come is not said, so nothing waits for one
that did not begin: whoever is there takes the next chunk until there is none, the caller too, which
then waits for chunks that others are at. One that comes later finds no chunk and touches nothing
else; who leaves last gives the memory back.
"""

import sys
from typing import Any, no_type_check

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.core.errors import RequireLiteralValue

from kvjax.kernels.numba_calls import API_VERSION, compiled, intrinsic, register, words

# Words of a team's memory.
_NEXT, _DONE, _MEMBERS, TOTAL, FRAME, PHASE, _WORDS = range(7)
# Offsets in words: of a frame, and of XLA_FFI_Api.
_API, _CONTEXT, _VERSION, _DESTROY, _SCHEDULE, _NUM_THREADS = 2, 3, 4, 8, 17, 18
_WORD, _SMALL = ir.IntType(64), ir.IntType(32)


def lend(name: str, task) -> None:
    """Let `address_of` find a task, a C function of one address, by a name."""
    llvmlite.binding.add_symbol(name, task.address)


def serve(name: str, task: Any, call: Any) -> None:
    """Let programs call a function of a frame by a name, by which it finds a task of a team.

    Raises:
        NotImplementedError: jaxlib does not serve the version of the interface.
    """
    lend(name, compiled(task, types.void(types.int64)))
    register(name, compiled(call, types.int64(types.CPointer(types.int64))))


@intrinsic
def address_of(typing, name):
    """Where a function of C is, of which the name is a literal."""
    if not isinstance(name, types.StringLiteral):
        raise RequireLiteralValue("name")

    def build(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [_WORD])
        return builder.ptrtoint(_c_function(builder, kind, name.literal_value), _WORD)

    return types.int64(name), build


@no_type_check
@numba.njit
def run(frame, task, phase, total):
    """Do so many chunks of a call, by the caller and as many threads as are of use.

    `task` is the address of a function that works with the address of a team and then leaves it.
    What is numbered `phase` is up to the task.
    """
    address = _allocate(_WORDS * 8)
    team = words(address)
    team[_NEXT], team[_DONE], team[TOTAL], team[FRAME] = 0, 0, total, _address(frame)
    helpers = max(0, min(_threads(frame), total) - 1)
    # Itself twice: it waits after its own work.
    team[PHASE], team[_MEMBERS] = phase, 2 + helpers
    for _ in range(helpers):
        if not _scheduled(frame, task, address):
            leave(address)
    _call(task, address)
    while _add(address + 8 * _DONE, 0) < total:
        _give_way()
    leave(address)


@no_type_check
@numba.njit(inline="always")
def take(address):
    """The number of a chunk that nobody else has; `TOTAL` and more where there is none left."""
    return _add(address + 8 * _NEXT, 1)


@no_type_check
@numba.njit(inline="always")
def finished(address):
    """Say that a chunk that was taken is done."""
    _add(address + 8 * _DONE, 1)


@no_type_check
@numba.njit
def leave(address):
    """The task's last step."""
    if _add(address + 8 * _MEMBERS, -1) == 1:
        _free(address)


@no_type_check
@numba.njit
def _threads(frame):
    """XLA's threads; one, itself, by a version of the interface that is not known."""
    api = words(frame[_API])
    if api[_VERSION] != API_VERSION[0] | (API_VERSION[1] << 32):
        return 1
    count, given = _allocate(8), _allocate(4 * 8)
    words(count)[0] = 1
    args = words(given)
    args[0], args[1], args[2], args[3] = 4 * 8, 0, frame[_CONTEXT], count
    error = _call(api[_NUM_THREADS], given)
    if error != 0:
        _destroy(api, error)
    found = words(count)[0]
    _free(count)
    _free(given)
    return found


@no_type_check
@numba.njit
def _scheduled(frame, task, address):
    """Whether XLA takes a task for one of its threads."""
    api, given = words(frame[_API]), _allocate(5 * 8)
    args = words(given)
    args[0], args[1], args[2], args[3], args[4] = 5 * 8, 0, frame[_CONTEXT], task, address
    error = _call(api[_SCHEDULE], given)
    if error != 0:
        _destroy(api, error)
    _free(given)
    return error == 0


@no_type_check
@numba.njit
def _destroy(api, error):
    given = _allocate(3 * 8)
    args = words(given)
    args[0], args[1], args[2] = 3 * 8, 0, error
    _call(api[_DESTROY], given)
    _free(given)


def _c_function(builder: ir.IRBuilder, kind: ir.FunctionType, name: str) -> ir.Function:
    found = builder.module.globals.get(name)
    return ir.Function(builder.module, kind, name) if found is None else found


@intrinsic
def _allocate(typing, size):
    def build(context, builder, signature, arguments):
        kind = ir.FunctionType(_WORD, [_WORD])
        return builder.call(_c_function(builder, kind, "malloc"), arguments)

    return types.int64(types.int64), build


@intrinsic
def _free(typing, address):
    def build(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [_WORD])
        builder.call(_c_function(builder, kind, "free"), arguments)
        return context.get_dummy_value()

    return types.none(types.int64), build


@intrinsic
def _give_way(typing):
    """Let another thread have the core, where the system has a call for it."""

    def build(context, builder, signature, arguments):
        if sys.platform != "win32":
            builder.call(_c_function(builder, ir.FunctionType(_SMALL, []), "sched_yield"), [])
        return context.get_dummy_value()

    return types.none(), build


@intrinsic
def _add(typing, address, more):
    """Add to a word that others change, too; what it was."""

    def build(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], _WORD.as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), build


@intrinsic
def _call(typing, function, argument):
    def build(context, builder, signature, arguments):
        kind = ir.FunctionType(_WORD, [_WORD]).as_pointer()
        return builder.call(builder.inttoptr(arguments[0], kind), [arguments[1]])

    return types.int64(types.int64, types.int64), build


@intrinsic
def _address(typing, pointer):
    def build(context, builder, signature, arguments):
        return builder.ptrtoint(arguments[0], _WORD)

    return types.int64(pointer), build
