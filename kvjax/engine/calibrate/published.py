"""Calibrations that others published: NVIDIA's KVzap, for the methods `kvzap-linear` and `-mlp`.

The format, as kvpress writes it: safetensors with `layers.N.weight` [H, D] and `layers.N.bias` [H]
of a linear surrogate, or `layers.N.0.weight` [M, D], `layers.N.0.bias`, `layers.N.2.weight` [H, M]
and `layers.N.2.bias` of an MLP, and beside it a config.json. Shapes are taken from the tensors.
"""

import re
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from kvjax.cache.calibration import Calibration
from kvjax.cache.methods.kvzap import LINEAR, MLP
from kvjax.checks import shown
from kvjax.errors import UserError
from kvjax.models import LoadedModel

WEIGHTS = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
"""Files that run code when they are read: never opened."""
_PARTS = {
    "weight": LINEAR[0],
    "bias": LINEAR[1],
    "0.weight": MLP[0],
    "0.bias": MLP[1],
    "2.weight": MLP[2],
    "2.bias": MLP[3],
}


def is_published(path: Path) -> bool:
    """Whether a path is such a folder or file, or a pickle, which `load_published` refuses."""
    if path.is_dir() or path.suffix in PICKLES:
        return True
    try:
        with safe_open(path, framework="numpy") as file:
            return any(re.fullmatch(r"layers\.\d+\..*", name) for name in list(file.keys()))
    except (OSError, SafetensorError):
        return False


def load_published(path: Path, model: LoadedModel) -> Calibration:
    """KVzap's surrogate of a model, as a calibration of it.

    Nothing in the files says of which weights they are; layers and sizes have to be the model's.

    Args:
        path: the folder, or the safetensors file.
        model: the model.

    Raises:
        UserError: there is no such file, it is a pickle, something is missing or of another shape.
    """
    file = path / WEIGHTS if path.is_dir() else path
    others = [p.name for p in path.iterdir() if p.suffix in PICKLES] if path.is_dir() else []
    if path.suffix in PICKLES or (others and not file.is_file()):
        raise UserError(
            f"{path}: {others[0] if others else 'it'} is a pickle, which may run code and is never "
            "loaded; give safetensors"
        )
    arrays = _arrays(file, model.config.num_layers)
    kind = "mlp" if MLP[0] in arrays else "linear"
    config = model.config
    size = arrays[MLP[0]].shape[-1] if kind == "mlp" else 0
    wanted = {
        LINEAR[0]: (config.hidden_size, config.num_kv_heads),
        LINEAR[1]: (config.num_kv_heads,),
        MLP[0]: (config.hidden_size, size),
        MLP[1]: (size,),
        MLP[2]: (size, config.num_kv_heads),
        MLP[3]: (config.num_kv_heads,),
    }
    for name, array in arrays.items():
        if array.shape[1:] != wanted[name]:
            raise UserError(
                f"{file}: {name} is {list(array.shape[1:])} in each layer, the model needs "
                f"{list(wanted[name])}: give the surrogate of {config.name}"
            )
    recipe = {"source": "KVzap, published", "file": file.name, "kind": kind}
    return Calibration(arrays, model.fingerprint, recipe)


def _arrays(file: Path, num_layers: int) -> dict[str, np.ndarray]:
    """The tensors of all layers, stacked, each as it is multiplied by; float32."""
    found: dict[str, dict[int, np.ndarray]] = {}
    try:
        with safe_open(file, framework="numpy") as tensors:
            for name in list(tensors.keys()):
                parts = re.fullmatch(r"layers\.(\d{1,4})\.(.+)", name)
                if parts is None or parts[2] not in _PARTS:
                    raise UserError(f"{file}: {shown(name)} is no tensor of a KVzap surrogate")
                tensor = np.asarray(tensors.get_tensor(name), np.float32)
                found.setdefault(_PARTS[parts[2]], {})[int(parts[1])] = tensor.T
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"{file}: {reason}; give a file that was saved whole") from None
    if set(found) not in (set(LINEAR), set(MLP)):
        raise UserError(f"{file}: it has {', '.join(sorted(found)) or 'nothing'}, not a surrogate")
    for name, layers in found.items():
        if sorted(layers) != list(range(num_layers)):
            raise UserError(
                f"{file}: {name} has {len(layers)} layers, the model {num_layers}: give the "
                "surrogate of this model"
            )
        if len({layer.shape for layer in layers.values()}) > 1:
            raise UserError(f"{file}: {name} is not of one shape in all layers")
    return {
        name: np.stack([layers[n] for n in range(num_layers)]) for name, layers in found.items()
    }
