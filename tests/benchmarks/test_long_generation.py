"""`python -m benchmarks.long_generation`: its texts, and what caps cost."""

import itertools
import json
import re

import pytest

from benchmarks.long_generation import ledger, main
from kvjax.cli import main_of
from kvjax.models.tokenizer import ByteTokenizer


@pytest.fixture
def run(tiny_folder, capsys):
    def run(*arguments):
        given = ("--weights", tiny_folder, "--tokens", 300, "--prompts", 2, *arguments)
        code = main_of(main, [str(argument) for argument in given])
        out, err = capsys.readouterr()
        return code, out and json.loads(out.splitlines()[-1]), err

    return run


@pytest.mark.parametrize("number", [0, 1, 5])
def test_the_number_asked_for_stands_once_and_in_the_middle(number):
    tokens = 2000
    made = ledger(ByteTokenizer(), 3, number, tokens)
    prompt, said = (bytes(part.tolist()).decode() for part in (made.prompt, made.said))
    answer = said[-made.answer :]
    assert re.fullmatch(r" [1-9]\d{4}", answer)
    assert tokens - 120 <= len(said) <= tokens
    seal = re.search(r"the seal number of the (.*) is(.*)\. I keep it", said)
    assert seal
    assert seal.group(2) == answer
    assert 0.4 < said.index(seal.group(0)) / len(said) < 0.6
    assert seal.group(1) in prompt
    assert said.removesuffix(answer).endswith(f"The seal number of the {seal.group(1)} is")
    assert said.removesuffix(answer).count(answer.strip()) == 1
    # Every step is right and goes on from the one before.
    steps = re.findall(r"so (\d+) ([+-]) (\d+) = (\d+)\. I write down (\d+)", said)
    assert len(steps) > 10
    for (first, sign, by, after, again), following in itertools.pairwise(steps):
        assert int(first) + int(sign + by) == int(after) == int(again) == int(following[0])
    other = ledger(ByteTokenizer(), 4, number, tokens)
    assert other.said.tolist() != made.said.tolist()


@pytest.mark.slow
def test_a_cap_that_holds_everything_costs_nothing_and_a_small_one_something(run, tmp_path):
    out = tmp_path / "long.jsonl"
    code, report, err = run(
        "--methods", "h2o-decode", "--caps", "4096,64", "--every", 48, "--out", out
    )
    assert code == 0, err
    assert json.loads(out.read_text()) == report
    full, *others = report["results"]
    assert full["method"] == "full"
    assert [(r["method"], r["cap"]) for r in others] == [("h2o-decode", 4096), ("h2o-decode", 64)]
    for result in others:
        if result["cap"] == 4096:
            assert result["nll"] == pytest.approx(full["nll"], abs=2e-4)
            assert result["nll_answer"] == pytest.approx(full["nll_answer"], abs=2e-4)
            assert result["answers"] == full["answers"]
            # All but the last token, which is never fed.
            assert result["kvs"] == full["kvs"] - 2 * 2
        else:
            # The weights are random, so little depends on what is read; but more than rounding.
            assert abs(result["nll"] - full["nll"]) > 6e-4
            assert result["kvs"] == 64 * 2 * 2


def test_what_cannot_go_on_is_refused(run):
    for method in ("kvzip", "full"):
        code, _, err = run("--methods", method)
        assert code == 2
        assert f"method {method} " in err.strip().splitlines()[-1]
    assert run("--caps", 8)[0] == 2
