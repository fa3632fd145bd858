"""Long texts to go on with: how well the true following text is predicted."""

from kvjax.errors import UserError
from kvjax.eval.files import read_texts
from kvjax.eval.rows import Row
from kvjax.eval.tasks.base import Context, cut_text

MARGIN = 32
"""Characters of text that a token may take, at most, on average over a window."""


def continuation(context: Context) -> list[Row]:
    """Windows of long texts; the first half of every text is for development, the second for test.

    Raises:
        UserError: no texts were given, or none is long enough.
    """
    options, tokenizer = context.options, context.tokenizer
    if options.texts is None:
        raise UserError("the task continuation needs long texts: give --texts or --data")
    halves = []
    for text in read_texts(options.texts):
        half = len(text) // 2
        halves.append(text[:half] if options.split == "dev" else text[half:])
    rows = []
    for length in options.lengths:
        size = (length + options.target_tokens) * MARGIN
        long = [half for half in halves if len(half) > 2 * size] or [max(halves, key=len)]
        for index in range(options.rows):
            rng = options.rng("continuation", length, index)
            text = long[index % len(long)]
            start = int(rng.integers(max(1, len(text) - size)))
            # From the beginning of a word on.
            start = text.find(" ", start) + 1
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
