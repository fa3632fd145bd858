"""`python -m benchmarks.episodes`: what a choice among caches of episodes gains."""

import argparse
import dataclasses

import numpy as np

from benchmarks.episodes import beside, lines, main, of_episode, questions_of
from kvjax.cache.methods.epicache import Episode
from kvjax.cache.policy.probe import AtHand
from kvjax.cli import main_of
from kvjax.eval.rows import Row, Turn
from kvjax.eval.tasks.base import chat_segments, next_turn
from kvjax.models.tokenizer import ByteTokenizer

OPTIONS = argparse.Namespace(number=2, rates=[8.0], beside=["snapkv"])


class Table(AtHand):
    def embedded(self, tokens):
        return np.random.default_rng(2).standard_normal((50, 4))[tokens]


def test_questions_count_by_the_caches_they_choose():
    def result(name, method, rate, **right):
        return {"id": name, "task": "five", "method": method, "rate": rate, **right}

    right = {"episode 0": ([1, 0, 0, 1], 1), "episode 1": ([0, 0, 1, 1], 0)}
    results = [result("a", "full", 1.0, turns=[1, 1, 1, 1]), result("b", "full", 1.0, em=1)]
    for method, (turns, em) in right.items():
        results += [result("a", method, 8.0, turns=turns), result("b", method, 8.0, em=em)]
    for rate in (8.0, 4.0):
        results += [
            result("a", "snapkv", rate, turns=[0, 0, 0, 1]),
            result("b", "snapkv", rate, em=0),
        ]
    found = list(lines(OPTIONS, {"a": [0, 1, 1, 0], "b": [1]}, results))
    assert [line[:5] for line in found] == [
        ["five", at, what, 2, 5]
        for at, what in (
            ("1", "full"),
            ("8", "the one chosen of 2 caches"),
            ("8", "the mean of 2 caches"),
            ("8", "any of 2 caches"),
            ("8", "snapkv"),
            ("4", "snapkv"),
        )
    ]
    # Means of prompts, each of its questions: 3/4 and 0; 1/2 and 1/2; 3/4 and 1; 1/4 and 0.
    means = [float(line[5].split()[0]) for line in found]
    np.testing.assert_allclose(means, [1, 0.375, 0.5, 0.875, 0.125, 0.125], atol=0.006)


def test_one_cache_of_all_blocks_stands_beside_several():
    assert beside(OPTIONS, 8.0) == [8.0, 4.0]
    assert beside(OPTIONS, 2.0) == [2.0]


def test_questions_choose_without_what_the_template_puts_around_them():
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (_, suffix), between = chat_segments(tokenizer), next_turn(tokenizer)
    turns = [Turn(f"\n\nWho?{suffix}", "", " a"), Turn(f"{between}Where?{suffix}", "", " b")]
    row = Row("a", "five", 1, "", "text", "", "", "", "", turns=tuple(turns))
    assert questions_of(row, tokenizer) == ["Who?", "Where?"]
    assert questions_of(
        dataclasses.replace(row, turns=(), question="When?", target="c"), tokenizer
    ) == ["When?"]


def test_caches_are_those_that_an_engine_retains():
    prompt = np.random.default_rng(1).integers(0, 50, 300).astype(np.int32)
    found = Episode(episodes=3).found(prompt, Table())
    for which in range(5):
        method = of_episode(3, which)
        (probe,) = method.scorer.probes(prompt, Table())
        assert tuple(probe.tokens.tolist()) == found[min(which, 2)][0].tokens
    assert of_episode(3, 0).scorer != of_episode(3, 1).scorer


def test_what_is_refused(capsys):
    for given, says in (
        (("--number", "0"), "--number 0"),
        (("--rates", "a"), "--rates"),
        (("--beside", "none"), "none"),
    ):
        assert main_of(main, list(given)) == 2
        assert says in capsys.readouterr().err.strip().splitlines()[-1]
