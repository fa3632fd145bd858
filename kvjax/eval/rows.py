"""One prompt as the evaluation knows it: text in segments, and where each protocol cuts it.

A row is head + context + question + suffix + answer_prefix, then the target. `head` opens the chat
template, `suffix` closes the user's turn and opens the assistant's. Each segment is tokenised on
its own, without special tokens of the tokenizer's or spaces where it goes on, and no BOS is added.
"""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvjax.checks import INT32_MAX, shown
from kvjax.errors import UserError
from kvjax.eval.files import open_text
from kvjax.eval.scorers import HELD, check_metric, needs_answer
from kvjax.models.tokenizer import Tokenizer

Protocol = Literal["chat", "agnostic", "question", "prompt"]
SEGMENTS = ("head", "context", "question", "suffix", "answer_prefix")
PROTOCOLS: dict[str, int] = {"chat": 4, "agnostic": 2, "question": 3, "prompt": 5}
"""How many of `SEGMENTS` are prefilled with full attention and then compressed once, in the order
of reports. Under all but `prompt` nothing of the answer is seen when the cache is compressed."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """A question that is put behind a prompt, and its true answer."""

    asked: str
    """From the end of the prompt, or of the answer before, to the assistant's opening."""
    answer_prefix: str
    target: str


@dataclasses.dataclass(frozen=True)
class Row:
    """A prompt, its true answer, and how an answer is scored."""

    id: str
    task: str
    length: int
    """Nominal length of the prompt in tokens."""
    head: str
    context: str
    question: str
    suffix: str
    answer_prefix: str
    target: str
    """The true answer, or the true following text; nothing with `turns` and with "own"."""
    metric: str = "em"
    """A name of `kvjax.eval.scorers.SCORERS`, or "em", "nll" (a text that goes on), "own" (the
    target is what the full cache says by itself, at most `max_new_tokens`)."""
    answers: tuple[str, ...] = ()
    """What the metric compares a generated answer with; the target alone if empty."""
    classes: tuple[str, ...] = ()
    """All classes, for the metric "classification"."""
    max_new_tokens: int = 64
    """Most tokens of a generated answer."""
    stop: tuple[str, ...] = ()
    """A generated answer ends before the first of these."""
    depth: float | None = None
    """Where in the context the answer stands, 0 to 1."""
    turns: tuple[Turn, ...] = ()
    """Questions one after the other behind the prompt, each with the true answers before it."""
    most_tokens: int | None = None
    """Most tokens of context and question, if the model's context does not leave fewer."""

    def __post_init__(self):
        without_target = bool(self.turns) or self.metric == "own"
        for field in ("id", "task", "target"):
            if not getattr(self, field) and not (field == "target" and without_target):
                raise ValueError(f"{field} is empty")
        for field, least in (("length", 0), ("max_new_tokens", 1)):
            if getattr(self, field) < least:
                raise ValueError(f"{field} {getattr(self, field)} is less than {least}")
        if self.depth is not None and not 0 <= self.depth <= 1:
            raise ValueError(f"depth {shown(self.depth)} is not from 0 to 1")
        check_metric(self.metric)
        true = self.answers or (self.target,)
        if self.metric == "classification" and not set(true) & set(self.classes):
            raise ValueError(f"classes have no {shown(true[0])}, which is true")
        if "" in self.stop:
            raise ValueError("stop has an empty text, before which every answer ends")
        if self.metric in HELD and not without_target:
            for name, texts in (("target", (self.target,)), ("answers", self.answers)):
                if not all(text.strip() for text in texts):
                    raise ValueError(f"{name} has a text without words, which any answer holds")


REQUIRED = ("id", "task", "length", *SEGMENTS, "target")
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    **dict.fromkeys(("id", "task", *SEGMENTS, "target", "metric"), (str, "text")),
    **dict.fromkeys(("length", "max_new_tokens"), (int, "whole number")),
    **dict.fromkeys(("answers", "classes", "stop"), (list, "list of texts")),
    "depth": ((int, float, type(None)), "number"),
}
"""What a prompt file may hold of each field."""


def row_from(values: Any) -> Row:
    """A row of a prompt file.

    Raises:
        ValueError: a field is missing or of the wrong kind; says which.
    """
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    if missing := [name for name in REQUIRED if name not in values]:
        raise ValueError(f"{missing[0]} is missing")
    known = {name: values[name] for name in _KINDS if name in values}
    for name, value in known.items():
        kind, called = _KINDS[name]
        fits = isinstance(value, kind) and not isinstance(value, bool)
        if isinstance(value, list):
            fits = fits and all(isinstance(text, str) for text in value)
            known[name] = tuple(value)
        if not fits:
            raise ValueError(f"{name} {shown(value)} is no {called}")
    return Row(**known)


@dataclasses.dataclass
class Skipped:
    """Rows that could not be used, and why: told to the user, never dropped in silence."""

    reasons: list[str] = dataclasses.field(default_factory=list)

    def add(self, source: str, number: int, reason: str) -> None:
        self.reasons.append(f"{source} row {number}: {reason}")


_HALF, _SPELT = re.compile("[\ud800-\udfff]"), re.compile(r"\\u[dD]")
"""Half of a surrogate pair: what JSON can spell, and no tokenizer and no results file can take."""


def read_jsonl(path: Path, skipped: Skipped) -> Iterator[tuple[int, Any]]:
    """Number (from 1) and value of every row of a .jsonl or .jsonl.gz file.

    Raises:
        UserError: the file cannot be read.
    """
    with open_text(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
                if _SPELT.search(line) and _HALF.search(json.dumps(value, ensure_ascii=False)):
                    raise ValueError("it holds half of a surrogate pair, which is no text")
            except (ValueError, RecursionError) as error:
                # Not every number of many digits, nor every depth of lists, is one to Python.
                skipped.add(path.name, number, f"no JSON ({getattr(error, 'msg', error)})")
            else:
                yield number, value


def read_prompts(path: Path, skipped: Skipped) -> list[Row]:
    """The rows of a prompt file.

    Raises:
        UserError: the file cannot be read or has no usable row.
    """
    rows = []
    for number, values in read_jsonl(path, skipped):
        try:
            rows.append(row_from(values))
        except ValueError as error:
            skipped.add(path.name, number, str(error))
    if not rows:
        why = f"; {skipped.reasons[-1]}" if skipped.reasons else ""
        raise UserError(f"{path} has no usable row{why}")
    return rows


@dataclasses.dataclass(frozen=True)
class Answer:
    """Where a true answer stands."""

    opened: int
    """Tokens of prompt and target before the assistant's turn opens."""
    start: int
    """Its first token, of the target's."""
    end: int
    """One behind its last."""


@dataclasses.dataclass(frozen=True)
class TokenRow:
    """A row as tokens."""

    segments: tuple[np.ndarray, ...]
    """Token ids of `SEGMENTS`, int32."""
    target: np.ndarray
    """What follows; of a row with turns also the questions."""
    removed: int
    """Tokens cut out of the middle because the model's context is shorter."""
    turns: tuple[Answer, ...] = ()

    @property
    def answers(self) -> tuple[Answer, ...]:
        """The parts of the target that count: all of it but in a row with turns."""
        return self.turns or (Answer(self.opened, 0, len(self.target)),)

    @property
    def prompt(self) -> np.ndarray:
        """Everything before the target."""
        return np.concatenate(self.segments)

    def cut(self, protocol: str) -> int:
        """Tokens that are prefilled with full attention and compressed; the rest is fed."""
        return sum(len(part) for part in self.segments[: PROTOCOLS[protocol]])

    @property
    def opened(self) -> int:
        """Tokens up to where the assistant's turn opens: an answer of its own begins there."""
        return sum(len(part) for part in self.segments[: SEGMENTS.index("answer_prefix")])


def tokenise(
    row: Row, tokenizer: Tokenizer, limit: int, max_target: int, vocab_size: int = INT32_MAX
) -> TokenRow:
    """The tokens of a row, at most `limit` with its target or generated answer.

    A longer one loses the middle of context and question: the first and the last half of what they
    may have stay (LongBench's rule). So does one of more than `Row.most_tokens`.

    Args:
        row: the row.
        tokenizer: the model's.
        limit: tokens of the model's context.
        max_target: tokens of the target that count; turns are not cut.
        vocab_size: of the model, which may have fewer tokens than its tokenizer.

    Raises:
        ValueError: a segment other than context and question fills the context by itself; the
            model has no such token.
    """

    def encoded(text: str, goes_on: bool = True) -> np.ndarray:
        ids = np.asarray(tokenizer.encode(text, goes_on=goes_on), np.int32).reshape(-1)
        if len(ids) and ids.max() >= vocab_size:
            wrong = int(ids[ids >= vocab_size][0])
            raise ValueError(
                f"token {wrong} of the tokenizer: the model's vocabulary ends at {vocab_size}"
            )
        return ids

    # What opens the text or the assistant's turn begins as a text of its own.
    head = encoded(row.head, False)
    context = encoded(row.context, bool(row.head))
    question, suffix = encoded(row.question), encoded(row.suffix)
    prefix = encoded(row.answer_prefix, not row.suffix)
    opens = row.suffix and not row.answer_prefix and not row.target.startswith(" ")
    target, spans = encoded(row.target, not opens)[:max_target], []
    if row.turns:
        target = np.zeros(0, np.int32)
        for turn in row.turns:
            asked, begun = encoded(turn.asked), encoded(turn.answer_prefix, False)
            said = encoded(turn.target, bool(turn.answer_prefix))
            opened = len(target) + len(asked)
            target = np.concatenate([target, asked, begun, said])
            spans.append((opened, len(target) - len(said), len(target)))
    elif row.metric == "own":
        target = target[:0]
    ends = [(start, end) for _, start, end in spans] or [(0, len(target))]
    if row.metric != "own" and any(start == end for start, end in ends):
        raise ValueError("the target has no token")
    generated = needs_answer(row.metric) or row.metric == "own"
    answer = max(len(target), row.max_new_tokens if generated else 1)
    room = limit - len(head) - len(suffix) - len(prefix) - answer
    if row.most_tokens is not None:
        room = min(room, row.most_tokens)
    if room < 2:
        raise ValueError(f"no room for the context: the limit is {limit} tokens")
    removed = max(0, len(context) + len(question) - room)
    if removed:
        whole = np.concatenate([context, question])
        first, last = room - room // 2, len(whole) - room // 2
        kept = np.r_[0:first, last : len(whole)]
        is_context = kept < len(context)
        context, question = whole[kept[is_context]], whole[kept[~is_context]]
    if not len(head) + len(context):
        raise ValueError("head and context have no token")
    segments = (head, context, question, suffix, prefix)
    before = sum(map(len, segments))
    turns = tuple(Answer(before + opened, start, end) for opened, start, end in spans)
    return TokenRow(segments, target, removed, turns)
