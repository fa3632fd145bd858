"""A checkpoint's fingerprint, from the few weights that `kvjax.models.fingerprint` looks at."""

import math

import numpy as np

from kvjax.models.config import ModelConfig
from kvjax.models.families import family_of
from kvjax.models.fingerprint import hash_of_samples, sample_bytes, sample_indices
from kvjax.models.layout import TensorSlot, tensor_slots
from kvjax.models.weights.source import TensorSource


def source_hash(source: TensorSource, config: ModelConfig) -> str:
    """What `model_hash` says of the parameters that the source fills."""
    family = family_of(config)
    plain, layers = family.table(config), family.layer_class.table(config)
    slots: dict[tuple[str, int | None], list[TensorSlot]] = {}
    for slot in tensor_slots(config):
        slots.setdefault((slot.param[-1], slot.layer), []).append(slot)

    def sample(name: str, layer: int | None) -> bytes:
        shape = (plain if layer is None else layers)[name].shape
        at = np.stack(np.unravel_index(sample_indices(shape), shape))
        found = np.zeros(at.shape[1], np.float32)
        for slot in slots[name, layer]:
            first = np.zeros(len(shape), int)
            first[: len(slot.index)] = [part.start or 0 for part in slot.index]
            own = at - first[:, None]
            inside = ((own >= 0) & (own < np.array(slot.shape)[:, None])).all(0)
            found[inside] = _elements(source, slot, own[:, inside], config.head_dim)
        return sample_bytes(found)

    return hash_of_samples(config, plain, layers, sample)


def _elements(source: TensorSource, slot: TensorSlot, at: np.ndarray, head_dim: int) -> np.ndarray:
    """Elements of a tensor by their places [axes, n] in what it fills."""
    inputs = slot.inputs
    order = (*range(inputs, len(at)), *range(inputs))
    flat = np.ravel_multi_index(
        tuple(at[axis] for axis in order), tuple(slot.shape[axis] for axis in order)
    )
    row, column = np.divmod(flat, math.prod(slot.file_shape[1:]))
    # Rotated heads are read whole.
    unit = head_dim if slot.rotated else 1
    found = np.empty(len(row), np.float32)
    for first in np.unique(row // unit * unit):
        here = row // unit * unit == first
        rows = source.read_rows(slot, int(first), int(first) + unit)
        found[here] = rows.reshape(unit, -1)[row[here] - first, column[here]].astype(np.float32)
    return found
