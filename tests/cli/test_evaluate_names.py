"""Methods and choices that kvjax evaluate names."""

import argparse
import functools

import pytest

from kvjax.cache import get_method
from kvjax.cache.config import CALIBRATED
from kvjax.cli import evaluate, main_of
from kvjax.cli.main import run_command
from kvjax.cli.rows import choose_methods, fill_in
from kvjax.engine.parallel import check_on_devices
from kvjax.errors import UserError

EVALUATE = functools.partial(run_command, "evaluate")


def test_quick_names_what_there_is(capsys):
    def options_of(*arguments):
        parser = argparse.ArgumentParser()
        evaluate.add_options(parser)
        options = parser.parse_args(arguments)
        fill_in(options, evaluate.QUICK)
        return options

    assert len(choose_methods(evaluate.QUICK["methods"])) > 5
    every = choose_methods("all")
    assert len(every) > 40
    assert "compactor" in every
    assert "duo-heads" not in every
    assert set(choose_methods("all", calibrated=True)) - set(every) > {CALIBRATED, "duo-heads"}
    assert CALIBRATED in choose_methods(evaluate.QUICK["methods"])
    options = options_of("--quick", "--rows", "3")
    assert (options.rows, options.length) == (3, evaluate.QUICK["length"])
    assert options_of("--quick", "--prompts", "x").tasks is None
    # On several devices those of them that can run there; others are refused where they are named.
    alone = {"random", "tova", "shared-reads"}
    for given, wanted in ((["--quick"], evaluate.QUICK["methods"]), (["--methods", "all"], "all")):
        options = options_of(*given, "--tensor-parallel", "2")
        every = choose_methods(wanted, calibrated=True)
        left = set(every) - set(evaluate._methods(options))
        assert alone <= left < set(every)
        for name in set(every) - left:
            check_on_devices(get_method(name), 2)
        said = capsys.readouterr().err
        assert all(name in said for name in alone)
        assert evaluate._methods(options_of(*given)) == every
    assert evaluate._methods(options_of("--methods", "tova", "--tensor-parallel", "2")) == ["tova"]
    with pytest.raises(UserError, match="did you mean"):
        choose_methods("snapvk")


def test_names_are_listed_without_a_model(capsys):
    assert main_of(EVALUATE, ["--list", "--weights", "/no/weights"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "methods:"
    names = [line.split()[0] for line in lines]
    assert set(choose_methods("all", calibrated=True)) <= set(names)
    assert {"needle", "ruler-vt", "ruler", "longbench"} <= set(names[names.index("tasks:") :])
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines if line.startswith(" "))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("continuation", "the task continuation needs long texts: give --texts or --data"),
        ("longbench/lcc", "LongBench needs its rows: give --longbench or --data"),
        ("ruler13", "ruler13 needs RULER's files: give --ruler13 or --data"),
        ("gsm8k", "gsm8k needs its rows: give --gsm8k or --data"),
        ("xsum", "xsum needs its rows: give --xsum or --data"),
        ("needle --haystack EMPTY", "EMPTY holds no text file"),
        ("continuation --texts EMPTY", "EMPTY holds no text file"),
        ("longbench --longbench EMPTY", "EMPTY lacks dataset2prompt.json"),
        ("ruler13/4096 --ruler13 EMPTY", "EMPTY holds no task of RULER"),
        ("gsm8k --gsm8k EMPTY", "EMPTY holds no .jsonl"),
    ],
)
def test_missing_data_are_refused_before_a_model_is_loaded(tmp_path, capsys, given, says):
    (tmp_path / "empty").mkdir()
    arguments = given.replace("EMPTY", str(tmp_path / "empty")).split()
    command = ["--weights", "/no/weights", "--out", str(tmp_path / "r.jsonl"), "--tasks"]
    assert main_of(EVALUATE, [*command, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {says.replace('EMPTY', str(tmp_path / 'empty'))}")
