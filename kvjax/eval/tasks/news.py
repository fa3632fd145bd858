"""Questions on news: pages of made-up articles, one of which is asked about; and summaries."""

from collections.abc import Iterator

import numpy as np

from kvjax.eval.rows import Row
from kvjax.eval.tasks.articles import ARTICLES, NAMES, TOWNS, Article
from kvjax.eval.tasks.base import (
    Context,
    Haystack,
    background_room,
    chat_segments,
    count_tokens,
    digits,
    insert_at,
)
from kvjax.eval.tasks.wordings import SUMMARIES

GAP = "\n\n"
SUMMARY_TOKENS = 64


def _articles(split: str, rng: np.random.Generator) -> Iterator[tuple[Article, dict[str, str]]]:
    """Articles in a random order with what their slots hold, no two the same in the same town."""
    kinds = ARTICLES[split]
    order, towns = rng.permutation(len(kinds)), rng.permutation(TOWNS[split])
    for number in range(len(kinds) * len(towns)):
        article = kinds[order[number % len(kinds)]]
        drawn = {
            # Another one with every article of a page, and of a kind in every round.
            "town": str(towns[(number + number // len(kinds)) % len(towns)]),
            "name": str(rng.choice(NAMES[split])),
            "cause": str(rng.choice(article.causes)),
            "number": digits(rng, int(rng.integers(3, 6))),
        }
        yield article, drawn


def news(context: Context) -> list[Row]:
    """A name, a number or a cause out of one article of a page."""
    options, tokenizer = context.options, context.tokenizer
    head, suffix = chat_segments(tokenizer)
    rows = []
    for length in options.lengths:
        for index in range(options.rows):
            rng = options.rng("news", length, index)
            articles = _articles(options.split, rng)
            chosen, drawn = next(articles)
            article = chosen.text.format(**drawn)
            question, prefix, slot = chosen.questions[index % len(chosen.questions)]
            question = GAP + question.format(**drawn)
            room = background_room(context, length, head, article, question, suffix, prefix)
            others = []
            for another, slots in articles:
                text = another.text.format(**slots)
                room -= count_tokens(tokenizer, GAP + text)
                if room < 0:
                    break
                others.append(text)
            depth = options.depth(index)
            rows.append(
                Row(
                    id=options.id_of("news", length, index),
                    task="news",
                    length=length,
                    head=head,
                    context=GAP.join(insert_at(others, [article], [depth])),
                    question=question,
                    suffix=suffix,
                    answer_prefix=prefix,
                    target=" " + drawn[slot],
                    depth=depth,
                )
            )
    return rows


def summary(context: Context) -> list[Row]:
    """What the full cache itself says when it is asked for a summary of a text."""
    options, tokenizer = context.options, context.tokenizer
    head, suffix = chat_segments(tokenizer)
    haystack, wordings = Haystack(context), SUMMARIES[options.split]
    rows = []
    for length in options.lengths:
        for index in range(options.rows):
            rng = options.rng("summary", length, index)
            question = GAP + wordings[index % len(wordings)]
            room = background_room(context, length, head, question, suffix)
            rows.append(
                Row(
                    id=options.id_of("summary", length, index),
                    task="summary",
                    length=length,
                    head=head,
                    context=" ".join(haystack.take(room, rng)),
                    question=question,
                    suffix=suffix,
                    answer_prefix="",
                    target="",
                    metric="own",
                    max_new_tokens=SUMMARY_TOKENS,
                )
            )
    return rows
