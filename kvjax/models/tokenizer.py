"""Tokenizers: text to token ids and back, chats, and text as it streams out.

`Tokenizer.from_path` takes whatever a checkpoint brings: a Hugging Face folder or its
tokenizer.json, a tokenizer.model (SentencePiece or tiktoken), or a GGUF file with an embedded
vocabulary. Encoding runs in the `tokenizers` library; decoding joins the tokens' bytes here, so
that streamed text and text decoded at once are the same by construction.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from kvjax.errors import UserError
from kvjax.models import vocabulary
from kvjax.models.chat import ChatTemplate, Message, check_role
from kvjax.models.streaming import StreamDecoder
from kvjax.models.tokenizer_files import (
    TOOL_TEMPLATE,
    TokenizerParts,
    library_errors,
    read_tokenizer,
)

_REPLACEMENT = "\ufffd".encode()


class Tokenizer:
    """A checkpoint's tokenizer.

    Attributes:
      vocab_size: one more than the largest token id.
      bos_id: the beginning-of-text token, None where the vocabulary has none.
      eos_ids: the tokens that end a text or a turn.
      adds_bos: whether plain text starts with `bos_id` by the checkpoint's own rule.
      special_ids: tokens that are marks, not text; `decode` leaves them out.
      chat_template: the Jinja source of the chat template, None where there is none.

    Example:
      >>> tokenizer = Tokenizer.from_path("SmolLM2-135M-Instruct.Q4_1.gguf")
      >>> tokenizer.decode(tokenizer.encode("48213"))
      '48213'
    """

    def __init__(self, parts: TokenizerParts):
        self._parts = parts
        self._backend = parts.backend
        self.vocab_size = parts.vocab_size
        self.bos_id = parts.bos_id
        self.eos_ids = parts.eos_ids
        self.adds_bos = parts.adds_bos
        self.chat_template = parts.chat_template
        self._templates: dict[str, ChatTemplate] = {}
        added = parts.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self._sentencepiece, self._strip_leading_space = _decoding(parts.backend)
        self._bytes = {index: token.content.encode() for index, token in added.items()}

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """The tokenizer of a folder, a tokenizer.json, a tokenizer.model or a GGUF file.

        Raises UserError, in one line, where there is none at `path`, it is malformed, or it is
        of a kind that is not supported.
        """
        parts = read_tokenizer(path)
        try:
            with library_errors():
                return Tokenizer(parts)
        except UserError as error:
            raise UserError(f"tokenizer {path}: {error}") from error

    def encode(self, text: str, add_bos: bool = False, *, goes_on: bool = False) -> list[int]:
        """The tokens of `text`. Special tokens that are spelled out in it become themselves.

        Args:
          text: any text.
          add_bos: whether to start with `bos_id`, if there is one and `text` does not already.
          goes_on: whether it stands behind another text: it gets no space of its own in front,
            which SentencePiece vocabularies put before the first word.

        Raises UserError for text that has no UTF-8 form (a lone surrogate), and where the
        checkpoint's own rules fail.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"the text is no Unicode: a lone surrogate stands at character {error.start}"
            ) from error
        ids = self._encode_behind(text) if goes_on and text else self._encode(text)
        if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of the tokens `ids`; bytes that are no UTF-8 become U+FFFD.

        Ids beyond the vocabulary, which a padded embedding can yield, stand for nothing.
        """
        data = b"".join(self._token_bytes(index, skip_special_tokens) for index in ids)
        text = data.decode(errors="replace")
        return text.removeprefix(" ") if self._strip_leading_space else text

    def token_bytes(self, index: int) -> bytes:
        """What one token stands for: perhaps a part of a character; marks are spelled out."""
        return self._token_bytes(index, skip_special_tokens=False)

    def stream(self, skip_special_tokens: bool = True, *, goes_on: bool = False) -> StreamDecoder:
        """A decoder for tokens as they come: its joined output equals `decode` of them all.

        Args:
          skip_special_tokens: whether special tokens are left out.
          goes_on: whether they stand behind another text: what `decode` takes for the space of
            SentencePiece vocabularies before the first word is a space of the text then.
        """
        return StreamDecoder(
            lambda index: self._token_bytes(index, skip_special_tokens),
            self._strip_leading_space and not goes_on,
        )

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        as_of: str | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as text, through the checkpoint's template.

        Without a template the contents follow each other, set apart by an empty line.

        Args:
          messages: mappings with `role` and `content`.
          add_generation_prompt: whether to open the assistant's next turn.
          as_of: the day that is today to the template (`kvjax.models.chat.ANY_DAY`); the real one
            by default.
          variables: further names for the template, such as `tools`.

        Raises UserError where a role is none, or the template is malformed or refuses the
        conversation, ValueError for a message without role or content.
        """
        for number, message in enumerate(messages):
            if missing := [key for key in ("role", "content") if key not in message]:
                raise ValueError(f"messages[{number}] lacks {missing[0]!r}: got {message!r}")
        source = self.tool_template if variables.get("tools") else self.chat_template
        for number, message in enumerate(messages):
            check_role(f"messages[{number}].role", message["role"], source)
        if source is None:
            return "\n\n".join(str(message["content"]) for message in messages)
        if source not in self._templates:
            self._templates[source] = ChatTemplate(source, self._parts.special_tokens)
        template = self._templates[source]
        return template.render(messages, add_generation_prompt, as_of=as_of, **variables)

    @property
    def tool_template(self) -> str | None:
        """The template of chats with tools: that of all chats, where there is no other."""
        return self._parts.tool_template or self.chat_template

    def chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """The tokens of a conversation; arguments and errors as for `render_chat`.

        The template alone decides on a beginning token, and a doubled one is made single.
        Without a template the text starts with it where the checkpoint's rule says so.
        """
        text = self.render_chat(messages, add_generation_prompt, **variables)
        ids = self.encode(text, add_bos=self.chat_template is None and self.adds_bos)
        while self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]:
            del ids[0]
        return ids

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes tokenizer.json, tokenizer_config.json and generation_config.json to `folder`.

        `from_path(folder)` then gives an equal tokenizer. Raises UserError where it cannot write.
        """
        target = Path(folder)
        config: dict[str, Any] = {**self._parts.special_tokens, "add_bos_token": self.adds_bos}
        # Without a class, transformers takes the one of the folder's model, and with it another
        # splitting of texts than tokenizer.json's.
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        if self.tool_template != self.chat_template:
            named = {"default": self.chat_template, TOOL_TEMPLATE: self.tool_template}
            config["chat_template"] = [
                {"name": name, "template": source} for name, source in named.items() if source
            ]
        try:
            target.mkdir(parents=True, exist_ok=True)
            (target / "tokenizer.json").write_text(self._backend.to_str(), encoding="utf-8")
            _write_json(target / "tokenizer_config.json", config)
            _write_json(
                target / "generation_config.json",
                {"bos_token_id": self.bos_id, "eos_token_id": sorted(self.eos_ids)},
            )
        except OSError as error:
            raise UserError(
                f"cannot write the tokenizer to {target}: {error.strerror or error}"
            ) from error

    def _encode(self, text: str) -> list[int]:
        # A tokenizer.json may load and yet have rules that fail on some text.
        try:
            with library_errors():
                # `encode` would hold the interpreter, and with it all other threads, for as long as
                # it takes: .2 s for 500 KB of text. It counts offsets, too, which nobody reads.
                (found,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
                return found.ids
        except UserError as error:
            raise UserError(
                f"the checkpoint's tokenizer cannot encode this text: {error}"
            ) from None

    def _encode_behind(self, text: str) -> list[int]:
        """The tokens of a text that goes on."""
        if self._strip_leading_space:
            # A line's end is a token of its own in these vocabularies.
            before = self._encode("\n")
            ids = self._encode("\n" + text)
            if ids[: len(before)] == before:
                return ids[len(before) :]
        return self._encode(text)

    def _token_bytes(self, index: int, skip_special_tokens: bool = True) -> bytes:
        if skip_special_tokens and index in self.special_ids:
            return b""
        known = self._bytes.get(index)
        if known is None:
            token = self._backend.id_to_token(index) if 0 <= index < self.vocab_size else None
            if token is None:
                known = b""
            elif self._sentencepiece:
                known = vocabulary.sentencepiece_token_bytes(token)
            else:
                known = vocabulary.byte_level_token_bytes(token)
            self._bytes[index] = known
        return known


class ByteTokenizer(Tokenizer):
    """One token per byte of UTF-8, for models that come without a tokenizer.

    Ids beyond 255, which such a model may well produce, read as U+FFFD.

    Example:
      >>> ByteTokenizer().encode("é")
      [195, 169]
    """

    def __init__(self) -> None:
        characters = vocabulary.byte_characters()
        backend = vocabulary.byte_level_backend(characters, [], vocabulary.PreTokenizer())
        super().__init__(TokenizerParts(backend, 256, None, frozenset(), adds_bos=False))

    def _encode(self, text: str) -> list[int]:
        return list(text.encode())

    def _token_bytes(self, index: int, skip_special_tokens: bool = True) -> bytes:
        return bytes([index]) if 0 <= index < 256 else _REPLACEMENT


def _decoding(backend: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """Whether the tokens are SentencePiece's, and whether text loses its first space.

    Read from the backend's decoder. Raises UserError for decoders of neither family.
    """
    decoder = backend.decoder
    state = json.loads(decoder.__getstate__()) if decoder is not None else {"type": None}
    steps: list[Mapping[str, Any]] = state.get("decoders") or [state]
    kinds = {step["type"]: step for step in steps}
    if "ByteLevel" in kinds:
        return False, False
    if "Metaspace" in kinds:
        return True, kinds["Metaspace"].get("prepend_scheme", "always") != "never"
    if "ByteFallback" in kinds or "Replace" in kinds:
        return True, bool(kinds.get("Strip", {}).get("start"))
    raise UserError(
        f"decoder {'+'.join(str(kind) for kind in kinds)} is not supported;"
        " supported: ByteLevel, Metaspace, ByteFallback"
    )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
