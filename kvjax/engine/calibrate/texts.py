"""The texts that a calibration is made from where none are given."""

import gzip
import json
from importlib import resources

from kvjax.engine.calibrate.generated import generated_text, planted

BOOKS = "books.jsonl.gz"
"""Excerpts of Frankenstein (Mary Shelley, 1818) and Pride and Prejudice (Jane Austen, 1813), both
in the public domain, one JSON text a line."""
GENERATED = 48
"""Texts that are made up."""
QUICK = 24
"""Texts of each of the two kinds that are enough where a model calibrates itself at first use."""

QUICK_EXERCISES = 96
"""Exercises that are enough there, off a CPU."""


def excerpts() -> list[str]:
    """The excerpts of books that come with this package."""
    data = (resources.files("kvjax.engine.calibrate") / BOOKS).read_bytes()
    lines = gzip.decompress(data).decode().splitlines()
    return [json.loads(line) for line in lines]


def default_texts(most: int | None = None) -> list[str]:
    """Excerpts of books, every second one with made-up facts in it, and made-up texts, in turn.

    Args:
        most: texts at most; all by default.
    """
    books = [planted(text, i) if i % 2 else text for i, text in enumerate(excerpts())]
    made = [generated_text(i) for i in range(GENERATED)]
    mixed = [text for pair in zip(books, made) for text in pair]
    mixed += books[len(made) :] + made[len(books) :]
    return mixed[:most]


def padded_room(tokens: int) -> int:
    """What texts of so many tokens at most are padded to: few sizes, as each is compiled."""
    return -(-tokens // 64) * 64
