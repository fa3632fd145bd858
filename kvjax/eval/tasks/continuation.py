"""Long texts to go on with: how well the true following text is predicted."""

from pathlib import Path

from kvjax.errors import UserError
from kvjax.eval.files import read_texts
from kvjax.eval.rows import Row
from kvjax.eval.tasks.base import Context, TaskOptions, count_tokens, cut_text
from kvjax.models.tokenizer import Tokenizer

MARGIN = 32
"""Characters of text that a token may take, at most, on average over a window."""


def needed(tokenizer: Tokenizer, text: str, tokens: int) -> int:
    """About how many characters of a text have so many tokens, and some more.

    A text that may be too short for `MARGIN` is counted: all windows of it would begin alike.
    """
    if len(text) > 2 * tokens * MARGIN:
        return tokens * MARGIN
    return 5 * len(text) * tokens // (4 * max(1, count_tokens(tokenizer, text)))


def source(options: TaskOptions) -> Path:
    """Where the long texts are.

    Raises:
        UserError: none were given.
    """
    if options.texts is None:
        raise UserError("the task continuation needs long texts: give --texts or --data")
    return options.texts


def continuation(context: Context) -> list[Row]:
    """Windows of long texts; the first half of every text is for development, the second for test.

    Raises:
        UserError: no texts were given, or none is long enough.
    """
    options, tokenizer = context.options, context.tokenizer
    halves = []
    for text in read_texts(source(options)):
        half = len(text) // 2
        halves.append(text[:half] if options.split == "dev" else text[half:])
    rows = []
    for length in options.lengths:
        wanted = length + options.target_tokens
        size = wanted * MARGIN
        long = [half for half in halves if len(half) > 2 * size] or [max(halves, key=len)]
        for index in range(options.rows):
            rng = options.rng("continuation", length, index)
            text = long[index % len(long)]
            last = len(text) - min(size, needed(tokenizer, text, wanted))
            start = int(rng.integers(max(1, last)))
            # From the beginning of a word on, where there are words.
            start = max(start, text.find(" ", start, start + MARGIN * 4) + 1)
            body = cut_text(tokenizer, text[start:], length)
            target = cut_text(tokenizer, text[start + len(body) :], options.target_tokens)
            if not body or not target.strip():
                raise UserError(f"{options.texts}: no text is long enough for {length} tokens")
            rows.append(
                Row(
                    id=options.id_of("continuation", length, index),
                    task="continuation",
                    length=length,
                    head="",
                    context=body,
                    question="",
                    suffix="",
                    answer_prefix="",
                    target=target,
                    metric="nll",
                )
            )
    return rows
