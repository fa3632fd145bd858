"""Heads of a tiny model dealt to fake devices, and functions that run on all of these."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from kvjax.cache.store import HeadShard

AXIS = "heads"


def mesh_of(devices: int) -> Mesh:
    return jax.make_mesh((devices,), (AXIS,), (AxisType.Auto,), devices=jax.devices()[:devices])


def dealt(rng: np.random.Generator, layers: int, heads: int, devices: int, places: int) -> Any:
    """A head's number, or `heads` for none, in each place of all devices, drawn at random."""
    empty = devices * places - heads
    rows = [rng.permutation([*range(heads), *[heads] * empty]) for _ in range(layers)]
    return np.array(rows, np.int32)


def in_places(x: np.ndarray, number: np.ndarray) -> np.ndarray:
    """[L, H, …] by head -> by place; what lies in an empty place is noise that must not count."""
    noise = np.full((len(x), 1, *x.shape[2:]), 7, x.dtype)
    return np.stack([row[at] for row, at in zip(np.concatenate([x, noise], 1), number)])


def by_head(x: np.ndarray, number: np.ndarray, heads: int) -> np.ndarray:
    """[L, places, …] back to [L, H, …]."""
    out = np.zeros((len(x), heads + 1, *x.shape[2:]), x.dtype)
    for layer, at in enumerate(number):
        out[layer, at] = x[layer]
    return out[:, :heads]


def on_devices(
    f: Callable[..., Any], devices: int, heads: int, specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """f(shard, *args) on each device; `number` comes first, and arguments lie as `specs` say."""

    def local(number: jax.Array, *args: Any) -> Any:
        return f(HeadShard(number, AXIS, heads), *args)

    split = PartitionSpec(None, AXIS)
    mapped = jax.shard_map(
        local,
        mesh=mesh_of(devices),
        in_specs=(split, *specs),
        out_specs=out_specs,
        check_vma=False,
    )
    return jax.jit(mapped)


SPLIT = PartitionSpec(None, AXIS)
SAME = PartitionSpec()
