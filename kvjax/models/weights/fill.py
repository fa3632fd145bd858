"""Fills a model's parameters from a tensor source, piece by piece.

A piece is read, dequantised, checked, cast and written to its place in the parameter, by a few
threads at once, so that nothing but pieces exists beside the parameters themselves.
"""

import concurrent.futures
import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.errors import UserError
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import abstract_params
from kvjax.models.hub import Progress
from kvjax.models.layout import IGNORED_SUFFIXES, TensorSlot, tensor_slots
from kvjax.models.weights.source import TensorSource, all_finite, convert

ParamPath = tuple[str | int, ...]

# Elements per piece: above NumPy's overhead, within a core's cache, nothing beside any model.
_PIECE = 1 << 18
_MAX_WORKERS = 8
# What XLA's CPU client asks of memory that it takes over without a copy.
_ALIGNMENT = 64


def check_source(source: TensorSource, config: ModelConfig) -> list[TensorSlot]:
    """The slots of `config`, each known to have its tensor of the right shape in `source`.

    Raises UserError for a missing tensor, a shape that disagrees, and tensors that the
    configuration has no place for (the model would not be the one that was trained).
    """
    slots: list[TensorSlot] = []
    known: set[str] = set()
    # Slot by slot: a damaged configuration may ask for millions of layers.
    for slot in tensor_slots(config):
        name = source.tensor_name(slot)
        known.add(name)
        shape = source.shapes.get(name)
        if shape is None:
            raise UserError(f"{source.path}: the tensor {name} is missing")
        if shape != slot.file_shape:
            raise UserError(
                f"{source.path}: the tensor {name} has shape {list(shape)}, but the "
                f"configuration says {list(slot.file_shape)}"
            )
        slots.append(slot)
    ignored = IGNORED_SUFFIXES + (("lm_head.weight",) if config.tie_word_embeddings else ())
    extra = [name for name in source.shapes if name not in known and not name.endswith(ignored)]
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise UserError(
            f"{source.path}: the configuration has no place for the tensor {extra[0]}{more}"
        )
    return slots


def fill_params(
    source: TensorSource,
    config: ModelConfig,
    dtype: np.dtype,
    progress: Progress | None = None,
    *,
    stacked: bool = True,
    shardings: Mapping[ParamPath, jax.sharding.Sharding] | None = None,
) -> nnx.State:
    """The parameters as `abstract_params(config, dtype, stacked)` has them, from `source`.

    On the CPU they are filled where they stay. Otherwise, and with `shardings` (by path, as
    `logical_axes` gives them), each layer goes to the device before the next one is read.
    """
    slots = check_source(source, config)
    abstract = abstract_leaves(config, dtype, stacked)
    total = sum(math.prod(slot.shape) for slot in slots) * dtype.itemsize
    report = _Report(progress, total)
    workers = min(_MAX_WORKERS, len(os.sched_getaffinity(0)))
    pool = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="kvjax-load")
    try:
        run = functools.partial(_run, pool, source, report)
        if shardings is None and default_platform() == "cpu":
            filled = _fill_on_host(abstract, slots, stacked, run)
        else:
            filled = _fill_on_device(abstract, slots, stacked, shardings or {}, run)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return state_from_leaves({path: leaf.replace(filled[path]) for path, leaf in abstract.items()})


def abstract_leaves(config: ModelConfig, dtype: np.dtype, stacked: bool) -> dict[ParamPath, Any]:
    """Abstract parameters by path.

    Single layers are made from the stack: to trace the model with each of them takes a second.
    """
    leaves: dict[ParamPath, Any] = {}
    flat = cast(list[tuple[ParamPath, Any]], nnx.to_flat_state(abstract_params(config, dtype)))
    for path, leaf in flat:
        if stacked or path[0] != "layers":
            leaves[path] = leaf
            continue
        layer = leaf.replace(jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype))
        leaves.update({("layers", i, *path[1:]): layer for i in range(config.num_layers)})
    return leaves


def state_from_leaves(leaves: Mapping[ParamPath, Any]) -> nnx.State:
    """The nnx.State with these leaves by path."""
    return nnx.from_flat_state(list(leaves.items()))


# Fills several (slot, part of the parameter on the host) and returns when all are whole.
_Run = Callable[[Iterable[tuple[TensorSlot, np.ndarray]]], None]


class _Report:
    def __init__(self, progress: Progress | None, total: int):
        self.progress, self.done, self.total = progress, 0, total

    def add(self, count: int) -> None:
        self.done += count
        if self.progress:
            self.progress("load", self.done, self.total)


def default_platform() -> str:
    """Platform of the device that new arrays go to."""
    return next(iter(jnp.zeros(()).devices())).platform


def _fill_on_host(
    abstract: dict[ParamPath, Any], slots: list[TensorSlot], stacked: bool, run: _Run
) -> dict[ParamPath, jax.Array]:
    buffers = {path: empty_on_host(leaf) for path, leaf in abstract.items()}
    run((slot, _part(buffers[_leaf_path(slot, stacked)], slot, stacked)) for slot in slots)
    # The memory becomes the array's own: the buffer is not touched again.
    return {path: jax.device_put(value, may_alias=True) for path, value in buffers.items()}


def _fill_on_device(
    abstract: dict[ParamPath, Any],
    slots: list[TensorSlot],
    stacked: bool,
    shardings: Mapping[ParamPath, jax.sharding.Sharding],
    run: _Run,
) -> dict[ParamPath, jax.Array]:
    filled: dict[ParamPath, jax.Array] = {}
    for path, leaf in abstract.items():
        sharding = shardings.get(path)
        mine = [slot for slot in slots if _leaf_path(slot, stacked) == path]
        if not (stacked and path[0] == "layers"):
            host = empty_on_host(leaf)
            run((slot, host[slot.index]) for slot in mine)
            filled[path] = jax.device_put(host, sharding)
            continue
        make, write = stack_functions(leaf.shape, leaf.dtype, sharding)
        value = make()
        for layer in range(leaf.shape[0]):
            host = np.empty(leaf.shape[1:], leaf.dtype)
            run((slot, host[slot.index]) for slot in mine if slot.layer == layer)
            value = write(value, host, np.int32(layer))
        filled[path] = value
    return filled


def stack_functions(shape: tuple[int, ...], dtype: Any, sharding: Any) -> tuple[Any, Any]:
    """A function that makes the stack of all layers, and one that writes a layer in place."""

    def write(stack: jax.Array, layer: jax.Array, index: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, layer, index, 0)

    make = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
    return make, jax.jit(write, donate_argnums=0, out_shardings=sharding)


def _leaf_path(slot: TensorSlot, stacked: bool) -> ParamPath:
    if stacked or slot.layer is None:
        return slot.param
    return (slot.param[0], slot.layer, *slot.param[1:])


def _part(buffer: np.ndarray, slot: TensorSlot, stacked: bool) -> np.ndarray:
    if stacked and slot.layer is not None:
        buffer = buffer[slot.layer]
    return buffer[slot.index]


def empty_on_host(leaf: Any) -> np.ndarray:
    """Uninitialised host memory of the leaf's shape and dtype, aligned for XLA."""
    size = math.prod(leaf.shape) * leaf.dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(leaf.dtype).reshape(leaf.shape)


def _run(
    pool: concurrent.futures.Executor,
    source: TensorSource,
    report: _Report,
    parts: Iterable[tuple[TensorSlot, np.ndarray]],
) -> None:
    futures = [
        pool.submit(_fill_piece, source, slot, units, start, stop)
        for slot, part in parts
        for units, start, stop in _pieces(slot, part)
    ]
    for future in concurrent.futures.as_completed(futures):
        report.add(future.result())


def _pieces(slot: TensorSlot, part: np.ndarray) -> Iterable[tuple[np.ndarray, int, int]]:
    """Cuts a slot into pieces: (part [U, ...], first and last of the U units of equal rows)."""
    units = _by_rows(slot, part)
    step = max(1, _PIECE // max(1, units[0].size)) if units.ndim > 1 else len(units)
    for start in range(0, len(units), step):
        yield units, start, min(start + step, len(units))


def _by_rows(slot: TensorSlot, part: np.ndarray) -> np.ndarray:
    """A view of `part` whose elements lie in the order of the file, its first axis > 1.

    A matrix [out, in] of the file fills a part [in axes…, out axes…].
    """
    if slot.transpose:
        inputs = 1
        while math.prod(slot.shape[:inputs]) != slot.file_shape[1]:
            inputs += 1
        axes = (*range(inputs, part.ndim), *range(inputs))
        part = part.transpose(axes)
    while part.ndim > 1 and part.shape[0] == 1:
        part = part[0]
    return part


def _fill_piece(
    source: TensorSource, slot: TensorSlot, units: np.ndarray, start: int, stop: int
) -> int:
    """Reads units [start, stop) of a slot into `units`; the number of bytes written."""
    rows = slot.file_shape[0] // len(units)
    values = source.read_rows(slot, start * rows, stop * rows)
    if not all_finite(values):
        raise UserError(
            f"{source.path}: the tensor {source.tensor_name(slot)} holds NaN or infinite values; "
            "the file is damaged or was converted badly: get it again"
        )
    cast = convert(values, units.dtype)
    if cast.dtype == np.float16 and cast is not values and not all_finite(cast):
        raise UserError(
            f"{source.path}: the tensor {source.tensor_name(slot)} has values beyond float16 "
            "(65504): use bfloat16 or float32"
        )
    target = units[start:stop]
    target[...] = cast.reshape(target.shape)
    return target.nbytes
