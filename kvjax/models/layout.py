"""Where every tensor of a checkpoint goes, as the tables of the model's family say it.

One list serves all loaders. A slot names the tensor in a Hugging Face checkpoint and in a GGUF
file, the parameter it fills (one layer of it, and which part), and its shape in the file. A matrix
lies [out, in] in the file and [in, out] in the parameter (the embedding does not), each of the two
in as many axes as the part has: `weights/fill.py` turns a view of the part instead, so that its
elements lie as in the file, and reads rows straight into it.

    for slot in tensor_slots(config):
        target = numpy_params[slot.param]          # e.g. ("layers", "qkv"), [L, D, H, r+2, d]
        part = target if slot.layer is None else target[slot.layer]
        part[slot.index]                           # holds the tensor slot.hf_name
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvjax.models.config import ModelConfig
from kvjax.models.families import family_of
from kvjax.models.family import ParamSpec

# Tensors that some checkpoints carry and that hold nothing the configuration does not say.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", "rope_freqs.weight")
# Of safetensors: two names of one matrix where a model is tied.
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class TensorSlot:
    """One checkpoint tensor and the place it fills.

    Attributes:
        hf_name, gguf_name: its names in safetensors and in GGUF files.
        param: path of the (stacked) parameter, ``(name,)`` or ``("layers", name)``.
        layer: index into the leading layer axis, None outside the layers.
        index: which part of that layer's parameter (slices; ``()`` is all of it).
        file_shape: shape of the tensor in a Hugging Face file, [out, in] for matrices. GGUF's
            reader gives the same after dequantisation.
        shape: shape of the part, of the same size.
        transpose: whether [out, in] must be turned to [in, out] before reshaping.
        rotated: whether the rows are those of rotated heads (q or k, weight or bias): GGUF files of
            some architectures interleave the two halves of each head there.
    """

    hf_name: str
    gguf_name: str
    param: tuple[str, ...]
    layer: int | None
    index: tuple[slice, ...]
    file_shape: tuple[int, ...]
    shape: tuple[int, ...]
    transpose: bool
    rotated: bool = False

    @property
    def inputs(self) -> int:
        """How many of the first axes of what it fills are those of its rows' elements."""
        if not self.transpose:
            return 0
        inputs = 1
        while math.prod(self.shape[:inputs]) != self.file_shape[1]:
            inputs += 1
        return inputs


def undo_gguf_permutation(rows: np.ndarray, heads: int) -> np.ndarray:
    """Puts interleaved rows of q or k of a GGUF file back into halves.

    Such a file stores, for each head, rows 0, d/2, 1, d/2 + 1, …; the two halves of a rotated
    pair lie beside each other. ``rows`` is [heads * d, ...] and so is the result.
    """
    d = rows.shape[0] // heads
    paired = rows.reshape(heads, d // 2, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def tensor_slots(config: ModelConfig) -> Iterator[TensorSlot]:
    """All tensors of a checkpoint of ``config``: those outside the layers, then layer by layer."""
    family = family_of(config)
    for name, spec in family.table(config).items():
        yield from _slots((name,), None, spec)
    table = family.layer_class.table(config)
    for i in range(config.num_layers):
        for name, spec in table.items():
            yield from _slots(("layers", name), i, spec)


def _slots(param: tuple[str, ...], layer: int | None, spec: ParamSpec) -> Iterator[TensorSlot]:
    """The tensors that fill one parameter, or one layer of it."""
    hf, gguf = ("", "") if layer is None else (f"model.layers.{layer}.", f"blk.{layer}.")
    for tensor in spec.tensors:
        cut = [len(range(*at.indices(n))) for at, n in zip(tensor.part, spec.shape)]
        shape = (*cut, *spec.shape[len(cut) :])
        file_shape = shape
        if spec.inputs:
            file_shape = (math.prod(shape[spec.inputs :]), math.prod(shape[: spec.inputs]))
        elif cut:
            file_shape = (math.prod(shape),)
        yield TensorSlot(
            hf + tensor.hf,
            gguf + tensor.gguf,
            param,
            layer,
            tensor.part,
            file_shape,
            shape,
            transpose=spec.inputs > 0,
            rotated=tensor.rotated,
        )
