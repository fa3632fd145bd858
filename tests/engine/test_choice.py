"""The training of the choice: what is kept, where its gradient points, what it is practised on."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.engine.calibrate import practice as practising
from kvjax.engine.calibrate.choice import METHOD, Change, Fitted, kept, loss, predictions, study
from kvjax.engine.calibrate.exercises import (
    ASKED,
    QUOTED,
    SAID,
    SAID_INSIDE,
    SAID_MOSTLY,
    drawn_fact,
    exercise,
    turn_of,
)
from kvjax.engine.calibrate.fit import Sums, solve
from kvjax.engine.calibrate.generated import Draw, generated_text
from kvjax.engine.calibrate.practice import Practice, practise
from kvjax.engine.calibrate.sheets import question, sheet
from kvjax.engine.dense import dense_pass
from kvjax.eval.tasks.wordings import FACTS, KEYS, LISTS, NEEDLES, PASSKEYS
from kvjax.models import load_model
from kvjax.models.tokenizer import ByteTokenizer
from tests.oracle.eviction import cheapest_blocks, eviction_count

TOKENS, LENGTH = 128, 117
TEXTS = [generated_text(i, lines=8) for i in range(4)]


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(weights=str(tiny_folder), dtype="float32")


@pytest.fixture(scope="module")
def fitted(model):
    rng = np.random.default_rng(1)
    sums = Sums.zeros(2, 2, 32)
    for _ in range(3):
        hidden = 1 + rng.standard_normal((2, 60, 32)).astype(np.float32)
        k, v = rng.uniform(0.5, 2, (2, 2, 2, 60)).astype(np.float32)
        sums.add(hidden, k, v, np.exp(rng.standard_normal((2, 2, 60))).astype(np.float32))
    weight, extra = solve(sums, 1e-3)
    return Fitted.of(sums, weight, extra, 99)


@pytest.fixture(scope="module")
def studied(model):
    rng = np.random.default_rng(2)
    context = np.pad(rng.integers(0, 256, LENGTH), (0, TOKENS - LENGTH)).astype(np.int32)
    said = rng.integers(0, 256, (2, 12)).astype(np.int32)
    at = np.array([*range(3, 9), *range(12, 23), 0, 0], np.int32)
    share = np.array([1 / 12] * 6 + [1 / 22] * 11 + [0, 0], np.float32)
    return jax.jit(study, static_argnums=0)(
        model.config, model.params, context, np.int32(LENGTH), said, at, share
    )


def value_of(model, fitted, studied, blocks, change=None):
    change = Change.none(model.config) if change is None else change
    fn = jax.jit(jax.value_and_grad(functools.partial(loss, model.config)))
    return fn(change, fitted, model.params, studied, np.int32(blocks))


@pytest.mark.parametrize("blocks", [4, 9, 20, 32])
def test_what_is_kept_is_what_the_paper_keeps(blocks):
    scores = np.random.default_rng(blocks).standard_normal((2, 2, TOKENS)).astype(np.float32)
    stays, price = jax.jit(kept)(scores, np.int32(LENGTH), np.int32(blocks))
    costs = {}
    for layer, head in np.ndindex(2, 2):
        row = scores[layer, head, :LENGTH].copy()
        row[: METHOD.sinks] = row[LENGTH - METHOD.protected :] = np.inf
        costs[layer, head] = row.tolist()
    chosen = cheapest_blocks(costs, 4 * 8 - blocks, 16)
    gone = []
    for (layer, head), row in costs.items():
        count = eviction_count(LENGTH, chosen.blocks[layer, head], 16)
        expected = np.ones(TOKENS)
        expected[LENGTH:] = 0
        lowest = np.argsort(row, kind="stable")[:count]
        expected[lowest] = 0
        gone += [row[i] for i in lowest]
        np.testing.assert_array_equal(np.asarray(stays)[layer, head], expected)
    assert float(price) == (np.float32(max(gone)) if gone else -np.inf)


def test_predictions_are_those_of_the_method(model, fitted, studied):
    rng = np.random.default_rng(3)
    none = Change.none(model.config)
    change = Change(*(jnp.asarray(rng.standard_normal(x.shape), jnp.float32) / 9 for x in none))
    weight, extra = fitted.changed(change)

    def found(change):
        return predictions(fitted.arrays(change), studied.hidden, studied.k, studied.v)

    changed = found(change)
    for layer, head in np.ndindex(2, 2):
        k, v = (np.linalg.norm(x[layer, :, head], axis=-1) for x in (studied.k, studied.v))
        # Positions behind the last one that was calibrated count as that one.
        at = np.minimum(np.arange(TOKENS), 99)
        own = np.stack([np.log(k), np.log(v), np.log1p(at), np.ones(TOKENS)], axis=-1)
        expected = studied.hidden[layer] @ weight[layer, :, head] + own @ extra[layer, head]
        np.testing.assert_allclose(changed[layer, head], expected, rtol=1e-4, atol=1e-4)
    # A change is one of regressors of mean 0 and variance 1.
    only = Change(none.weight.at[0, 5, 1].set(0.25), none.extra)
    moved = found(only) - found(none)
    scaled = (studied.hidden[0, :, 5] - fitted.mean[0, 5]) / fitted.deviation[0, 5]
    np.testing.assert_allclose(moved[0, 1], 0.25 * scaled, rtol=1e-3, atol=1e-4)
    assert not np.abs(moved[1]).max() > 1e-5


def test_the_scale_of_regressors_is_that_of_the_texts():
    rng = np.random.default_rng(7)
    sums = Sums.zeros(2, 2, 3)
    hidden = rng.standard_normal((2, 50, 3)).astype(np.float32) * 3 + 2
    one = np.ones((2, 2, 50), np.float32)
    sums.add(hidden, one, one, one)
    found = Fitted.of(sums, *solve(sums, 1e-3), 49)
    np.testing.assert_allclose(found.mean, hidden[:, 4:].mean(axis=1), rtol=1e-4)
    np.testing.assert_allclose(found.deviation, hidden[:, 4:].std(axis=1), rtol=1e-3)


def test_with_all_blocks_nothing_is_lost(model, fitted, studied):
    assert float(value_of(model, fitted, studied, 32)[0]) == pytest.approx(0, abs=1e-4)
    few, some = (float(value_of(model, fitted, studied, n)[0]) for n in (6, 20))
    assert few > some > 1e-4


def test_what_counts_is_what_is_marked(model, fitted, studied):
    def lost(part):
        share = jnp.zeros_like(studied.share).at[part].set(studied.share[part])
        return float(value_of(model, fitted, dataclasses.replace(studied, share=share), 8)[0])

    first, second = lost(slice(6)), lost(slice(6, 17))
    assert min(first, second) > 1e-4
    assert lost(slice(None)) == pytest.approx(first + second, rel=1e-4)


def test_each_token_is_told_by_what_the_whole_model_says(model, fitted, studied):
    """The rows that count, in their order, from another pass over all of them."""
    rng = np.random.default_rng(2)
    context = rng.integers(0, 256, LENGTH)
    said = rng.integers(0, 256, (2, 12))
    tokens = np.stack([np.concatenate([context, row]) for row in said]).astype(np.int32)
    every = np.arange(tokens.shape[1], dtype=np.int32)
    rows = np.stack([
        dense_pass(model.config, model.params, jnp.asarray(row), jnp.asarray(every)).logits
        for row in tokens
    ])  # fmt: skip
    expected = jax.nn.log_softmax(rows[:, LENGTH:].reshape(24, -1), axis=-1)
    np.testing.assert_allclose(studied.log_p, expected[studied.at], rtol=1e-3, atol=1e-3)


def test_the_gradient_leads_down(model, fitted, studied):
    value, slope = value_of(model, fitted, studied, 8)
    size = float(jnp.sqrt(sum(jnp.sum(x**2) for x in slope)))
    assert size > 0
    # Steps of some length: what stays changes by whole KVs.
    found = {}
    for step in (-2.0, -1.0, -0.5, 0.5, 1.0, 2.0):
        change = Change(*(step * x / size for x in slope))
        found[step] = float(value_of(model, fitted, studied, 8, change)[0])
    down, up = ([x for step, x in found.items() if step * sign > 0] for sign in (-1, 1))
    assert min(down) < float(value)
    assert sum(down) < sum(up)


def test_what_all_predictions_share_has_no_slope(model, fitted, studied):
    slope = value_of(model, fitted, studied, 8)[1]
    own = np.asarray(slope.extra)[..., 3]
    assert np.abs(own).max() > 0
    assert abs(own.sum()) < 1e-3 * np.abs(own).sum()


def test_an_exercise_asks_what_the_context_says():
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = "<user>{{ messages[0].content }}</user>"
    head, suffix = turn_of(tokenizer)
    assert (head, suffix) == ("<user>", "</user>")
    seen = set()
    for number in range(16):
        found = exercise(tokenizer, TEXTS, number, 900)
        again = exercise(tokenizer, TEXTS, number, 900)
        assert (found.context, found.said) == (again.context, again.said)
        assert len(found.context) <= 900
        text = tokenizer.decode(found.context)
        assert text.startswith(head)
        seen.add(len(found.said))
        context, length, said, at, share = found.padded(960)
        assert (len(context), length) == (720 if length <= 720 else 960, len(found.context))
        counted = np.zeros(said.shape)
        np.add.at(counted.reshape(-1), at, share)
        assert len(at) == said.size // 2 or np.count_nonzero(counted) > said.size // 2
        if len(found.said) == 1:
            assert text.endswith(suffix)
            assert said.shape == (1, SAID_INSIDE)
            assert counted[0, 0] > 0
        else:
            assert len(found.said) == ASKED + 1
            longest = max(map(len, found.said))
            assert said.shape == (ASKED + 1, SAID_MOSTLY if longest <= SAID_MOSTLY else SAID)
            goes_on = found.first[-1] == 0
            seen.add(goes_on)
            passage = tokenizer.decode(found.said[-1] if goes_on else found.said[-1][-QUOTED:])
            assert passage in (TEXTS[number % 4] if goes_on else text)
            request = tokenizer.decode(found.said[-1][:-QUOTED])
            assert goes_on or request.endswith(suffix)
            assert len(found.said[-1]) <= SAID
        for ids, first in list(zip(found.said, found.first))[:ASKED]:
            answer = tokenizer.decode(ids[first + 1 if first else 0 :])
            missing = set(re.findall(r"\w{4,}", answer)) - set(re.findall(r"\w+", text))
            assert missing <= {"hidden"}, (number, answer)
        for row, (ids, first) in enumerate(zip(found.said, found.first)):
            # With the last one, behind which an answer ends.
            end = min(len(ids), said.shape[1])
            assert not counted[row, :first].any()
            np.testing.assert_allclose(counted[row, first:end], 1 / len(said) / (end - first))
            assert not counted[row, end:].any()
        tight = exercise(tokenizer, TEXTS, number, 200)
        assert len(tight.context) <= 200
        if len(tight.said) == 1:
            assert tokenizer.decode(tight.context).endswith(suffix)
    assert seen == {False, True, ASKED + 1}
    # Of one text: from its beginning, and twice from elsewhere.
    a, b, c = (exercise(tokenizer, TEXTS, number, 900) for number in (0, 4, 8))
    assert a != b != c


def test_exercises_share_no_wording_with_the_evaluation():
    made = [drawn_fact(Draw(number)) for number in range(400)]
    said = [f"{x.statement}\n{x.question}\n{x.answer}" for x in made]
    for number in range(60):
        head, rows = sheet(Draw(number))
        cells = [cell for _, found in rows for cell in found]
        said += [head, *(line for line, _ in rows)]
        said += [" ".join(question(Draw(i), cell, cells)) for i, cell in enumerate(cells[:40])]
    everything = "\n".join(said)
    for split in ("dev", "test"):
        for wording in (*NEEDLES[split], *PASSKEYS[split], *FACTS[split], LISTS[split]):
            for sentence in wording[:3]:
                for part in sentence.replace("{key}", "{v}").split("{v}"):
                    assert len(part) < 12 or part not in everything
    assert not [key for key in KEYS if f" {key} " in everything]
    assert len({x.question.split()[0] for x in made}) >= 5


PRACTICE = Practice(exercises=10, tokens=256, step=0.05)


@pytest.mark.slow
def test_practice_gains_what_it_says_and_goes_on_where_it_was(model, fitted, tmp_path, monkeypatch):
    monkeypatch.setattr(practising, "HELD_OUT", 2)
    told = []
    whole = practise(model, TEXTS, fitted, PRACTICE, progress=lambda *at: told.append(at))
    assert told[0] == ("checking", 0, 14)
    assert ("training the choice", 11, 14) in told
    assert whole.before.keys() == whole.after.keys() == {4, 8, 16, 32}
    changed = not np.array_equal(whole.weight, fitted.weight)
    gained = np.mean([*whole.after.values()]) < np.mean([*whole.before.values()])
    assert changed == gained
    state = tmp_path / "state"

    def stop(what, done, total):
        if done == 2 + 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        practise(model, TEXTS, fitted, PRACTICE, state=state, key="k", progress=stop)
    told.clear()
    again = practise(
        model, TEXTS, fitted, PRACTICE, state=state, key="k",
        progress=lambda *at: told.append(at),
    )  # fmt: skip
    assert told[0] == ("training the choice", 2 + 8, 14)
    np.testing.assert_array_equal(again.weight, whole.weight)
    assert again.after == whole.after
    # All of it is kept until its result is saved.
    told.clear()
    practise(
        model, TEXTS, fitted, PRACTICE, state=state, key="k",
        progress=lambda *at: told.append(at),
    )  # fmt: skip
    assert {what for what, *_ in told} == {"checking"}


def test_training_that_gains_nothing_changes_nothing(model, fitted, monkeypatch):
    monkeypatch.setattr(practising, "HELD_OUT", 1)
    # Steps that are no numbers are not gone.
    wild = dataclasses.replace(PRACTICE, exercises=1, step=float("nan"))
    found = practise(model, TEXTS, fitted, wild)
    np.testing.assert_array_equal(found.weight, fitted.weight)
    np.testing.assert_array_equal(found.extra, fitted.extra)
    assert found.before == found.after


def test_a_step_that_is_no_number_teaches_nothing(model, fitted, monkeypatch):
    """Of a bowl, whose slope is no number where the blocks are odd."""

    def bowl(config, change, fitted, params, of, blocks):
        far = sum(jnp.sum((x - 1) ** 2) for x in change)
        odd = blocks % 2 == 1
        return far + jnp.sqrt(jnp.where(odd, 0 * far, 1)) - ~odd

    monkeypatch.setattr(practising, "HELD_OUT", 1)
    monkeypatch.setattr(practising, "loss", bowl)
    monkeypatch.setattr(practising, "study", lambda config, params, context, *rest: context)
    found = practise(model, TEXTS, fitted, PRACTICE)
    assert all(found.after[rate] < found.before[rate] for rate in found.before)
    assert not np.array_equal(found.weight, fitted.weight)
    # What was looked at is what is returned.
    weight = (found.weight - fitted.weight) * fitted.deviation[..., None]
    extra = found.extra - fitted.extra
    extra = extra.at[..., -1].add(
        jnp.einsum("ld,ldh->lh", fitted.mean, weight / fitted.deviation[..., None])
    )
    far = float(jnp.sum((weight - 1) ** 2) + jnp.sum((extra - 1) ** 2))
    np.testing.assert_allclose(list(found.after.values()), far, rtol=1e-3, atol=2)
    # It is a running mean, behind the last step.
    monkeypatch.setattr(practising, "AVERAGED", 1.0)
    last = practise(model, TEXTS, fitted, PRACTICE)
    assert all(last.after[rate] < 0.9 * found.after[rate] for rate in found.after)


def test_several_trainings_are_one_mean(model, fitted, monkeypatch):
    """Of a bowl whose middle lies at 1 in the first half of the exercises, then at 1/4."""

    def bowl(config, change, fitted, params, of, blocks):
        return sum(jnp.sum((x - of) ** 2) for x in change)

    def middle(config, params, context, *rest):
        return context[0] / 4

    def marked(tokenizer, texts, number, *rest):
        found = real(tokenizer, texts, number, *rest)
        held_out = number == practising.FIRST_HELD_OUT
        return dataclasses.replace(found, context=[2 if held_out else 4 if number < 10 else 1])

    real, patches = practising.exercise, {"loss": bowl, "study": middle, "exercise": marked}
    for name, with_ in (patches | {"HELD_OUT": 1}).items():
        monkeypatch.setattr(practising, name, with_)
    one = practise(model, TEXTS, fitted, PRACTICE)
    both = practise(model, TEXTS, fitted, dataclasses.replace(PRACTICE, trainings=2))
    monkeypatch.setattr(
        practising, "exercise", lambda t, x, n, *rest: marked(t, x, n + 10 * (n < 10), *rest)
    )
    other = practise(model, TEXTS, fitted, PRACTICE)
    assert not np.array_equal(one.weight, fitted.weight)
    np.testing.assert_allclose(both.weight, (one.weight + other.weight) / 2, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(both.extra, (one.extra + other.extra) / 2, rtol=1e-4, atol=1e-5)


def test_every_second_exercise_is_in_the_models_own_words(model, fitted, monkeypatch):
    made = []

    class Own:
        def __init__(self, model):
            self.tokenizer = model.tokenizer

        def exercise(self, texts, number, tokens, sheets):
            made.append(("own", number, sheets))
            return real(self.tokenizer, texts, number, tokens, sheets)

    def of_facts(tokenizer, texts, number, tokens, sheets):
        made.append(("facts", number, sheets))
        return real(tokenizer, texts, number, tokens, sheets)

    real, patches = practising.exercise, {"exercise": of_facts, "OwnWords": Own, "HELD_OUT": 2}
    patches["loss"] = lambda config, change, *rest: sum(jnp.sum(x**2) for x in change)
    patches["study"] = lambda config, params, context, *rest: context
    for name, with_ in patches.items():
        monkeypatch.setattr(practising, name, with_)
    of_both = dataclasses.replace(PRACTICE, exercises=4, own_words=True)
    practise(model, TEXTS, fitted, of_both)
    held_out = [("facts", practising.FIRST_HELD_OUT + number, False) for number in range(2)]
    trained = [("facts", 0, False), ("own", 1, False), ("facts", 2, False), ("own", 3, False)]
    assert made == [*held_out, *trained, *held_out]
    made.clear()
    practise(model, TEXTS, fitted, dataclasses.replace(of_both, own_words=False, sheets=True))
    assert {(kind, sheets) for kind, _, sheets in made} == {("facts", True)}


def test_every_exercise_is_compressed_little_and_much():
    low, high = practising.RATES
    drawn = [practising.drawn_rates(number, 2) for number in range(64)]
    middle = (low * high) ** 0.5
    assert all(low <= little <= middle <= much <= high for little, much in drawn)
    assert min(drawn)[0] < 1.1 * low
    assert max(much for _, much in drawn) > 0.9 * high
    assert drawn[3] == practising.drawn_rates(3, 2) != drawn[4]
