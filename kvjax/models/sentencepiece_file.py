"""SentencePiece model files (`tokenizer.model`), read without the sentencepiece package.

The file is one protocol-buffer message, ModelProto of sentencepiece_model.proto. A handful of
its fields say all that encoding and decoding need.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import no_type_check

from kvjax.errors import UserError

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_BPE = 2  # TrainerSpec.ModelType


@dataclass(frozen=True)
class SentencePieceModel:
    """Pieces with scores and types in order of id, and how text is prepared."""

    pieces: tuple[tuple[str, float], ...]
    types: tuple[int, ...]
    add_dummy_prefix: bool
    unknown_id: int
    bos_id: int | None
    eos_id: int | None


# The three below run for every field of every piece: too often to check their signatures.
@no_type_check
def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("number of more than 64 bits")


@no_type_check
def _signed(value: int | bytes) -> int:
    """An int32 field: negative numbers are written as 64-bit two's complement."""
    if not isinstance(value, int):
        raise ValueError("number expected")
    return value - (1 << 64) if value >= 1 << 63 else value


@no_type_check
def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("bytes expected")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message: number, and value as an integer or raw bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == _LENGTH:
            size, at = _varint(data, at)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire}")
        if number == 0 or at + size > len(data):
            raise ValueError("field beyond the end")
        yield number, data[at : at + size]
        at += size


def _piece(data: bytes) -> tuple[str, float, int]:
    text, score, kind = "", 0.0, 1
    for number, value in _fields(data):
        if number == 1:
            text = _bytes(value).decode()
        elif number == 2:
            (score,) = struct.unpack("<f", _bytes(value))
        elif number == 3:
            kind = _signed(value)
    return text, score, kind


def parse_sentencepiece(data: bytes) -> SentencePieceModel:
    """Reads the bytes of a SentencePiece model file.

    Raises UserError for other data, and for models that are not plain BPE: unigram models and
    those that normalise the text (Llama and Mistral have neither).
    """
    pieces: list[tuple[str, float]] = []
    types: list[int] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    try:
        for number, value in _fields(data):
            if number == 1:
                text, score, kind = _piece(_bytes(value))
                pieces.append((text, score))
                types.append(kind)
            elif number == 2:
                trainer = dict(_fields(_bytes(value)))
            elif number == 3:
                normalizer = dict(_fields(_bytes(value)))
        special = {
            name: _signed(trainer.get(number, default))
            for name, number, default in (("unk", 40, 0), ("bos", 41, 1), ("eos", 42, 2))
        }
        model_type = _signed(trainer.get(3, 1))
    except (ValueError, IndexError, struct.error) as error:
        raise UserError(f"not a SentencePiece model ({error})") from error
    if not pieces:
        raise UserError("not a SentencePiece model (no pieces)")
    if model_type != _BPE:
        raise UserError("only SentencePiece models of type BPE are supported")
    if normalizer.get(2) or normalizer.get(4, 1):
        raise UserError(
            "a SentencePiece model that normalises its text is not supported;"
            " use the checkpoint's tokenizer.json"
        )

    def index(name: str) -> int | None:
        return special[name] if 0 <= special[name] < len(pieces) else None

    unknown = index("unk")
    if unknown is None:
        raise UserError("not a SentencePiece model (no unknown piece)")
    return SentencePieceModel(
        pieces=tuple(pieces),
        types=tuple(types),
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        unknown_id=unknown,
        bos_id=index("bos"),
        eos_id=index("eos"),
    )
