"""Needles in a haystack: numbers and facts hidden in background text, over lengths and depths."""

from collections.abc import Callable

import numpy as np

from kvjax.errors import UserError
from kvjax.eval.rows import Row
from kvjax.eval.tasks.base import (
    Context,
    Haystack,
    background_room,
    chat_segments,
    count_tokens,
    digits,
    insert_at,
)
from kvjax.eval.tasks.wordings import FACTS, KEYS, NEEDLES, PASSKEYS

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
    """A list of words with a number of four digits each; one of them is asked for."""
    options, tokenizer = context.options, context.tokenizer
    head, suffix = chat_segments(tokenizer)
    first = "A list of names and numbers:\n"
    rows = []
    for length in options.lengths:
        for index in range(options.rows):
            rng = options.rng("kv", length, index)
            asked = "\n\nWhich number stands beside {}?"
            prefix = "The number beside {} is"
            longest = (asked.format("bramble thistle"), prefix.format("bramble thistle"))
            room = background_room(context, length, head, first, suffix, *longest)
            lines: list[tuple[str, str]] = []
            used: set[str] = set()
            while True:
                first_word, second_word = rng.choice(KEYS, 2, replace=False)
                name, value = f"{first_word} {second_word}", digits(rng, 4)
                room -= count_tokens(tokenizer, f"{name}: {value}\n")
                if room < 0:
                    break
                if name not in used:
                    used.add(name)
                    lines.append((name, value))
            if not lines:
                raise UserError(f"length {length}: too short for a list, give a longer one")
            depth = options.depth(index)
            name, value = lines[round(depth * (len(lines) - 1))]
            rows.append(
                Row(
                    id=options.id_of("kv", length, index),
                    task="kv",
                    length=length,
                    head=head,
                    context=first + "\n".join(f"{name}: {value}" for name, value in lines),
                    question=asked.format(name),
                    suffix=suffix,
                    answer_prefix=prefix.format(name),
                    target=" " + value,
                    depth=depth,
                )
            )
    return rows
