"""Generated prompts: what is asked for is in them, where it should be, and nowhere else."""

import re
from typing import Any

import numpy as np
import pytest

from kvjax.engine.calibrate import generated
from kvjax.errors import UserError
from kvjax.eval.rows import Row, Skipped
from kvjax.eval.tasks import Context, TaskOptions, get_task, make_rows
from kvjax.eval.tasks.articles import ARTICLES, NAMES, TOWNS
from kvjax.eval.tasks.base import Haystack, chat_segments, cut_text, insert_at, next_turn
from kvjax.eval.tasks.wordings import (
    FACTS,
    LONG_NUMBERS,
    NEEDLES,
    PASSKEYS,
    PHRASES,
    SERIES,
    SUMMARIES,
)
from kvjax.models.tokenizer import ByteTokenizer

TEXT = " ".join(f"Sentence {i} says {'quite ' * (i % 4)}little." for i in range(400))


@pytest.fixture
def haystack(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def rows_of(names, haystack=None, **options) -> list[Row]:
    given: dict[str, Any] = {"lengths": (600, 1500), "rows": 10, "haystack": haystack, **options}
    return make_rows(names, Context(ByteTokenizer(), TaskOptions(**given), Skipped()))


def texts(rows):
    return [row.head + row.context + row.question + row.suffix + row.answer_prefix for row in rows]


def statements(wordings) -> set[str]:
    return {wording if isinstance(wording, str) else wording[0] for wording in wordings}


@pytest.mark.parametrize("name", ["needle", "passkey", "fact"])
@pytest.mark.parametrize("split", ["dev", "test"])
def test_the_needle_is_in_the_text_at_its_depth(haystack, name, split):
    times = 2 if name == "passkey" else 1
    for row in rows_of([name], haystack, split=split):
        value = row.target.removeprefix(" ")
        assert row.target == " " + value
        assert row.context.count(value) == times
        assert value not in row.question + row.answer_prefix
        where = row.context.index(value) / len(row.context)
        # The value stands within the needle; sentences are short against the context.
        assert abs(where - (row.depth or 0)) < 0.2
        length = len(texts([row])[0])
        assert 0.9 * row.length - 60 <= length <= row.length


def test_depths_go_from_the_front_to_the_end(haystack):
    rows = rows_of(["needle"], haystack, lengths=(800,), rows=10, depths=5)
    assert [row.depth for row in rows] == [0.0, 0.25, 0.5, 0.75, 1.0] * 2
    front, end = rows[0], rows[4]
    assert re.match(r"[^.]*\d{7}", front.context)
    assert re.search(r"\d{7}[^.]*\.$", end.context)
    assert rows_of(["needle"], haystack, depths=1)[0].depth == 0.5


@pytest.mark.parametrize("split", ["dev", "test"])
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("digits16", r" [1-9]\d{15}"),
        ("phrase9", r"\w+( \w+){8}"),
        ("list", r" (\w+), (\w+), and (\w+)"),
    ],
)
def test_long_answers_stand_in_the_text_behind_their_beginning(haystack, name, form, split):
    rows = rows_of([name], haystack, split=split)
    for row in rows:
        found = re.fullmatch(form, row.target)
        assert found
        assert len(set(found.groups())) == len(found.groups())
        assert row.context.count(row.answer_prefix + row.target) == 1
        assert row.target.strip() not in row.question
        assert 0.9 * row.length - 90 <= len(texts([row])[0]) <= row.length
    assert len({row.target for row in rows}) > len(rows) / 2


@pytest.mark.parametrize("split", ["dev", "test"])
def test_five_questions_are_put_one_after_the_other(haystack, split):
    rows = rows_of(["five"], haystack, split=split, lengths=(2200,))
    assert rows == rows_of(["five"], haystack, split=split, lengths=(2200,))
    assert len({row.turns[0].asked for row in rows}) > 2
    for row in rows:
        assert row.question + row.suffix + row.answer_prefix + row.target == ""
        assert len({turn.answer_prefix for turn in row.turns}) == 5
        spoken = "".join(turn.asked + turn.answer_prefix for turn in row.turns)
        for turn in row.turns:
            value = turn.target.removeprefix(" ")
            # A pass key is stated twice.
            assert row.context.count(value) == (2 if len(value) == 5 and value.isdigit() else 1)
            assert value not in spoken
        # Blanks between sentences count with the sentences, but for those around what is planted.
        whole = row.context + spoken + "".join(turn.target for turn in row.turns)
        assert 0.9 * row.length - 90 <= len(row.head + whole) <= row.length + 5


@pytest.mark.parametrize("split", ["dev", "test"])
@pytest.mark.parametrize("length", [1500, 9000])
def test_news_are_asked_of_one_article_of_a_page(split, length):
    slots = set()
    for row in rows_of(["news"], split=split, lengths=(length,)):
        parts = row.context.split("\n\n")
        page = dict(zip(parts[::2], parts[1::2]))
        # No event twice in one town, or the question would have two answers.
        assert len(page) == len(parts) / 2 >= length / 800
        holding = [
            (headline, body)
            for headline, body in page.items()
            if row.target.strip() in body and any(t in row.question for t in TOWNS[split]
                                                  if t in headline)
        ]  # fmt: skip
        assert holding
        depth = list(page).index(holding[0][0]) / (len(page) - 1)
        assert len(holding) > 1 or abs(depth - (row.depth or 0)) < 0.3
        assert 0.9 * length - 500 <= len(texts([row])[0]) <= length
        slots.add("number" if row.target.strip().isdigit() else row.target[1].isupper())
    assert slots == {"number", True, False}


def test_summaries_have_no_answer_of_their_own(haystack):
    for row in rows_of(["summary"], haystack):
        assert (row.metric, row.target, row.answer_prefix) == ("own", "", "")
        assert row.question.removeprefix("\n\n") in SUMMARIES["test"]
        assert 0.9 * row.length - 60 <= len(texts([row])[0]) <= row.length


@pytest.mark.parametrize("name", ["needle", "passkey", "fact", "kv", "list", "news"])
def test_rows_are_the_same_in_every_run_and_differ_by_seed_and_split(haystack, name):
    first = rows_of([name], haystack)
    assert rows_of([name], haystack) == first
    # More rows or other lengths do not change a row.
    more = {row.id: row for row in rows_of([name], haystack, rows=12, lengths=(1500, 700, 600))}
    assert all(more[row.id] == row for row in first)
    for other in ({"seed": 1}, {"split": "dev"}):
        changed = rows_of([name], haystack, **other)
        assert not {row.id for row in changed} & {row.id for row in first}
        assert not set(texts(changed)) & set(texts(first))
    assert len({row.id for row in first}) == len(first)


def test_splits_share_neither_wording_nor_background(haystack):
    every = (NEEDLES, PASSKEYS, FACTS, LONG_NUMBERS, SERIES, SUMMARIES, ARTICLES, TOWNS, NAMES)
    for wordings in every:
        dev, test = (statements(wordings[split]) for split in ("dev", "test"))
        assert not dev & test
        assert len(dev) > 1
    assert not statements(PHRASES["dev"]) & statements(PHRASES["test"])
    numbers = {
        split: {
            found
            for row in rows_of(["needle"], haystack, split=split)
            for found in re.findall(r"Sentence (\d+)", row.context)
        }
        for split in ("dev", "test")
    }
    assert not numbers["dev"] & numbers["test"]


def test_calibration_texts_share_no_name_with_the_news():
    """Nor a wording: no statement of a prompt with its values left out stands in one."""
    known = {*generated.FIRST, *generated.LAST, *generated.PLACE}
    for split in ("dev", "test"):
        names = {word for name in (*TOWNS[split], *NAMES[split]) for word in name.split()}
        assert not names & known
    made = "".join(generated.generated_text(number) for number in range(32))
    for wordings in (NEEDLES, PASSKEYS, FACTS, LONG_NUMBERS, PHRASES, SERIES, ARTICLES):
        for statement in statements(wordings["dev"]) | statements(wordings["test"]):
            for part in re.split(r"\{\w+\}", statement):
                assert len(part) < 12 or part not in made


def test_key_value_lists_hold_the_asked_pair_once(haystack):
    asked = set()
    for row in rows_of(["kv"], haystack):
        name = re.split(r"ticket |\?", row.question)[1]
        pairs = re.findall(
            r"^The price of the ticket (\w+) is (\d{4})\.$", row.context, re.MULTILINE
        )
        assert len(pairs) == len({word for word, _ in pairs}) == 3
        assert f" {dict(pairs)[name]}" == row.target
        asked.add([word for word, _ in pairs].index(name))
        assert 0.8 * row.length <= len(texts([row])[0]) <= row.length
    assert len(asked) == 3


def test_the_background_needs_no_file():
    rows = rows_of(["needle"])
    assert len(rows) == 20
    assert len(set(texts(rows))) == 20


def test_needles_go_where_their_depths_say():
    items = ["a", "b", "c", "d"]
    assert insert_at(items, ["X"], [0.0]) == ["X", "a", "b", "c", "d"]
    assert insert_at(items, ["X"], [1.0]) == ["a", "b", "c", "d", "X"]
    assert insert_at(items, ["X", "Y"], [0.75, 0.25]) == ["a", "Y", "b", "c", "X", "d"]
    assert insert_at([], ["X", "Y"], [0.5, 0.5]) == ["X", "Y"]


def test_background_is_consecutive_and_no_longer_than_asked(haystack):
    context = Context(ByteTokenizer(), TaskOptions(haystack=haystack), Skipped())
    taken = Haystack(context).take(500, np.random.default_rng(0))
    joined = " ".join(taken)
    assert joined in TEXT + " " + TEXT
    assert 450 <= len(joined) <= 500


def test_texts_are_cut_to_whole_words():
    assert cut_text(ByteTokenizer(), "one two three", 9) == "one two"
    assert cut_text(ByteTokenizer(), "one two", 100) == "one two"
    assert [cut_text(ByteTokenizer(), "天地玄黄", size) for size in (6, 7, 8)] == ["天地"] * 3
    long = "word " * 1000
    assert len(cut_text(ByteTokenizer(), long, 200)) in range(195, 201)


def test_the_chat_template_is_split_where_the_user_speaks():
    assert chat_segments(ByteTokenizer()) == ("", "")
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert chat_segments(tokenizer) == ("<user>", "</user><assistant>")
    assert next_turn(tokenizer) == "</assistant><user>"
    assert next_turn(ByteTokenizer()) == "\n\n"
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(UserError, match="does not show a second turn"):
        next_turn(tokenizer)


def test_what_cannot_be():
    with pytest.raises(UserError, match="did you mean needle"):
        get_task("nedle")
    with pytest.raises(UserError, match="too short for this task's prompt"):
        rows_of(["needle"], lengths=(40,))
    lengths = [{"lengths": these} for these in ((), (8,), (10**11,))]
    for values in (*lengths, {"rows": 0}, {"seed": -1}):
        with pytest.raises(UserError):
            TaskOptions(**values)  # pyright: ignore[reportArgumentType]
