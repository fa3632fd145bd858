"""Rows as tokens where a vocabulary, a language or a day could get in between."""

import datetime
import json
from pathlib import Path

import pytest

from kvjax.engine.calibrate.exercises import turn_of
from kvjax.eval.rows import Row, Skipped, Turn, tokenise
from kvjax.eval.tasks import Context, TaskOptions, make_rows
from kvjax.eval.tasks.base import chat_segments, count_tokens, next_turn
from kvjax.models import vocabulary
from kvjax.models.tokenizer import ByteTokenizer, Tokenizer
from kvjax.models.tokenizer_files import TokenizerParts
from tests.models.tokenizer_builders import tiny_tokenizer

SPACE = vocabulary.SPACE


def spaced(prepend: str) -> Tokenizer:
    """A SentencePiece vocabulary in which two spaces are a piece, as they are in Llama 2's."""
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789.[]/", SPACE]
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, SPACE * 2]
    kinds = [vocabulary.UNKNOWN, vocabulary.CONTROL, *[vocabulary.BYTE] * 256]
    kinds += [vocabulary.NORMAL] * (len(letters) + 1)
    scored = [(piece, -float(at)) for at, piece in enumerate(pieces)]
    backend = vocabulary.sentencepiece_backend(scored, kinds, prepend=prepend)
    return Tokenizer(TokenizerParts(backend, len(pieces), 1, frozenset(), adds_bos=True))


ROW = Row(
    id="a",
    task="a",
    length=9,
    head="<s>[inst] ",
    context="the code is 48.",
    question="\n\nwhat is it",
    suffix=" [/inst]",
    answer_prefix="it is",
    target=" 48",
)


@pytest.mark.parametrize("prepend", ["always", "first", "never"])
def test_segments_that_go_on_get_no_space_of_their_own(prepend):
    tokenizer = spaced(prepend)
    row = tokenise(ROW, tokenizer, 999, 99)
    texts = ["".join(tokenizer.token_bytes(int(i)).decode() for i in part) for part in row.segments]
    target = "".join(tokenizer.token_bytes(int(i)).decode() for i in row.target)
    assert target == " 48"
    assert texts[1:4] == [ROW.context, ROW.question, ROW.suffix]
    # What the assistant says begins as a text does.
    assert texts[4] == ("it is" if prepend == "never" else " it is")
    assert count_tokens(tokenizer, " 48") == len(row.target) == 3


def test_answers_of_turns_get_none_either():
    turns = (Turn("\n\nwhat [/inst]", "it is", " 48"), Turn("\n\nand [/inst]", "", "48"))
    row = Row(id="a", task="a", length=9, head="", context="the code", question="", suffix="",
              answer_prefix="", target="", turns=turns)  # fmt: skip
    tokenizer = spaced("always")
    tokens = tokenise(row, tokenizer, 999, 99)
    said = "".join(tokenizer.token_bytes(int(i)).decode() for i in tokens.target)
    assert said == "\n\nwhat [/inst] it is 48\n\nand [/inst] 48"


def test_rows_with_tokens_that_the_model_lacks_are_refused():
    with pytest.raises(ValueError, match="vocabulary ends at 119"):
        tokenise(ROW, ByteTokenizer(), 999, 99, vocab_size=119)
    tokenise(ROW, ByteTokenizer(), 999, 99, vocab_size=120)


@pytest.mark.parametrize("task", ["needle", "continuation"])
def test_languages_without_spaces_fill_prompts(tmp_path, task):
    text = "".join(chr(0x4E00 + 7 * i * i % 9999) + "。" * (i % 9 == 8) for i in range(40_000))
    path = Path(tmp_path, "text.txt")
    path.write_text(text, encoding="utf-8")
    options = TaskOptions(lengths=(3000,), rows=3, haystack=path, texts=path)
    rows = make_rows([task], Context(ByteTokenizer(), options, Skipped()))
    sizes = [len((row.head + row.context + row.question).encode()) for row in rows]
    assert min(sizes) > 2500
    assert max(sizes) <= 3000
    assert len({row.context[-300:] for row in rows}) == 3


def test_windows_of_a_short_text_differ(tmp_path):
    path = Path(tmp_path, "text.txt")
    path.write_text(" ".join(f"{number * number}" for number in range(3000)))
    options = TaskOptions(lengths=(1000,), rows=5, texts=path)
    rows = make_rows(["continuation"], Context(ByteTokenizer(), options, Skipped()))
    assert len({row.context for row in rows}) == 5
    assert all(len(row.target) > 40 for row in rows)


def test_prompts_are_the_same_another_day():
    template = "{{ strftime_now('%d %b %Y') }} {% for m in messages %}{{ m.content }};{% endfor %}"
    tokenizer = tiny_tokenizer(chat_template=template)
    assert chat_segments(tokenizer) == turn_of(tokenizer) == ("26 Jul 2024 ", ";")
    assert next_turn(tokenizer) == ";"
    today = datetime.datetime.now().strftime("%d %b %Y")
    assert tokenizer.render_chat([{"role": "user", "content": "a"}]).startswith(today)


def test_prompts_may_come_through_a_pipe(tmp_path):
    import argparse
    import os
    import threading

    from kvjax.cli.rows import check_rows, collect_rows

    fields = ("id", "task", "length", "head", "context", "question", "suffix", "answer_prefix",
              "target")  # fmt: skip
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    line = json.dumps({name: getattr(ROW, name) for name in fields})
    writer = threading.Thread(target=pipe.write_text, args=(f"{line}\nnothing\n",))
    writer.start()
    options = argparse.Namespace(tasks=None, prompts=[str(pipe)])
    check_rows(options)
    writer.join()
    skipped = Skipped()
    assert [row.id for row in collect_rows(options, ByteTokenizer(), skipped)] == ["a"]
    assert len(skipped.reasons) == 1
