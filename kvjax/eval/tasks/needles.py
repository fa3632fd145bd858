"""Needles in a haystack: numbers and facts hidden in background text, over lengths and depths."""

from collections.abc import Callable

import numpy as np

from kvjax.eval.rows import Row, Turn
from kvjax.eval.tasks.base import (
    Context,
    Haystack,
    background_room,
    chat_segments,
    digits,
    insert_at,
    next_turn,
)
from kvjax.eval.tasks.wordings import (
    FACTS,
    KEYS,
    LISTS,
    LONG_NUMBERS,
    NEEDLES,
    PASSKEYS,
    PHRASES,
    SERIES,
    Wording,
)

PAIRS = 3
"""Entries of a list of words and numbers."""
SERIES_SIZE = 3
"""Things in a series that is asked for whole."""
Draw = Callable[[int, np.random.Generator], tuple[str, str, str, str]]
"""(row, rng) -> statement, question, beginning of the answer, value."""


def _in_background(context: Context, task: str, draw: Draw, gap: str = " ") -> list[Row]:
    """Rows of a statement in background text; `gap` stands between an answer and its beginning."""
    options, tokenizer = context.options, context.tokenizer
    haystack = Haystack(context)
    head, suffix = chat_segments(tokenizer)
    rows = []
    for length in options.lengths:
        for index in range(options.rows):
            rng = options.rng(task, length, index)
            statement, question, prefix, value = draw(index, rng)
            question = "\n\n" + question
            room = background_room(context, length, head, statement, question, suffix, prefix)
            sentences = haystack.take(room, rng)
            depth = options.depth(index)
            rows.append(
                Row(
                    id=options.id_of(task, length, index),
                    task=task,
                    length=length,
                    head=head,
                    context=" ".join(insert_at(sentences, [statement], [depth])),
                    question=question,
                    suffix=suffix,
                    answer_prefix=prefix,
                    target=gap + value,
                    depth=depth,
                )
            )
    return rows


def _number(wordings: tuple[Wording, ...], size: int) -> Draw:
    """A number of `size` digits."""

    def draw(index: int, rng: np.random.Generator):
        statement, question, prefix = wordings[index % len(wordings)]
        value = digits(rng, size)
        return statement.format(v=value), question, prefix, value

    return draw


def _fact(split: str) -> Draw:
    wordings = FACTS[split]

    def draw(index: int, rng: np.random.Generator):
        statement, question, prefix, values = wordings[index % len(wordings)]
        value = values[int(rng.integers(len(values)))]
        return statement.format(v=value), question, prefix, value

    return draw


def _series(split: str) -> Draw:
    wordings = SERIES[split]

    def draw(index: int, rng: np.random.Generator):
        statement, question, prefix, items = wordings[index % len(wordings)]
        *first, last = rng.permutation(items)[:SERIES_SIZE]
        value = f"{', '.join(first)}, and {last}"
        return statement.format(v=value), question, prefix, value

    return draw


def _pair(split: str) -> Draw:
    def draw(index: int, rng: np.random.Generator):
        del index
        names = rng.permutation(KEYS)[:PAIRS]
        values = [digits(rng, 4) for _ in names]
        line, question, prefix = LISTS[split]
        listed = "\n".join(line.format(key=name, v=value) for name, value in zip(names, values))
        # Any of them may be asked for, whatever the depth of the list.
        asked = int(rng.integers(PAIRS))
        question, prefix = question.format(key=names[asked]), prefix.format(key=names[asked])
        return f"\n\n{listed}\n\n", question, prefix, values[asked]

    return draw


def needle(context: Context) -> list[Row]:
    """A number of seven digits, stated once."""
    return _in_background(context, "needle", _number(NEEDLES[context.options.split], 7))


def passkey(context: Context) -> list[Row]:
    """A number of five digits, stated twice."""
    return _in_background(context, "passkey", _number(PASSKEYS[context.options.split], 5))


def long_number(context: Context) -> list[Row]:
    """A number of sixteen digits, stated once."""
    return _in_background(context, "digits16", _number(LONG_NUMBERS[context.options.split], 16))


def fact(context: Context) -> list[Row]:
    """A fact in words."""
    return _in_background(context, "fact", _fact(context.options.split))


def phrase(context: Context) -> list[Row]:
    """A phrase of nine words, stated once between quotation marks."""
    wordings = PHRASES[context.options.split]

    def draw(index: int, rng: np.random.Generator):
        statement, question, prefix, places = wordings[index % len(wordings)]
        value = " ".join(words[int(rng.integers(len(words)))] for words in places)
        return statement.format(v=value), question, prefix, value

    return _in_background(context, "phrase9", draw, gap="")


def series(context: Context) -> list[Row]:
    """Three things that one sentence names, asked for whole."""
    return _in_background(context, "list", _series(context.options.split))


def key_value(context: Context) -> list[Row]:
    """A short list of words with a number each, somewhere in the text; one is asked for."""
    return _in_background(context, "kv", _pair(context.options.split))


def five(context: Context) -> list[Row]:
    """Five questions one after the other on one text, which is compressed before the first."""
    options, tokenizer = context.options, context.tokenizer
    split = options.split
    draws = (
        _number(NEEDLES[split], 7),
        _number(PASSKEYS[split], 5),
        _fact(split),
        _series(split),
        _pair(split),
    )
    haystack = Haystack(context)
    head, suffix = chat_segments(tokenizer)
    between = next_turn(tokenizer)
    rows = []
    for length in options.lengths:
        for index in range(options.rows):
            rng = options.rng("five", length, index)
            planted = [draw(index, rng) for draw in draws]
            order = rng.permutation(len(planted))
            turns = tuple(
                Turn((between if n else "\n\n") + planted[i][1] + suffix, planted[i][2],
                     " " + planted[i][3])
                for n, i in enumerate(order)
            )  # fmt: skip
            parts = [
                part for turn in turns for part in (turn.asked, turn.answer_prefix, turn.target)
            ]
            statements = [statement for statement, *_ in planted]
            room = background_room(context, length, head, *statements, *parts)
            sentences = haystack.take(room, rng)
            places = [n / (len(planted) - 1) for n in rng.permutation(len(planted))]
            rows.append(
                Row(
                    id=options.id_of("five", length, index),
                    task="five",
                    length=length,
                    head=head,
                    context=" ".join(insert_at(sentences, statements, places)),
                    question="",
                    suffix="",
                    answer_prefix="",
                    target="",
                    turns=turns,
                )
            )
    return rows
