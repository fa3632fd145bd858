"""The model as the peer reads it: a Hugging Face checkpoint in float32."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.cli.progress import Progress
from kvjax.errors import UserError
from kvjax.models.architectures import config_to_hf
from kvjax.models.config import ModelConfig
from kvjax.models.layout import tensor_slots


def export(config: Any, tokenizer: Any, weights: Path, folder: Path, progress: Progress) -> None:
    """Write the model as the peer reads it, float32, unless the folder has it already."""
    import safetensors.numpy
    from flax import nnx

    from kvjax.models.weights import load_params

    if (folder / "model.safetensors").exists():
        held = json.loads((folder / "config.json").read_text())
        if held != checkpoint_config(config):
            raise UserError(f"--export {folder} holds another model: give another folder")
        return
    progress("weights for the peer")
    _, params = load_params(weights, config, "float32", stacked=True)
    arrays = {tuple(path): leaf[...] for path, leaf in nnx.to_flat_state(params)}
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    (folder / "config.json").write_text(json.dumps(checkpoint_config(config), indent=1))
    part = folder / "model.part"
    tensors = checkpoint_tensors(config, arrays)
    safetensors.numpy.save_file(tensors, part, metadata={"format": "pt"})
    os.replace(part, folder / "model.safetensors")


def checkpoint_tensors(config: ModelConfig, stacked: Mapping[Any, Any]) -> dict[str, np.ndarray]:
    """The tensors of a Hugging Face checkpoint, float32, from parameters with stacked layers.

    Args:
        config: the model.
        stacked: parameters by path, as `kvjax.models.layout` names them.
    """
    tensors = {}
    for slot in tensor_slots(config):
        part = stacked[slot.param]
        part = np.asarray(part if slot.layer is None else part[slot.layer])[slot.index]
        rows = part.reshape(slot.file_shape[::-1] if slot.transpose else slot.file_shape)
        rows = rows.T if slot.transpose else rows
        tensors[slot.hf_name] = np.ascontiguousarray(rows, dtype=np.float32)
    return tensors


def checkpoint_config(config: ModelConfig) -> dict[str, Any]:
    """The same model's config.json, as older and newer releases of transformers read it."""
    values = config_to_hf(config)
    del values["_name_or_path"]  # the same model under another name
    rope = values.get("rope_scaling", {"rope_type": "default"})
    return {
        **values,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        "use_sliding_window": False,
        "torch_dtype": "float32",
    }
