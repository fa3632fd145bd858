"""Small GGUF files with nothing but a vocabulary, for tokenizer tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf

from kvjax.models import vocabulary

SPECIAL = ["<|begin_of_text|>", "<|eot_id|>"]


def write_gguf(
    path: Path,
    tokens: Sequence[str],
    types: Sequence[int],
    *,
    model: str = "gpt2",
    merges: Sequence[str] | None = None,
    scores: Sequence[float] | None = None,
    **fields: Any,
) -> Path:
    """Writes the vocabulary; `fields` are further keys after `tokenizer.ggml.`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    for key, value in fields.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}[type(value)]
        name = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        add(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_byte_gguf(path: Path, merges: Sequence[str] = (), **fields: Any) -> Path:
    """A byte-level vocabulary: 256 bytes, what `merges` makes, and two special tokens."""
    merges = merges or ["a b"]
    tokens = [*vocabulary.byte_characters(), *(merge.replace(" ", "") for merge in merges)]
    types = [vocabulary.NORMAL] * len(tokens) + [vocabulary.CONTROL] * len(SPECIAL)
    ids: dict[str, Any] = {"bos_token_id": len(tokens), "eos_token_id": len(tokens) + 1}
    return write_gguf(path, [*tokens, *SPECIAL], types, merges=merges, **(ids | fields))


def write_sentencepiece_gguf(path: Path, **fields: Any) -> Path:
    """A SentencePiece vocabulary: 3 marks, 256 bytes, and a few pieces with scores."""
    pieces = ["▁", "h", "e", "l", "o", "é", "he", "ll", "hell", "hello", "▁hello", "▁▁"]
    marks = ["<unk>", "<s>", "</s>"]
    tokens = [*marks, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [
        vocabulary.UNKNOWN,
        *[vocabulary.CONTROL] * 2,
        *[vocabulary.BYTE] * 256,
        *[vocabulary.NORMAL] * len(pieces),
    ]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))]
    fields = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0} | fields
    return write_gguf(path, tokens, types, model="llama", scores=scores, **fields)
