import argparse

import pytest

from benchmarks.documents import MOST_TOKENS, Ask, page, prompt_of, questions, right, summaries
from kvjax.errors import UserError
from kvjax.models import ByteTokenizer


def test_questions_are_answered_by_their_documents():
    """What a right answer holds stands in the text."""
    asks = questions()
    assert len(asks) == 9
    for ask in asks:
        assert ask.says
        assert right(ask, ask.text), ask.asks
        assert not right(ask, ask.asks), ask.asks


def test_an_answer_holds_one_of_what_is_right_in_any_case():
    ask = Ask("a.txt", "text", "how long?", ("three years", "3 years"))
    assert right(ask, "It lasts Three Years.")
    assert right(ask, "3 years")
    assert right(ask, "thirty years") is False
    assert right(Ask("a.txt", "text", "summarise"), "three years") is None


def test_long_texts_are_cut_before_what_is_asked():
    ask = Ask("a.txt", "x" * (MOST_TOKENS + 50), "How many?")
    text = ByteTokenizer().decode(prompt_of(ask, ByteTokenizer()))
    assert text.count("x") == MOST_TOKENS
    assert "How many?" in text


def test_summaries_of_ones_own_files(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    (found,) = summaries([tmp_path / "a.txt"])
    assert (found.document, found.text, found.says) == ("a.txt", "hello", ())
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    for name in ("b.txt", "absent.txt"):
        with pytest.raises(UserError, match=f"cannot read .*{name}"):
            summaries([tmp_path / name])
    assert len(summaries(None)) == 3


def test_the_page_counts_and_escapes():
    asked = {"document": "a.txt", "asks": "How long?", "tokens": 90}
    rows = [
        {**asked, "rate": 1.0, "reached_rate": 1.0, "answer": "three\n|<b>", "right": True},
        {**asked, "rate": 8.0, "reached_rate": 7.8, "answer": "four", "right": False},
    ]
    text = page(rows, argparse.Namespace(rates=[8.0], method="m", tokens=9, block_size=8), "tiny")
    assert "| of 1 questions, right | full cache | 8× |" in text
    assert "\n| | 1 | 0 |\n" in text
    assert "\n| full cache | 1.0× | ✓ three \\|&lt;b> |\n| 8× | 7.8× | ✗ four |\n" in text
    assert text.count("## a.txt (90 tokens)") == 1
