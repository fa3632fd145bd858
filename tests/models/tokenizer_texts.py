"""A thousand varied strings for tokenizer tests, from real texts and from a generator."""

import csv
import gzip
import json
import random
import unicodedata
from pathlib import Path

_FRAGMENTS = [
    " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "\v",
    "0", "7", "48213", "3.14159", "1,000,000", "½", "²", "٣٤", "Ⅷ", "一二三", "१२",
    "don't", "WE'LL", "'s", "'S", "it’s", "I'Ve", "naïve", "Straße", "ﬁ", "e\u0301", "é",
    "Привет", "Ελλάδα", "こんにちは", "世界", "안녕하세요", "שלום", "مرحبا", "नमस्ते", "ไทย",
    "😀", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇫🇷", "👍🏽", "\U0001f9ff", "\U00020000", "\u200b", "\ufeff", "\u202e",
    "_", "__init__", "->", "!=", "...", "…", "—", "(", ")", "[", "]", "{", "}", "<|", "|>", "/*",
    "$x^2$", "\\n", "#", "@user", "https://example.org/a?b=c&d=%20", "camelCase", "snake_case",
    "ALLCAPS", "word", "the", " the", "Ġ", "▁", "<0x0A>", "\x00", "\x07", "\x7f", "\ufffd",
]  # fmt: skip


def _pieces(random_: random.Random, text: str, count: int) -> list[str]:
    """Excerpts of 1 to 400 characters that start and end anywhere."""
    starts = [random_.randrange(len(text)) for _ in range(count)]
    return [text[start : start + random_.randint(1, 400)] for start in starts]


def _generated(random_: random.Random) -> str:
    return "".join(random_.choice(_FRAGMENTS) for _ in range(random_.randint(1, 24)))


def _any_unicode(random_: random.Random) -> str:
    points = (random_.randrange(0x110000) for _ in range(random_.randint(1, 40)))
    return "".join(chr(p) for p in points if unicodedata.category(chr(p)) not in ("Cs", "Cn"))


def own_texts(count: int = 400, seed: int = 1) -> list[str]:
    """`count` different strings: this project's prose, tables and code, and generated Unicode."""
    root = Path(__file__).resolve().parents[2]
    files = [root / "README.md", *sorted((root / "docs").glob("*.md")), Path(__file__)]
    random_ = random.Random(seed)
    strings = dict.fromkeys(_FRAGMENTS)
    for file in files:
        strings.update(dict.fromkeys(_pieces(random_, file.read_text(), count // 20)))
    while len(strings) < count:
        make = random_.choice([_generated, _generated, _any_unicode])
        strings[make(random_)] = None
        strings.pop("", None)
    return list(strings)[:count]


def varied_texts(data_dir: Path, count: int = 1000, seed: int = 0) -> list[str]:
    """`count` different strings: books, wiki text, mathematics, code, tables, generated Unicode."""

    def text(name: str) -> str:
        return gzip.decompress((data_dir / name).read_bytes()).decode()

    def rows(name: str, key: str) -> str:
        return "\n\n".join(json.loads(line)[key] for line in text(name).splitlines())

    random_ = random.Random(seed)
    sources = [
        text("books/frankenstein.txt.gz"),
        text("books/pride_and_prejudice.txt.gz"),
        text("books/wikitext-2-test.txt.gz"),
        rows("gsm8k/test.jsonl.gz", "answer"),
        rows("longbench/mini/lcc.jsonl.gz", "context"),
        rows("longbench/mini/repobench-p.jsonl.gz", "context"),
        "\n".join(
            ",".join(row)
            for row in csv.reader(text("traces/AzureLLMInferenceTrace_code.csv.gz").splitlines())
        ),
    ]
    strings = dict.fromkeys(_FRAGMENTS)
    for source in sources:
        strings.update(dict.fromkeys(_pieces(random_, source, count // 11)))
    while len(strings) < count:
        make = random_.choice([_generated, _generated, _any_unicode])
        strings[make(random_)] = None
        strings.pop("", None)
    return list(strings)[:count]
