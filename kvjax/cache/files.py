"""Arrays in files: safetensors whose metadata say what they are."""

import os
import stat
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kvjax.errors import UserError


def read_arrays(
    path: str | os.PathLike[str], what: str, layout: str
) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """The metadata and the arrays of a file.

    Args:
        path: where it lies.
        what: what it should be, for messages.
        layout: the metadata's "format".

    Raises:
        UserError: there is no such file, it is damaged or of another format; names file and fault.
    """
    path = Path(path)
    try:
        # What is not there, or may not be read, is told apart here alone.
        with path.open("rb"):
            pass
    except OSError as error:
        raise UserError(f"{what} {path}: {error.strerror or error}") from None
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in list(file.keys())}
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"{what} {path}: {reason}; give a file that was saved whole") from None
    if metadata.get("format") != layout:
        raise UserError(f"{what} {path}: wanted metadata of format {layout!r}")
    return metadata, arrays


def write_arrays(
    path: str | os.PathLike[str],
    what: str,
    layout: str,
    arrays: Mapping[str, np.ndarray],
    metadata: Mapping[str, str],
) -> None:
    """Write what `read_arrays` reads, whole or not at all.

    Raises:
        UserError: the file cannot be written.
    """
    path = Path(path)
    # What is saved is the memory of an array, whatever its strides.
    whole = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    # Another process may write the same file.
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        with part.open("wb") as made:
            mode = os.fstat(made.fileno()).st_mode
        save_file(whole, part, {"format": layout, **metadata})
        # The library's are for nobody else to read.
        part.chmod(stat.S_IMODE(mode))
        os.replace(part, path)
    except OSError as error:
        raise UserError(f"{what} {path}: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)
