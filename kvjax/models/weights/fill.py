"""Fills a model's parameters from a tensor source, piece by piece.

A piece is read, dequantised, checked, cast and written to its place in the parameter, by a few
threads at once, so that nothing but pieces exists beside the parameters themselves.
"""

import concurrent.futures
import dataclasses
import os
from collections.abc import Iterable

import numpy as np
from flax import nnx

from kvjax.errors import UserError
from kvjax.models.config import ModelConfig
from kvjax.models.hub import Progress
from kvjax.models.layout import EMBEDDING, HEAD, IGNORED_SUFFIXES, TensorSlot, tensor_slots
from kvjax.models.narrow import narrowed
from kvjax.models.weights.placement import Lying, ParamPath, Placement, scale_path
from kvjax.models.weights.source import TensorSource, all_finite, convert

# Elements per piece: above NumPy's overhead, within a core's cache, nothing beside any model.
_PIECE = 1 << 18
_MAX_WORKERS = 8
TIED_ROWS = 64
"""Rows of a head that are compared with the embedding's."""


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
    ignored = IGNORED_SUFFIXES + ((HEAD,) if config.tie_word_embeddings else ())
    if config.tie_word_embeddings and {EMBEDDING, HEAD} <= source.shapes.keys():
        _check_tied(source, config)
    extra = [name for name in source.shapes if name not in known and not name.endswith(ignored)]
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise UserError(
            f"{source.path}: the configuration has no place for the tensor {extra[0]}{more}"
        )
    return slots


def _check_tied(source: TensorSource, config: ModelConfig) -> None:
    """Refuse an output head that is not the embedding that the configuration says it is."""
    untied = dataclasses.replace(config, tie_word_embeddings=False)
    slots = {source.tensor_name(slot): slot for slot in tensor_slots(untied)}
    head, table = slots[HEAD], slots[EMBEDDING]
    rows = range(0, config.vocab_size, max(1, config.vocab_size // TIED_ROWS))
    if source.shapes[HEAD] != head.file_shape or not all(
        np.array_equal(source.read_rows(head, row, row + 1), source.read_rows(table, row, row + 1))
        for row in rows
    ):
        raise UserError(
            f"{source.path}: the tensor {HEAD} is not the embedding, and config.json says "
            "tie_word_embeddings: set it to false to use this head, or leave the tensor out"
        )


def fill_params(
    source: TensorSource,
    config: ModelConfig,
    dtype: np.dtype,
    progress: Progress | None = None,
    *,
    stacked: bool = True,
    shardings: Lying = None,
) -> nnx.State:
    """The parameters as `abstract_params(config, dtype, stacked)` has them, from `source`.

    On the CPU they are filled where they stay. Otherwise, and with `shardings`, each parameter
    of a layer goes to the devices before the next one is read.
    """
    singles: dict[ParamPath, list[TensorSlot]] = {}
    for slot in check_source(source, config):
        layer = () if slot.layer is None else (slot.layer,)
        singles.setdefault((*slot.param[:-1], *layer, slot.param[-1]), []).append(slot)
    place = Placement(config, dtype, stacked, shardings)
    report = _Report(progress, place.num_bytes)
    workers = min(_MAX_WORKERS, len(os.sched_getaffinity(0)))
    pool = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="kvjax-load")
    try:
        # On the host nothing is in the way of reading all at once.
        for paths in [list(singles)] if place.on_host else [[path] for path in singles]:
            rooms = {path: place.room(path) for path in paths}
            scales = {path: place.room(scale_path(path)) for path in paths if place.is_narrow(path)}
            targets = (
                _Target.of(slot, rooms[path], scales.get(path))
                for path in paths
                for slot in singles[path]
            )
            _run(pool, source, report, targets)
            for path in paths:
                place.put(path, rooms[path])
                if path in scales:
                    place.put(scale_path(path), scales[path])
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return place.state()


@dataclasses.dataclass(frozen=True)
class _Target:
    """The part of a parameter that a tensor fills, its elements in the order of the file."""

    slot: TensorSlot
    units: np.ndarray
    """[U, …], each of as many rows of the file: whole heads of rotated ones."""
    scale: np.ndarray | None
    """[U, …], of the same rows, where weights are of few bits."""

    @classmethod
    def of(cls, slot: TensorSlot, weight: np.ndarray, scale: np.ndarray | None) -> "_Target":
        least = 2 if slot.rotated else 1
        units = _without_ones(_by_rows(slot, weight[slot.index]), least + slot.inputs)
        if scale is not None:
            scale = _without_ones(scale[slot.index[slot.inputs :]], least)
        return cls(slot, units, scale)

    def pieces(self) -> Iterable[tuple[int, int]]:
        """First and last of the units of each piece."""
        units = self.units
        step = max(1, _PIECE // max(1, units[0].size)) if units.ndim > 1 else len(units)
        for start in range(0, len(units), step):
            yield start, min(start + step, len(units))


class _Report:
    def __init__(self, progress: Progress | None, total: int):
        self.progress, self.done, self.total = progress, 0, total

    def add(self, count: int) -> None:
        self.done += count
        if self.progress:
            self.progress("load", self.done, self.total)


def _run(
    pool: concurrent.futures.Executor,
    source: TensorSource,
    report: _Report,
    targets: Iterable[_Target],
) -> None:
    futures = [
        pool.submit(_fill_piece, source, target, start, stop)
        for target in targets
        for start, stop in target.pieces()
    ]
    for future in concurrent.futures.as_completed(futures):
        report.add(future.result())


def _by_rows(slot: TensorSlot, part: np.ndarray) -> np.ndarray:
    """A view of `part` whose elements lie in the order of the file.

    A matrix [out, in] of the file fills a part [in axes…, out axes…].
    """
    inputs = slot.inputs
    return part.transpose((*range(inputs, part.ndim), *range(inputs)))


def _without_ones(part: np.ndarray, least: int) -> np.ndarray:
    """The same without leading axes of one element, as long as more than `least` axes are left."""
    while part.ndim > least and part.shape[0] == 1:
        part = part[0]
    return part


def _fill_piece(source: TensorSource, to: _Target, start: int, stop: int) -> int:
    """Reads units [start, stop) of a tensor into their place; the number of bytes written."""
    slot, target = to.slot, to.units[start:stop]
    rows = slot.file_shape[0] // len(to.units)
    values = source.read_rows(slot, start * rows, stop * rows)
    if not all_finite(values):
        raise UserError(
            f"{source.path}: the tensor {source.tensor_name(slot)} holds NaN or infinite values; "
            "the file is damaged or was converted badly: get it again"
        )
    if to.scale is not None:
        scale = to.scale[start:stop]
        numbers, scales = narrowed(values, target.dtype, scale.dtype)
        target[...], scale[...] = numbers.reshape(target.shape), scales.reshape(scale.shape)
        return target.nbytes + scale.nbytes
    cast = convert(values, target.dtype)
    if cast.dtype == np.float16 and cast is not values and not all_finite(cast):
        raise UserError(
            f"{source.path}: the tensor {source.tensor_name(slot)} has values beyond float16 "
            "(65504): use bfloat16 or float32"
        )
    target[...] = cast.reshape(target.shape)
    return target.nbytes
