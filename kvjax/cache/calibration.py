"""Calibrated arrays beside the weights: measured of a model once, for methods that read them.

A file is safetensors, its metadata say which model it is of and what made it.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.files import read_arrays, write_arrays
from kvjax.checks import shown
from kvjax.errors import UserError

FORMAT = "kvjax-calibration-1"
HEAD_LOAD = "head_load"
"""[L, H, R]: how many KVs each head keeps, beside the others, at each of R rates; or [L, H]. Heads
are dealt to devices by it."""
MADE_WITH = {
    "retrieval_head": "--heads",
    "semantic_head": "--heads",
    "kvquant": "--levels",
    "kvzap": "--import",
}
"""Options of `kvjax calibrate` that bring arrays which it does not make by itself, by how their
names begin."""


def lacking(reader: str, array: str) -> UserError:
    """What to say where a calibration lacks an array that somebody reads."""
    options = [option for name, option in MADE_WITH.items() if array.startswith(name)]
    command = " ".join(["kvjax calibrate", *options])
    return UserError(
        f"{reader} reads the calibrated array {array}: give a calibration that has it, as "
        f"`{command}` makes it"
    )


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Arrays by name, each with a leading axis of layers."""

    arrays: Mapping[str, np.ndarray]
    model_hash: str
    """Of the model that they were measured on; see `kvjax.models.model_hash`."""
    recipe: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What made it: command, data, settings."""

    def __post_init__(self):
        if not self.arrays:
            raise UserError("a calibration without arrays: give one at least")
        for name, array in self.arrays.items():
            if array.ndim < 1 or not np.isfinite(np.asarray(array, np.float32)).all():
                raise UserError(f"calibrated array {shown(name)}: wanted finite numbers by layer")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Calibration":
        """Read a calibration.

        Raises:
            UserError: there is no such file, or it is no calibration; names file and fault.
        """
        metadata, arrays = read_arrays(path, "calibration", FORMAT)
        if "model_hash" not in metadata:
            raise UserError(f"calibration {path}: wanted metadata of format {FORMAT!r}")
        try:
            recipe = json.loads(metadata.get("recipe", "{}"))
        except ValueError:
            raise UserError(f"calibration {path}: its recipe is no JSON") from None
        if not isinstance(recipe, dict):
            raise UserError(f"calibration {path}: its recipe is no JSON object")
        try:
            return cls(arrays, metadata["model_hash"], {str(k): str(v) for k, v in recipe.items()})
        except UserError as error:
            raise UserError(f"calibration {path}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it, whole or not at all."""
        metadata = {"model_hash": self.model_hash, "recipe": json.dumps(dict(self.recipe))}
        write_arrays(path, "calibration", FORMAT, self.arrays, metadata)

    def with_arrays(
        self, arrays: Mapping[str, np.ndarray], recipe: Mapping[str, str] | None = None
    ) -> "Calibration":
        """The same with other arrays beside these or instead of them, and what made them."""
        return dataclasses.replace(
            self, arrays={**self.arrays, **arrays}, recipe={**self.recipe, **(recipe or {})}
        )

    def digest(self, names: Iterable[str] | None = None) -> str:
        """16 hexadecimal digits of the arrays of some names, or of all; absent ones count."""
        found = hashlib.sha256()
        for name in sorted(self.arrays if names is None else names):
            array = self.arrays.get(name)
            shape = None if array is None else (str(array.dtype), array.shape)
            found.update(repr((name, shape)).encode())
            if array is not None:
                found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()[:16]

    def on_device(self) -> dict[str, jax.Array]:
        """The arrays, each whole on the default device."""
        return {name: jnp.asarray(array) for name, array in self.arrays.items()}

    def check(self, model_hash: str, num_layers: int) -> None:
        """Raise `UserError` unless it is of this model."""
        if self.model_hash != model_hash:
            raise UserError(
                f"the calibration is of model {shown(self.model_hash)}, not of {model_hash}: "
                "calibrate this one"
            )
        for name, array in self.arrays.items():
            if len(array) != num_layers:
                raise UserError(
                    f"calibrated array {shown(name)} has {len(array)} layers, the model "
                    f"{num_layers}: calibrate this one"
                )
