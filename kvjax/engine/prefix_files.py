"""Prefixes in files: a prompt's compressed cache, for another time and another process."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kvjax.cache import CompressionConfig
from kvjax.checks import shown
from kvjax.engine.worker import Worker
from kvjax.errors import UserError

FORMAT = "kvjax-prefix-1"


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a prefix depends on; it can be used where all of it is the same."""

    model: str
    """Its hash; see `kvjax.models.model_hash`."""
    settings: str
    calibration: str
    """Hash of the arrays that the method reads."""
    cache_dtype: str
    block_size: int

    @classmethod
    def of(cls, model: str, worker: Worker, settings: Hashable) -> "Kind":
        """Those of an engine."""
        digest = hashlib.sha256()
        names = settings.resolved.artefacts if isinstance(settings, CompressionConfig) else ()
        for name in names:
            digest.update(name.encode() + np.asarray(worker.artefacts[name]).tobytes())
        spec = worker.cache.spec
        codec = f"{spec.codec.name} of {spec.codec.dtype}"
        return cls(model, repr(settings), digest.hexdigest()[:16], codec, spec.block_size)


def write(
    path: str | os.PathLike[str],
    kind: Kind,
    tokens: np.ndarray,
    logits: jax.Array | None,
    held: Mapping[str, np.ndarray],
) -> None:
    """Write a prefix, whole or not at all.

    Raises:
        UserError: the file cannot be written.
    """
    path = Path(path)
    arrays = {f"held.{name}": np.asarray(x, order="C") for name, x in held.items()}
    arrays["tokens"] = np.ascontiguousarray(tokens, np.int32)
    if logits is not None:
        arrays["logits"] = np.asarray(logits, np.float32)
    metadata = {"format": FORMAT, "kind": json.dumps(dataclasses.asdict(kind))}
    part = path.with_name(path.name + ".part")
    try:
        save_file(arrays, part, metadata)
        os.replace(part, path)
    except OSError as error:
        raise UserError(f"prefix {path}: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The kind of a prefix, as a dict, and its arrays: `tokens`, `logits` and those held.

    Raises:
        UserError: there is no such file, or it is no prefix; names file and fault.
    """
    path = Path(path)
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            names = list(file.keys())
            arrays = {name: file.get_tensor(name) for name in names}
        kind = json.loads(metadata.get("kind", "{}"))
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"prefix {path}: {reason}; give a file that was saved whole") from None
    tokens = arrays.get("tokens")
    if metadata.get("format") != FORMAT or not isinstance(kind, dict):
        raise UserError(f"prefix {path}: wanted metadata of format {FORMAT!r}")
    if tokens is None or tokens.dtype != np.int32 or tokens.ndim != 1 or not len(tokens):
        raise UserError(f"prefix {path}: it has no tokens; give a file that was saved whole")
    return kind, arrays


def check(path: str | os.PathLike[str], found: Mapping[str, Any], wanted: Kind) -> None:
    """Raise `UserError` unless a prefix is of this kind; names the first thing that differs."""
    for name, value in dataclasses.asdict(wanted).items():
        if found.get(name) != value:
            raise UserError(
                f"prefix {path}: its {name} is {shown(found.get(name))}, here it is "
                f"{shown(value)}; save one with these settings"
            )
