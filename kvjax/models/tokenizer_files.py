"""Tokenizers as they lie in checkpoints: Hugging Face folders, tokenizer.model, GGUF.

`read_tokenizer` finds out which of them a path is and returns the parts of a Tokenizer.
"""

import contextlib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from kvjax.checks import check_text, shown
from kvjax.errors import UserError
from kvjax.models import vocabulary
from kvjax.models.files import (
    Fields,
    find,
    open_file,
    read_bytes,
    read_fields,
    shown_error,
    shown_path,
)
from kvjax.models.sentencepiece_file import parse_sentencepiece
from kvjax.models.weights.gguf_header import read_gguf_header

# Tokens that end a turn or a text in published chat models. They count as end tokens where a
# checkpoint has no generation_config.json to say which do.
_END_TOKENS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",
    "<end_of_turn>",
)
_LLAMA3_RANKS = 128_000
# The largest published: 33 MB of tokenizer.json, 4 MB of tokenizer.model, 20 kB of template.
_MAX_TOKENIZER_JSON = 256 << 20
_MAX_TOKENIZER_MODEL = 16 << 20
_MAX_TEMPLATE = 1 << 20
TEMPLATE_FILE = "chat_template.jinja"
TOOL_TEMPLATE = "tool_use"
TOOL_TEMPLATE_FILE = f"additional_chat_templates/{TOOL_TEMPLATE}.jinja"
_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")
_PREFIXED = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')


@dataclass(frozen=True)
class TokenizerParts:
    """What a Tokenizer is made of.

    adds_bos: whether plain text starts with the beginning token by the checkpoint's own rule.
    special_tokens: variables for the chat template, such as `bos_token`, with their text.
    tool_template: the template of chats with tools, where that is another one.
    """

    backend: tokenizers.Tokenizer
    vocab_size: int
    bos_id: int | None
    eos_ids: frozenset[int]
    adds_bos: bool
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    tool_template: str | None = None


def read_tokenizer(path: str | os.PathLike[str]) -> TokenizerParts:
    """Reads the tokenizer at `path`: a folder, a tokenizer.json, a tokenizer.model or a GGUF.

    Raises UserError, one line with the file's name, where there is none or it is malformed.
    """
    if find(path, "tokenizer") is None:
        raise UserError(f"cannot read tokenizer {shown_path(path)}: No such file or folder")
    source = Path(path)
    if source.is_dir():
        source = _tokenizer_file(source)
    try:
        with library_errors(), open_file(source) as stream:
            start = stream.read(4)
            if start == b"GGUF":
                return _read_gguf(source)
            if start.lstrip()[:1] == b"{":
                return _read_tokenizer_json(source)
            return _read_tokenizer_model(source)
    except UserError as error:
        if str(source) in str(error):
            raise
        raise UserError(f"tokenizer {source}: {error}") from error


@contextlib.contextmanager
def library_errors() -> Iterator[None]:
    """Turns whatever a damaged vocabulary makes the tokenizers library raise into one line.

    It raises plain Exception for what it refuses, and where its Rust code panics, an exception
    of its own that is none of Exception's.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"malformed: {shown_error(error)}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"malformed: {shown_error(error)}") from error


def _tokenizer_file(folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer.model"):
        if (folder / name).is_file():
            return folder / name
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise UserError(f"no tokenizer in {folder}: neither tokenizer.json nor tokenizer.model")
    return files[0]


def _read_json(path: Path) -> Fields:
    """The object in a JSON file, an empty one where there is no file."""
    try:
        return read_fields(path)
    except FileNotFoundError:
        return Fields({}, str(path))


def _with_configs(
    backend: tokenizers.Tokenizer,
    folder: Path,
    *,
    bos_id: int | None = None,
    eos_id: int | None = None,
    adds_bos: bool = False,
) -> TokenizerParts:
    """Completes a backend with what the configuration files beside it say.

    bos_id, eos_id and adds_bos are the tokenizer file's own word, which the files overrule.
    """
    config = _read_json(folder / "tokenizer_config.json")
    generation = _read_json(folder / "generation_config.json")
    model = _read_json(folder / "config.json")
    # Where older checkpoints say what the first says now.
    before = _read_json(folder / "special_tokens_map.json")
    special_tokens = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        said = config if key in config.values else before
        if (token := _token_text(said.get(key), said.label(key))) is not None:
            special_tokens[key] = token
    _add_tokens(backend, folder, config, set(special_tokens.values()))

    def index(key: str) -> int | None:
        return backend.token_to_id(special_tokens[key]) if key in special_tokens else None

    if (bos := index("bos_token")) is None:
        bos = bos_id
    eos_ids = {index("eos_token"), eos_id}
    for file in (generation, model):
        eos_ids.update(file.whole_or_several("eos_token_id"))
    if not generation.values:
        eos_ids |= _end_ids(backend)
    if eos_ids <= {None} and "eos_token" in special_tokens:
        raise UserError(
            f"the vocabulary lacks the eos_token {shown(special_tokens['eos_token'])} of "
            f"{folder}, so no answer would end: get the tokenizer's files again"
        )
    adds_bos = config.flag("add_bos_token", adds_bos)
    for key, token_id in (("bos_token", bos), ("eos_token", eos_id)):
        if token_id is not None and (token := backend.id_to_token(token_id)) is not None:
            special_tokens.setdefault(key, token)
    return TokenizerParts(
        backend=backend,
        vocab_size=_vocab_size(backend),
        bos_id=bos,
        eos_ids=frozenset(index for index in eos_ids if index is not None),
        adds_bos=adds_bos and bos is not None,
        special_tokens=special_tokens,
        **_chat_templates(folder, config),
    )


def _add_tokens(
    backend: tokenizers.Tokenizer, folder: Path, config: Fields, marks: Collection[str]
) -> None:
    """Adds the tokens that the files beside a vocabulary have and it lacks, by their ids.

    marks: what else is special where the files do not say.
    """
    listed = config.object("added_tokens_decoder")
    found: dict[int, tokenizers.AddedToken] = {}
    for index, (text, token) in _listed(listed).items():
        flags = token if isinstance(token, dict) else {}
        flags = {name: flags[name] is True for name in _FLAGS if name in flags}
        found[index] = tokenizers.AddedToken(text, **{"normalized": False, **flags})
    if not found:
        older = _read_json(folder / "added_tokens.json")
        for text in older.values:
            special = text in marks
            index = older.whole(text, -1, 0)
            found[index] = tokenizers.AddedToken(text, normalized=False, special=special)
    for index, token in sorted(found.items()):
        if not token.content or backend.token_to_id(token.content) is not None:
            continue
        # One below that has another name in the vocabulary, which the model was trained with.
        if index < (size := _vocab_size(backend)):
            continue
        if index > size:
            raise UserError(
                f"the added token {shown(token.content)} has the id {index}, and the vocabulary "
                f"ends at {size}: get the tokenizer's files again"
            )
        backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])


def _listed(added: Fields) -> dict[int, tuple[str, Any]]:
    """The text and the entry of each token of an added_tokens_decoder, by its id."""
    found = {}
    for key, token in added.values.items():
        if not re.fullmatch(r"[0-9]{1,9}", key):
            raise UserError(f"{added.where} has the key {shown(key)}: give token ids")
        found[int(key)] = _token_text(token, added.label(key)) or "", token
    return found


def _token_text(value: Any, label: str) -> str | None:
    """A token in tokenizer_config.json is its text or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return None if value is None else check_text(label, value, "the text of a token")


def _chat_templates(folder: Path, config: Fields) -> dict[str, str | None]:
    """The template of plain chat, and that of chats with tools where it is another one."""
    template, label = config.get("chat_template"), config.label("chat_template")
    named = {"default": template}
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
        if "default" not in named and not (folder / TEMPLATE_FILE).exists():
            raise UserError(f"{label} has no template of the name default: give it one")
    checked = {
        name: None if source is None else _checked_template(source, label)
        for name in ("default", TOOL_TEMPLATE)
        for source in [named.get(name)]
    }
    for name, file in (("default", TEMPLATE_FILE), (TOOL_TEMPLATE, TOOL_TEMPLATE_FILE)):
        if (folder / file).exists():
            try:
                checked[name] = read_bytes(folder / file, _MAX_TEMPLATE).decode()
            except UnicodeDecodeError as error:
                raise UserError(f"cannot read {folder / file}: {error}") from error
    return {"chat_template": checked["default"], "tool_template": checked[TOOL_TEMPLATE]}


def _checked_template(template: Any, label: str) -> str:
    """A template's source, which another program will compile."""
    if len(check_text(label, template, "the source of a template")) > _MAX_TEMPLATE:
        raise UserError(f"{label} has more than {_MAX_TEMPLATE} characters")
    return template


def _special_ids(backend: tokenizers.Tokenizer) -> dict[str, int]:
    return {
        token.content: index
        for index, token in backend.get_added_tokens_decoder().items()
        if token.special
    }


def _end_ids(backend: tokenizers.Tokenizer) -> set[int]:
    special = _special_ids(backend)
    return {special[token] for token in _END_TOKENS if token in special}


def _vocab_size(backend: tokenizers.Tokenizer) -> int:
    added = backend.get_added_tokens_decoder()
    return max([backend.get_vocab_size(), *(index + 1 for index in added)])


def _read_tokenizer_json(path: Path) -> TokenizerParts:
    data = read_bytes(path, _MAX_TOKENIZER_JSON)
    if _PREFIXED.search(data):
        # The library ends the process where a merge of such a vocabulary is too short.
        raise UserError("continuing_subword_prefix is not supported: no such model is")
    backend = tokenizers.Tokenizer.from_buffer(data)
    backend.no_truncation()
    backend.no_padding()
    # What the file itself puts before a text is the beginning token, if it has one.
    marked, plain = (backend.encode("a", add_special_tokens=marks).ids for marks in (True, False))
    start = [
        index
        for index in marked[:1]
        if marked != plain and plain[:1] != [index] and index in _special_ids(backend).values()
    ]
    bos_id = start[0] if start else None
    return _with_configs(backend, path.parent, bos_id=bos_id, adds_bos=bool(start))


def _read_tokenizer_model(path: Path) -> TokenizerParts:
    data = read_bytes(path, _MAX_TOKENIZER_MODEL)
    if _looks_like_tiktoken(data):
        return _read_tiktoken(data, path.parent)
    model = parse_sentencepiece(data)
    # Llama's first converter put a space after every special token too; `legacy` false in the
    # configuration says that the checkpoint was made without that.
    legacy = _read_json(path.parent / "tokenizer_config.json").get("legacy") is not False
    prepend = ("always" if legacy else "first") if model.add_dummy_prefix else "never"
    backend = vocabulary.sentencepiece_backend(
        model.pieces, model.types, prepend=prepend, unknown_id=model.unknown_id
    )
    return _with_configs(
        backend, path.parent, bos_id=model.bos_id, eos_id=model.eos_id, adds_bos=True
    )


def _looks_like_tiktoken(data: bytes) -> bool:
    fields = data[:4096].split(b"\n", 1)[0].split()
    return len(fields) == 2 and fields[1].isdigit() and fields[0].isascii()


def _read_tiktoken(data: bytes, folder: Path) -> TokenizerParts:
    ranked = vocabulary.tiktoken_ranks(data)
    added = _read_json(folder / "tokenizer_config.json").object("added_tokens_decoder")
    if added.values:
        by_id = _listed(added)
        special = [by_id.get(len(ranked) + index, ("", None))[0] for index in range(len(by_id))]
        if "" in special:
            raise UserError(f"added_tokens_decoder beside it does not follow {len(ranked)} ranks")
    elif len(ranked) == _LLAMA3_RANKS:
        special = vocabulary.llama3_special_tokens()
    else:
        raise UserError(
            f"{len(ranked)} tiktoken ranks without a tokenizer_config.json that lists the special"
            f" tokens (only Llama 3's, after {_LLAMA3_RANKS} ranks, are known)"
        )
    backend = vocabulary.tiktoken_backend(ranked, special)
    return _with_configs(
        backend, folder, bos_id=backend.token_to_id("<|begin_of_text|>"), adds_bos=True
    )


def _read_gguf(path: Path) -> TokenizerParts:
    metadata = read_gguf_header(path).metadata
    prefix = "tokenizer.ggml."
    model = metadata.get(prefix + "model")
    tokens = metadata.get(prefix + "tokens")
    if model is None or tokens is None:
        raise UserError("the file has no embedded vocabulary")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise UserError("tokenizer.ggml.tokens is no list of strings")
    types = _numbers(metadata, prefix + "token_type", len(tokens))
    types = [vocabulary.NORMAL] * len(tokens) if types is None else types.astype(int).tolist()
    ids = {
        name: _index(metadata, f"{prefix}{name}_token_id", len(tokens))
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    if model == "gpt2":
        name = metadata.get(prefix + "pre", "default")
        if not isinstance(name, str) or name not in vocabulary.PRE_TOKENIZERS:
            raise UserError(
                f"pre-tokenizer {shown(name)} (tokenizer.ggml.pre) is not supported; supported:"
                f" {', '.join(vocabulary.PRE_TOKENIZERS)}"
            )
        pre_tokenizer = vocabulary.PRE_TOKENIZERS[name]
        backend = vocabulary.byte_level_backend(tokens, _merges(metadata), pre_tokenizer)
        vocabulary.add_marked_tokens(backend, tokens, types)
        adds_bos = pre_tokenizer.adds_bos
    elif model == "llama":
        scores = _numbers(metadata, prefix + "scores", len(tokens))
        if scores is None:
            raise UserError("tokenizer.ggml.scores is missing")
        spaced = _flag(metadata, prefix + "add_space_prefix", True)
        backend = vocabulary.sentencepiece_backend(
            [(token, float(score)) for token, score in zip(tokens, scores, strict=True)],
            types,
            prepend="always" if spaced else "never",
            unknown_id=ids["unknown"],
        )
        adds_bos = True
        ids = {"bos": 1, "eos": 2} | {key: index for key, index in ids.items() if index is not None}
    else:
        raise UserError(
            f"vocabulary {shown(model)} (tokenizer.ggml.model) is not supported; "
            "supported: gpt2, llama"
        )
    template = metadata.get(key := "tokenizer.chat_template")
    keys = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ends = {ids.get(name) for name in ("eos", "eot", "eom")} | _end_ids(backend)
    return TokenizerParts(
        backend=backend,
        vocab_size=len(tokens),
        bos_id=ids.get("bos"),
        eos_ids=frozenset(index for index in ends if index is not None),
        adds_bos=_flag(metadata, prefix + "add_bos_token", adds_bos) and ids.get("bos") is not None,
        chat_template=None if template is None else _checked_template(template, key),
        special_tokens={
            key: tokens[index] for name, key in keys.items() if (index := ids.get(name)) is not None
        },
    )


def _numbers(metadata: Mapping[str, Any], key: str, count: int) -> np.ndarray | None:
    """An array of `count` finite numbers in a GGUF's metadata; None where there is none."""
    values = metadata.get(key)
    if values is None:
        return None
    if not isinstance(values, np.ndarray) or len(values) != count or not np.isfinite(values).all():
        raise UserError(f"{key} is no array of {count} numbers, one for each token")
    return values


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(key, default)
    if not isinstance(value, bool):
        raise UserError(f"{key} {shown(value)} is neither true nor false")
    return value


def _index(metadata: Mapping[str, Any], key: str, count: int) -> int | None:
    """A token id in a GGUF's metadata; None where there is none."""
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise UserError(f"{key} {shown(value)} is not among the {count} tokens")
    return value


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = metadata.get("tokenizer.ggml.merges")
    if not isinstance(lines, list):
        raise UserError("tokenizer.ggml.merges is missing")
    merges = []
    for rank, line in enumerate(lines):
        left, space, right = line.partition(" ") if isinstance(line, str) else ("", "", "")
        if not (left and space and right):
            raise UserError(f"tokenizer.ggml.merges[{rank}] is not two tokens: {shown(line)}")
        merges.append((left, right))
    return merges
