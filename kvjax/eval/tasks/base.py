"""What tasks share: their options, the chat template around a prompt, text of a given length."""

import dataclasses
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from kvjax.errors import UserError
from kvjax.eval.files import read_texts
from kvjax.eval.rows import Row, Skipped
from kvjax.models.chat import ANY_DAY
from kvjax.models.tokenizer import Tokenizer

Split = Literal["dev", "test"]
MOST_TOKENS = 1 << 22
"""Of a prompt: as many as the longest contexts have; more would take for ever to make up."""
LONGEST, LONGEST_WORD = 30, 120
"""Words of a sentence of background text before it is taken for several, and characters of a word:
not every language puts spaces between them."""


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """What rows a task makes."""

    lengths: tuple[int, ...] = (1024,)
    """Prompt lengths in tokens; rows of local data sets have their own."""
    rows: int = 8
    """Rows of each task and length."""
    depths: int = 5
    """Places from the beginning to the end of the context where an answer is put, in turn."""
    split: Split = "test"
    """Development and test rows differ in seeds, wordings and background."""
    seed: int = 0
    target_tokens: int = 64
    """Tokens of a continuation."""
    haystack: Path | None = None
    """Background text: a file or a folder; topics of the Python documentation if None."""
    texts: Path | None = None
    """Long texts to continue: a file or a folder."""
    longbench: Path | None = None
    """A folder with LongBench's rows and its two configuration files."""
    ruler13: Path | None = None
    """A folder with the files of RULER's own tasks."""
    gsm8k: Path | None = None
    xsum: Path | None = None
    whole: bool = False
    """Data sets have all their rows to choose from, not those of the split alone."""
    prompt_tokens: int | None = None
    """Most tokens of LongBench's prompts, before a turn of a chat is put around them."""
    prompt_and_answer: int | None = None
    """Most tokens of such a prompt and its longest answer together."""
    turn: tuple[str, str] | None = None
    """What stands before and after LongBench's prompts, in place of the chat template, where the
    tokenizer has these marks; nothing, where both are empty."""

    def __post_init__(self):
        if not self.lengths or min(self.lengths) < 32 or max(self.lengths) > MOST_TOKENS:
            raise UserError(f"lengths {self.lengths}: give numbers from 32 to {MOST_TOKENS}")
        for name in ("rows", "depths"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} {getattr(self, name)}: give at least 1")
        if self.target_tokens < 2:
            raise UserError(f"target_tokens {self.target_tokens}: give at least 2")
        if self.seed < 0:
            raise UserError(f"seed {self.seed}: give a number of at least 0")

    def rng(self, *parts: str | int) -> np.random.Generator:
        """A stream of random numbers of its own for every split, seed and row."""
        salt = zlib.crc32("/".join(map(str, (self.split, *parts))).encode())
        return np.random.default_rng((self.seed, salt))

    def id_of(self, task: str, length: int, index: int) -> str:
        return f"{task}/{self.split}/{length}/{self.seed}/{index}"

    def depth(self, index: int) -> float:
        """The depth of a row, 0 to 1; the middle if there is only one."""
        return 0.5 if self.depths == 1 else (index % self.depths) / (self.depths - 1)


@dataclasses.dataclass(frozen=True)
class Context:
    """What a task may use to make rows."""

    tokenizer: Tokenizer
    options: TaskOptions
    skipped: Skipped


MakeRows = Callable[[Context], list[Row]]


def chat_segments(tokenizer: Tokenizer) -> tuple[str, str]:
    """What the model's chat template puts before and after what the user says."""
    # No blank space in it, which templates may trim.
    mark = "\u2045user\u2046"
    text = tokenizer.render_chat([{"role": "user", "content": mark}], as_of=ANY_DAY)
    head, found, suffix = text.partition(mark)
    if not found:
        raise UserError("the chat template does not show what the user says")
    return head, suffix


def beginning(tokenizer: Tokenizer) -> str:
    """What texts without a chat template begin with, by the checkpoint's own rule."""
    bos = tokenizer.bos_id if tokenizer.adds_bos else None
    return "" if bos is None else tokenizer.token_bytes(bos).decode()


def next_turn(tokenizer: Tokenizer) -> str:
    """What the chat template puts between an answer and what the user says next."""
    said, mark = "\u2045said\u2046", "\u2045user\u2046"
    turns = [("user", "?"), ("assistant", said), ("user", mark)]
    messages = [{"role": role, "content": what} for role, what in turns]
    text = tokenizer.render_chat(messages, as_of=ANY_DAY)
    between, found, _ = text.partition(said)[2].partition(mark)
    if not found:
        raise UserError("the chat template does not show a second turn of the user")
    return between


def count_tokens(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, goes_on=True))


def cut_text(tokenizer: Tokenizer, text: str, size: int) -> str:
    """The beginning of a text, at most so many tokens and whole words, or whole letters where no
    space is between them."""
    # No token is longer than this on average over a text, and encoding all of a book is slow.
    piece = text[: 16 * size]
    ids = tokenizer.encode(piece)
    if len(ids) <= size:
        return piece if len(piece) == len(text) else piece[: piece.rfind(" ")]
    # The last token may be a part of a letter, which is decoded as this mark.
    piece = tokenizer.decode(ids[:size]).rstrip("\ufffd")
    end = max(piece.rfind(" "), piece.rfind("\n"))
    return piece[:end] if end > 0 else piece


def _pieces(sentence: str) -> Iterator[str]:
    """A sentence in pieces of at most `LONGEST` words: what is no prose has no end."""
    words = sentence.split()
    for start in range(0, len(words), LONGEST):
        piece = words[start : start + LONGEST]
        if max(map(len, piece)) <= LONGEST_WORD:
            yield " ".join(piece)
            continue
        for word in piece:
            for at in range(0, len(word), LONGEST_WORD):
                yield word[at : at + LONGEST_WORD]


class Haystack:
    """Background text as sentences with their numbers of tokens."""

    def __init__(self, context: Context):
        options = context.options
        if options.haystack is None:
            from pydoc_data.topics import topics

            texts = [topics[name] for name in sorted(topics)]
        else:
            texts = read_texts(options.haystack)
        flat = re.sub(r"\s+", " ", " ".join(texts))
        sentences = [part for s in re.split(r"(?<=[.!?]) +", flat) for part in _pieces(s)]
        # The halves of the text are the two splits' own.
        half = len(sentences) // 2
        self.sentences = sentences[:half] if options.split == "dev" else sentences[half:]
        if not self.sentences:
            raise UserError(f"{options.haystack} has too few sentences for a background")
        self._tokenizer = context.tokenizer
        self._sizes: dict[int, int] = {}

    def _size(self, index: int) -> int:
        if index not in self._sizes:
            sentence = " " + self.sentences[index]
            self._sizes[index] = count_tokens(self._tokenizer, sentence)
        return self._sizes[index]

    def take(self, size: int, rng: np.random.Generator) -> list[str]:
        """Consecutive sentences from a random place on, at most `size` tokens."""
        index = int(rng.integers(len(self.sentences)))
        taken: list[str] = []
        while True:
            size -= self._size(index)
            if size < 0:
                return taken
            taken.append(self.sentences[index])
            index = (index + 1) % len(self.sentences)


def digits(rng: np.random.Generator, size: int) -> str:
    """A number of so many digits that does not begin with 0."""
    return str(int(rng.integers(10 ** (size - 1), 10**size)))


def background_room(context: Context, length: int, *others: str) -> int:
    """Tokens of background in a prompt of `length` tokens with these other parts.

    Raises:
        UserError: there is none.
    """
    room = length - sum(count_tokens(context.tokenizer, text) for text in others)
    if room < 1:
        raise UserError(f"length {length}: too short for this task's prompt, give a longer one")
    return room


def pick_rows[T](options: TaskOptions, name: str, rows: Sequence[T]) -> list[T]:
    """Some rows of a data set: those of the split in an order of the seed's, at most `rows`.

    Every second row is for development, the others for test; with `whole` all are for both.
    """
    halves = [] if options.whole else rows[0 if options.split == "dev" else 1 :: 2]
    own = list(halves) or list(rows)
    order = options.rng(name, "pick").permutation(len(own))[: options.rows]
    return [own[index] for index in order]


def insert_at(items: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> list[str]:
    """The items with each needle before the item at its depth; 0 is the front, 1 the end."""
    where = sorted(zip((round(depth * len(items)) for depth in depths), range(len(needles))))
    out, start = [], 0
    for place, needle in where:
        out += [*items[start:place], needles[needle]]
        start = place
    return out + list(items[start:])
