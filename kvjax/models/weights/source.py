"""What every checkpoint format offers to the loader: named tensors, read in pieces of rows."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from kvjax.errors import UserError
from kvjax.models.config import ModelConfig
from kvjax.models.layout import TensorSlot


@runtime_checkable
class TensorSource(Protocol):
    """The tensors of one checkpoint, shaped and ordered as in a Hugging Face checkpoint."""

    @property
    def path(self) -> Path:
        """The folder or file, for messages."""
        ...

    @property
    def config(self) -> ModelConfig:
        """The configuration that the checkpoint states."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all tensors, by their names in the file."""
        ...

    def tensor_name(self, slot: TensorSlot) -> str:
        """The name in the file of the tensor that fills `slot`."""
        ...

    def read_rows(self, slot: TensorSlot, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of the first axis in a float dtype; whole heads of rotated ones.

        May be called from several threads at once.
        """
        ...

    def close(self) -> None:
        """Closes the files."""
        ...


def read_exactly(descriptor: int, offset: int, count: int, path: Path) -> np.ndarray:
    """Reads `count` bytes at `offset` into a new uint8 array; UserError if the file ends before.

    Plain reads instead of a memory map: pages of a map count as the process's own memory,
    so that a float32 copy of a large file would appear to need both at once.
    """
    out = np.empty(count, np.uint8)
    view = memoryview(out)
    done = 0
    while done < count:
        try:
            # One call transfers at most 2 GiB on Linux: the loop asks for the rest.
            got = os.preadv(descriptor, [view[done : done + (1 << 30)]], offset + done)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from error
        if got == 0:
            raise UserError(
                f"{path} is truncated: it ends at byte {offset + done}, "
                f"but its tensors reach at least to byte {offset + count}; get the file again"
            )
        done += got
    return out


def all_finite(values: np.ndarray) -> bool:
    """Whether no element is NaN or infinite (any float dtype, any shape)."""
    if values.dtype == ml_dtypes.bfloat16:
        bits = values.view(np.uint16)
        return not bool(np.any((bits & np.uint16(0x7F80)) == np.uint16(0x7F80)))
    return bool(np.isfinite(values).all())


def convert(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`values` in `dtype`; no copy where the dtype is the same already.

    bfloat16 to float32 goes through the bits: several times faster than the general cast.
    """
    if values.dtype == dtype:
        return values
    if values.dtype == ml_dtypes.bfloat16 and dtype == np.float32:
        wide = values.view(np.uint16).astype(np.uint32)
        wide <<= np.uint32(16)
        return wide.view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(dtype)
