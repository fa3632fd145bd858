"""Needles in a haystack: numbers and facts hidden in background text, over lengths and depths."""

from collections.abc import Callable

import numpy as np

from kvjax.eval.rows import Row
from kvjax.eval.tasks.base import (
    Context,
    Haystack,
    background_room,
    chat_segments,
    digits,
    insert_at,
)
from kvjax.eval.tasks.wordings import FACTS, KEYS, LISTS, NEEDLES, PASSKEYS

PAIRS = 3
"""Entries of a list of words and numbers."""
Draw = Callable[[int, np.random.Generator], tuple[str, str, str, str]]
"""(row, rng) -> statement, question, beginning of the answer, value."""


def _in_background(context: Context, task: str, draw: Draw) -> list[Row]:
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
                    target=" " + value,
                    depth=depth,
                )
            )
    return rows


def needle(context: Context) -> list[Row]:
    """A number of seven digits, stated once."""
    wordings = NEEDLES[context.options.split]

    def draw(index: int, rng: np.random.Generator):
        statement, question, prefix = wordings[index % len(wordings)]
        value = digits(rng, 7)
        return statement.format(v=value), question, prefix, value

    return _in_background(context, "needle", draw)


def passkey(context: Context) -> list[Row]:
    """A number of five digits, stated twice."""
    wordings = PASSKEYS[context.options.split]

    def draw(index: int, rng: np.random.Generator):
        statement, question, prefix = wordings[index % len(wordings)]
        value = digits(rng, 5)
        return statement.format(v=value), question, prefix, value

    return _in_background(context, "passkey", draw)


def fact(context: Context) -> list[Row]:
    """A fact in words."""
    wordings = FACTS[context.options.split]

    def draw(index: int, rng: np.random.Generator):
        statement, question, prefix, values = wordings[index % len(wordings)]
        value = values[int(rng.integers(len(values)))]
        return statement.format(v=value), question, prefix, value

    return _in_background(context, "fact", draw)


def key_value(context: Context) -> list[Row]:
    """A short list of words with a number each, somewhere in the text; one is asked for."""
    options = context.options

    def draw(index: int, rng: np.random.Generator):
        names = rng.permutation(KEYS)[:PAIRS]
        values = [digits(rng, 4) for _ in names]
        line, question, prefix = LISTS[options.split]
        listed = "\n".join(line.format(key=name, v=value) for name, value in zip(names, values))
        # Any of them may be asked for, whatever the depth of the list.
        asked = int(rng.integers(PAIRS))
        question, prefix = question.format(key=names[asked]), prefix.format(key=names[asked])
        return f"\n\n{listed}\n\n", question, prefix, values[asked]

    return _in_background(context, "kv", draw)
