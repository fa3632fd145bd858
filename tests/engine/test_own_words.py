"""Exercises in a model's own words: what it says, how long, and what is made of it."""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.engine.calibrate import own_words
from kvjax.engine.calibrate.exercises import ASKED, SAID, SAID_INSIDE, Setting, exercise
from kvjax.engine.calibrate.generated import generated_text
from kvjax.engine.calibrate.own_words import OwnWords, heard, spoken
from kvjax.engine.dense import dense_pass
from kvjax.eval.tasks import wordings
from kvjax.models import load_model

TEXTS = [generated_text(i, lines=8) for i in range(4)]
ROOM, LENGTH, COLUMNS = 64, 50, 12
GIVEN = np.array([3, 7, 1], np.int32)


@pytest.fixture(scope="module")
def model(tiny_folder):
    found = load_model(weights=str(tiny_folder), dtype="float32")
    # Queries that look where they look: what is said depends on where it stands.
    group = found.config.group_size

    def sharper(path, x):
        return x.at[..., :group, :].multiply(8) if "'qkv'" in jax.tree_util.keystr(path) else x

    params = jax.tree_util.tree_map_with_path(sharper, found.params)
    return dataclasses.replace(found, params=params)


@pytest.fixture(scope="module")
def context(model):
    # What pads it is a token like any other.
    return np.random.default_rng(1).integers(0, 256, ROOM).astype(np.int32)


@pytest.fixture(scope="module")
def said():
    return np.random.default_rng(2).integers(0, 256, (3, COLUMNS)).astype(np.int32)


@pytest.fixture(scope="module")
def say(model, context, said):
    """What is said behind the context: greedily, or drawn; row by row to one of `ends`."""
    k, v = jax.jit(functools.partial(heard, model.config))(model.params, context)
    run = jax.jit(functools.partial(spoken, model.config))

    def found(ends=(), seed=0, warmth=0.0, given=GIVEN):
        ends = np.array([-1, *ends], np.int32)
        drawn = np.uint32(seed), np.float32(warmth)
        return np.asarray(run(model.params, k, v, np.int32(LENGTH), said, given, ends, drawn))

    return found


@pytest.fixture(scope="module")
def told(model, context, said):
    """The same by a whole pass for every token."""

    def found(given):
        rows = []
        at = jnp.arange(LENGTH + COLUMNS, dtype=jnp.int32)
        run = jax.jit(functools.partial(dense_pass, model.config))
        for row, count in zip(said.copy(), given):
            for column in range(count, COLUMNS):
                tokens = np.concatenate([context[:LENGTH], row])
                logits = run(model.params, tokens, at).logits
                row[column] = int(jnp.argmax(logits[LENGTH + column - 1]))
            rows.append(row)
        return np.stack(rows)

    return found


def test_what_is_said_is_what_whole_passes_say(say, told):
    np.testing.assert_array_equal(say(), told(GIVEN))


def test_it_stops_when_every_row_has_ended(say, said):
    whole = say()
    # One that only the first row says, and one of each.
    ends = [row[count + 2] for row, count in zip(whole, GIVEN)]

    def length(row, count, ends):
        (at,) = np.nonzero(np.isin(row[count:], ends))
        return count + at[0] + 1 if len(at) else COLUMNS

    lengths = [length(row, count, ends) for row, count in zip(whole, GIVEN)]
    found = say(ends)
    assert max(lengths) < COLUMNS
    for row, want, count in zip(found, whole, lengths):
        np.testing.assert_array_equal(row[:count], want[:count])
    # What comes behind the last end is as it was given.
    np.testing.assert_array_equal(found[:, max(lengths) :], said[:, max(lengths) :])


def test_tokens_that_are_given_end_nothing(say, said):
    whole = say()
    ends = [said[0, 2], said[1, 5], whole[2, 1]]
    found = say(ends)
    for row in (0, 1):
        ended = np.isin(whole[row, GIVEN[row] :], ends)
        count = GIVEN[row] + (np.argmax(ended) + 1 if ended.any() else COLUMNS)
        np.testing.assert_array_equal(found[row, :count], whole[row, :count])


def test_what_is_told_ends_before_its_end(model):
    own: Any = OwnWords(model)
    end, seen = 9, []
    own._model = types.SimpleNamespace(
        params=None, tokenizer=types.SimpleNamespace(eos_ids=frozenset({11, end}))
    )

    def spoken(params, k, v, length, said, given, ends, drawn):
        seen.append((said.copy(), given))
        assert ends.tolist() == [end, 11]
        return np.where(np.arange(SAID) < given[:, None], said, [[7], [end], [8]])

    own._spoken = spoken
    long = list(range(1, SAID + 20))
    found = own._behind((jnp.zeros(0), jnp.zeros(0), 5), [[1, end, 3], [4], long], 0, 0.0)
    assert found == [[7] * (SAID - 3), [], [8]]
    ((said, given),) = seen
    assert given.tolist() == [3, 1, SAID - 1]
    # Of a row that is too long its end is given.
    assert said[2, : SAID - 1].tolist() == long[-(SAID - 1) :]
    assert said[0, :4].tolist() == [1, end, 3, 0]


def test_what_is_drawn_follows_from_the_seed(say):
    np.testing.assert_array_equal(say(seed=1), say(seed=2))
    warm = say(seed=1, warmth=3.0)
    np.testing.assert_array_equal(warm, say(seed=1, warmth=3.0))
    assert not np.array_equal(warm, say(seed=2, warmth=3.0))
    assert not np.array_equal(warm, say())
    for row, count in zip(warm, GIVEN):
        assert len(np.unique(row[count:])) > 3


class Told(OwnWords):
    """Says what it is told to, and tells what it was asked."""

    def __init__(self, model, *answers):
        super().__init__(model)
        self.answers, self.asked = list(answers), []

    def _behind(self, memory, rows, seed, warmth):
        encode, decode = self._model.tokenizer.encode, self._model.tokenizer.decode
        self.asked.append(([decode(row) for row in rows], warmth, memory[2]))
        return [encode(answer) for answer in self.answers.pop(0)]


def numbers(model, tokens, inside):
    """Exercises whose question stands in the context, or behind it."""
    for number in range(64):
        if Setting.of(model.tokenizer, TEXTS, number, tokens).inside == inside:
            yield number


QUESTIONS = " What is the kiln's weight? And more\nWhy?", "No question."


def test_its_own_questions_are_asked_and_answered(model):
    number = next(numbers(model, 900, False))
    own = Told(model, QUESTIONS, ["It is 9 kg.", ""])
    found, other = own.exercise(TEXTS, number, 900), exercise(model.tokenizer, TEXTS, number, 900)
    setting = Setting.of(model.tokenizer, TEXTS, number, 900)
    text = model.tokenizer.decode(found.context)
    (requests, warm, length), (asked, cold, _) = own.asked
    assert found.context == other.context
    assert length == len(found.context)
    assert (warm, cold) == (own_words.WARMTH, 0)
    # A passage of the text is beside them, the one of the other exercise.
    assert (found.said[ASKED:], found.first[ASKED:]) == (other.said[ASKED:], other.first[ASKED:])
    anchors = []
    for request in requests:
        (form,) = [x for x in own_words.ASKING if request.strip().startswith(x.split('"')[0])]
        begin, end = form.split("{}")
        anchors.append(request.partition(begin)[2].rpartition(end)[0])
        assert anchors[-1] in " ".join(text.split())
    assert anchors[0] != anchors[1]
    assert asked[0] == f"\n\nWhat is the kiln's weight?{setting.suffix}"
    # Where it writes none, a passage is asked about.
    forms = [x.format(anchors[1]) for x in own_words.TELLING]
    assert asked[1].removesuffix(setting.suffix).strip()[-30:] in [x[-30:] for x in forms]
    for ids, first, question, answer in zip(found.said, found.first, asked, ["It is 9 kg.", ""]):
        assert model.tokenizer.decode(ids) == question + answer
        assert model.tokenizer.decode(ids[: first + 1]) == question
    # Of an empty answer its end is what counts.
    counted = found.padded(960)
    assert np.isclose(counted[-1].sum(), 1)
    again = Told(model, QUESTIONS, ["It is 9 kg.", ""])
    assert again.exercise(TEXTS, number, 900) == found
    assert again.asked == own.asked


def test_a_question_in_the_context_is_its_own_as_well(model):
    for tokens in (900, 200):
        number = next(numbers(model, tokens, True))
        own = Told(model, QUESTIONS, ["It is 9 kg, " * 9, "x"])
        found = own.exercise(TEXTS, number, tokens)
        setting = Setting.of(model.tokenizer, TEXTS, number, tokens)
        text = model.tokenizer.decode(found.context)
        assert len(found.context) <= tokens
        assert text.endswith(f"\n\nWhat is the kiln's weight?{setting.suffix}")
        assert setting.context[: len(found.context) - 60] == found.context[:-60]
        assert len(found.said) == 1 == len(found.first)
        assert model.tokenizer.decode(found.said[0]) == ("It is 9 kg, " * 9)[:SAID_INSIDE]
        assert found.first == [0]


def test_sheets_are_asked_about_as_texts_are(model):
    for number in range(1, 64, 2):
        sheet = Setting.of(model.tokenizer, TEXTS, number, 900, sheets=True)
        if not sheet.behind and not sheet.inside:
            break
    own = Told(model, QUESTIONS, ["It is 9 kg.", ""])
    found = own.exercise(TEXTS, number, 900, sheets=True)
    assert found.context == sheet.context
    text = " ".join(model.tokenizer.decode(sheet.context).split())
    for request in own.asked[0][0]:
        assert request.partition('"')[2].rpartition('"')[0] in text


def test_the_model_itself_is_asked(model):
    number = next(numbers(model, 400, False))
    own = OwnWords(model)
    found, again = own.exercise(TEXTS, number, 400), OwnWords(model).exercise(TEXTS, number, 400)
    assert found == again
    ends = model.tokenizer.eos_ids
    whole = jax.jit(functools.partial(dense_pass, model.config))
    for ids, first in zip(found.said[:ASKED], found.first):
        assert 0 < first < len(ids) <= SAID
        assert not set(ids[first + 1 :]) & set(ends)
        # Greedy: what whole passes say behind the question.
        tokens = np.array([*found.context, *ids], np.int32)
        at = np.arange(len(found.context) + first, len(tokens), dtype=np.int32)
        best = np.argmax(whole(model.params, tokens, at).logits, axis=-1)
        np.testing.assert_array_equal(best[:-1], ids[first + 1 :])
        assert len(ids) == SAID or best[-1] in ends


def test_what_it_is_asked_shares_no_wording_with_the_evaluation():
    asked = {*own_words.ASKING, *own_words.TELLING}
    for split in ("dev", "test"):
        for wording in (
            *wordings.NEEDLES[split],
            *wordings.PASSKEYS[split],
            *wordings.FACTS[split],
        ):
            assert not asked & set(wording)
