"""Vocabularies as `tokenizers` backends: byte-level BPE and SentencePiece.

Two families cover the Llama-like checkpoints. Byte-level BPE writes every byte as one printable
character and splits the text by a regular expression first. SentencePiece writes a space as
U+2581 and falls back to tokens such as <0x0A> for bytes it has no piece for. Each is built here
from plain lists, whichever file format they were read from.
"""

import base64
import binascii
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from kvjax.errors import UserError
from kvjax.models.files import shown_error

# Token types, numbered alike in SentencePiece models and in GGUF files.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

SPACE = "\u2581"  # how SentencePiece writes a space
_LONGEST_PIECE = 512  # characters of a mergeable token; published ones have at most 256

_LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# As Llama 3's, but every digit stands alone.
_QWEN2_REGEX = _LLAMA3_REGEX.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before the merges, and what else comes with the rule.

    ignore_merges: a word that is a token as a whole becomes it without merging.
    adds_bos: files that say nothing else put the beginning token before plain text.
    composed: letters and their marks are made one first (Unicode's NFC).
    """

    single_digits: bool = False
    punctuation_first: bool = False
    regex: str | None = None  # None: GPT-2's, built into the byte-level step
    ignore_merges: bool = False
    adds_bos: bool = False
    composed: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The `tokenizers` object: the splits, then bytes as printable characters."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.punctuation_first:
            # llama.cpp's rule for files that name no pre-tokenizer: runs of punctuation, then
            # GPT-2's words, then numbers in groups of three from the left.
            for pattern in (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_REGEX, r"\p{N}+", r"[0-9][0-9][0-9]"):
                steps.append(pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"))
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.regex is not None:
            steps.append(pre_tokenizers.Split(tokenizers.Regex(self.regex), "isolated"))
        splits_itself = self.regex is None and not self.punctuation_first
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits_itself))
        return pre_tokenizers.Sequence(steps)


_LLAMA3 = PreTokenizer(regex=_LLAMA3_REGEX, ignore_merges=True, adds_bos=True)
_QWEN2 = PreTokenizer(regex=_QWEN2_REGEX)
_GPT2 = PreTokenizer()
_SINGLE_DIGITS = PreTokenizer(single_digits=True)

# By the value of tokenizer.ggml.pre.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer(punctuation_first=True),
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,
    "mpt": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "command-r": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": PreTokenizer(regex=_LLAMA3_REGEX),
    "dbrx": PreTokenizer(regex=_LLAMA3_REGEX),
    "qwen2": PreTokenizer(regex=_QWEN2_REGEX, composed=True),
    "stablelm2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


@functools.cache
def byte_characters() -> tuple[str, ...]:
    """The printable character that stands for each byte in byte-level vocabularies.

    Bytes that are printable in Latin-1 stand for themselves; the others follow from U+0100 on
    (Radford et al. 2019, GPT-2).
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    characters, spare = [], 0x100
    for byte in range(256):
        characters.append(chr(byte if byte in printable else spare))
        spare += byte not in printable
    return tuple(characters)


@functools.cache
def _bytes_of_characters() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(byte_characters())}


def byte_level_token_bytes(token: str) -> bytes:
    """The bytes a byte-level token stands for; added tokens are their own text."""
    table = _bytes_of_characters()
    try:
        return bytes([table[character] for character in token])
    except KeyError:
        return token.encode()


def sentencepiece_token_bytes(token: str) -> bytes:
    """The bytes a SentencePiece token stands for: one for <0xHH>, else its text with spaces."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(SPACE, " ").encode()


def byte_level_backend(
    tokens: Sequence[str],
    merges: Sequence[tuple[str, str]],
    pre_tokenizer: PreTokenizer,
) -> tokenizers.Tokenizer:
    """A byte-level BPE from its tokens in order of id and its merges in order of rank.

    Raises UserError where a merge names a token that the vocabulary lacks.
    """
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        model = models.BPE(
            vocabulary, list(merges), fuse_unk=False, ignore_merges=pre_tokenizer.ignore_merges
        )
    except Exception as error:
        raise UserError(f"the vocabulary and its merges disagree: {shown_error(error)}") from error
    backend = tokenizers.Tokenizer(model)
    if pre_tokenizer.composed:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizer.build()
    backend.decoder = decoders.ByteLevel()
    return backend


def _joins(pieces: Iterable[str]) -> Iterator[tuple[str, int, int, int]]:
    """Every way to make a piece of two others: piece, length of the left part, ids of both.

    Raises UserError for a piece so long that trying all its cuts would not end.
    """
    ids = {piece: index for index, piece in enumerate(pieces)}
    for piece in ids:
        if len(piece) > _LONGEST_PIECE:
            raise UserError(f"a token has {len(piece)} characters, more than {_LONGEST_PIECE}")
        for cut in range(1, len(piece)):
            left, right = ids.get(piece[:cut]), ids.get(piece[cut:])
            if left is not None and right is not None:
                yield piece, cut, left, right


def merges_from_ranks(tokens: Sequence[str]) -> list[tuple[str, str]]:
    """The merges that tokens in order of rank (tiktoken) stand for, most urgent first.

    Any two tokens that concatenate to a third may merge, at the third's rank; among the ways to
    make one token, the ids of its parts decide.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    joins = sorted((ranks[token], left, right, cut) for token, cut, left, right in _joins(tokens))
    return [(tokens[rank][:cut], tokens[rank][cut:]) for rank, _, _, cut in joins]


def merges_from_scores(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The merges that pieces with scores (SentencePiece) stand for, most urgent first.

    Any two pieces that concatenate to a third may merge, at the third's score. SentencePiece
    breaks ties by the leftmost place in the text; a merge list cannot say that, but the longest
    left part first comes to the same in runs of one character, where ties arise.
    """
    joins = [(piece, cut) for piece, cut, _, _ in _joins(scores)]
    joins.sort(key=lambda join: (-scores[join[0]], -join[1], join[1] - len(join[0])))
    return [(piece[:cut], piece[cut:]) for piece, cut in joins]


def sentencepiece_backend(
    pieces: Sequence[tuple[str, float]],
    types: Sequence[int],
    *,
    prepend: str = "always",
    unknown_id: int | None = 0,
) -> tokenizers.Tokenizer:
    """A SentencePiece vocabulary of BPE pieces with byte fallback.

    Args:
      pieces: piece and score in order of id.
      types: NORMAL, UNKNOWN, CONTROL, … of each piece.
      prepend: where a space is put before the text: "always" (after every special token too),
        "first" (at the start alone) or "never".
      unknown_id: the piece for what cannot be written.
    """
    # Only whole pieces take part in merges: bytes and marks never arise from joining.
    mergeable = {
        piece: score
        for (piece, score), kind in zip(pieces, types, strict=True)
        if kind in (NORMAL, USER_DEFINED, UNUSED)
    }
    model = models.BPE(
        {piece: index for index, (piece, _) in enumerate(pieces)},
        merges_from_scores(mergeable),
        unk_token=None if unknown_id is None else pieces[unknown_id][0],
        fuse_unk=True,
        byte_fallback=BYTE in types,
    )
    backend = tokenizers.Tokenizer(model)
    steps: list[decoders.Decoder] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prepend == "first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first", split=False)
    elif prepend == "always":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        )
    else:
        backend.normalizer = normalizers.Replace(" ", SPACE)
    if prepend != "never":
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    add_marked_tokens(backend, [piece for piece, _ in pieces], types)
    return backend


def add_marked_tokens(
    backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]
) -> None:
    """Marks control, unknown and user-defined tokens, which are found in the text before it is
    cut; control and unknown ones are special: decoding leaves them out."""
    backend.add_special_tokens(
        [
            tokenizers.AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (CONTROL, UNKNOWN)
        ]
    )
    backend.add_tokens(
        [
            tokenizers.AddedToken(token, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == USER_DEFINED
        ]
    )


def tiktoken_ranks(text: bytes) -> list[bytes]:
    """The tokens of a tiktoken file, in order of rank.

    Raises UserError, naming the line, where it is not one: base64, a space and the rank a line,
    with the ranks 0, 1, 2, … complete.
    """
    tokens: list[bytes] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            encoded, rank = line.split()
            if len(rank) > 9:
                raise ValueError
            tokens.append(base64.b64decode(encoded, validate=True))
            in_order = int(rank) == len(tokens) - 1
        except (ValueError, binascii.Error) as error:
            raise UserError(f"line {number} is not a base64 token and its rank") from error
        if not in_order:
            raise UserError(f"line {number} has rank {int(rank)}, not {len(tokens) - 1}")
    return tokens


def tiktoken_backend(ranked: Sequence[bytes], special: Sequence[str]) -> tokenizers.Tokenizer:
    """Llama 3's tokenizer from its tiktoken ranks and the special tokens that follow them."""
    table = byte_characters()
    tokens = ["".join(table[byte] for byte in token) for token in ranked]
    known = set(tokens)
    if len(known) != len(tokens):
        raise UserError("the same token stands there twice")
    if missing := [byte for byte in range(256) if table[byte] not in known]:
        raise UserError(f"there is no token for byte 0x{missing[0]:02X}")
    backend = byte_level_backend(tokens, merges_from_ranks(tokens), _LLAMA3)
    add_marked_tokens(backend, special, [CONTROL] * len(special))
    return backend


def llama3_special_tokens() -> list[str]:
    """The 256 special tokens that Llama 3.1's code adds after its 128,000 ranks."""
    named = [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|reserved_special_token_0|>",
        "<|reserved_special_token_1|>",
        "<|finetune_right_pad_id|>",
        "<|reserved_special_token_2|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
    ]
    reserved = 256 - len(named)
    return named + [f"<|reserved_special_token_{3 + index}|>" for index in range(reserved)]
