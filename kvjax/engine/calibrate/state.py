"""What a calibration has done so far, on disk: a run that was stopped goes on from it."""

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.errors import UserError

OF_CHOICE = ".choice"
"""Behind a state's name: that of the training of the choice."""


def save(path: Path, key: str, arrays: Mapping[str, Any]) -> None:
    """Write arrays under a key, whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.writing")
    try:
        with open(part, "wb") as file:
            np.savez(file, key=np.array(key), **arrays)
        os.replace(part, path)
    except OSError as error:
        raise UserError(f"calibration state {path}: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)


def load(path: Path | None, key: str) -> dict[str, np.ndarray] | None:
    """The arrays that were saved under this key; None where there is no whole file of it."""
    if path is None or not path.is_file():
        return None
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None
    return arrays if str(arrays.pop("key", "")) == key else None


def forget(path: Path) -> None:
    """Remove all states of a run, once its result is saved."""
    for kept in (path, path.with_name(path.name + OF_CHOICE)):
        kept.unlink(missing_ok=True)
