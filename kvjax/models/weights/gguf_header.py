"""The header of a GGUF file: metadata and the table of tensors.

The gguf package's own reader makes an array view for every vocabulary entry, which takes
seconds; this one walks the header once. Format: the GGUF specification of ggml, versions 2
and 3, little endian.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.checks import shown
from kvjax.errors import UserError
from kvjax.models.files import open_file

# Metadata type -> struct code, which is NumPy's code as well.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd"))
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_NAME = 200


@dataclass(frozen=True)
class GGUFTensor:
    """One entry of the tensor table. `shape` is row-major: the quantised axis is last."""

    name: str
    shape: tuple[int, ...]
    type_name: str  # "Q4_1", "F32", …
    offset: int  # bytes from the start of the file
    num_bytes: int
    block_size: int  # elements per quantisation block
    block_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata values by key, and tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    metadata_end: int  # bytes from the start of the file to the end of the metadata
    metadata_count: int


def read_gguf_header(path: str | os.PathLike[str]) -> GGUFHeader:
    """Reads the metadata and the tensor table of the GGUF file at `path`.

    Arrays of numbers come as NumPy arrays, arrays of strings as lists. Raises UserError for a
    file that is missing, of another format or version, truncated, or damaged in its header.
    """
    file = Path(path)
    try:
        with open_file(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            return _Parser(file, stream, size).parse()
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error


class _Parser:
    def __init__(self, path: Path, stream: Any, size: int):
        self.path, self.stream, self.size = path, stream, size
        self.position = 0  # of the next byte of the header
        self.base = 0  # file offset of self.buffer[0]
        self.buffer = b""

    def parse(self) -> GGUFHeader:
        if self.take(min(4, self.size)) != b"GGUF":
            raise UserError(f"{self.path} is not a GGUF file: it does not begin with 'GGUF'")
        version = self.number("I")
        if version & 0xFFFF == 0:
            raise UserError(f"{self.path} is a big-endian GGUF file; only little endian is read")
        if version not in (2, 3):
            raise UserError(f"{self.path} has GGUF version {version}; supported: 2, 3")
        tensor_count, metadata_count = self.number("Q"), self.number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            key = self.string()
            if key in metadata:
                raise self.damaged(f"the metadata key {shown(key)} appears twice")
            metadata[key] = self.value(self.number("I"))
        metadata_end = self.position
        table = [self.tensor_entry() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self.damaged(f"its alignment {shown(alignment)} is not a power of two")
        start = -(-self.position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        end = 0
        for name, shape, kind, offset in table:
            if name in tensors:
                raise self.damaged(f"the tensor {shown(name)} appears twice")
            # Every writer lays them one after the other; a gap is a flipped bit.
            if offset != -(-end // alignment) * alignment:
                raise self.damaged(f"the tensor {shown(name)} does not follow the one before it")
            tensors[name] = tensor = self.tensor(name, shape, kind, start + offset)
            end = offset + tensor.num_bytes
        return GGUFHeader(self.path, metadata, tensors, metadata_end, metadata_count)

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        if not name.isprintable() or len(name) > _MAX_NAME:
            raise self.damaged(f"{shown(name)} is no name of a tensor")
        dimensions = self.number("I")
        if dimensions > _MAX_DIMENSIONS:
            raise self.damaged(f"the tensor {shown(name)} has {dimensions} dimensions")
        sizes = struct.unpack(f"<{dimensions}Q", self.take(8 * dimensions))
        return name, tuple(reversed(sizes)), self.number("I"), self.number("Q")

    def tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            type_ = GGMLQuantizationType(kind)
        except ValueError:
            raise self.damaged(f"the tensor {shown(name)} has the unknown type {kind}") from None
        block, block_bytes = GGML_QUANT_SIZES[type_]
        elements = 1
        for size in shape:
            elements *= size
        if shape and shape[-1] % block:
            raise self.damaged(
                f"rows of the tensor {shown(name)} have {shape[-1]} elements, "
                f"not a multiple of {type_.name}'s block of {block}"
            )
        num_bytes = elements // block * block_bytes
        if offset + num_bytes > self.size:
            raise UserError(
                f"{self.path} is truncated: the tensor {name} ends at byte {offset + num_bytes}, "
                f"but the file has {self.size} bytes; get the file again"
            )
        return GGUFTensor(name, shape, type_.name, offset, num_bytes, block, block_bytes)

    def damaged(self, what: str) -> UserError:
        return UserError(f"{self.path} is a damaged GGUF file: {what}; get the file again")

    def take(self, count: int) -> bytes:
        start = self.position - self.base
        end = start + count
        if end > len(self.buffer):
            if self.position + count > self.size:
                raise UserError(
                    f"{self.path} is truncated or damaged: its header needs "
                    f"{self.position + count} bytes and the file has {self.size}; get it again"
                )
            self.buffer = self.buffer[start:] + self.stream.read(max(1 << 20, count))
            self.base, start, end = self.position, 0, count
            if end > len(self.buffer):
                raise UserError(f"{self.path} changed while it was read; try again")
        self.position += count
        return self.buffer[start:end]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        raw = self.take(int.from_bytes(self.take(8), "little"))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.damaged(f"a string before byte {self.position} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.damaged(f"a metadata value before byte {self.position} has type {kind}")
        item, count = self.number("I"), self.number("Q")
        if item in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[item])
            return np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if item != _STRING:
            raise self.damaged(f"an array before byte {self.position} has items of type {item}")
        return self.strings(count)

    def strings(self, count: int) -> list[str]:
        """`count` strings; a loop of its own because vocabularies have hundreds of thousands."""
        raw: list[bytes] = []
        # Each string takes at least its length: a wild count ends at the end of the file.
        while len(raw) < count:
            raw.append(self.take(int.from_bytes(self.take(8), "little")))
            buffer, position = self.buffer, self.position - self.base
            end = len(buffer)
            while len(raw) < count and position + 8 <= end:
                start = position + 8
                stop = start + int.from_bytes(buffer[position:start], "little")
                if stop > end:
                    break
                raw.append(buffer[start:stop])
                position = stop
            self.position = self.base + position
        try:
            return [item.decode() for item in raw]
        except UnicodeDecodeError:
            raise self.damaged(f"a string before byte {self.position} is not UTF-8") from None
