"""GGUF files: configuration from the metadata, tensors dequantised and in Hugging Face order.

llama.cpp's converter reorders the rows of the Q and K projections of Llama models so that
rotary pairs lie side by side; that is undone here. Other files keep the original order.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvjax.checks import shown
from kvjax.errors import UserError
from kvjax.models.architectures import GGUF_ARCHITECTURES
from kvjax.models.config import ModelConfig, RopeScaling
from kvjax.models.files import open_file
from kvjax.models.layout import TensorSlot, undo_gguf_permutation
from kvjax.models.rope import rope_frequencies
from kvjax.models.weights.gguf_header import GGUFHeader, read_gguf_header
from kvjax.models.weights.source import read_exactly

SUPPORTED_TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K",
)  # fmt: skip

# Divisors of the rotary frequencies: they become the configuration's rope_scaling.
_ROPE_FREQS = "rope_freqs.weight"

# The gguf package dequantises 16 rows per step; rows of this many elements make a step
# large enough to be bound by memory and small enough for a core's cache.
_ROW_ELEMENTS = 1 << 14


class GGUFSource:
    """The tensors of a GGUF file; see `TensorSource`."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        header = read_gguf_header(self.path)
        self.config = config_from_gguf(header)
        self.shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
        self._tensors = header.tensors
        architecture = GGUF_ARCHITECTURES[header.metadata["general.architecture"]]
        self._interleaved = architecture.gguf_interleaved
        self._file = open_file(self.path)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def tensor_name(self, slot: TensorSlot) -> str:
        """The name of the slot's tensor in the file."""
        return slot.gguf_name

    def read_rows(self, slot: TensorSlot, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop), dequantised to float32 (float16 and bfloat16 stay as they are)."""
        tensor = self._tensors[slot.gguf_name]
        if tensor.type_name not in SUPPORTED_TYPES:
            raise UserError(
                f"{self.path}: the tensor {tensor.name} is quantised as {tensor.type_name}; "
                f"supported: {', '.join(SUPPORTED_TYPES)}"
            )
        rows = stop - start
        row_bytes = tensor.num_bytes // tensor.shape[0]
        offset = tensor.offset + start * row_bytes
        raw = read_exactly(self._file.fileno(), offset, rows * row_bytes, self.path)
        values = dequantize(raw, tensor.type_name).reshape(rows, *tensor.shape[1:])
        if self._interleaved and slot.rotated:
            values = undo_gguf_permutation(values, rows // self.config.head_dim)
        return values


def dequantize(raw: np.ndarray, type_name: str) -> np.ndarray:
    """The flat values of `raw` (uint8, whole blocks of a GGUF type) as float32.

    float16 and bfloat16 are reinterpreted, not widened. The arithmetic is the gguf package's.
    """
    if type_name == "F32":
        return raw.view(np.float32)
    if type_name == "F16":
        return raw.view(np.float16)
    if type_name == "BF16":
        return raw.view(ml_dtypes.bfloat16)
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize as dequantize_rows

    type_ = GGMLQuantizationType[type_name]
    block, block_bytes = GGML_QUANT_SIZES[type_]
    row_bytes = _ROW_ELEMENTS // block * block_bytes
    whole = raw.size // row_bytes * row_bytes
    parts = []
    # Damaged scales give NaN here; the loader reports it with the tensor's name.
    with np.errstate(all="ignore"):
        if whole:
            parts.append(dequantize_rows(raw[:whole].reshape(-1, row_bytes), type_).reshape(-1))
        if whole < raw.size:
            parts.append(dequantize_rows(raw[whole:].reshape(1, -1), type_).reshape(-1))
    return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, np.float32)])


def config_from_gguf(source: GGUFHeader | str | os.PathLike[str]) -> ModelConfig:
    """The model configuration that a GGUF file's metadata and tensor table describe.

    Raises UserError for other architectures (by name, with the supported ones), mixtures of
    experts, other rotary scalings than Llama 3.1's, and missing or contradictory entries.
    Llama 3.1's scaling comes from the factors in the tensor rope_freqs.weight, as llama.cpp
    stores it.
    """
    header = source if isinstance(source, GGUFHeader) else read_gguf_header(source)
    values, path = header.metadata, header.path
    if (parts := get_parts(values)) > 1:
        raise UserError(
            f"{path} is one of {parts} parts of a GGUF file: make one file of them first "
            "(llama-gguf-split --merge FIRST_PART WHOLE)"
        )
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in GGUF_ARCHITECTURES:
        raise UserError(
            f"{path}: the GGUF architecture {shown(architecture)} is not supported; "
            f"supported: {', '.join(GGUF_ARCHITECTURES)}"
        )

    def get(key: str, default: float | None = None) -> Any:
        value = values.get(f"{architecture}.{key}", default)
        if value is None:
            raise UserError(f"{path}: the metadata entry {architecture}.{key} is missing")
        if isinstance(value, np.ndarray):
            if value.size == 0 or np.any(value != value[0]):
                raise UserError(f"{path}: {architecture}.{key} differs between layers")
            value = value[0].item()
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UserError(f"{path}: {architecture}.{key} is not a number")
        if not math.isfinite(value):
            raise UserError(f"{path}: {architecture}.{key} is {value}")
        return value

    if get("expert_count", 0):
        raise UserError(
            f"{path}: a mixture of experts ({architecture}.expert_count) is not supported"
        )
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"{path}: the tensor token_embd.weight is missing or not a matrix")
    hidden, heads = get("embedding_length"), get("attention.head_count")
    if heads <= 0 or (hidden % heads and f"{architecture}.attention.key_length" not in values):
        raise UserError(f"{path}: {heads} heads do not divide an embedding of {hidden}")
    head_dim = get("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise UserError(
                f"{path}: {architecture}.{key} is {get(key)} and the head dimension {head_dim}; "
                "they have to be equal"
            )
    try:
        name = values.get("general.name")
        config = ModelConfig(
            name=name if isinstance(name, str) and name else path.stem,
            vocab_size=embedding.shape[0],
            hidden_size=hidden,
            intermediate_size=get("feed_forward_length"),
            num_layers=get("block_count"),
            num_heads=heads,
            num_kv_heads=get("attention.head_count_kv", heads),
            head_dim=head_dim,
            rope_theta=_shortest(get("rope.freq_base", 10000.0)),
            rms_norm_eps=_shortest(get("attention.layer_norm_rms_epsilon")),
            max_position_embeddings=get("context_length"),
            tie_word_embeddings="output.weight" not in header.tensors,
            attention_bias="blk.0.attn_q.bias" in header.tensors,
            family=GGUF_ARCHITECTURES[architecture].family,
        )
    except UserError as error:
        raise UserError(f"{path}: its metadata describe no usable model: {error}") from None
    kind = values.get(f"{architecture}.rope.scaling.type", "linear")
    factor = get("rope.scaling.factor", get("rope.scale_linear", 1.0))
    if not (isinstance(kind, str) and kind == "none") and factor not in (0.0, 1.0):
        raise UserError(
            f"{path}: rotary scaling {shown(kind)} by {factor} is not supported; "
            "supported: none, Llama 3.1's"
        )
    if _ROPE_FREQS not in header.tensors:
        return config
    return dataclasses.replace(config, rope_scaling=_rope_scaling(header, config))


def get_parts(metadata: Mapping[str, Any]) -> int:
    """How many files a GGUF file was split into: 1 where it is whole."""
    count = metadata.get("split.count")
    return count if isinstance(count, int) else 1


def _shortest(value: float) -> float:
    """A float32 of the file as the decimal it was written from: 1e-05, not 9.99999974e-06."""
    with np.errstate(over="ignore"):  # an infinity is refused as such
        return float(str(np.float32(value)))


def _rope_scaling(header: GGUFHeader, config: ModelConfig) -> RopeScaling | None:
    """The scaling that the file's tensor of divisors stands for."""
    tensor = header.tensors[_ROPE_FREQS]
    expected = (config.head_dim // 2,)
    if tensor.type_name != "F32" or tensor.shape != expected:
        raise UserError(
            f"{header.path}: {_ROPE_FREQS} is {tensor.type_name} {list(tensor.shape)}, "
            f"expected F32 {list(expected)}"
        )
    with open(header.path, "rb") as stream:
        raw = read_exactly(stream.fileno(), tensor.offset, tensor.num_bytes, header.path)
    factors = raw.view(np.float32).astype(np.float64)
    scaling = rope_scaling_from_factors(factors, config)
    if scaling is None and not np.all(factors == 1.0):
        raise UserError(
            f"{header.path}: the factors in {_ROPE_FREQS} are not Llama 3.1's rotary scaling, "
            "the only one that is supported"
        )
    return scaling


def rope_factors(config: ModelConfig) -> np.ndarray:
    """By what scaling divides each rotary frequency, f64 [d / 2]: what rope_freqs.weight holds."""
    plain = rope_frequencies(dataclasses.replace(config, rope_scaling=None))
    return plain.astype(np.float64) / rope_frequencies(config)


def rope_scaling_from_factors(factors: np.ndarray, config: ModelConfig) -> RopeScaling | None:
    """The Llama 3.1 scaling of `config`'s frequencies with these divisors [d / 2]; None if none is.

    The published parameters (1, 4, 8192) are tried first. Otherwise the blended part is solved
    for: the divisors determine only the ratios between the two factors and the original context.
    """
    factor = float(np.max(factors, initial=1.0))
    if not np.isfinite(factors).all() or factor <= 1.0:
        return None
    factor = _shortest(factor)
    candidates = [RopeScaling(factor)]
    # keep = (original · frequency / 2π - low) / (high - low): a line, cut off at 0 and 1.
    turns = rope_frequencies(dataclasses.replace(config, rope_scaling=None)) / (2.0 * np.pi)
    keep = (1.0 / factors - 1.0 / factor) / (1.0 - 1.0 / factor)
    if (line := _blending_line(turns, keep)) is not None:
        slope, offset = line
        span = -1.0 / offset
        candidates += [
            # Low factor 1 and whole numbers, as people choose them; else at a scale so large
            # that the whole number asked for the original context is exact enough.
            RopeScaling(factor, scale, scale + high, max(1, round(slope * span * scale)))
            for scale, high in ((1.0, max(1, round(span))), (1.0, span), (2.0**20, span * 2.0**20))
        ]
    for candidate in candidates:
        wanted = rope_factors(dataclasses.replace(config, rope_scaling=candidate))
        if np.allclose(wanted, factors, rtol=1e-4):
            return candidate
    return None


def _blending_line(turns: np.ndarray, keep: np.ndarray) -> tuple[float, float] | None:
    """Slope and offset of the rising part of `keep`, which falls along the axis from 1 to 0."""
    blended = np.flatnonzero((keep > 1e-5) & (keep < 1.0 - 1e-5))
    if blended.size >= 2:
        slope, offset = np.polyfit(turns[blended], keep[blended], 1)
    else:
        kept, stretched = np.flatnonzero(keep >= 1.0 - 1e-5), np.flatnonzero(keep <= 1e-5)
        if not kept.size or not stretched.size:
            return None
        fast, slow = turns[kept[-1]], turns[stretched[0]]
        at, value = (turns[blended[0]], keep[blended[0]]) if blended.size else (slow, 0.0)
        # Steep enough to reach 1 at the next faster and 0 at the next slower frequency.
        rates = [(1.0 - value) / (fast - at)] + ([value / (at - slow)] if value else [])
        slope = max(rates)
        offset = value - slope * at
    return (float(slope), float(offset)) if slope > 0.0 > offset else None
