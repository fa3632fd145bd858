"""The prompt format: segments, cuts, truncation, and what is said of rows that do not do."""

import dataclasses
import gzip
import json
from unittest.mock import Mock

import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.eval.evaluator import Evaluator
from kvjax.eval.files import read_texts
from kvjax.eval.rows import SEGMENTS, Skipped, TokenRow, Turn, read_prompts, row_from, tokenise
from kvjax.eval.run import tokenised
from kvjax.models.tokenizer import ByteTokenizer
from tests.eval.conftest import make_row

ROW = {
    **dict.fromkeys(SEGMENTS, ""),
    "id": "1",
    "task": "t",
    "length": 10,
    "context": "abc",
    "target": "d",
}


def test_protocols_cut_where_they_should():
    row = make_row()
    tokens = tokenise(row, ByteTokenizer(), 1000, 100)
    joined = row.head + row.context + row.question + row.suffix + row.answer_prefix
    assert bytes(tokens.prompt.tolist()).decode() == joined
    assert bytes(tokens.target.tolist()).decode() == row.target
    assert tokens.cut("prompt") == len(joined)
    assert tokens.cut("chat") == tokens.opened == len(joined) - len(row.answer_prefix)
    assert len(row.answer_prefix) > 0
    assert tokens.cut("question") == len(row.head + row.context + row.question)
    assert tokens.cut("agnostic") == len(row.head + row.context)
    assert tokens.removed == 0


@pytest.mark.parametrize("excess", [1, 2, 7, 60])
def test_too_long_prompts_lose_their_middle(excess):
    row = make_row()
    whole = tokenise(row, ByteTokenizer(), 1000, 100)
    limit = len(whole.prompt) + len(whole.target) - excess
    tokens = tokenise(row, ByteTokenizer(), limit, 100)
    assert len(tokens.prompt) + len(tokens.target) == limit
    assert tokens.removed == excess
    body, kept = row.context + row.question, np.concatenate(tokens.segments[1:3])
    room = len(body) - excess
    text = body[: room - room // 2] + body[len(body) - room // 2 :]
    assert bytes(kept.tolist()).decode() == text
    # What was removed, context lost before the question did.
    assert bytes(tokens.segments[3].tolist()).decode() == row.suffix


TURNS = (Turn(" Who?<end>", "He", " is me"), Turn("<user>And?<end>", "", "you"))


def test_turns_follow_the_prompt_and_only_their_answers_count():
    row = make_row(question="", suffix="", answer_prefix="", target="", turns=TURNS)
    tokens = tokenise(row, ByteTokenizer(), 1000, 3)
    text = bytes(tokens.target.tolist()).decode()
    assert text == " Who?<end>He is me<user>And?<end>you"
    before = len(row.head + row.context)
    assert [tokens.cut(name) for name in ("chat", "agnostic", "prompt")] == [before] * 3
    assert [text[answer.start : answer.end] for answer in tokens.answers] == [" is me", "you"]
    opened = [text[: answer.opened - before] for answer in tokens.answers]
    assert opened == [" Who?<end>", " Who?<end>He is me<user>And?<end>"]
    shortened = tokenise(row, ByteTokenizer(), before + len(text) - 5, 3)
    assert shortened.removed == 5
    assert [answer.opened for answer in shortened.answers] == [
        answer.opened - 5 for answer in tokens.answers
    ]
    empty = make_row(target="", turns=(TURNS[0], Turn("?", "x", "")))
    with pytest.raises(ValueError, match="the target has no token"):
        tokenise(empty, ByteTokenizer(), 1000, 3)


def test_an_answer_of_the_full_cache_has_room():
    row = make_row(metric="own", target="", max_new_tokens=500)
    tokens = tokenise(row, ByteTokenizer(), 600, 3)
    assert len(tokens.target) == 0
    assert len(tokens.prompt) == 100
    (answer,) = tokenise(make_row(), ByteTokenizer(), 600, 3).answers
    whole = tokenise(make_row(), ByteTokenizer(), 600, 3)
    (answer,) = whole.answers
    assert (answer.opened, answer.start, answer.end) == (whole.opened, 0, 3)


def test_targets_are_cut_and_generated_answers_need_room():
    row = make_row(metric="f1", max_new_tokens=500)
    assert len(tokenise(row, ByteTokenizer(), 1000, 3).target) == 3
    assert tokenise(row, ByteTokenizer(), 600, 3).removed > 0
    with pytest.raises(ValueError, match="no room for the context: the limit is 40"):
        tokenise(row, ByteTokenizer(), 40, 3)


def test_a_prompt_may_have_a_length_of_its_own():
    whole = "".join(chr(ord("a") + i) for i in range(20))
    row = make_row(head="<", context=whole[:15], question=whole[15:], suffix=">", most_tokens=8)
    found = tokenise(row, ByteTokenizer(), 1000, 64)
    kept = [bytes(part.tolist()).decode() for part in found.segments[:4]]
    assert kept == ["<", "abcd", "qrst", ">"]
    assert found.removed == 12
    # No more than the model's context leaves.
    long = dataclasses.replace(row, most_tokens=500)
    assert tokenise(long, ByteTokenizer(), 1000, 64).removed == 0
    assert tokenise(long, ByteTokenizer(), 25, 64).removed > 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"target": None}, "target None is no text"),
        ({"target": ""}, "target is empty"),
        ({"id": 7}, "id 7 is no text"),
        ({"length": "x"}, "length 'x' is no whole number"),
        ({"length": True}, "length True is no whole number"),
        ({"length": -1}, "length -1 is less than 0"),
        ({"depth": "x"}, "depth 'x' is no number"),
        ({"depth": float("nan")}, "depth nan is not from 0 to 1"),
        ({"depth": float("inf")}, "depth inf is not from 0 to 1"),
        ({"depth": 2}, "depth 2 is not from 0 to 1"),
        ({"depth": -0.1}, "depth -0.1 is not from 0 to 1"),
        ({"depth": 10**400}, "is not from 0 to 1"),
        ({"answers": "x"}, "answers 'x' is no list of texts"),
        ({"answers": ["x", 1]}, "is no list of texts"),
        ({"max_new_tokens": 0}, "max_new_tokens 0"),
        ({"metric": "bleu"}, "metric 'bleu'"),
        ({"target": " \n"}, "target has a text without words"),
        ({"metric": "contains", "answers": ["x", ""]}, "answers has a text without words"),
        ({"stop": ["x", ""]}, "stop has an empty text"),
        ({"metric": "classification", "answers": ["x", "y"]}, "classes have no 'x', which is true"),
    ],
)
def test_malformed_rows_say_what_is_wrong(change, says):
    with pytest.raises(ValueError, match=says):
        row_from({**ROW, **change})


@pytest.mark.parametrize("depth", [None, 0, 0.5, 1])
def test_depths_lie_in_the_context(depth):
    assert row_from({**ROW, "depth": depth}).depth == depth


def test_missing_fields_and_other_values_are_refused():
    for name in ROW:
        with pytest.raises(ValueError, match=f"{name} is missing"):
            row_from({key: value for key, value in ROW.items() if key != name})
    with pytest.raises(ValueError, match="no JSON object"):
        row_from([])


@pytest.mark.parametrize("packed", [False, True])
def test_malformed_rows_of_a_file_are_counted_by_number(tmp_path, packed):
    lines = [json.dumps(ROW), "", "{", json.dumps({**ROW, "id": "2", "answers": ["x"], "more": 1})]
    lines.append(json.dumps({**ROW, "target": ""}))
    # What JSON can spell and nothing can read.
    lines.append(json.dumps({**ROW, "id": "3", "context": "half \ud83d of a face"}))
    lines += ["9" * 5000, "[" * 100_000, json.dumps({**ROW, "id": "\U0001f600"})]
    path = tmp_path / ("rows.jsonl" + ".gz" * packed)
    data = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    skipped = Skipped()
    rows = read_prompts(path, skipped)
    assert [row.id for row in rows] == ["1", "2", "\U0001f600"]
    assert rows[1].answers == ("x",)
    assert [reason.split(":")[0] for reason in skipped.reasons] == [
        f"{path.name} row 3",
        *(f"{path.name} row {number}" for number in (5, 6, 7, 8)),
    ]
    assert "half of a surrogate pair" in skipped.reasons[2]


def test_files_that_do_not_do(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*missing\.jsonl: No such file"):
        read_prompts(tmp_path / "missing.jsonl", Skipped())
    empty = tmp_path / "empty.jsonl"
    empty.write_text("[]\n")
    with pytest.raises(UserError, match=r"no usable row; empty\.jsonl row 1: it is no JSON"):
        read_prompts(empty, Skipped())
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(UserError, match="not UTF-8"):
        read_prompts(latin, Skipped())
    cut = tmp_path / "cut.jsonl.gz"
    whole = gzip.compress(json.dumps(ROW).encode() * 9)
    # Too short, and with bits turned around.
    for data in (whole[:-9], whole[:10] + bytes(255 - byte for byte in whole[10:])):
        cut.write_bytes(data)
        with pytest.raises(UserError, match="cannot read"):
            read_prompts(cut, Skipped())


def test_rows_that_a_tokenizer_refuses_are_counted():
    def tokenise(row):
        if row.id == "bad":
            raise UserError("no such text")
        return TokenRow((np.zeros(9, np.int32),), np.zeros(1, np.int32), 0)

    skipped = Skipped()
    evaluator = Mock(spec=Evaluator, tokenise=tokenise)
    found = tokenised(evaluator, [make_row(id="good"), make_row(id="bad")], skipped)
    assert [row.id for row, _ in found] == ["good"]
    assert [reason.partition(" ")[2] for reason in skipped.reasons] == ["row 2: no such text"]


def test_texts_come_from_files_and_folders(tmp_path):
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": " "}\n')
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(b'{"text": "three"}'))
    (tmp_path / "picture.png").write_bytes(b"\x89")
    assert read_texts(tmp_path) == ["one", "two", "three"]
    assert read_texts(tmp_path / "b.txt") == ["two"]
    for name, content, says in (
        ("d.json", "[]", "is not what its name says"),
        ("e.txt", " ", "holds no text"),
        ("f.json", "[" * 100_000, "is not what its name says"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=says):
            read_texts(tmp_path / name)
    with pytest.raises(UserError, match="there is no"):
        read_texts(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no text file"):
        read_texts(tmp_path / "empty")
