"""Where every tensor of a checkpoint goes in the parameters of ``kvjax.models.llama``.

One table serves all loaders. A slot names the tensor in a Hugging Face checkpoint and in a GGUF
file, the parameter it fills (one layer of it, and which part), and its shape in the file. Applying
it is ``param[layer][slot.index] = slot.arrange(tensor)``: a matrix lies [out, in] in the file, is
transposed to [in, out] (the embedding is not) and reshaped to the part it fills.

    for slot in tensor_slots(config):
        target = numpy_params[slot.param]          # e.g. ("layers", "qkv"), [L, D, H, r+2, d]
        part = target if slot.layer is None else target[slot.layer]
        part[slot.index] = slot.arrange(read(slot.hf_name))
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvjax.models.config import LlamaConfig

# Tensors that some checkpoints carry and that hold nothing the configuration does not say.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", "rope_freqs.weight")


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
        rope_heads: number of heads if the rows are a rotated projection (q or k, weight or bias):
            GGUF files of the ``llama`` architecture interleave the two halves of each head there.
    """

    hf_name: str
    gguf_name: str
    param: tuple[str, ...]
    layer: int | None
    index: tuple[slice, ...]
    file_shape: tuple[int, ...]
    shape: tuple[int, ...]
    transpose: bool
    rope_heads: int | None = None

    def arrange(self, tensor: np.ndarray) -> np.ndarray:
        """The tensor of ``file_shape`` as it lies in the parameter: a view if nothing copies.

        Raises ValueError if the tensor has another shape.
        """
        if tuple(tensor.shape) != self.file_shape:
            raise ValueError(
                f"{self.hf_name}: expected shape {self.file_shape}, got {tuple(tensor.shape)}"
            )
        return (tensor.T if self.transpose else tensor).reshape(self.shape)


def undo_gguf_permutation(rows: np.ndarray, heads: int) -> np.ndarray:
    """Puts rows of q or k as ``llama`` GGUF files order them back into halves.

    Such a file stores, for each head, rows 0, d/2, 1, d/2 + 1, …; the two halves of a rotated
    pair lie beside each other. ``rows`` is [heads * d, ...] and so is the result.
    """
    d = rows.shape[0] // heads
    paired = rows.reshape(heads, d // 2, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def tensor_slots(config: LlamaConfig) -> Iterator[TensorSlot]:
    """All tensors of a checkpoint of ``config``, embedding first, then layer by layer."""
    dim, ffn, vocab, d = (
        config.hidden_size,
        config.intermediate_size,
        config.vocab_size,
        config.head_dim,
    )
    heads, kv, r = config.num_heads, config.num_kv_heads, config.group_size
    everything: tuple[slice, ...] = ()

    def whole(
        hf: str,
        gguf: str,
        param: tuple[str, ...],
        layer: int | None,
        shape: tuple[int, ...],
        inputs: int = 0,
    ) -> TensorSlot:
        """A tensor that fills its parameter; ``inputs`` leading axes of a matrix are inputs."""
        file_shape = shape
        if inputs:
            file_shape = (math.prod(shape[inputs:]), math.prod(shape[:inputs]))
        return TensorSlot(
            hf, gguf, param, layer, everything, file_shape, shape, transpose=inputs > 0
        )

    yield whole("model.embed_tokens.weight", "token_embd.weight", ("embed",), None, (vocab, dim))
    # Part of the group axis of qkv, and the number of rotated heads.
    parts = {
        "q": (slice(0, r), heads),
        "k": (slice(r, r + 1), kv),
        "v": (slice(r + 1, r + 2), None),
    }
    for i in range(config.num_layers):
        hf, gguf = f"model.layers.{i}.", f"blk.{i}."

        yield whole(
            hf + "input_layernorm.weight",
            gguf + "attn_norm.weight",
            ("layers", "attn_norm"),
            i,
            (dim,),
        )
        for letter, (part, rotated) in parts.items():
            size = part.stop - part.start
            yield TensorSlot(
                hf + f"self_attn.{letter}_proj.weight",
                gguf + f"attn_{letter}.weight",
                ("layers", "qkv"),
                i,
                (slice(None), slice(None), part),
                (kv * size * d, dim),
                (dim, kv, size, d),
                transpose=True,
                rope_heads=rotated,
            )
            if config.attention_bias:
                yield TensorSlot(
                    hf + f"self_attn.{letter}_proj.bias",
                    gguf + f"attn_{letter}.bias",
                    ("layers", "qkv_bias"),
                    i,
                    (slice(None), part),
                    (kv * size * d,),
                    (kv, size, d),
                    transpose=False,
                    rope_heads=rotated,
                )
        yield whole(
            hf + "self_attn.o_proj.weight",
            gguf + "attn_output.weight",
            ("layers", "out"),
            i,
            (kv, r, d, dim),
            inputs=3,
        )
        yield whole(
            hf + "post_attention_layernorm.weight",
            gguf + "ffn_norm.weight",
            ("layers", "mlp_norm"),
            i,
            (dim,),
        )
        for position, (name, short) in enumerate((("gate", "ffn_gate"), ("up", "ffn_up"))):
            yield TensorSlot(
                hf + f"mlp.{name}_proj.weight",
                gguf + f"{short}.weight",
                ("layers", "gate_up"),
                i,
                (slice(None), slice(position, position + 1)),
                (ffn, dim),
                (dim, 1, ffn),
                transpose=True,
            )
        yield whole(
            hf + "mlp.down_proj.weight",
            gguf + "ffn_down.weight",
            ("layers", "down"),
            i,
            (ffn, dim),
            inputs=1,
        )
    yield whole("model.norm.weight", "output_norm.weight", ("final_norm",), None, (dim,))
    if not config.tie_word_embeddings:
        yield whole("lm_head.weight", "output.weight", ("lm_head",), None, (dim, vocab), inputs=1)
