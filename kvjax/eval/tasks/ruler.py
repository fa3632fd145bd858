"""Tasks in the manner of RULER (Hsieh et al. 2024): several needles, chains, counts, long keys.

The kinds of task are RULER's; wordings and random streams are our own.
"""

import itertools
import uuid
from collections.abc import Sequence

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
from kvjax.eval.tasks.wordings import BINDINGS, KEYS

HOPS = 4
"""Assignments that follow the first one in variable tracking."""
COMMON = 10
"""Common words that are asked for, and their share of a list of words."""
COMMON_SHARE = 0.6


def _joined(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]


def _names(rng: np.random.Generator, size: int) -> list[str]:
    """Distinct names of two words."""
    words = rng.permutation(KEYS)
    return [f"{words[2 * i]} {words[2 * i + 1]}" for i in range(size)]


def _numbers_of_names(context: Context, task: str, keys: int, values: int, asked: int) -> list[Row]:
    """Needles that bind numbers to names; some of the names are asked for.

    Args:
        context: the tokenizer and the options.
        task: its name.
        keys: names in the text.
        values: numbers of each.
        asked: names asked for.
    """
    options, tokenizer = context.options, context.tokenizer
    statement, one, several, prefix_one, prefix_several = BINDINGS[options.split]
    haystack = Haystack(context)
    head, suffix = chat_segments(tokenizer)
    rows = []
    for length in options.lengths:
        for index in range(options.rows):
            rng = options.rng(task, length, index)
            names = _names(rng, keys)
            numbers = [[digits(rng, 5) for _ in range(values)] for _ in names]
            needles = [
                statement.format(v=value, key=name)
                for name, held in zip(names, numbers)
                for value in held
            ]
            single = asked == values == 1
            key = _joined(names[:asked])
            question = "\n\n" + (one if single else several).format(key=key)
            prefix = (prefix_one if single else prefix_several).format(key=key)
            answers = [value for held in numbers[:asked] for value in held]
            others = (head, " ".join(needles), question, suffix, prefix)
            sentences = haystack.take(background_room(context, length, *others), rng)
            # The first needle, which is asked for, at the row's depth; the others anywhere.
            depths = [options.depth(index), *rng.random(len(needles) - 1).tolist()]
            rows.append(
                Row(
                    id=options.id_of(task, length, index),
                    task=task,
                    length=length,
                    head=head,
                    context=" ".join(insert_at(sentences, needles, depths)),
                    question=question,
                    suffix=suffix,
                    answer_prefix=prefix,
                    target=" " + _joined(answers),
                    metric="em" if single else "contains-all",
                    answers=tuple(answers),
                    max_new_tokens=16 * len(answers),
                    depth=depths[0],
                )
            )
    return rows


def single(context: Context) -> list[Row]:
    """One name, one number."""
    return _numbers_of_names(context, "ruler-single", keys=1, values=1, asked=1)


def multikey(context: Context) -> list[Row]:
    """Four names with a number each, one asked for."""
    return _numbers_of_names(context, "ruler-multikey", keys=4, values=1, asked=1)


def multivalue(context: Context) -> list[Row]:
    """One name with four numbers, all asked for."""
    return _numbers_of_names(context, "ruler-multivalue", keys=1, values=4, asked=1)


def multiquery(context: Context) -> list[Row]:
    """Four names with a number each, all asked for."""
    return _numbers_of_names(context, "ruler-multiquery", keys=4, values=1, asked=4)


def variables(context: Context) -> list[Row]:
    """A value passed on from variable to variable; which ones hold it?"""
    options, task = context.options, "ruler-vt"
    haystack = Haystack(context)
    head, suffix = chat_segments(context.tokenizer)
    rows = []
    for length in options.lengths:
        for index in range(options.rows):
            rng = options.rng(task, length, index)
            letters = rng.permutation([a + b for a in "BCDFGHJKLM" for b in "AEIOU"])
            names = [f"{letters[2 * i]}{letters[2 * i + 1]}" for i in range(HOPS + 1)]
            value = digits(rng, 5)
            needles = [f"VAR {names[0]} = {value}."]
            needles += [f"VAR {b} = VAR {a}." for a, b in itertools.pairwise(names)]
            question = f"\n\nWhich variables hold the value {value}? There are {len(names)}."
            prefix = f"The variables that hold the value {value} are"
            others = (head, " ".join(needles), question, suffix, prefix)
            sentences = haystack.take(background_room(context, length, *others), rng)
            depths = np.sort(rng.random(len(needles))).tolist()
            rows.append(
                Row(
                    id=options.id_of(task, length, index),
                    task=task,
                    length=length,
                    head=head,
                    context=" ".join(insert_at(sentences, needles, depths)),
                    question=question,
                    suffix=suffix,
                    answer_prefix=prefix,
                    target=" " + _joined(names),
                    metric="contains-all",
                    answers=tuple(names),
                    max_new_tokens=8 * len(names),
                )
            )
    return rows


def common_words(context: Context) -> list[Row]:
    """A numbered list of words; which come most often?"""
    options, tokenizer, task = context.options, context.tokenizer, "ruler-cwe"
    head, suffix = chat_segments(tokenizer)
    first = "A numbered list of words, some of which come often:\n"
    question = f"\n\nWhich are the {COMMON} words that come most often in the list?"
    prefix = f"The {COMMON} words that come most often are"
    rows = []
    for length in options.lengths:
        room = background_room(context, length, head, first, question, suffix, prefix)
        for index in range(options.rows):
            rng = options.rng(task, length, index)
            words = [str(word) for word in rng.permutation(KEYS)]
            size, listed = room // 3, ""
            while not listed or count_tokens(tokenizer, listed) > room:
                size = int(0.97 * size)
                often = int(COMMON_SHARE * size) // COMMON
                if often < 2:
                    raise UserError(f"length {length}: too short for a list, give a longer one")
                common, rest = words[:COMMON], words[COMMON:]
                rare = [rest[i % len(rest)] for i in range(size - often * COMMON)]
                # The rest is evened out, so that no rare word comes as often as a common one.
                items = rng.permutation([*common * often, *rare])
                listed = " ".join(f"{i}. {word}" for i, word in enumerate(items, 1))
            rows.append(
                Row(
                    id=options.id_of(task, length, index),
                    task=task,
                    length=length,
                    head=head,
                    context=first + listed,
                    question=question,
                    suffix=suffix,
                    answer_prefix=prefix,
                    target=" " + _joined(common),
                    metric="contains-all",
                    answers=tuple(common),
                    max_new_tokens=6 * COMMON,
                )
            )
    return rows


def long_keys(context: Context) -> list[Row]:
    """Pairs of random identifiers; the one beside a given one is asked for."""
    options, tokenizer, task = context.options, context.tokenizer, "ruler-kv"
    head, suffix = chat_segments(tokenizer)
    first = "Pairs of identifiers:\n"
    rows = []

    def identifier(rng: np.random.Generator) -> str:
        return str(uuid.UUID(bytes=rng.bytes(16), version=4))

    for length in options.lengths:
        for index in range(options.rows):
            rng = options.rng(task, length, index)
            asked = identifier(rng)
            question = f"\n\nWhich identifier belongs to {asked}?"
            prefix = f"{asked}:"
            room = background_room(context, length, head, first, question, suffix, prefix)
            pairs = []
            while True:
                key = identifier(rng) if pairs else asked
                pair = f"{key}: {identifier(rng)}"
                room -= count_tokens(tokenizer, pair + "\n")
                if room < 0:
                    break
                pairs.append(pair)
            if not pairs:
                raise UserError(f"length {length}: too short for a pair, give a longer one")
            depth = options.depth(index)
            pairs.insert(round(depth * (len(pairs) - 1)), pairs.pop(0))
            value = next(pair for pair in pairs if pair.startswith(asked))[len(asked) + 2 :]
            rows.append(
                Row(
                    id=options.id_of(task, length, index),
                    task=task,
                    length=length,
                    head=head,
                    context=first + "\n".join(pairs),
                    question=question,
                    suffix=suffix,
                    answer_prefix=prefix,
                    target=" " + value,
                    depth=depth,
                )
            )
    return rows
