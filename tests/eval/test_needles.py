"""Generated prompts: what is asked for is in them, where it should be, and nowhere else."""

import re
from typing import Any

import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.eval.rows import Row, Skipped
from kvjax.eval.tasks import Context, TaskOptions, get_task, make_rows
from kvjax.eval.tasks.base import Haystack, chat_segments, cut_text, insert_at
from kvjax.eval.tasks.wordings import FACTS, NEEDLES, PASSKEYS
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


@pytest.mark.parametrize("name", ["needle", "passkey", "fact", "kv"])
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
    for wordings in (NEEDLES, PASSKEYS, FACTS):
        dev, test = ({w[0] for w in wordings[split]} for split in ("dev", "test"))
        assert not dev & test
        assert len(dev) > 1
    numbers = {
        split: {
            found
            for row in rows_of(["needle"], haystack, split=split)
            for found in re.findall(r"Sentence (\d+)", row.context)
        }
        for split in ("dev", "test")
    }
    assert not numbers["dev"] & numbers["test"]


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


def test_what_cannot_be():
    with pytest.raises(UserError, match="did you mean needle"):
        get_task("nedle")
    with pytest.raises(UserError, match="too short for this task's prompt"):
        rows_of(["needle"], lengths=(40,))
    for values in ({"lengths": ()}, {"lengths": (8,)}, {"rows": 0}, {"seed": -1}):
        with pytest.raises(UserError):
            TaskOptions(**values)  # pyright: ignore[reportArgumentType]
