"""Small vocabularies: GGUF files with nothing else, and a tokenizer for tiny models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf

from kvjax.models import vocabulary
from kvjax.models.tokenizer import Tokenizer
from kvjax.models.tokenizer_files import TokenizerParts

SPECIAL = ["<|begin_of_text|>", "<|eot_id|>"]

TINY_BYTES = b"abcdefghijklmnopqrstuvwxyz\n\xc3\xa9\xe2\x82\xac" + bytes(range(0x20, 0x5F))
"""What ids 0 to 94 of `tiny_tokenizer` stand for: ASCII, and the bytes of é and €."""
TINY_BOS, TINY_EOS = len(TINY_BYTES), len(TINY_BYTES) + 1
TINY_VOCABULARY = TINY_EOS + 1


def tiny_tokenizer(adds_bos: bool = True, chat_template: str | None = None) -> Tokenizer:
    """97 tokens: single bytes, parts of characters among them, then BOS and EOS.

    A model that draws at random soon writes half a character, and soon ends.
    """
    characters = vocabulary.byte_characters()
    tokens = [*(characters[byte] for byte in TINY_BYTES), *SPECIAL]
    backend = vocabulary.byte_level_backend(tokens, [], vocabulary.PreTokenizer())
    types = [vocabulary.NORMAL] * len(TINY_BYTES) + [vocabulary.CONTROL] * len(SPECIAL)
    vocabulary.add_marked_tokens(backend, tokens, types)
    return Tokenizer(
        TokenizerParts(
            backend,
            vocab_size=TINY_VOCABULARY,
            bos_id=TINY_BOS,
            eos_ids=frozenset({TINY_EOS}),
            adds_bos=adds_bos,
            chat_template=chat_template,
            special_tokens={"bos_token": SPECIAL[0], "eos_token": SPECIAL[1]},
        )
    )


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
