"""Prefixes in files: a prompt's compressed cache, for another time and another process."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Hashable, Mapping
from typing import Any

import jax
import numpy as np

from kvjax.cache import CompressionConfig
from kvjax.cache.config import as_method
from kvjax.cache.files import read_arrays, write_arrays
from kvjax.cache.methods import METHODS
from kvjax.checks import shown
from kvjax.engine.worker import Worker
from kvjax.errors import UserError
from kvjax.models import LoadedModel

FORMAT = "kvjax-prefix-1"


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a prefix depends on; it can be used where all of it is the same."""

    model: str
    """Its hash; see `kvjax.models.model_hash`: the same whatever its weights were narrowed to."""
    weight_dtype: str | None
    """What they were narrowed to: keys and values differ then."""
    settings: dict[str, Any]
    """Of its compression, as JSON has them; nothing where nothing is evicted."""
    calibration: str
    """Hash of the arrays that the method reads, and of how keys are smoothed."""
    cache_dtype: str
    block_size: int

    @classmethod
    def of(cls, model: LoadedModel, worker: Worker, settings: Hashable) -> "Kind":
        """Those of an engine.

        Raises:
            UserError: the method is one of its own whose parts have no text that is theirs alone.
        """
        digest = hashlib.sha256()
        names = settings.resolved.artefacts if isinstance(settings, CompressionConfig) else ()
        for name in names:
            digest.update(name.encode() + np.asarray(worker.artefacts[name]).tobytes())
        for x in worker.on_host(jax.tree.leaves(worker.cache.smoothing)):
            digest.update(np.asarray(x).tobytes())
        spec = worker.cache.spec
        codec = f"{spec.codec.name} of {spec.codec.dtype}"
        return cls(
            model.fingerprint, model.config.weight_dtype, _told(settings),
            digest.hexdigest()[:16], codec, spec.block_size,
        )  # fmt: skip


def _told(settings: Hashable) -> dict[str, Any]:
    """Equal settings, however they were given, are told alike."""
    if not isinstance(settings, CompressionConfig):
        return {}
    told = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    method = as_method(settings.method)
    if METHODS.get(method.name) == method:
        told["method"] = method.name
    else:
        told["method"] = repr(method)
        if " at 0x" in told["method"]:
            raise UserError(
                f"method {method.name}: a file tells it by what its parts print, and one of them "
                "prints its place in memory: make them frozen dataclasses of plain values"
            )
    return told | {"rate": None if settings.rate is None else float(settings.rate)}


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
    arrays = {f"held.{name}": x for name, x in held.items()}
    arrays["tokens"] = np.asarray(tokens, np.int32)
    if logits is not None:
        arrays["logits"] = np.asarray(logits, np.float32)
    write_arrays(path, "prefix", FORMAT, arrays, {"kind": json.dumps(dataclasses.asdict(kind))})


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The kind of a prefix, as a dict, and its arrays: `tokens`, `logits` and those held.

    Raises:
        UserError: there is no such file, or it is no prefix; names file and fault.
    """
    metadata, arrays = read_arrays(path, "prefix", FORMAT)
    try:
        kind = json.loads(metadata.get("kind", "{}"))
    except ValueError as error:
        raise UserError(f"prefix {path}: {error}; give a file that was saved whole") from None
    tokens = arrays.get("tokens")
    if not isinstance(kind, dict):
        raise UserError(f"prefix {path}: wanted metadata of format {FORMAT!r}")
    if tokens is None or tokens.dtype != np.int32 or tokens.ndim != 1 or not len(tokens):
        raise UserError(f"prefix {path}: it has no tokens; give a file that was saved whole")
    return kind, arrays


def check(path: str | os.PathLike[str], found: Mapping[str, Any], wanted: Kind) -> None:
    """Raise `UserError` unless a prefix is of this kind; names the first thing that differs."""
    here, there = dataclasses.asdict(wanted), dict(found)
    own, others = here.pop("settings"), there.pop("settings", None)
    if not isinstance(others, dict):
        raise UserError(f"prefix {path}: another release wrote it; save it again with this one")
    here, there = {**here, **own}, {**there, **others}
    # One of the two may be of a cache that nothing is evicted from.
    for name in dict.fromkeys((*here, *there)):
        if here.get(name) != there.get(name):
            raise UserError(
                f"prefix {path}: its {name} is {shown(there.get(name))}, here it is "
                f"{shown(here.get(name))}; save one with these settings"
            )
