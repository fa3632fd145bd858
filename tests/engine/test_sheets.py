"""Exercises about sheets: what their lines say, and what is asked about them."""

import re
from collections import Counter

import pytest

from kvjax.engine.calibrate import exercises, sheets
from kvjax.engine.calibrate.exercises import ASKED, Setting, exercise
from kvjax.engine.calibrate.generated import Draw, generated_text
from kvjax.engine.calibrate.sheets import Cell, question, sheet
from kvjax.models.tokenizer import ByteTokenizer

TEXTS = [generated_text(i, lines=8) for i in range(4)]


def sheets_of(kind, monkeypatch, count=12):
    monkeypatch.setattr(sheets, "KINDS", (kind,))
    return [sheet(Draw(number)) for number in range(count)]


KINDS = {kind.__name__.strip("_"): kind for kind in sheets.KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_every_line_says_its_cells_and_no_row_comes_twice(kind, monkeypatch):
    for _, rows in sheets_of(KINDS[kind], monkeypatch):
        assert 30 <= len(rows) <= sheets.LINES
        seen = Counter((cell.row, cell.column) for _, cells in rows for cell in cells)
        assert set(seen.values()) == {1}
        for line, cells in rows:
            assert cells
            words = re.sub(r"[-_]", " ", line.lower())
            for cell in cells:
                assert cell.value in line
                row = re.sub(r"[-_]", " ", cell.row.lower())
                named = row.removeprefix("the function ").partition(" about the ")
                assert (named[2] or named[0]) in words


def test_kinds_differ_and_follow_from_the_draw():
    heads = [sheet(Draw(number)) for number in range(40)]
    assert heads == [sheet(Draw(number)) for number in range(40)]
    firsts = {re.sub(r"\w+", "", rows[0][0]) for _, rows in heads}
    assert len(firsts) > 15


def test_what_is_asked_has_one_answer():
    cells = [Cell("a", "height", "7"), Cell("b", "height", "7"), Cell("c", "height", "8")]
    cells += [Cell("c", "weight", "7")]
    asked = {cell: {question(Draw(n), cell, cells) for n in range(60)} for cell in cells}
    turned = {
        cell: [x for x in found if x[1] == f"That is {cell.row}."] for cell, found in asked.items()
    }
    assert [len(turned[cell]) for cell in cells] == [0, 0, 1, 1]
    for cell, found in asked.items():
        straight = found - {*turned[cell]}
        assert len(straight) == 5
        for what, answer in straight:
            assert cell.row in what
            assert cell.column in what
            assert cell.value in answer


def of_sheet(setting):
    """Whether its facts are cells, and no sentences."""
    return all(fact.statement == fact.told for fact in setting.facts)


@pytest.mark.parametrize("tokens", [400, 900])
def test_an_exercise_about_a_sheet(tokens):
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = "<user>{{ messages[0].content }}</user>"
    seen, behind = 0, 0
    for number in range(120):
        found = Setting.of(tokenizer, TEXTS, number, tokens, sheets=True)
        if not of_sheet(found):
            continue
        seen += 1
        assert not of_sheet(Setting.of(tokenizer, TEXTS, number, tokens))
        text = tokenizer.decode(found.context)
        assert len(found.context) <= tokens
        assert text.startswith("<user>")
        behind += text[6:40] in TEXTS[number % 4]
        assert 1 <= len(found.facts) <= ASKED
        assert len({fact.question for fact in found.facts}) == len(found.facts)
        if tokens == 900:
            for fact in found.facts:
                assert fact.told in text
        made = exercise(tokenizer, TEXTS, number, tokens, sheets=True)
        if found.inside:
            assert tokenizer.decode(made.context).endswith(f"{found.facts[0].question}</user>")
        else:
            # No sheet goes on: some of it is quoted.
            passage = tokenizer.decode(made.said[-1][-exercises.QUOTED :])
            assert passage in text
    assert 15 <= seen <= 50
    assert 0 < behind < seen / 2
