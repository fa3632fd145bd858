"""Reads Orbax checkpoints: a folder with config.json, the tokenizer's files and the weights.

    config.json     as Hugging Face writes it
    tokenizer…      the files that the original had; of a GGUF file, its metadata alone
    params/         the Orbax checkpoint: {"embed": …, "layers": {"0": {"qkv": …}, …}, …}
    dealing.json    of a model that was saved as it lay on several devices: which head lies where
    files.json      the size and the CRC-32 of every file below params/

The weights lie as the model takes them (``kvjax.models.families``), one array per layer, so that
they load without a second copy whether the layers are to be stacked or not.
"""

import contextlib
import dataclasses
import gc
import logging
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.checks import shown
from kvjax.errors import UserError
from kvjax.models.architectures import config_from_hf
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import logical_axes
from kvjax.models.files import crc32, find
from kvjax.models.fingerprint import hash_of_samples, sample_of
from kvjax.models.hub import Progress
from kvjax.models.parallel import Dealing, dealt_shape, layer_of, undealt
from kvjax.models.weights.placement import (
    Lying,
    ParamPath,
    Placement,
    abstract_leaves,
    whole_in_every_process,
)
from kvjax.models.weights.safetensors import read_part
from kvjax.models.weights.source import all_finite

PARAMS = "params"
CONFIG = "config.json"
FINGERPRINT = "kvjax_fingerprint"
"""Field of config.json: float16 has other weights than what it was rounded from."""
DEALING, FILES = "dealing.json", "files.json"
# What Orbax reads or writes at a time: it holds that much a second time meanwhile.
GROUP_BYTES = 1 << 28
# Keys of an entry of files.json, and what a file holds that holds more than metadata.
BYTES, SUM = "bytes", "crc32"
LARGE_BYTES = 1 << 20


def library() -> Any:
    """Orbax, which takes a while to import and would have the root logger print to stderr."""
    handlers = list(logging.root.handlers)
    from orbax.checkpoint import v1

    logging.root.handlers[:] = handlers
    return v1


def is_orbax(folder: Path) -> bool:
    """Whether `folder` is a checkpoint that `save_orbax` wrote (whole or not)."""
    return (folder / PARAMS).is_dir()


def load_orbax(
    path: str | os.PathLike[str],
    config: ModelConfig,
    dtype: np.dtype,
    progress: Progress | None = None,
    *,
    stacked: bool = True,
    shardings: Lying = None,
) -> nnx.State:
    """The parameters in the Orbax checkpoint `path`, cast to `dtype` and sharded as asked.

    Raises UserError if arrays are missing, damaged, of other shapes than `config` says, or hold
    NaN or infinite values.
    """
    folder = Path(path)
    _check_files(folder)
    dealing = _read_dealing(folder, config)
    whole = dataclasses.replace(config, weight_dtype=None)
    stored = _check_metadata(folder, whole, dtype, dealing)
    place = Placement(config, dtype, stacked, shardings)
    if dealing is not None and place.reads_itself(dealing):
        # Every device reads its own part.
        place, dealing = Placement(config, dtype, stacked, place.shardings), None
    total = sum(math.prod(leaf.shape) for leaf in stored.values()) * dtype.itemsize
    done = 0
    for group in _groups(stored):
        for name, value in _read_arrays(folder, stored, group, place.sharding_of_single).items():
            _check_finite(folder, name, value, dtype)
            done += value.nbytes
            if dealing is not None:
                names = place.names_of(name)
                value = undealt(np.asarray(value), names, config, dealing, layer_of(name))
            elif place.split is not None and not value.is_fully_addressable:
                value = np.asarray(value)  # it lies on other devices than it will
            place.put_whole(name, value)
            if progress:
                progress("load", done, total)
    return place.state()


def orbax_hash(folder: Path, config: ModelConfig, dtype: np.dtype) -> str:
    """The `model_hash` of the model in a checkpoint, of which a few arrays at a time are read.

    Raises UserError as `load_orbax`.
    """
    if (told := told_hash(folder)) is not None:
        return told
    _check_files(folder)
    dealing = _read_dealing(folder, config)
    stored, lies = _check_metadata(folder, config, dtype, dealing), whole_in_every_process()
    axes = logical_axes(config, stacked=False)
    samples: dict[tuple[str, int | None], bytes] = {}
    for group in _groups(stored):
        for path, value in _read_arrays(folder, stored, group, lambda _: lies).items():
            _check_finite(folder, path, value, dtype)
            layer, whole = layer_of(path), value
            if dealing is not None:
                whole = undealt(np.asarray(value), axes[path], config, dealing, layer)
            elif not value.is_fully_addressable:
                whole = np.asarray(value)
            samples[str(path[-1]), layer] = sample_of(whole)
    plain = {name for name, layer in samples if layer is None}
    layers = {name for name, layer in samples if layer is not None}
    return hash_of_samples(config, plain, layers, lambda name, layer: samples[name, layer])


def told_hash(folder: Path) -> str | None:
    """That of the checkpoint that one was converted from; None where it does not say."""
    return read_part(folder / CONFIG).text(FINGERPRINT) if is_orbax(folder) else None


def read_config(folder: Path) -> ModelConfig:
    """The configuration of an Orbax checkpoint."""
    if not (folder / CONFIG).exists():
        raise UserError(f"{folder} has no {CONFIG}: it is no whole checkpoint; convert it again")
    return config_from_hf(read_part(folder / CONFIG).values, where=str(folder / CONFIG))


def _read_dealing(folder: Path, config: ModelConfig) -> Dealing | None:
    path = folder / DEALING
    if not path.exists():
        return None
    try:
        values = read_part(path).values
        found = Dealing(
            np.array(values["number"], np.int32),
            config.num_kv_heads,
            values["devices"] // values.get("replicas", 1),
            values.get("replicas", 1),
        )
        fits = len(found.number) == config.num_layers and found.whole
        fits &= found.devices == values["devices"] and 1 <= found.replicas <= config.group_size
        if fits and found.number.shape[1] == found.places * found.shards:
            return found
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError, OverflowError):
        pass
    raise UserError(f"{path} deals other heads than the model has; convert the checkpoint again")


def file_sizes(params: Path) -> dict[str, int]:
    """Bytes of every file below `params`, by its path there.

    Raises UserError for what is neither a file nor a folder: Orbax would wait for a pipe.
    """
    sizes = {}
    for path in sorted(params.rglob("*")):
        if (found := find(path, "the checkpoint's")) and path.is_file():
            sizes[path.relative_to(params).as_posix()] = found.st_size
    return sizes


def list_files(params: Path) -> dict[str, dict[str, int]]:
    """What files.json says of every file below `params`: its bytes and their CRC-32."""
    sizes = file_sizes(params)
    sums = _sums(params, sizes)
    return {name: {BYTES: size, SUM: sums[name]} for name, size in sizes.items()}


def _sums(params: Path, names: Iterable[str]) -> dict[str, int]:
    """The CRC-32 of files below `params`, several at a time."""
    names = list(names)
    with futures.ThreadPoolExecutor() as pool:
        found = pool.map(lambda name: crc32(params / name), names)
        return dict(zip(names, found, strict=True))


def _check_files(folder: Path) -> None:
    """Compares all files with files.json, as far as it tells.

    Orbax tells of a truncated file in hundreds of lines, of bytes that changed inside an array
    not at all; and where it fails while it reads arrays, its threads call into an event loop that
    is closed. Of the files that hold arrays each of several processes compares a share.
    """
    params, listed = folder / PARAMS, read_part(folder / FILES).values
    sizes = file_sizes(params)

    def damaged(name: str, more: str) -> UserError:
        shown_name = name if name.isprintable() else shown(name)
        return UserError(f"{params / shown_name} is {more}; convert the checkpoint again")

    expected = {
        # Checkpoints of earlier versions have sizes alone.
        name: told if isinstance(told, dict) else {BYTES: told}
        for name, told in listed.items()
    }
    for name, told in expected.items():
        if name not in sizes:
            raise damaged(name, "missing")
        if sizes[name] != told.get(BYTES):
            size = shown(told.get(BYTES))
            raise damaged(name, f"truncated or damaged: it has {sizes[name]} of {size} bytes")
    summed = [name for name, told in expected.items() if SUM in told]
    large = [name for name in summed if sizes[name] > LARGE_BYTES]
    others = set(large) - set(large[jax.process_index() :: jax.process_count()])
    sums = _sums(params, (name for name in summed if name not in others))
    for name, found in sums.items():
        if found != expected[name][SUM]:
            raise damaged(name, "damaged: its bytes are not those that were written")


def _check_metadata(
    folder: Path, config: ModelConfig, dtype: np.dtype, dealing: Dealing | None
) -> dict[ParamPath, jax.ShapeDtypeStruct]:
    """What is to be stored, by path, after comparing it with what is."""
    ocp = library()

    axes = logical_axes(config, stacked=False)

    def shape(path: ParamPath, leaf: Any) -> tuple[int, ...]:
        return leaf.shape if dealing is None else dealt_shape(leaf.shape, axes[path], dealing)

    wanted: dict[ParamPath, jax.ShapeDtypeStruct] = {
        path: jax.ShapeDtypeStruct(shape(path, leaf), dtype)
        for path, leaf in abstract_leaves(config, dtype, stacked=False).items()
    }
    with _reading(folder):
        tree = ocp.metadata(str((folder / PARAMS).absolute())).metadata
        found = {
            tuple(str(getattr(key, "key", key)) for key in path): tuple(leaf.shape)
            for path, leaf in jax.tree_util.tree_flatten_with_path(
                tree, is_leaf=lambda node: hasattr(node, "shape")
            )[0]
        }
    for path, leaf in wanted.items():
        name = ".".join(map(str, path))
        there = found.pop(tuple(map(str, path)), None)
        if there is None:
            raise UserError(f"{folder}: the array {name} is missing")
        if there != leaf.shape:
            raise UserError(
                f"{folder}: the array {name} has shape {list(there)}, but the configuration says "
                f"{list(leaf.shape)}"
            )
    if found:
        raise UserError(
            f"{folder}: the configuration has no place for the array {'.'.join(next(iter(found)))}"
        )
    return wanted


def _groups(stored: Mapping[ParamPath, jax.ShapeDtypeStruct]) -> Iterable[list[ParamPath]]:
    """Arrays to read together; the largest first, while there is little else in memory."""

    def size(path: ParamPath) -> int:
        return math.prod(stored[path].shape) * stored[path].dtype.itemsize

    group: list[ParamPath] = []
    total = 0
    for path in sorted(stored, key=size, reverse=True):
        if group and total + size(path) > GROUP_BYTES:
            yield group
            group, total = [], 0
        group.append(path)
        total += size(path)
    if group:
        yield group


def _read_arrays(
    folder: Path,
    stored: Mapping[ParamPath, jax.ShapeDtypeStruct],
    group: list[ParamPath],
    lies: Callable[[ParamPath], jax.sharding.Sharding],
) -> dict[ParamPath, jax.Array]:
    ocp = library()

    chosen = set(group)
    tree: dict[str, Any] = {}
    for path, leaf in stored.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(str(key), {})
        # What Orbax calls a leaf that it is to leave on disk.
        node[str(path[-1])] = ocp.PLACEHOLDER
        if path in chosen:
            node[str(path[-1])] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=lies(path))
    with _reading(folder):
        loaded = cast(dict[str, Any], ocp.load(str((folder / PARAMS).absolute()), tree))
    values: dict[ParamPath, jax.Array] = {}
    for path in group:
        node = loaded
        for key in path:
            node = node[str(key)]
        values[path] = cast(jax.Array, node)
    return values


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Turns whatever Orbax raises for a damaged checkpoint into one line."""
    reason = None
    # Of Orbax's many tasks one reports the damage. The others report it to stderr as soon as
    # they are collected, so that has to happen in here.
    hook, logs = sys.unraisablehook, [logging.getLogger(name) for name in ("asyncio", "absl")]
    quiet = [log.disabled for log in logs]
    # What it logs by the root logger gives that a handler.
    handlers = list(logging.root.handlers)
    sys.unraisablehook = lambda _: None
    for log in logs:
        log.disabled = True
    try:
        try:
            yield
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reason = lines[0].partition(". See full")[0][:200]
            traceback.clear_frames(error.__traceback__)
        if reason is not None:
            with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
                gc.collect()
    finally:
        sys.unraisablehook = hook
        logging.root.handlers[:] = handlers
        for log, disabled in zip(logs, quiet, strict=True):
            log.disabled = disabled
    if reason is not None:
        raise UserError(
            f"{folder} is no readable Orbax checkpoint, or is damaged: {reason}; convert it again"
        )


def _check_finite(folder: Path, path: ParamPath, value: jax.Array, dtype: np.dtype) -> None:
    if not _is_finite(value):
        raise UserError(
            f"{folder}: the array {'.'.join(map(str, path))} holds NaN or infinite values "
            f"as {dtype.name}; convert it again, or load it as float32 or bfloat16"
        )


def _is_finite(value: jax.Array) -> bool:
    if value.is_fully_addressable and next(iter(value.devices())).platform == "cpu":
        return all_finite(np.asarray(value))
    return bool(jnp.isfinite(value).all())
