"""A Hugging Face checkpoint folder: config.json and safetensors files, single or sharded.

Only the header of each file is parsed; tensors are read piece by piece with plain reads, so that
no file is ever mapped or held as a whole. Format: eight bytes with the length of a JSON header,
the header (name -> dtype, shape, [begin, end) in the data), the data.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np

from kvjax.checks import shown
from kvjax.errors import UserError
from kvjax.models.architectures import config_from_hf
from kvjax.models.config import ModelConfig
from kvjax.models.files import (
    MAX_JSON_BYTES,
    Fields,
    open_file,
    parse_json,
    read_fields,
    shown_error,
)
from kvjax.models.layout import EMBEDDING, HEAD, TensorSlot
from kvjax.models.weights.source import read_exactly

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_INDEX = "model.safetensors.index.json"
_MAX_DIMENSIONS = 8


@dataclass(frozen=True)
class _Tensor:
    file: BinaryIO
    path: Path
    dtype: str
    offset: int  # bytes from the start of the file


class SafetensorsSource:
    """The tensors of a checkpoint folder; see `TensorSource`."""

    def __init__(self, path: str | os.PathLike[str], config: ModelConfig | None = None):
        """Reads config.json (without one, `config` is taken) and all headers of the folder."""
        self.path = Path(path)
        self.config = read_hf_config(self.path, config)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._tensors: dict[str, _Tensor] = {}
        self._files: list[BinaryIO] = []
        try:
            for file in _shards(self.path):
                self._add(file)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the files."""
        for file in self._files:
            file.close()

    def tensor_name(self, slot: TensorSlot) -> str:
        """The name of the slot's tensor in the files."""
        name = slot.hf_name
        # Whoever writes a matrix of two names once, as safetensors' `save_model`, may keep either.
        only_head = name == EMBEDDING not in self._tensors and self.config.tie_word_embeddings
        return HEAD if only_head and HEAD in self._tensors else name

    def read_rows(self, slot: TensorSlot, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) in the dtype of the file."""
        name = self.tensor_name(slot)
        tensor = self._tensors[name]
        if tensor.dtype not in _DTYPES:
            raise UserError(
                f"{tensor.path}: the tensor {name} has dtype {tensor.dtype}; "
                f"supported: {', '.join(_DTYPES)}"
            )
        dtype, row_shape = _DTYPES[tensor.dtype], self.shapes[name][1:]
        row_bytes = math.prod(row_shape) * dtype.itemsize
        offset, count = tensor.offset + start * row_bytes, (stop - start) * row_bytes
        raw = read_exactly(tensor.file.fileno(), offset, count, tensor.path)
        return raw.view(dtype).reshape(stop - start, *row_shape)

    def _add(self, path: Path) -> None:
        """Parses the header of one file and adds its tensors."""
        try:
            file = open_file(path)
        except FileNotFoundError:
            raise UserError(
                f"the shard {path.name} is missing in {path.parent}; get it again"
            ) from None
        self._files.append(file)
        size = os.fstat(file.fileno()).st_size
        for name, (dtype, shape, begin, end) in _parse_header(path, file, size).items():
            if name in self._tensors:
                raise UserError(f"{path}: the tensor {name} is in another shard already")
            if end > size:
                raise UserError(
                    f"{path} is truncated: the tensor {name} ends at byte {end}, "
                    f"but the file has {size} bytes; get the file again"
                )
            self.shapes[name] = shape
            self._tensors[name] = _Tensor(file, path, dtype, begin)


def read_hf_config(folder: Path, fallback: ModelConfig | None = None) -> ModelConfig:
    """The configuration in `folder`/config.json; `fallback` if there is no such file."""
    path = folder / "config.json"
    if not path.exists() and fallback is not None:
        return fallback
    return config_from_hf(read_part(path).values, _name_of(folder), str(path))


def _name_of(folder: Path) -> str:
    """What the model in a folder is called: as the folder, or as on the hub.

    The hub's cache has models--ORG--NAME/snapshots/COMMIT, and no name has two hyphens in a row.
    """
    *_, repository, kind, name = ("", "", *Path(os.path.abspath(folder)).parts)
    if kind == "snapshots" and repository.startswith("models--"):
        return repository.rpartition("--")[2]
    return name


def read_part(path: Path) -> Fields:
    """The JSON object in the file `path`, without which a checkpoint is not whole.

    Raises:
        UserError: it is missing, or something else.
    """
    try:
        return read_fields(path)
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}: it is not a whole checkpoint") from None


def _shards(folder: Path) -> list[Path]:
    """The files that hold the checkpoint's tensors."""
    # As transformers does: an index beside it is that of a checkpoint that lay there before.
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    index = folder / _INDEX
    if index.exists():
        weight_map = read_part(index).object("weight_map").values
        if not weight_map:
            raise UserError(f"{index} has no weight_map")
        for name in weight_map.values():
            # Its own folder's: no path, and nothing that no file can be called.
            plain = isinstance(name, str) and name.isprintable() and len(name) < 256
            if not (plain and Path(name).name == name):
                raise UserError(f"{index} names {shown(name)}, which is not a file of its folder")
        return [folder / name for name in sorted(set(weight_map.values()))]
    files = sorted(folder.glob("*.safetensors"))
    whole = [file for file in files if not file.name.startswith("consolidated")]
    if not whole:
        raise UserError(f"{folder} has no safetensors files")
    shard_counts = {file.stem.rpartition("-of-")[2] for file in whole if "-of-" in file.stem}
    if len(whole) > 1 or any(int(count) != 1 for count in shard_counts if count.isdecimal()):
        raise UserError(
            f"{folder} has files of a checkpoint of several, but no {_INDEX}; get it as well"
        )
    return whole


def _parse_header(
    path: Path, file: BinaryIO, size: int
) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """dtype, shape, and first and last byte in the file, by name."""
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, MAX_JSON_BYTES):
        raise UserError(
            f"{path} is truncated or no safetensors file: its header would take {length} bytes "
            f"of {size}; get the file again"
        )
    header = parse_json(file.read(length), f"{path} has a damaged safetensors header: it")
    entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    try:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            dtype, shape = str(entry["dtype"]), tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            wrong = not name.isprintable() or not dtype.isprintable() or len(dtype) > 16
            wrong |= len(shape) > _MAX_DIMENSIONS
            # A bool is an int to Python, a float never is: 1e3, NaN and Infinity are refused.
            wrong |= any(type(n) is not int or n < 0 for n in (*shape, begin, end))
            if not wrong and dtype in _DTYPES:
                wrong = end - begin != math.prod(shape) * _DTYPES[dtype].itemsize
            if wrong or end < begin:
                raise ValueError(f"the entry of {shown(name)} contradicts itself")
            entries[name] = dtype, shape, 8 + length + begin, 8 + length + end
        # The format allows neither gaps nor overlaps: they are flipped bits.
        position = 8 + length
        for name, (_, _, begin, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
            if begin != position:
                raise ValueError(f"the tensor {shown(name)} does not follow the one before it")
            position = end
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} has a damaged safetensors header: {shown_error(error)}") from None
    return entries
