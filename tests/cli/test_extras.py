"""What an installation without the extras says: which one to install, before anything slow."""

import functools
import json

import pytest

from kvjax import extras
from kvjax.cli import main_of
from kvjax.cli.main import main, run_command
from kvjax.errors import UserError
from kvjax.eval.result_plots import plot_scores
from kvjax.eval.scorers import score_answer


@pytest.fixture
def bare(monkeypatch):
    """As if only what kvjax always needs were installed."""
    absent = {"matplotlib", "rouge"}
    find = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name in absent else find(name))


@pytest.mark.parametrize(
    "arguments",
    [
        ("decode", "--plot", "x.png", "--weights", "nowhere"),
        ("throughput", "--plot-dir", ".", "--weights", "nowhere"),
        ("plot", "nowhere.jsonl"),
    ],
)
def test_pictures_need_an_extra(bare, capsys, arguments):
    assert main_of(main, list(arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(" needs matplotlib: pip install '.[plots]' in kvjax's checkout")


def test_figures_say_so_too(bare):
    full = {"task": "t", "id": "a", "method": "full", "rate": 1.0, "protocol": "chat", "kvs": 9}
    full |= {"kvs_full": 9, "metric": "em", "score": 1.0, "free": 1.0, "nll": 1.0, "kl": 0.0}
    full |= {"agree": 1.0, "recall": 1.0, "bytes": 9, "em": 1, "length": 9, "depth": None}
    full["seconds"] = {"prefill": 1, "select": 0.1, "score": 0.1, "decode": 0}
    with pytest.raises(UserError, match=r"pip install '\.\[plots\]'"):
        plot_scores([full, {**full, "method": "h2o", "rate": 2.0}], "chat")


def test_a_metric_needs_an_extra(bare):
    with pytest.raises(UserError, match=r"rouge-l needs rouge: pip install '\.\[eval\]'"):
        score_answer("rouge-l", "a", ("b",))


def test_a_metric_without_its_library_is_refused_before_anything_runs(
    bare, capsys, tmp_path, tiny_folder
):
    row = {"id": "a", "task": "mine", "context": "one two " * 9, "target": "x", "metric": "rouge-l"}
    row |= {"length": 50, "head": "", "question": "?", "suffix": "", "answer_prefix": ""}
    prompts, out = tmp_path / "mine.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(json.dumps(row))
    arguments = ["--weights", tiny_folder, "--prompts", prompts, "--out", out]
    command = functools.partial(run_command, "evaluate")
    assert main_of(command, [str(argument) for argument in arguments]) == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith("pip install '.[eval]' in kvjax's checkout")
    )
    assert not out.exists()
