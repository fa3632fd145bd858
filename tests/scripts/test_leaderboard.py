"""docs/leaderboard.md is what the committed results say, and rows are of the same prompts."""

import argparse
import gzip
import json
import os

import pytest

from kvjax.cli import main_of
from kvjax.cli.main import main as kvjax
from kvjax.cli.rows import choose_protocols, rates_of
from tests.scripts.conftest import load_script

BOARD = load_script("leaderboard")


def result(task, number, method, rate, *, kvs=100, em=1, kl=0.0, protocol="chat", **more):
    return {
        "id": f"{task}/dev/1024/5/{number}", "task": task, "protocol": protocol,
        "method": method, "rate": rate, "digest": f"{task}{number}", "em": em, "kl": kl,
        "metric": "nll" if task == "continuation" else "em", "kvs": kvs, "kvs_full": 100,
        "bytes": 4 * kvs, "bytes_full": 800, "settings": {"model": "m", "weights": "w"},
        "length": 1024,
        "seconds": {"prefill": 2.0, "select": 0.1, "score": 0, "decode": 0}, "depth": None, **more,
    }  # fmt: skip


def test_the_page_is_that_of_the_results(capsys):
    """If this fails: python scripts/leaderboard.py"""
    assert BOARD.main(["--check"]) == 0
    assert "as the results have it" in capsys.readouterr().out


def test_a_row_says_what_was_measured():
    full = [result("needle", i, "full", 1.0) for i in range(2)]
    text = result("continuation", 0, "full", 1.0)
    ours = [
        result("needle", 0, "a", 8.0, kvs=20, em=1),
        result("needle", 1, "a", 8.0, kvs=30, em=0),
        result("continuation", 0, "a", 8.0, kvs=25, kl=0.25),
        result("needle", 0, "a", 32.0, kvs=3, em=0),
    ]

    def shown(value):
        return f"{value:.3f} [{value:.3f}, {value:.3f}]"

    rows = BOARD.rows_at([*full, text, *ours], 8.0)
    assert rows == [
        ("`full`", "m", "100 [100, 100]", "–", shown(0), "1.0", "2.0", "+5.0 %", "100 %"),
        ("`a`", "m", "50 [0, 100]", "–", shown(0.25), "4.0", "8.0", "+5.0 %", "25 %"),
    ]


def test_weights_of_one_name_have_rows_of_their_own():
    rows = [
        result("needle", 0, method, rate, em=em, settings={"model": "m", "weights": weights})
        for weights, em in (("q4", 1), ("q2", 0))
        for method, rate in (("full", 1.0), ("a", 8.0))
    ]
    found = {cells[:2]: cells[2] for cells in BOARD.rows_at(rows, 8.0)}
    right, wrong = "100 [100, 100]", "0 [0, 0]"
    assert found == {("`full`", "m q4"): right, ("`a`", "m q4"): right,
                     ("`full`", "m q2"): wrong, ("`a`", "m q2"): wrong}  # fmt: skip


def test_what_was_not_run_on_all_prompts_has_no_figure():
    full = [result("needle", i, "full", 1.0) for i in range(2)]
    other = result("needle", 0, "b", 8.0)
    rows = BOARD.rows_at([*full, other], 8.0)
    assert [row[0] for row in rows] == ["`full`"]
    # Nor what was run on a prompt of another wording.
    others = [result("needle", i, "b", 8.0, digest=f"other{i}") for i in range(2)]
    assert [row[0] for row in BOARD.rows_at([*full, *others], 8.0)] == ["`full`"]
    both = [result("needle", i, "b", 8.0, em=0) for i in range(2)]
    best = [result("needle", i, "c", 8.0) for i in range(2)]
    assert [row[0] for row in BOARD.rows_at([*both, *best, *full], 8.0)] == ["`full`", "`c`", "`b`"]


def test_results_of_other_prompts_are_passed_over(tmp_path):
    kept = result("fact", 3, "full", 1.0)
    ids = ["fact/test/1024/5/3", "fact/dev/1024/5/4", "fact/dev/2048/5/3", "kv/dev/1024/5/3"]
    rows = [kept, *({**kept, "id": name} for name in ids), {**kept, "protocol": "prompt"}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert BOARD.results_of([path, path]) == [kept]


def test_lengths_have_tables_of_their_own():
    rows = [result("fact", 0, "full", 1.0), result("fact", 0, "full", 1.0, em=0)]
    rows[1] |= {"id": "fact/dev/4096/5/0", "digest": "another"}
    page = BOARD.page(rows)
    titles = [line for line in page.splitlines() if line.startswith("## ")]
    lengths = ("1,024", "4,096")
    assert titles == [f"## {n} tokens, {rate}×" for n in lengths for rate in (8, 32)]
    cells = [line.split(" | ")[2] for line in page.splitlines() if line.startswith("| `full`")]
    assert cells == ["100 [100, 100]"] * 2 + ["0 [0, 0]"] * 2
    assert "4,096" not in BOARD.page(rows[:1])


def test_what_was_just_measured_wins_over_what_was_packed(tmp_path):
    rows = {"a.jsonl.gz": 0, "a.jsonl": 1, "z.jsonl.gz": 0}
    for name, em in rows.items():
        text = json.dumps(result("fact", 3, "full", 1.0, em=em)) + "\n"
        data = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
        (tmp_path / f"leaderboard-{name}").write_bytes(data)
    assert [row["em"] for row in BOARD.results_of(BOARD.paths_in(tmp_path))] == [1]


def test_a_row_more_is_one_command(tmp_path, monkeypatch, capsys):
    said = []
    monkeypatch.setattr("kvjax.cli.main.main", lambda arguments: said.append(arguments) or 3)
    monkeypatch.setattr(BOARD, "RESULTS", tmp_path)
    given = ["--measure", "kvcrush:snapkv", "--data", "DATA", "--kv-dtype", "int8"]
    assert BOARD.main(given) == 3
    ((name, *options),) = said
    assert name == "evaluate"
    pairs = dict(zip(options[::2], options[1::2], strict=True))
    assert pairs["--out"] == str(tmp_path / "leaderboard-smollm2-135m-kvcrush-snapkv.jsonl")
    assert pairs["--kv-dtype"] == "int8"
    # Nothing else is left among the results.
    assert pairs["--table"] == os.devnull
    assert choose_protocols(pairs["--protocols"]) == ["chat", "agnostic"]
    assert tuple(rates_of(pairs["--rates"])) == BOARD.RATES
    given = [
        "--measure",
        "snapkv,h2o",
        "--data",
        "DATA",
        "--length",
        "4096",
        "--weights",
        "A/b.gguf",
    ]
    assert BOARD.main(given) == 3
    options = said[1][1:]
    pairs = dict(zip(options[::2], options[1::2], strict=True))
    assert pairs["--out"] == str(tmp_path / "leaderboard-b-snapkv-h2o-4096.jsonl")
    assert (pairs["--length"], pairs["--weights"]) == ("4096", "A/b.gguf")
    assert "--model" not in pairs
    assert main_of(BOARD.main, ["--measure", "snapkv"]) == 2
    assert "--measure needs --data" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--data", "--split", "--rows", "--free-tokens", "--details"])
def test_the_command_has_options_that_there_are(option, tmp_path, capsys):
    given = {"measure": "snapkv", "model": "m", "data": "DATA", "weights": None, "kv_dtype": ""}
    options = argparse.Namespace(**given, length=1024)
    assert option in BOARD.command(options, tmp_path / "x")
    with pytest.raises(SystemExit):
        kvjax(["evaluate", "--help"])
    assert option in capsys.readouterr().out
