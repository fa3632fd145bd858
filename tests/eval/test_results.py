"""Results on disk: what a killed run leaves, settings, and rows that are no results."""

import gzip
import json

import pytest

from kvjax.errors import UserError
from kvjax.eval.results import FIELDS, ResultsFile, key_of, read_results
from kvjax.eval.run import settings_read

SETTINGS = {"model": "tiny", "block_size": 16}


def result(index: int, **values):
    answer = "two\u2028lines\nand a tab\t"
    numbers = dict.fromkeys(("rate", "length", "em", "kvs", "kvs_full", "bytes"), 1)
    seconds = dict.fromkeys(("prefill", "select", "score", "decode"), 0.5)
    names = {"protocol": "prompt", "method": "full", "task": "kv", "metric": "em", "digest": "0"}
    row = {"id": f"r{index}", **names, **numbers, "depth": None, "seconds": seconds}
    return {**row, "answer": answer, **values}


def test_rows_survive_and_are_known_again(tmp_path):
    path = tmp_path / "r.jsonl"
    with ResultsFile(path, SETTINGS) as file:
        file.add([result(0), result(1)])
        assert file.has(("r1", "prompt", "full", 1.0))
        assert not file.has(("r1", "question", "full", 1.0))
    with ResultsFile(path, SETTINGS) as file:
        assert [key_of(row)[0] for row in file.results] == ["r0", "r1"]
        file.add([result(2)])
    assert [row["id"] for row in read_results(path)] == ["r0", "r1", "r2"]
    assert read_results(path)[0]["answer"] == result(0)["answer"]


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_half_written_last_row_is_computed_again(tmp_path, kept):
    path = tmp_path / "r.jsonl"
    with ResultsFile(path, SETTINGS) as file:
        file.add([result(0), result(1)])
    lines = path.read_bytes().splitlines(keepends=True)
    # Cut in the row, in its last character, or just before its line end.
    path.write_bytes(lines[0] + lines[1][:kept])
    with ResultsFile(path, SETTINGS) as file:
        assert not file.has(("r1", "prompt", "full", 1.0))
        file.add([result(1)])
    assert path.read_bytes() == b"".join(lines)


def test_a_broken_row_in_the_middle_is_not_guessed_at(tmp_path):
    path = tmp_path / "r.jsonl"
    with ResultsFile(path, SETTINGS) as file:
        file.add([result(0)])
    text = path.read_text()
    path.write_text(text + "{}\n" + text)
    for whole in (text + "{}\n" + text, text + "{}\n"):
        path.write_text(whole)
        with pytest.raises(UserError, match=r"line 2 is no result .*: mend or remove it"):
            ResultsFile(path, SETTINGS)
        assert path.read_text() == whole


@pytest.mark.parametrize("text", ['{"id": "mine"}\n', '{"id": "mine"}', "a letter\nof two lines"])
def test_what_others_wrote_stays(tmp_path, text):
    path = tmp_path / "mine.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=r"no results? of kvjax evaluate.*give another"):
        ResultsFile(path, SETTINGS)
    assert path.read_text() == text


def test_rows_that_say_too_little_are_named(tmp_path):
    path = tmp_path / "r.jsonl.gz"

    def said(line):
        path.write_bytes(gzip.compress(f"{json.dumps(result(0))}\n{line}\n".encode()))
        with pytest.raises(UserError, match=r"r\.jsonl\.gz line 2 is no result") as caught:
            read_results(path)
        return str(caught.value)

    for name in FIELDS:
        row = {key: value for key, value in result(0).items() if key != name}
        assert f"{name} is missing" in said(json.dumps(row))
        assert f"({name} [])" in said(json.dumps({**row, name: []}))
    assert "seconds {'prefill': 1}" in said(json.dumps(result(0, seconds={"prefill": 1})))
    assert "settings 'none'" in said(json.dumps(result(0, settings="none")))
    assert "no JSON object" in said("[1]")
    # What Python's JSON has no room for: a number of many digits, lists of lists of lists.
    for value in ("9" * 5000, "[" * 100_000):
        assert "mend or remove it" in said(value)


def test_a_file_has_one_run_at_a_time(tmp_path):
    path = tmp_path / "r.jsonl"
    with ResultsFile(path, SETTINGS) as file:
        with pytest.raises(UserError, match=r"r\.jsonl is in use: another run writes into it"):
            ResultsFile(path, SETTINGS)
        file.add([result(0)])
    with ResultsFile(path, SETTINGS) as file:
        assert len(file.results) == 1


def test_settings_of_methods_count_where_they_are_read(tmp_path):
    assert settings_read("full") == settings_read("snapkv at 128 tokens in int8") == set()
    assert settings_read("predicted-reads at 64 tokens in int8") == {"calibration"}
    assert settings_read("full in kvquant4c") == {"levels"}
    assert settings_read("speckv") == {"draft"}
    assert len(settings_read("a method of one's own")) == 3
    path = tmp_path / "r.jsonl"

    def run(method, **given):
        with ResultsFile(path, {**SETTINGS, **given}, settings_read) as file:
            file.add([result(len(file.results), method=method)])
            return file.results[-1]["settings"]

    # Added to one another in any order.
    assert run("full") == SETTINGS
    for _ in range(2):
        assert run("predicted-reads", calibration="a") == {**SETTINGS, "calibration": "a"}
        assert run("snapkv", calibration="a") == SETTINGS
        assert run("speckv", draft=None) == SETTINGS
    # What such a row was made with is what its method goes on with.
    for method, given, said in (
        ("predicted-reads", {"calibration": "b"}, "calibration a, and this run has b"),
        ("speckv", {"draft": "small"}, "draft None, and this run has small"),
        ("h2o", {"paper": "mine"}, "paper None, and this run has mine"),
    ):
        with pytest.raises(UserError, match=said):
            run(method, **given)
    # Of rows from before, which had all settings of their run.
    path.write_text(json.dumps(result(0, settings={**SETTINGS, "calibration": "a"})) + "\n")
    assert run("predicted-reads", calibration="b")["calibration"] == "b"


def test_other_settings_do_not_mix(tmp_path):
    path = tmp_path / "r.jsonl"
    with ResultsFile(path, SETTINGS) as file:
        file.add([result(0)])
    with pytest.raises(UserError, match="block_size 16, and this run has 8"):
        ResultsFile(path, {**SETTINGS, "block_size": 8})
    with pytest.raises(UserError, match="without"):
        ResultsFile(tmp_path / "r.jsonl.gz", SETTINGS)
    with pytest.raises(UserError, match="cannot write"):
        ResultsFile(tmp_path / "nowhere" / "r.jsonl", SETTINGS)
