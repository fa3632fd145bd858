"""Text from token bytes, whole characters at a time."""

import codecs
from collections.abc import Callable


class StreamDecoder:
    """Turns a stream of tokens into text, never a part of a UTF-8 character.

    What `push` returned so far, and then `flush`, joined, equals the tokenizer's `decode` of all
    tokens. A byte that is part of no character becomes U+FFFD as soon as that is certain.

    Args:
      token_bytes: the bytes of a token id (none for special tokens that are not printed).
      strip_leading_space: whether the text as a whole loses one leading space, which
        SentencePiece vocabularies put before the first word.

    Example:
      >>> stream = ByteTokenizer().stream()
      >>> [stream.push(byte) for byte in "é!".encode()]
      ['', 'é', '!']
    """

    def __init__(self, token_bytes: Callable[[int], bytes], strip_leading_space: bool = False):
        self._token_bytes = token_bytes
        self._strip = strip_leading_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Text that has become certain with this token; empty while a character is incomplete."""
        return self._emit(self._decoder.decode(self._token_bytes(token)))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an incomplete character, else nothing."""
        return self._emit(self._decoder.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
